"""Find what else is wrong with an invalid specification: whatever can be checked without its invalid fields.

Pydantic checks fields together only once each of them is valid. A copy without the invalid ones passes, so that the
checks of several fields run too; their problems count if they depend on none of the invalid fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from jobs.errors import Problem
from jobs.spec.error_messages import has_field, problems_of
from training.config import choices

Spec = TypeVar("Spec", bound=BaseModel)

ROUNDS = 4  # tables are checked from the inside out
NAME = "unnamed"  # a specification has to have one
SIZE = ("resources.nodes", "resources.gpus_per_node", "resources.ranks_per_node")
# The fields that a check of several fields reads, apart from the field that it names and the kind.
READS = {
    "run.global_batch": (*SIZE, "run.micro_batch"),
    "run.warmup_steps": ("run.steps",),
    "resources.gpu_type": ("resources.gpus_per_node",),
    "resources.require_nodes": ("resources.nodes",),
    "resources.exclude_nodes": ("resources.require_nodes",),
    "client": ("run.recipe", "run.algorithm"),
    "run": ("client",),  # which brings a recipe
    "resources": (*SIZE, "resources.cpus_per_rank", "resources.memory_gib"),  # whether any node has that much
}


def validate_rest(
    model: type[Spec], data: dict[str, Any], problems: list[Problem]
) -> tuple[Spec | None, list[Problem]]:
    """Return the specification without its invalid fields, and what else is wrong; None if it stays invalid."""
    rest, fresh = data, problems
    more: list[Problem] = []
    for _ in range(ROUNDS):
        for problem in fresh:
            rest = _without(rest, _field(problem))
        try:
            return model.model_validate({"name": NAME, **rest}), more
        except ValidationError as error:
            fresh = problems_of(error, model, rest)
            more += independent_problems(model, fresh, [*problems, *more], data.get("kind"))
    return None, more


def independent_problems(
    model: type[BaseModel], problems: Iterable[Problem], broken: list[Problem], kind: object
) -> list[Problem]:
    """Return the problems that do not depend on the broken fields. `kind`: of the job."""
    fields = {_field(problem) for problem in broken}
    # It is unknown what an unknown key was meant for: its whole table may be affected.
    fields |= {
        field.rpartition(".")[0] for field in fields if not _is_option(field) and not has_field(model, field, kind)
    }
    return [problem for problem in problems if not any(_overlap(a, b) for a in _reads(_field(problem)) for b in fields)]


def _reads(field: str) -> tuple[str, ...]:
    if _is_option(field):
        return (field, "kind", "client", *(f"run.{chooses}" for of in choices.CHOICE_FIELDS.values() for chooses in of))
    return (field, "kind", *READS.get(field, READS.get(field.partition(".")[0], ())))


def _is_option(field: str) -> bool:
    """Return whether the field is, or is inside, the table of a recipe, a parallelism or a communication."""
    table, *inside = field.split(".")
    return table == "run" and any(
        inside[:1] == [name] for kind in choices.ENTRY_FUNCTIONS for name in choices.names(kind)
    )


def _overlap(first: str, other: str) -> bool:
    """Return whether two paths are the same, or one contains the other."""
    return first == other or first.startswith(f"{other}.") or other.startswith(f"{first}.")


def _field(problem: Problem) -> str:
    return problem.field.partition("[")[0]


def _without(data: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy without the value at a path, if there is one: even a default can be invalid."""
    key, _, inside = path.partition(".")
    others = {name: value for name, value in data.items() if name != key}
    if inside and key in data:
        return {**others, key: _without(data[key], inside)} if isinstance(data[key], dict) else data
    return others
