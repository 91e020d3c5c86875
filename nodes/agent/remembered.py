"""The GPUs that this machine had, on its own disk: one that is gone for good can't say that it was there."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpus.pci import normalised

FILE = "gpus.json"
MOST_BYTES = 1 << 20
About = dict[str, Any]


class Remembered:
    """By their places on the bus: another GPU in the same slot takes the place of the one before."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE
        self._gpus = _read(self._path)

    @property
    def gpus(self) -> list[About]:
        return list(self._gpus.values())

    def note(self, gpus: list[About]) -> None:
        """What there is now; those that are missing stay, until somebody removes the file."""
        known = {**self._gpus, **{normalised(gpu["bus"]): gpu for gpu in gpus if gpu.get("bus") and gpu.get("uuid")}}
        if known != self._gpus:
            self._gpus = known
            with suppress(OSError):  # of a full disk: it is written when something changes again
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                temporary = self._path.with_suffix(".tmp")
                temporary.write_text(json.dumps(self.gpus))
                os.replace(temporary, self._path)

    def uuid_at(self, bus: str) -> str:
        return str(self._gpus.get(normalised(bus), {}).get("uuid", ""))

    def missing(self, uuids: set[str]) -> list[About]:
        """Those that were there and are none of these."""
        return [gpu for gpu in self.gpus if gpu["uuid"] not in uuids]


def _read(path: Path) -> dict[str, About]:
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(MOST_BYTES))
        return {normalised(gpu["bus"]): gpu for gpu in told if gpu["uuid"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
