"""Store conditions that last (a lost GPU, a slow mount), so that the next agent can report their end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "lasting.json"
MAX_BYTES = 1 << 20
MAX_CONDITIONS = 200
END_OF = {"gpu.lost": "gpu.back", "gpu.silent": "gpu.answers", "mount.slow": "mount.well"}
_BEGINNING_OF = {end: beginning for beginning, end in END_OF.items()}
Event = dict[str, Any]


class LastingConditions:
    """Conditions by kind, and by the GPU or mount concerned."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE
        self._since = _read(self._path)

    def note(self, events: Iterable[Event]) -> None:
        """Record beginnings and ends. Call it before the events are sent: a superfluous end does no harm."""
        before = dict(self._since)
        for event in events:
            kind, subject = event["kind"], str(event.get("gpu") or event.get("mount") or "")
            if kind in END_OF and len(self._since) < MAX_CONDITIONS:
                self._since.setdefault((kind, subject), float(event["since"] if "since" in event else event["at"]))
            elif kind in _BEGINNING_OF:
                self._since.pop((_BEGINNING_OF[kind], subject), None)
        if self._since != before:
            self._write()

    def since_by_subject(self, kind: str) -> dict[str, float]:
        """Return since when (Unix seconds) each subject has had a condition of this kind."""
        return {subject: since for (other, subject), since in self._since.items() if other == kind}

    def _write(self) -> None:
        conditions = [{"kind": kind, "about": about, "since": since} for (kind, about), since in self._since.items()]
        with suppress(OSError):  # the disk is full: the next change writes it
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(conditions))
            os.replace(temporary, self._path)


def _read(path: Path) -> dict[tuple[str, str], float]:
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(MAX_BYTES))
        return {
            (str(condition["kind"]), str(condition["about"])): float(condition["since"])
            for condition in document[:MAX_CONDITIONS]
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
