"""What a federation's client is called: by its number, and by whose its data are where that is known."""

from __future__ import annotations

from vigil_core import formatting


def called(number: int, name: str = "") -> str:
    """ "client 7", or "client 7 (asyncio)"."""
    return f"client {formatting.count(number)}" + (f" ({name})" if name else "")
