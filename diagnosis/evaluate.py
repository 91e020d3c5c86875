"""How good verdicts are: held against cases whose causes are known, by code, by owner, and by how sure they were.

Cases are a folder of folders, each with `case.toml` (cause, also, software) beside its logs, or JSON lines with
`label`, `alt` and `log`, or of several logs `logs` by their names.
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
from diagnosis.logs.files import Unreadable
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.verdict import Verdict

CASE = "case.toml"
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.01)
SURE = 0.9


@dataclass(frozen=True, slots=True)
class Case:
    """Logs, and what they should be found to be."""

    name: str
    cause: str
    also: tuple[str, ...] = ()
    software: tuple[str, ...] = ()
    folder: Path | None = None
    logs: Mapping[str, str] = field(default_factory=dict)

    def verdict(self, known: Catalogue) -> Verdict:
        if self.folder is None:
            return offline.verdict_on(offline.logs_of_texts(self.logs), known)
        names = [str(path) for path in sorted(self.folder.iterdir()) if path.name != CASE]
        logs, _ = offline.logs_of(names)
        for log in logs:
            log.name = Path(log.name).name
        return offline.verdict_on(logs, known)


@dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        return self.verdict.cause in (self.case.cause, *self.case.also)

    @property
    def has_right_owner(self) -> bool:
        owners = {CAUSES[code].owner for code in (self.case.cause, *self.case.also)}
        return self.verdict.owner in owners

    def told(self) -> dict[str, Any]:
        said, sure = self.verdict.cause, round(self.verdict.confidence, 2)
        return {"case": self.case.name, "is": self.case.cause, "said": said, "confidence": sure}


@dataclass(slots=True)
class Score:
    """Of all cases: which were right, and where not."""

    judged: list[Judged]
    without: dict[str, tuple[int, int]] = field(default_factory=dict)  # framework: right, of its cases

    @property
    def right(self) -> int:
        return sum(one.is_right for one in self.judged)

    @property
    def accuracy(self) -> float:
        return self.right / len(self.judged) if self.judged else 0.0

    def by_code(self) -> dict[str, tuple[int, int]]:
        found: dict[str, list[bool]] = {}
        for one in self.judged:
            found.setdefault(one.case.cause, []).append(one.is_right)
        return {code: (sum(rights), len(rights)) for code, rights in sorted(found.items())}

    def owners(self) -> tuple[int, int]:
        return sum(one.has_right_owner for one in self.judged), len(self.judged)

    def confusion(self) -> list[tuple[str, str, int]]:
        wrong = Counter((one.case.cause, one.verdict.cause) for one in self.judged if not one.is_right)
        return [
            (is_, said, count) for (is_, said), count in sorted(wrong.items(), key=lambda pair: (-pair[1], pair[0]))
        ]

    def calibration(self) -> list[tuple[float, float, int, int]]:
        """From, to, right, of: verdicts by how sure they were."""
        found = []
        for low, high in zip((0.0, *BINS), BINS, strict=False):
            among = [one for one in self.judged if low <= one.verdict.confidence < high]
            found.append((low, min(high, 1.0), sum(one.is_right for one in among), len(among)))
        return found

    def sure(self) -> tuple[int, int, int]:
        """Of verdicts at least `SURE` sure: right, with a wrong owner, in all."""
        among = [one for one in self.judged if one.verdict.confidence >= SURE]
        return sum(one.is_right for one in among), sum(not one.has_right_owner for one in among), len(among)

    def told(self) -> dict[str, Any]:
        right, wrong_owner, sure = self.sure()
        return {
            "cases": len(self.judged),
            "right": self.right,
            "accuracy": round(self.accuracy, 4),
            "owners": self.owners()[0],
            "by_code": {code: {"right": got, "of": of} for code, (got, of) in self.by_code().items()},
            "confusion": [{"is": is_, "said": said, "count": count} for is_, said, count in self.confusion()],
            "calibration": [{"from": a, "to": b, "right": got, "of": of} for a, b, got, of in self.calibration()],
            "sure": {"right": right, "wrong_owner": wrong_owner, "of": sure},
            "without": {name: {"right": got, "of": of} for name, (got, of) in self.without.items()},
            "wrong": [one.told() for one in self.judged if not one.is_right],
        }


def cases(path: Path) -> Iterator[Case]:
    """The cases of a folder or of a file of JSON lines; Unreadable where it is neither."""
    if path.is_dir():
        for folder in sorted(one for one in path.iterdir() if (one / CASE).is_file()):
            yield _case(folder)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _of_json(path, number, line)


def _case(folder: Path) -> Case:
    try:
        told = tomllib.loads((folder / CASE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Unreadable(f"{folder / CASE}: {error}") from None
    return Case(
        folder.name,
        _code(folder / CASE, told.get("cause")),
        tuple(told.get("also", ())),
        tuple(told.get("software", ())),
        folder,
    )


def _of_json(path: Path, number: int, line: str) -> Case:
    try:
        told = json.loads(line)
        name = str(told.get("id", number))
        logs = (
            {str(key): str(text) for key, text in told["logs"].items()} if "logs" in told else {name: str(told["log"])}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{path}, line {number}: {error}") from None
    label = told.get("label") or told.get("cause")
    also = tuple(told.get("alt") or told.get("also") or ())
    return Case(name, _code(f"{path}, line {number}", label), also, logs=logs)


def _code(where: object, code: object) -> str:
    if not isinstance(code, str) or code not in CAUSES:
        raise Unreadable(f"{where}: {code!r} is no cause")
    return code


def evaluate(several: Sequence[Case], known: Catalogue, *, without: bool = False) -> Score:
    """The score of a catalogue on cases. `without`: also of each framework's own cases with its entries taken out."""
    score = Score([Judged(case, case.verdict(known)) for case in several])
    for name in known.frameworks() if without else ():
        theirs = [one.case for one in score.judged if name in one.case.software and one.is_right]
        if theirs:
            less = known.without(name)
            score.without[name] = (sum(Judged(case, case.verdict(less)).is_right for case in theirs), len(theirs))
    return score
