"""What others wrote, made fit to be told: process names, kernel log lines and paths hold whatever anybody put there."""

from __future__ import annotations


def clean(text: str, most: int) -> str:
    """One printable line of at most so many characters."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
