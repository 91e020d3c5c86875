"""Store the GPUs that this machine has had: one that is gone for good cannot report that it was there."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpus.pci import normalised

FILE = "gpus.json"
MAX_BYTES = 1 << 20
GpuFacts = dict[str, Any]


class GpuHistory:
    """GPUs by bus address: a new GPU in the same slot replaces the previous one."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE
        self._gpus = _read(self._path)

    @property
    def gpus(self) -> list[GpuFacts]:
        return list(self._gpus.values())

    def note(self, gpus: list[GpuFacts]) -> None:
        """Record the present GPUs; missing ones stay until somebody deletes the file."""
        merged = {**self._gpus, **{normalised(gpu["bus"]): gpu for gpu in gpus if gpu.get("bus") and gpu.get("uuid")}}
        if merged != self._gpus:
            self._gpus = merged
            with suppress(OSError):  # the disk is full: the next change writes it
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                temporary = self._path.with_suffix(".tmp")
                temporary.write_text(json.dumps(self.gpus))
                os.replace(temporary, self._path)

    def uuid_at(self, bus: str) -> str:
        return str(self._gpus.get(normalised(bus), {}).get("uuid", ""))

    def missing(self, uuids: set[str]) -> list[GpuFacts]:
        """Return the recorded GPUs that are not among these."""
        return [gpu for gpu in self.gpus if gpu["uuid"] not in uuids]


def _read(path: Path) -> dict[str, GpuFacts]:
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(MAX_BYTES))
        return {normalised(gpu["bus"]): gpu for gpu in document if gpu["uuid"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
