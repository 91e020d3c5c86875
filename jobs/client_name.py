"""Name a federation's client by its number, and by its data's owner if that is known."""

from __future__ import annotations

from vigil_core import formatting


def client_name(number: int, name: str = "") -> str:
    """Return "client 7", or "client 7 (asyncio)"."""
    return f"client {formatting.count(number)}" + (f" ({name})" if name else "")
