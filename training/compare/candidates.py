"""Parse what is to be compared: a run's configuration and each candidate's changes to it.

Checked before anything starts.

--with fsdp=parallelism=fsdp,fsdp.reshard=never      a name, then settings of [run] with their values
--with wide=parallelism=fsdp,mesh.shard=             no value: the setting is removed
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from training import contracts
from training.config import choices, communication, shape
from training.config.base import ConfigError
from training.config.run_config import RunConfig, parse
from training.planning import checking

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
MIN_STEPS = 12
"""Fewer steps leave nothing to measure: the first ones allocate memory and prepare the checkpoint."""
DEFAULT_CANDIDATES = ("ddp=parallelism=ddp", "fsdp=parallelism=fsdp")

_FIXED = frozenset({"recipe", "seed", "global_batch"})
_CONTROLLED = frozenset({"steps", "validate_every", "checkpoint_every", "keep_checkpoints", "keep_every", "keep_best"})


class ComparisonError(Exception):
    """The comparison is impossible; one line per reason, with the candidate's name and the field."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True)
class Candidate:
    """A configuration to compare."""

    name: str
    config: RunConfig
    changes: str
    """The changes to the run, as written on the command line."""


def candidates(base: RunConfig, written: Sequence[str], *, steps: int, ranks: int) -> list[Candidate]:
    """Parse all candidates. Raises ComparisonError with everything that is wrong with any of them."""
    if steps < MIN_STEPS:
        raise ComparisonError([f"--steps: {steps} are too few to measure. The minimum is {MIN_STEPS}."])
    parsed: list[Candidate] = []
    errors: list[str] = []
    for text in written or DEFAULT_CANDIDATES:
        name, _, changes = text.partition("=")
        try:
            if not NAME.fullmatch(name) or not changes:
                raise ComparisonError(
                    [f"--with {text}: write NAME=setting=value, for example {DEFAULT_CANDIDATES[1]}."]
                )
            if any(candidate.name == name for candidate in parsed):
                raise ComparisonError([f"--with {text}: the name {name} is given twice."])
            parsed.append(Candidate(name, _configuration(name, base, changes, steps=steps, ranks=ranks), changes))
        except ComparisonError as refused:
            errors += refused.lines
    if not errors and len(parsed) < 2:
        errors = ["--with: only one configuration is given. Name a second one to compare it with."]
    if errors:
        raise ComparisonError(errors)
    return parsed


def _configuration(name: str, base: RunConfig, changes: str, *, steps: int, ranks: int) -> RunConfig:
    table = _measured_run(base, steps)
    changed = _changes(name, changes)
    for path, value in changed.items():
        _check_comparable(name, base, path)
        _set(table, path, value, name)
    _drop_unused(table, base, mentioned={path.partition(".")[0] for path in changed})
    try:
        config = parse(table)
        problems = [f"run.{problem.field}: {problem.message}" for problem in checking.problems(config, ranks)]
        problems = problems or list(_unmeasurable(config))
    except ConfigError as error:
        problems = [str(problem) for problem in error.problems]
    if problems:
        raise ComparisonError([f"{name}: {problem}" for problem in problems])
    return config


def _unmeasurable(config: RunConfig) -> Iterator[str]:
    name, interval = config.communication, communication.sync_interval(config)
    if contracts.communication(name).trainer is not None:
        yield f"run.communication: {name} has its own training loop, whose steps are not measured. Choose another."
    elif config.steps < MIN_STEPS + interval:
        yield (
            f"run.{name}.every: is {interval}, so that {config.steps} steps may lie between two exchanges. "
            f"Write --steps {MIN_STEPS + interval}, or a smaller one."
        )


def _measured_run(base: RunConfig, steps: int) -> dict[str, Any]:
    """Return the run for measuring: this many steps, no validation, no profile, and one checkpoint at the end.

    The checkpoint is prepared in advance.
    """
    table = base.model_dump()
    table |= {"steps": steps, "warmup_steps": min(base.warmup_steps, steps // 5)}
    return table | {
        "validate_every": 0,
        "profile_at": 0,
        "checkpoint_every": steps + 1,
        "keep_checkpoints": 1,
        "keep_every": 0,
        "keep_best": 0,
    }


def _changes(name: str, changes: str) -> dict[str, Any]:
    """Map each setting to its value, as TOML would read it; None: remove it. Values may contain commas."""
    values = {}
    for change in re.split(r",(?=\s*[A-Za-z_][\w.]*\s*=)", changes):
        path, sign, value = (part.strip() for part in change.partition("="))
        if not sign or not path:
            raise ComparisonError([f"{name}: {change!r} is not a setting. Write setting=value, for example mesh.tp=2."])
        values[path] = _value(value)
    return values


def _value(text: str) -> Any:
    if not text:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # words need no quotes on the command line


def _check_comparable(name: str, base: RunConfig, path: str) -> None:
    field = path.partition(".")[0]
    if field in _FIXED or field in choices.names("recipes"):
        raise ComparisonError(
            [f"{name}: run.{path} determines what is trained, so candidates would not be comparable. Change RUN.toml."]
        )
    if field == "steps":
        raise ComparisonError([f"{name}: run.steps is the same for all candidates. Use --steps."])
    if field in _CONTROLLED:
        raise ComparisonError(
            [f"{name}: run.{path} is set by the comparison: no validation, one checkpoint at the end."]
        )


def _set(table: dict[str, Any], path: str, value: Any, name: str) -> None:
    *tables, field = path.split(".")
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ComparisonError([f"{name}: run.{path}: {part} is a setting, not a table."])
    if value is None:
        table.pop(field, None)
    else:
        table[field] = value


def _drop_unused(table: dict[str, Any], base: RunConfig, *, mentioned: set[str]) -> None:
    """Remove the run's options for modules that this candidate does not use, except those that it sets itself."""
    used = {table.get("parallelism"), table.get("communication")}
    if table.get("parallelism") == shape.AUTO:
        used |= set(choices.names("parallel"))  # whichever is chosen
    elif table.get("parallelism") in choices.names("parallel") and isinstance(table.get("mesh", {}), dict):
        used |= set(shape.modules_by_axis(table["parallelism"], table.get("mesh", {})).values())
    for option in (*choices.names("parallel"), *choices.names("comm")):
        if option not in used | mentioned and option in base.options:
            table.pop(option, None)
