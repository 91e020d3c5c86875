"""How replicas stay one model: the choice of training/comm, checked without torch, made with it.

    [run]
    communication = "powersgd"
    [run.powersgd]
    rank = 2

Each is one module of training/comm (training.contracts.Communication). docs/communication.md has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from training import contracts
from training.config import choices
from training.config.shape import Misfit, nearest_multiples, shape_of

if TYPE_CHECKING:
    from training.config.run_config import RunConfig

PLAIN = "plain"
"""Left to the parallelism, whichever it is."""
OF = "ddp"
"""The parallelism that all others are for: each replica has the whole model, and its whole gradient."""


def check(config: RunConfig, world_size: int) -> Iterator[Misfit]:
    """What the chosen communication can't work with; nothing where config.shape refuses the mesh itself."""
    name = config.communication
    if name == PLAIN:
        return
    try:
        shape = shape_of(config, world_size)
    except Misfit:
        return
    several = [axis for axis, size in shape.items() if size > 1 and axis != "dp"]
    if config.parallelism != OF:
        message = f'is for parallelism = "{OF}", where each replica has whole gradients, not for {config.parallelism}.'
        yield Misfit("communication", f'"{name}" {message} Write communication = "{PLAIN}", or parallelism = "{OF}".')
    elif several:
        message = (
            f'is for replicas of whole models, not with mesh.{several[0]}. Write "{PLAIN}", or leave the axis out.'
        )
        yield Misfit("communication", f'"{name}" {message}')
    elif config.dtype == "fp16" and contracts.communication(name).REMEMBERS:
        message = "brings gradients of several steps together, whose loss scales differ. Write bf16 or fp32."
        yield Misfit("dtype", f'is "fp16", and {name} {message}')
    elif config.keep_best and (every := apart(config)) and config.validate_every % every:
        message = (
            f"{config.validate_every} is no multiple of {name}.every, {every}, but keep_best is given: in between, a "
            f"checkpoint's model is not what was validated. {nearest_multiples(config.validate_every, every)}"
        )
        yield Misfit("validate_every", message)
    else:
        try:
            contracts.communication(name).check(shape, **config.options_of(name))
        except Misfit as misfit:
            yield misfit


def apart(config: RunConfig) -> int:
    """How many steps replicas stay apart for; 0: they don't."""
    every = config.options_of(config.communication).get("every")
    return every if isinstance(every, int) else 0


def table() -> Iterator[str]:
    """Lines of Markdown: what there is, and what each sends."""
    yield "| communication | what is done | bytes a rank sends in a step |"
    yield "| --- | --- | --- |"
    for name, choice in choices.describe("comm").items():
        yield f"| `{name}` | {choice.description} | {choice.constants['SENDS']} |"


def options() -> Iterator[str]:
    yield "| option | default | |"
    yield "| --- | --- | --- |"
    for name, choice in choices.describe("comm").items():
        for option in choice.options:
            yield f"| `{name}.{option.name}` | {option.default} | {option.description} |"
