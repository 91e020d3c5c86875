"""Minimum versions: which software should not be older than what, why, and who says so.

They are data: nodes/inventory/minimums.toml ships with Vigil, and a site adds its own (VIGIL_MINIMUM_VERSIONS). Tables
`[[minimum]]` have `software`, `version`, `why` and `source`; `branch` limits one to versions that begin so, such as
"550", and `models` to GPUs or adapters with one of these texts in their names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nodes.inventory import versions
from nodes.inventory.software import HEXADECIMAL, TITLES, UNORDERED, Software
from vigil_core import bounded
from vigil_core.bounded import Bounds

SHIPPED = Path(__file__).with_name("minimums.toml")
MAX_BYTES = 256 * 1024
MAX_MINIMUMS = 200
MAX_MODELS = 20
MAX_ANSWERS = 20_000
BOUNDS = Bounds(depth=4, items=5_000)
_LONGEST = {"software": 32, "version": 64, "branch": 32, "why": 500, "source": 500}
_REQUIRED = ("software", "version", "why", "source")


class BadMinimum(ValueError):
    """Raised for a file of minimum versions that cannot be read; the message says where and why."""


@dataclass(frozen=True, kw_only=True)
class MinimumVersion:
    """One minimum version."""

    software: str
    version: str
    why: str
    source: str
    branch: str = ""
    models: tuple[str, ...] = ()
    is_site: bool = False

    @property
    def numbers(self) -> versions.Numbers:
        return _numbers(self.software, self.version)

    @property
    def title(self) -> str:
        return TITLES[self.software]

    @property
    def subject(self) -> tuple[str, str, tuple[str, ...]]:
        """Return what it is about: a site's minimum replaces the shipped one about the same."""
        return self.software, self.branch, self.models

    def applies_to(self, software: Software, model: str, version: str) -> bool:
        """Return whether it says something about this version. `model`: of the node's GPUs."""
        if software.name != self.software:
            return False
        about = (software.part or model).casefold()
        if self.models and not any(name.casefold() in about for name in self.models):
            return False
        return versions.is_of_branch(_numbers(self.software, version), _numbers(self.software, self.branch))


@dataclass(frozen=True)
class MinimumVersions:
    """The minimums in force. Answers are cached: a thousand nodes have few different versions."""

    items: tuple[MinimumVersion, ...]
    _answers: dict[tuple[Software, str, str], MinimumVersion | None] = field(default_factory=dict, compare=False)
    _judged: dict[tuple[Software, str, str], bool] = field(default_factory=dict, compare=False)

    def violated(self, software: Software, model: str, version: str) -> MinimumVersion | None:
        """Return the highest minimum that the version is below; None if it is below none."""
        key = (software, model, version)
        if key not in self._answers:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            self._answers[key] = self._highest(*key)
        return self._answers[key]

    def judges(self, software: Software, model: str, version: str) -> bool:
        """Return whether a minimum is about the version's branch, or none about any branch of the software."""
        key = (software, model, version)
        if key not in self._judged:
            if len(self._judged) >= MAX_ANSWERS:
                self._judged.clear()
            self._judged[key] = self._has_branch(*key)
        return self._judged[key]

    def _has_branch(self, software: Software, model: str, version: str) -> bool:
        branches = [minimum for minimum in self.items if minimum.branch and minimum.software == software.name]
        if not branches or self.violated(software, model, version) is not None:
            return True
        return any(minimum.applies_to(software, model, version) for minimum in branches)

    def _highest(self, software: Software, model: str, version: str) -> MinimumVersion | None:
        numbers = _numbers(software.name, version)
        below = [
            minimum
            for minimum in self.items
            if minimum.applies_to(software, model, version) and versions.is_below(numbers, minimum.numbers)
        ]
        return max(below, key=lambda minimum: minimum.numbers, default=None)


@cache
def shipped_minimums() -> tuple[MinimumVersion, ...]:
    return parse_minimums(SHIPPED.read_text(encoding="utf-8"))


def read_site_file(path: Path) -> tuple[MinimumVersion, ...]:
    """Return a site's own minimum versions. Raises BadMinimum and OSError."""
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise BadMinimum(f"the file is larger than {MAX_BYTES // 1024} KiB")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise BadMinimum("the file is not UTF-8") from None
    return parse_minimums(text, is_site=True)


def with_site(site: Sequence[MinimumVersion]) -> MinimumVersions:
    """Return the shipped minimums and the site's, which replace shipped ones about the same."""
    subjects = {minimum.subject for minimum in site}
    return MinimumVersions((*(item for item in shipped_minimums() if item.subject not in subjects), *site))


def parse_minimums(text: str, *, is_site: bool = False) -> tuple[MinimumVersion, ...]:
    """Return the minimum versions that a file's text names. Raises BadMinimum."""
    try:
        raw = bounded.toml(text, BOUNDS)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise BadMinimum(str(error)) from None
    tables = raw.pop("minimum", [])
    if raw:
        raise BadMinimum(f"unknown key {sorted(raw)[0]!r:.40}; a file has tables [[minimum]] only")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadMinimum("a minimum must be a table: [[minimum]]")
    if len(tables) > MAX_MINIMUMS:
        raise BadMinimum(f"more than {MAX_MINIMUMS} minimums")
    return tuple(_minimum(table, number, is_site) for number, table in enumerate(tables, 1))


def _minimum(table: dict[str, Any], number: int, is_site: bool) -> MinimumVersion:
    where = f"minimum {number}"
    if unknown := sorted(table.keys() - {*_LONGEST, "models"}):
        raise BadMinimum(f"{where}: unknown key {unknown[0]!r:.40}")
    for key in _REQUIRED:
        if key not in table:
            raise BadMinimum(f"{where}: {key} is missing")
    for key, most in _LONGEST.items():
        value = table.get(key, "")
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise BadMinimum(f"{where}: {key} must be a text of at most {most} characters in one line")
    models = table.get("models", [])
    if (
        not isinstance(models, list)
        or len(models) > MAX_MODELS
        or not all(isinstance(model, str) and 0 < len(model) <= 64 for model in models)
    ):
        raise BadMinimum(f"{where}: models must be a list of at most {MAX_MODELS} texts")
    software = table["software"]
    if software not in TITLES or software in UNORDERED:
        names = ", ".join(name for name in TITLES if name not in UNORDERED)
        raise BadMinimum(f"{where}: software must be one of {names}, not {software!r:.40}")
    if not _numbers(software, table["version"]):
        raise BadMinimum(f"{where}: version {table['version']!r:.40} has no number")
    return MinimumVersion(**{**table, "models": tuple(models)}, is_site=is_site)


def _numbers(software: str, version: str) -> versions.Numbers:
    return versions.version_numbers(version, is_hexadecimal=software in HEXADECIMAL)
