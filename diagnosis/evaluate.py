"""Score verdicts on cases whose causes are known: by cause, by owner, and by how sure they were.

Cases are a folder of folders, each with its logs and a `case.toml` (cause, also, software, and `filler` for generated
lines, see `diagnosis.filler`), or a file of JSON lines with `label`, `alt` and `log` (or `logs` by their names).
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagnosis import offline
from diagnosis.causes import CAUSES
from diagnosis.filler import Filler, complete_log
from diagnosis.logs.files import Log, Unreadable
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.verdict import Verdict

CASE = "case.toml"
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.01)
HIGH_CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class LabelledCase:
    """Logs of one failure with its known cause. `also` lists further causes that count as right."""

    name: str
    cause: str
    also: tuple[str, ...] = ()
    software: tuple[str, ...] = ()
    folder: Path | None = None
    logs: Mapping[str, str] = field(default_factory=dict)
    fillers: tuple[Filler, ...] = ()

    def verdict(self, catalogue: Catalogue) -> Verdict:
        """Diagnose the case. Raises Unreadable if a log of its folder cannot be opened."""
        if self.folder is None:
            return offline.diagnose_logs(offline.logs_from_texts(self.logs), catalogue)
        return offline.diagnose_logs(self._logs_of(self.folder), catalogue)

    def complete_log(self, name: str) -> bytes:
        """Return a log of its folder with all generated lines."""
        assert self.folder is not None
        return complete_log((self.folder / name).read_bytes(), [f for f in self.fillers if f.file == name])

    def _logs_of(self, folder: Path) -> list[Log]:
        generated = {filler.file for filler in self.fillers}
        logs, _ = offline.open_logs([str(p) for p in folder.iterdir() if p.name != CASE and p.name not in generated])
        for log in logs:
            log.name = Path(log.name).name
        logs += [offline.log_from_text(self.complete_log(name), name) for name in generated]
        return sorted(logs, key=lambda log: log.name)


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """A case with the verdict on it."""

    case: LabelledCase
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        return self.verdict.cause in (self.case.cause, *self.case.also)

    @property
    def has_right_owner(self) -> bool:
        owners = {CAUSES[code].owner for code in (self.case.cause, *self.case.also)}
        return self.verdict.owner in owners

    def as_json(self) -> dict[str, Any]:
        verdict, sure = self.verdict.cause, round(self.verdict.confidence, 2)
        return {"case": self.case.name, "confidence": sure, **_mismatch(self.case.cause, verdict)}


def _mismatch(expected: str, verdict: str) -> dict[str, str]:
    """Return both causes, also under their deprecated names `is` and `said`."""
    return {"expected": expected, "verdict": verdict, "is": expected, "said": verdict}


@dataclass(slots=True)
class Score:
    """The results over all cases. `without_framework` maps a framework to (right, of its cases)."""

    judged: list[JudgedCase]
    without_framework: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def right(self) -> int:
        return sum(case.is_right for case in self.judged)

    @property
    def accuracy(self) -> float:
        """Return the share of right verdicts, 0 to 1."""
        return self.right / len(self.judged) if self.judged else 0.0

    def by_code(self) -> dict[str, tuple[int, int]]:
        """Return (right, total) by the known cause."""
        found: dict[str, list[bool]] = {}
        for case in self.judged:
            found.setdefault(case.case.cause, []).append(case.is_right)
        return {code: (sum(rights), len(rights)) for code, rights in sorted(found.items())}

    def owners(self) -> tuple[int, int]:
        """Return (verdicts with the right owner, total)."""
        return sum(case.has_right_owner for case in self.judged), len(self.judged)

    def confusion(self) -> list[tuple[str, str, int]]:
        """Return (known cause, cause of the verdict, count) of wrong verdicts, most frequent first."""
        wrong = Counter((case.case.cause, case.verdict.cause) for case in self.judged if not case.is_right)
        return [
            (cause, verdict, count)
            for (cause, verdict), count in sorted(wrong.items(), key=lambda pair: (-pair[1], pair[0]))
        ]

    def calibration(self) -> list[tuple[float, float, int, int]]:
        """Return (from, to, right, total) by bins of confidence, 0 to 1."""
        found = []
        for low, high in zip((0.0, *BINS), BINS, strict=False):
            among = [case for case in self.judged if low <= case.verdict.confidence < high]
            found.append((low, min(high, 1.0), sum(case.is_right for case in among), len(among)))
        return found

    def sure(self) -> tuple[int, int, int]:
        """Return (right, with a wrong owner, total) of verdicts that are at least `HIGH_CONFIDENCE` sure."""
        among = [case for case in self.judged if case.verdict.confidence >= HIGH_CONFIDENCE]
        return sum(case.is_right for case in among), sum(not case.has_right_owner for case in among), len(among)

    def as_json(self) -> dict[str, Any]:
        """Return the score as `vigil diagnose --evaluate --json` prints it."""
        right, wrong_owner, sure = self.sure()
        return {
            "cases": len(self.judged),
            "right": self.right,
            "accuracy": round(self.accuracy, 4),
            "owners": self.owners()[0],
            "by_code": {code: {"right": got, "of": of} for code, (got, of) in self.by_code().items()},
            "confusion": [{**_mismatch(cause, verdict), "count": count} for cause, verdict, count in self.confusion()],
            "calibration": [{"from": a, "to": b, "right": got, "of": of} for a, b, got, of in self.calibration()],
            "sure": {"right": right, "wrong_owner": wrong_owner, "of": sure},
            "without": {name: {"right": got, "of": of} for name, (got, of) in self.without_framework.items()},
            "wrong": [case.as_json() for case in self.judged if not case.is_right],
        }


def read_cases(path: Path) -> Iterator[LabelledCase]:
    """Yield the cases of a folder or of a file of JSON lines. Raises Unreadable if it is neither."""
    if path.is_dir():
        for folder in sorted(path_inside for path_inside in path.iterdir() if (path_inside / CASE).is_file()):
            yield _case_of_folder(folder)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _case_of_json(path, number, line)


def _case_of_folder(folder: Path) -> LabelledCase:
    try:
        table = tomllib.loads((folder / CASE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Unreadable(f"{folder / CASE}: {error}") from None
    try:
        fillers = tuple(Filler.parse(filler) for filler in table.get("filler", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{folder / CASE}, filler: {error}") from None
    return LabelledCase(
        folder.name,
        _code(folder / CASE, table.get("cause")),
        tuple(table.get("also", ())),
        tuple(table.get("software", ())),
        folder,
        fillers=fillers,
    )


def _case_of_json(path: Path, number: int, line: str) -> LabelledCase:
    try:
        record = json.loads(line)
        name = str(record.get("id", number))
        logs = (
            {str(key): str(text) for key, text in record["logs"].items()}
            if "logs" in record
            else {name: str(record["log"])}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{path}, line {number}: {error}") from None
    label = record.get("label") or record.get("cause")
    also = tuple(record.get("alt") or record.get("also") or ())
    return LabelledCase(name, _code(f"{path}, line {number}", label), also, logs=logs)


def _code(where: object, code: object) -> str:
    if not isinstance(code, str) or code not in CAUSES:
        raise Unreadable(f"{where}: {code!r} is not a cause")
    return code


def evaluate(cases: Sequence[LabelledCase], catalogue: Catalogue, *, without_frameworks: bool = False) -> Score:
    """Score a catalogue on cases.

    With `without_frameworks`, also score each framework's own cases with that framework's entries removed.
    """
    score = Score([JudgedCase(case, case.verdict(catalogue)) for case in cases])
    for name in catalogue.frameworks() if without_frameworks else ():
        framework_cases = [judged.case for judged in score.judged if name in judged.case.software and judged.is_right]
        if framework_cases:
            reduced = catalogue.without_framework(name)
            score.without_framework[name] = (
                sum(JudgedCase(case, case.verdict(reduced)).is_right for case in framework_cases),
                len(framework_cases),
            )
    return score
