"""What is wrong for the time being, on the agent's own disk: the agent after this one can then tell its end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "lasting.json"
MOST_BYTES = 1 << 20
MOST = 200
ENDS = {"gpu.lost": "gpu.back", "gpu.silent": "gpu.answers", "mount.slow": "mount.well"}
_BEGINNINGS = {end: beginning for beginning, end in ENDS.items()}
Event = dict[str, Any]


class Lasting:
    """By kind, and by the GPU or mount that it is about."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE
        self._since = _read(self._path)

    def note(self, events: Iterable[Event]) -> None:
        """What begins with these, and what ends. Written before they are told: an end too many does no harm."""
        before = dict(self._since)
        for event in events:
            kind, about = event["kind"], str(event.get("gpu") or event.get("mount") or "")
            if kind in ENDS and len(self._since) < MOST:
                self._since.setdefault((kind, about), float(event["since"] if "since" in event else event["at"]))
            elif kind in _BEGINNINGS:
                self._since.pop((_BEGINNINGS[kind], about), None)
        if self._since != before:
            self._write()

    def of(self, kind: str) -> dict[str, float]:
        """Those of a kind that last: since when, in Unix seconds, by what they are about."""
        return {about: since for (one, about), since in self._since.items() if one == kind}

    def _write(self) -> None:
        told = [{"kind": kind, "about": about, "since": since} for (kind, about), since in self._since.items()]
        with suppress(OSError):  # of a full disk: it is written when something changes again
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(told))
            os.replace(temporary, self._path)


def _read(path: Path) -> dict[tuple[str, str], float]:
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(MOST_BYTES))
        return {(str(one["kind"]), str(one["about"])): float(one["since"]) for one in told[:MOST]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
