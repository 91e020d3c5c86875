"""What the GPUs of each machine did last, read of a thousand machines at once (`Agent.newest`, as intake writes it)."""

from __future__ import annotations

import msgspec


class Newest(msgspec.Struct, gc=False):
    """A GPU's newest values; None is what nobody tells."""

    gpu_percent: int | None = None
    memory_mib: int | None = None
    temperature_c: int | None = None
    watts: int | None = None
    throttle: int = 0
    quiet_since: float | None = None  # Unix seconds: since when it has done nothing


UNTOLD = Newest()


class _OfMachine(msgspec.Struct, gc=False):
    gpus: dict[str, Newest] = {}


_decoder = msgspec.json.Decoder(_OfMachine)


def newest_of(text: str) -> dict[str, Newest]:
    """By UUID, from the column as text."""
    return _decoder.decode(text).gpus
