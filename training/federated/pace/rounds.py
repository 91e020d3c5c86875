"""The server waits for everybody whom it has asked."""

from __future__ import annotations


def schedule() -> None:
    return None
