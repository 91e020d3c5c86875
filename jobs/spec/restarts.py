"""Define [restart.on]: what follows a failure, by its cause, if site, project or job change Vigil's default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from diagnosis.causes import CAUSES, NONE
from jobs.errors import Problem, SpecError
from jobs.spec.error_messages import problems_of
from jobs.spec.toml import read_toml

Move = Literal["elsewhere", "apart", "restart", "once", "once-if-saved", "rewind", "before", "stop"]

MOVES: Mapping[str, str] = {
    "elsewhere": "restarts without the failed node",
    "apart": "restarts; after another failure, without the nodes that both attempts used",
    "restart": "restarts",
    "once": "restarts once",
    "once-if-saved": "restarts once, if it has saved a checkpoint",
    "rewind": "restarts well before that point, with half the learning rate",
    "before": "restarts from the previous checkpoint",
    "stop": "stops",
}
assert set(MOVES) == set(get_args(Move))

ANY = ".*"
NO_FAILURES = frozenset({NONE, "scheduler.preempted", "scheduler.cancelled"})  # what follows them cannot be configured
_DOMAINS = {cause.domain for cause in CAUSES.values() if "." in cause.code}


def _causes(on: dict[str, Move]) -> dict[str, Move]:
    for key in on:
        if key in NO_FAILURES or not (key in CAUSES or (key.endswith(ANY) and key.removesuffix(ANY) in _DOMAINS)):
            raise ValueError(
                f'"{key[:64]}" is not a cause. Write one, such as "memory.gpu_oom", or all of a kind: "gpu.*".'
            )
    return on


On = Annotated[dict[str, Move], AfterValidator(_causes)]


class _RestartRows(BaseModel):
    """The table by itself, as a site and a project have it."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    on: On = {}


def parse_toml(text: str) -> dict[str, Move]:
    """Parse lines such as `"gpu.*" = "stop"`. Raises SpecError for an invalid one."""
    data = {"on": read_toml(text)}
    try:
        return _RestartRows.model_validate(data).on
    except ValidationError as error:
        raise SpecError(Problem(p.field, p.message) for p in problems_of(error, _RestartRows, data)) from None


def lookup(code: str, tables: Iterable[Mapping[str, Move]]) -> Move | None:
    """Return what the tables set for a cause, the nearest first, and the cause itself before its kind; else None."""
    any_of_kind = code.partition(".")[0] + ANY
    for on in tables:
        if (found := on.get(code) or on.get(any_of_kind)) is not None:
            return found
    return None
