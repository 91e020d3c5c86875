"""Check how replicas stay in sync: the choice of training/comm. No torch.

    [run]
    communication = "powersgd"
    [run.powersgd]
    rank = 2

Each choice is one module of training/comm (training.contracts.Communication).
docs/reference/communication.md has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from training import contracts
from training.config import choices
from training.config.mesh import shape_of
from training.config.run_config import RunConfig
from training.config.shape import Misfit, nearest_multiples

PLAIN = "plain"
"""Leaves communication to the parallelism, whichever it is."""
REQUIRED_PARALLELISM = "ddp"
"""The parallelism that all other choices require: each replica has the whole model and its whole gradient."""


def check(config: RunConfig, world_size: int) -> Iterator[Misfit]:
    """Yield what the chosen communication cannot work with; nothing where config.shape refuses the mesh itself."""
    name = config.communication
    if name == PLAIN:
        return
    try:
        shape = shape_of(config, world_size)
    except Misfit:
        return
    split_axes = [axis for axis, size in shape.items() if size > 1 and axis != "dp"]
    if config.parallelism != REQUIRED_PARALLELISM:
        needed = f'parallelism = "{REQUIRED_PARALLELISM}"'
        message = f"is for {needed}, where each replica has whole gradients, not for {config.parallelism}."
        yield Misfit("communication", f'"{name}" {message} Write communication = "{PLAIN}", or {needed}.')
    elif split_axes:
        message = (
            f'is for replicas of whole models, not with mesh.{split_axes[0]}. Write "{PLAIN}", or leave the axis out.'
        )
        yield Misfit("communication", f'"{name}" {message}')
    elif config.dtype == "fp16" and contracts.communication(name).ACCUMULATES_GRADIENTS:
        message = "combines gradients of several steps, whose loss scales differ. Write bf16 or fp32."
        yield Misfit("dtype", f'is "fp16", and {name} {message}')
    elif config.keep_best and (interval := sync_interval(config)) and config.validate_every % interval:
        message = (
            f"{config.validate_every} is not a multiple of {name}.every, {interval}, but keep_best is set: in "
            "between, a "
            "checkpoint's model is not the one that was validated. "
            f"{nearest_multiples(config.validate_every, interval)}"
        )
        yield Misfit("validate_every", message)
    else:
        try:
            contracts.communication(name).check(shape, **config.options_of(name))
        except Misfit as misfit:
            yield misfit


def sync_interval(config: RunConfig) -> int:
    """Return how many steps pass between synchronisations of the replicas; 0: they synchronise in every step."""
    steps = config.options_of(config.communication).get("every")
    return steps if isinstance(steps, int) else 0


def markdown_list() -> Iterator[str]:
    """Yield the lines of a Markdown list: the choices, and what each sends."""
    for name, choice in choices.describe("comm").items():
        yield from choices.list_item(f"`{name}`: {choice.description} Sends {choice.constants['SENDS']}.")


def options() -> Iterator[str]:
    """Yield the lines of a Markdown table of all options."""
    yield "| option | default | |"
    yield "| --- | --- | --- |"
    for name, choice in choices.describe("comm").items():
        for option in choice.options:
            yield f"| `{name}.{option.name}` | {option.default} | {option.description} |"
