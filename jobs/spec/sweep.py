"""Define a sweep: a specification in which some values are lists, and every combination of them is a job."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tomlkit
from pydantic import BeforeValidator, Field, ValidationError

from jobs.errors import Problem, SpecError
from jobs.spec.code import Code
from jobs.spec.error_messages import problems_of
from jobs.spec.model import JobSpec
from jobs.spec.sweep_options import is_within, unused_tables, without_code, without_tables
from jobs.spec.table import SpecTable
from jobs.spec.toml import read_toml
from training.federation.data_division import EMPTY_CLIENTS

MAX_COMBINATIONS = 1_000  # combinations
MAX_PROBLEMS = 20
# Values and lines of all combinations together: each is checked and written out for every job. 250,000 take 3 s; what
# 64 KB can hold, times a thousand, took 30 s.
MAX_VALUES_AND_LINES = 250_000
# Tags and jobs to wait for, of all combinations together: rows that one transaction inserts while others wait for it.
# 50,000 tags took 1.4 s of processor time.
MAX_LINKS = 10_000
TABLE = "sweep"
_PATH = re.compile(r"run(\.\w+)+|script\.args|script\.env\.\w+", re.ASCII)
_EXAMPLE = 'Write a line [sweep.over], and below it the values, such as "run.learning_rate" = [1e-3, 2e-3].'
_ONLY = "A sweep can vary run.…, script.args and script.env.…"


def _flatten(over: object) -> object:
    """Return {"run.steps": […]} for what TOML makes of run.steps without quotes: {"run": {"steps": […]}}."""
    if not isinstance(over, Mapping):
        return over
    flat: dict[str, object] = {}
    for name, inner in over.items():
        deeper = _flatten(inner)
        flat |= {f"{name}.{rest}": value for rest, value in deeper.items()} if isinstance(deeper, dict) else {
            name: deeper
        }  # fmt: skip
    return flat


class SweepTable(SpecTable):
    """[sweep]: the values by path, and how many jobs run at once."""

    at_once: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COMBINATIONS,
        title="At once",
        description="How many of the jobs run at the same time.",
    )
    over: Annotated[dict[str, list[Any]], BeforeValidator(_flatten)] = Field(
        title="Over", description='Values by path: "run.learning_rate" = [1e-3, 2e-3]. Every combination is a job.'
    )

    @property
    def size(self) -> int:
        return math.prod(map(len, self.over.values()))


class _SpecWithSweep(SpecTable):
    sweep: SweepTable


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """A combination: the values by path, and the whole specification with them, as data and as text."""

    values: dict[str, Any]
    spec: JobSpec
    spec_toml: str


@dataclass(frozen=True, kw_only=True)
class RefusedPoint:
    """A combination that gets no job, while the others do."""

    values: dict[str, Any]
    message: str


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A specification with [sweep], and all jobs that it makes."""

    name: str
    at_once: int | None
    over: dict[str, list[Any]]
    points: tuple[SweepPoint, ...]  # the last path changes fastest
    refused: tuple[RefusedPoint, ...] = ()

    @property
    def first(self) -> JobSpec:
        """Return the first job's specification; all jobs have its project and kind, and request the same resources."""
        return self.points[0].spec

    @property
    def others(self) -> list[JobSpec]:
        return [point.spec for point in self.points[1:]]

    @property
    def code(self) -> Code | None:
        """Return the code that is uploaded with it; jobs that use no file of it have none."""
        return next((point.spec.code for point in self.points if point.spec.code is not None), None)

    @classmethod
    def parse(cls, data: dict[str, Any], text: str | None = None) -> SweepSpec:
        """Parse plain values and the text they come from. Raises SpecError that names path and value."""
        table = _table(data)
        base = {name: value for name, value in data.items() if name != TABLE}
        name = base.get("name")
        _check_cost(table.size, _count(base), "values")
        links = sum(len(base[key]) for key in ("tags", "after") if isinstance(base.get(key), list))
        _check_cost(table.size, links, "tags and jobs to wait for", most=MAX_LINKS)
        combinations, specs, refused = _parsed(base, table.over, name)
        texts = _texts(text if text is not None else plain_toml(data), combinations, specs, table.over)
        points = (
            SweepPoint(values=values, spec=spec, spec_toml=toml)
            for values, spec, toml in zip(combinations, specs, texts, strict=True)
        )
        return cls(name=str(name), at_once=table.at_once, over=table.over, points=tuple(points), refused=refused)

    @classmethod
    def parse_toml(cls, text: str) -> SweepSpec:
        return cls.parse(read_toml(text), text)


def plain_toml(data: Mapping[str, Any]) -> str:
    """Return plain values as TOML. Raises SpecError for a value that TOML cannot express."""
    try:
        return tomlkit.dumps(_without_none(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError.at("", f"It cannot be written as TOML: {error}") from None


def has_sweep(data: Mapping[str, Any]) -> bool:
    return TABLE in data


def _table(data: dict[str, Any]) -> SweepTable:
    """Return the validated table [sweep]."""
    try:
        found = _SpecWithSweep.model_validate({TABLE: data.get(TABLE)}).sweep
    except ValidationError as error:
        raise SpecError(_with_example(problems_of(error, _SpecWithSweep, data))) from None
    if problems := list(_table_problems(found)):
        raise SpecError(problems)
    return found


def _with_example(problems: list[Problem]) -> list[Problem]:
    """Add an example to the message about a missing table, which nobody could guess."""
    return [
        Problem(problem.field, f"Missing. {_EXAMPLE}")
        if problem.field == f"{TABLE}.over" and "Missing" in problem.message
        else problem
        for problem in problems
    ]


def _table_problems(found: SweepTable) -> Iterator[Problem]:
    if not found.over:
        yield Problem("sweep.over", f"No values are given. {_EXAMPLE}")
    for path, values in found.over.items():
        field = f"sweep.over.{path[:200]}"
        if path.startswith("resources."):
            text = "All jobs of a sweep request the same resources, as they are submitted as one array."
            yield Problem(field, f"{text} Remove it, and submit a sweep for each value.")
        elif not _PATH.fullmatch(path):
            yield Problem(field, f"{_ONLY} only. Remove this.")
        elif not values:
            yield Problem(field, "Has no values. Write at least one.")
        elif inner := next((other for other in found.over if other.startswith(f"{path}.")), None):
            yield Problem(field, f"{inner} lies within it. Remove one of them.")
        elif (twice := _duplicate(values)) is not None:
            yield Problem(field, f"{_quote(twice)} is given twice. Remove one of them.")
    if len(found.over) and found.size > MAX_COMBINATIONS:
        each = " × ".join(str(len(values)) for values in found.over.values())
        text = f"{each} = {found.size:,} combinations; a sweep has {MAX_COMBINATIONS:,} at most."
        yield Problem("sweep.over", f"{text} Use fewer values, or split it into several sweeps.")


def _check_cost(jobs: int, each: int, what: str, *, most: int = MAX_VALUES_AND_LINES) -> None:
    """Refuse a sweep that is many jobs of a very long specification."""
    if jobs * each > most:
        text = f"{jobs:,} jobs of {each:,} {what} each are too much: {most:,} {what} in total at most."
        raise SpecError.at("sweep.over", f"{text} Use fewer jobs, or a shorter specification.")


def _count(value: object) -> int:
    """Return how many values a table or a list holds, at any depth."""
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _duplicate(values: list[Any]) -> Any | None:
    encoded = set()
    for value in values:
        if (text := json.dumps(value, sort_keys=True, default=str)) in encoded:
            return value
        encoded.add(text)
    return None


def _combinations(base: dict[str, Any], over: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the values of each job by path.

    Options that a job does not use are left out, and jobs that differ only in such options become one.
    """
    combinations: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*over.values()):
        whole = dict(zip(over, values, strict=True))
        tables = unused_tables(base, over, values=whole)
        used = {path: value for path, value in whole.items() if not is_within(path, tables)}
        combinations.setdefault(json.dumps(used, sort_keys=True, default=str), used)
    return list(combinations.values())


def _data_of(
    base: dict[str, Any], values: dict[str, Any], over: dict[str, list[Any]], name: object, number: int
) -> dict[str, Any]:
    """Return the data of one combination; its job has the sweep's name with its number."""
    data = _with_values(base, values)
    without_tables(data.get("run"), unused_tables(data, over))
    without_code(data, over)
    if isinstance(name, str) and len(name) <= 64:  # an invalid name is reported as for any job
        data["name"] = job_name(name, number)
    return data


def _with_values(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(base)
    for path, value in values.items():
        *tables, key = path.split(".")
        place: Any = data
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                return data  # parsing the specification reports what is wrong
        place[key] = copy.deepcopy(value)
    return data


def job_name(sweep: str, number: int) -> str:
    """Return the name of a job, `lr` → `lr-3`, within the 64 characters of a name."""
    return f"{sweep[: 64 - len(f'-{number}')]}-{number}"


def _parsed(
    base: dict[str, Any], over: dict[str, list[Any]], name: object
) -> tuple[list[dict[str, Any]], list[JobSpec], tuple[RefusedPoint, ...]]:
    """Return the values and specifications of the jobs, and the combinations that are refused for their draw alone."""
    combinations, failed = [], []
    specs: list[JobSpec] = []
    for values in _combinations(base, over):
        try:
            specs.append(JobSpec.parse(_data_of(base, values, over, name, len(specs))))
            combinations.append(values)
        except SpecError as error:
            failed.append((values, error.problems))
            if sum(not _is_drawn(problems) for _, problems in failed) >= MAX_PROBLEMS:
                break
    wrong = failed if not specs else [row for row in failed if not _is_drawn(row[1])]
    if wrong:
        raise SpecError(_merge_problems(wrong, is_all=not specs))
    refused = (RefusedPoint(values=values, message=" ".join(map(str, problems))) for values, problems in failed)
    return combinations, specs, tuple(refused)


def _is_drawn(problems: list[Problem]) -> bool:
    """Return whether only the draw of the clients' data is wrong, which does not refuse the other jobs."""
    return all(EMPTY_CLIENTS in problem.message for problem in problems)


def _merge_problems(failed: list[tuple[dict[str, Any], list[Problem]]], *, is_all: bool) -> list[Problem]:
    """Merge the problems of all combinations.

    A problem of every combination is reported once; others at the path of their value, or with their combination.
    """
    everywhere = set.intersection(*({*problems} for _, problems in failed)) if is_all and len(failed) > 1 else set()
    merged: dict[Problem, None] = {}
    for values, problems in failed:
        for problem in problems:
            field = problem.field.partition("[")[0]
            path = next((path for path in values if field == path or field.startswith(f"{path}.")), None)
            if path is not None and problem in everywhere:
                merged.setdefault(Problem(f"sweep.over.{path}", problem.message))
            elif path is not None:
                value_text = _quote(values[path])
                text = problem.message if problem.message.startswith(value_text) else f"{value_text}: {problem.message}"
                merged.setdefault(Problem(f"sweep.over.{path}", text))
            elif problem in everywhere:
                merged.setdefault(problem)
            else:
                with_them = ", ".join(f"{path} = {_quote(value)}" for path, value in values.items())
                merged.setdefault(Problem(problem.field, f"{problem.message} That is with {with_them}."))
    return list(merged)[:MAX_PROBLEMS]


def _quote(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _texts(
    text: str, combinations: list[dict[str, Any]], specs: list[JobSpec], over: dict[str, list[Any]]
) -> Iterator[str]:
    """Yield the text of each job, without [sweep] and with its values; comments and order stay."""
    whole = tomlkit.parse(text)
    whole.remove(TABLE)
    _check_cost(len(specs), tomlkit.dumps(whole).count("\n"), "lines")
    for values, spec in zip(combinations, specs, strict=True):
        document = copy.deepcopy(whole)
        for path, value in {"name": spec.name, **values}.items():
            *tables, key = path.split(".")
            place: Any = document
            for name in tables:
                place = place.setdefault(name, tomlkit.table())
            place[key] = value
        without_tables(document.get("run"), unused_tables(document, over))
        without_code(document, over)
        yield f"{tomlkit.dumps(document).strip()}\n"


def _without_none(value: Any) -> Any:
    """Remove None values, which TOML cannot express."""
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
