"""What is to be compared: a run's configuration, and each candidate's changes to it. Checked before anything starts.

--with fsdp=parallelism=fsdp,fsdp.reshard=never      a name, then settings of [run] with their values
--with wide=parallelism=fsdp,mesh.shard=             nothing behind the last sign: as if it were not written
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from training import contracts
from training.config import choices, communication, shape
from training.config.asked import ConfigError
from training.config.run_config import RunConfig, parse
from training.planning import checking

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
LEAST_STEPS = 12
"""Fewer leave nothing to measure: the first ones allocate, and make ready for the checkpoint."""
USUAL = ("ddp=parallelism=ddp", "fsdp=parallelism=fsdp")

_WORK = frozenset({"recipe", "seed", "global_batch"})
_OURS = frozenset({"steps", "validate_every", "checkpoint_every", "keep_checkpoints", "keep_every", "keep_best"})


class Refused(Exception):
    """The comparison can't be made; a line for each reason, with the candidate's name and the field."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True)
class Candidate:
    """One way to do the work."""

    name: str
    config: RunConfig
    changes: str
    """The changes to the run, as they were written."""


def candidates(base: RunConfig, written: Sequence[str], *, steps: int, ranks: int) -> list[Candidate]:
    """Everything that can't work is told at once, whichever candidate it is."""
    if steps < LEAST_STEPS:
        raise Refused([f"--steps: {steps} are too few to measure. The least is {LEAST_STEPS}."])
    found: list[Candidate] = []
    wrong: list[str] = []
    for text in written or USUAL:
        name, _, changes = text.partition("=")
        try:
            if not NAME.fullmatch(name) or not changes:
                raise Refused([f"--with {text}: write NAME=setting=value, for example {USUAL[1]}."])
            if any(candidate.name == name for candidate in found):
                raise Refused([f"--with {text}: the name {name} is given twice."])
            found.append(Candidate(name, _configuration(name, base, changes, steps=steps, ranks=ranks), changes))
        except Refused as refused:
            wrong += refused.lines
    if not wrong and len(found) < 2:
        wrong = ["--with: one configuration has nothing to be compared with. Name a second."]
    if wrong:
        raise Refused(wrong)
    return found


def _configuration(name: str, base: RunConfig, changes: str, *, steps: int, ranks: int) -> RunConfig:
    table = _as_measured(base, steps)
    given = _changes(name, changes)
    for path, value in given.items():
        _refuse_other_work(name, base, path)
        _set(table, path, value, name)
    _drop_unused(table, base, mentioned={path.partition(".")[0] for path in given})
    try:
        config = parse(table)
        problems = [f"run.{problem.field}: {problem.message}" for problem in checking.problems(config, ranks)]
        problems = problems or list(_unmeasurable(config))
    except ConfigError as error:
        problems = [str(problem) for problem in error.problems]
    if problems:
        raise Refused([f"{name}: {problem}" for problem in problems])
    return config


def _unmeasurable(config: RunConfig) -> Iterator[str]:
    way, every = config.communication, communication.apart(config)
    if contracts.communication(way).trainer is not None:
        yield f"run.communication: {way} has a loop of its own, whose steps are not measured. Write another."
    elif config.steps < LEAST_STEPS + every:
        yield (
            f"run.{way}.every: is {every}, so that {config.steps} steps may lie between two exchanges. "
            f"Write --steps {LEAST_STEPS + every}, or a smaller one."
        )


def _as_measured(base: RunConfig, steps: int) -> dict[str, Any]:
    """The run, but so many steps, no validation, no profile, and one checkpoint at the end, made ready for before."""
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
    """Setting → value, as TOML would read it; None where it is to be left out. Values may hold commas."""
    found = {}
    for change in re.split(r",(?=\s*[A-Za-z_][\w.]*\s*=)", changes):
        path, sign, value = (part.strip() for part in change.partition("="))
        if not sign or not path:
            raise Refused([f"{name}: {change!r} is no setting. Write setting=value, for example mesh.tp=2."])
        found[path] = _value(value)
    return found


def _value(text: str) -> Any:
    if not text:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a word needs no quotes here


def _refuse_other_work(name: str, base: RunConfig, path: str) -> None:
    field = path.partition(".")[0]
    if field in _WORK or field in choices.names("recipes"):
        raise Refused(
            [f"{name}: run.{path} decides what is trained, so the two could not be compared. Change the run."]
        )
    if field == "steps":
        raise Refused([f"{name}: run.steps is the same for all. Write --steps."])
    if field in _OURS:
        raise Refused([f"{name}: run.{path} is set by the comparison: no validation, one checkpoint at the end."])


def _set(table: dict[str, Any], path: str, value: Any, name: str) -> None:
    *tables, field = path.split(".")
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise Refused([f"{name}: run.{path}: {part} is a setting, not a table."])
    if value is None:
        table.pop(field, None)
    else:
        table[field] = value


def _drop_unused(table: dict[str, Any], base: RunConfig, *, mentioned: set[str]) -> None:
    """Options of what this candidate does otherwise than the run; those it names itself are left to be refused."""
    used = {table.get("parallelism"), table.get("communication")}
    if table.get("parallelism") == shape.AUTO:
        used |= set(choices.names("parallel"))  # whichever it chooses
    elif table.get("parallelism") in choices.names("parallel") and isinstance(table.get("mesh", {}), dict):
        used |= set(shape.owners(table["parallelism"], table.get("mesh", {})).values())
    for option in (*choices.names("parallel"), *choices.names("comm")):
        if option not in used | mentioned and option in base.options:
            table.pop(option, None)
