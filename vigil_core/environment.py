"""Read settings from the environment; a secret also from the file that NAME_FILE names. No Django."""

import os
from pathlib import Path


def env(name: str, default: str = "") -> str:
    """Return the variable, else the contents of the file that NAME_FILE names, else the default."""
    if value := os.environ.get(name):
        return value
    if path := os.environ.get(f"{name}_FILE"):
        return Path(path).read_text().strip()
    return default


def flag(name: str, default: bool = False) -> bool:
    return env(name, str(default)).lower() in {"1", "true", "yes", "on"}


def amount(name: str) -> float | None:
    """Return a number above 0, or None if it is not set."""
    if not (text := env(name).strip()):
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise SystemExit(f"{name}={text} is not an amount. Use a number above 0, such as 2.10, or leave it out.")
    return value


def whole(name: str, default: int, low: int, high: int) -> int:
    """Return a whole number of this range."""
    if not (text := env(name).strip()):
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise SystemExit(f"{name}={text} is not a whole number from {low} to {high}.")
    return value


def share(name: str) -> float:
    """Return a number from 0 to 1; 0 if it is not set."""
    text = env(name).strip() or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise SystemExit(f"{name}={text} is not a number from 0 to 1.")
    return value


def choice(name: str, default: str, *others: str) -> str:
    """Return one of these words."""
    value = env(name, default)
    if value not in (default, *others):
        raise SystemExit(f"{name}={value} is not valid: use {' or '.join((default, *others))}.")
    return value
