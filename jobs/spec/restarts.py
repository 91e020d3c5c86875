"""[restart.on]: what follows a failure, by its cause, where site, project or job want something else than Vigil."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from diagnosis.causes import CAUSES, NONE
from jobs.errors import Problem, SpecError
from jobs.spec.toml import read_toml
from jobs.spec.wording import problems_of

Move = Literal["elsewhere", "apart", "restart", "once", "once-if-saved", "rewind", "before", "stop"]

MOVES: Mapping[str, str] = {
    "elsewhere": "starts anew without the node it was on",
    "apart": "starts anew; if it happens again, without the nodes that both had",
    "restart": "starts anew",
    "once": "starts anew once",
    "once-if-saved": "starts anew once, if it had saved",
    "rewind": "goes well back, with half the learning rate",
    "before": "starts anew from the checkpoint before",
    "stop": "stops",
}
assert set(MOVES) == set(get_args(Move))

ANY = ".*"
NO_FAILURES = frozenset({NONE, "scheduler.preempted", "scheduler.cancelled"})  # what they are followed by is not asked
_DOMAINS = {cause.domain for cause in CAUSES.values() if "." in cause.code}


def _causes(on: dict[str, Move]) -> dict[str, Move]:
    for key in on:
        if key in NO_FAILURES or not (key in CAUSES or (key.endswith(ANY) and key.removesuffix(ANY) in _DOMAINS)):
            raise ValueError(
                f'"{key[:64]}" is no cause. Write one of them, such as "memory.gpu_oom", or all of a kind: "gpu.*".'
            )
    return on


On = Annotated[dict[str, Move], AfterValidator(_causes)]


class _Alone(BaseModel):
    """The table by itself, as a site and a project have it."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    on: On = {}


def parse_toml(text: str) -> dict[str, Move]:
    """Lines such as `"gpu.*" = "stop"`; SpecError where one does not hold."""
    data = {"on": read_toml(text)}
    try:
        return _Alone.model_validate(data).on
    except ValidationError as error:
        raise SpecError(Problem(p.field, p.message) for p in problems_of(error, _Alone, data)) from None


def named(code: str, tables: Iterable[Mapping[str, Move]]) -> Move | None:
    """What the tables say of a cause, the nearest first: the code itself before all of its kind."""
    any_of_kind = code.partition(".")[0] + ANY
    for on in tables:
        if (found := on.get(code) or on.get(any_of_kind)) is not None:
            return found
    return None
