"""Sanitise foreign text: process names, kernel log lines and paths contain whatever anybody put there."""

from __future__ import annotations


def clean(text: str, most: int) -> str:
    """Return one printable line of at most `most` characters."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
