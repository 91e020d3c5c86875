"""What a run is: validated before anything is allocated, by the portal and by `python -m training` alike; no torch.

[run]
recipe = "language"
steps = 400
[run.language]        # the recipe's own options, and [run.ddp] the parallelism's (see training.config.choices)
layers = 4
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from training.config import asked, choices, communication, shape
from training.config.asked import Asked, ConfigError, Problem
from training.config.choices import Choice
from training.config.dims import Dims

WARMUP_STEPS = 20


class RunConfig(Asked):
    """The trainer's own configuration."""

    KIND: ClassVar[str] = "distributed"
    BOOKKEEPING: ClassVar[frozenset[str]] = Asked.BOOKKEEPING | {
        *("validation_batches", "check_weights_every", "micro_batch"),
        *("sample_seconds", "profile_at", "profile_steps"),
    }

    recipe: str = Field(
        "language",
        json_schema_extra=asked.named("recipes", kind=KIND),
        description="What is trained, on what data.",
    )
    parallelism: str = Field(
        "ddp",
        json_schema_extra=asked.named("parallel", shape.AUTO),
        description="What is done with the ranks that the batch is divided over; auto: chosen with the mesh, by the "
        "model's size and a rank's memory.",
    )
    communication: str = Field(
        "plain",
        json_schema_extra=asked.named("comm"),
        description="How replicas average their gradients, or stay apart.",
    )
    mesh: dict[str, int] = Field(
        default_factory=dict,
        description="Ranks along each axis (pp, dp, shard, cp, tp); parallelism's own axis takes what is left over.",
    )
    steps: int = Field(200, ge=1, le=100_000_000, description="Optimizer steps.")
    global_batch: int = Field(
        32,
        ge=1,
        le=1_000_000,
        description="Samples per step, over all ranks; fixed for the whole run, also when ranks are lost.",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="Samples per rank and forward pass; left out: the global batch over the ranks, so no accumulation.",
    )
    learning_rate: float = Field(
        3e-4, gt=0, le=100, allow_inf_nan=False, description="The highest, at the end of the warm-up."
    )
    warmup_steps: int = Field(
        WARMUP_STEPS,
        ge=0,
        description="Steps over which the learning rate rises linearly, before it falls along a cosine.",
    )
    min_learning_rate_ratio: float = Field(
        0.1, ge=0, le=1, allow_inf_nan=False, description="Where the cosine ends, as a part of the learning rate."
    )
    weight_decay: float = Field(0.1, ge=0, le=10, allow_inf_nan=False, description="AdamW's, on matrices only.")
    clip: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest global gradient norm; with guards the least: they clip at the usual norm + 4 deviations "
        "where that is larger. 0: no clipping, with or without guards.",
    )
    guards: bool = Field(
        True,
        description="Clip at the usual gradient norm + 4 deviations where that is above clip, skip steps above 20 "
        "times the usual norm, stop a run that has diverged, name stragglers.",
    )
    check_weights_every: int = Field(
        2000,
        ge=0,
        description="Steps between checks that the ranks hold the same bits and compute alike, which name broken "
        "hardware. A check takes less than ten steps' time, so 2,000 cost below 0.5 %; 0: none.",
    )
    validation_batches: int = Field(8, ge=1, description="Global batches per validation; spread over its data.")
    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = Field(
        "fp32",
        description="Of the arithmetic; weights and the optimizer's state are always float32. fp8: the blocks' "
        "products, the rest in bf16.",
    )
    fp8_scaling: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise", description="For fp8: one scale a tensor (faster), or one a row (nearer to bf16)."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations computed again in the backward pass instead of kept: nothing; all but products and "
        "attention; everything but each block's input (a third more arithmetic, least memory).",
    )
    compile: bool = Field(
        False, description="Blocks are compiled by torch.compile: a minute or more at each start, then faster steps."
    )
    sample_seconds: float = Field(
        60.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="At least so long from one step to the next that rank 0 looks at from inside, to tell what bounds "
        "the run; under 0.5 % of the time in any case. 0: none.",
    )
    profile_at: int = Field(
        0, ge=0, description="The first step that torch.profiler records on rank 0; 0: none but those asked for later."
    )
    profile_steps: int = Field(5, ge=1, le=100, description="How many steps it then records.")

    @model_validator(mode="before")
    @classmethod
    def _shorten_warmup(cls, data: Any) -> Any:
        """A run too short for the usual warm-up gets a shorter one, unless somebody asked for it by number."""
        if isinstance(data, Mapping) and "warmup_steps" not in data and type(steps := data.get("steps")) is int:
            return {**data, "warmup_steps": min(WARMUP_STEPS, max(0, steps // 5))}
        return data

    @field_validator("parallelism")
    @classmethod
    def _is_parallelism(cls, name: str) -> str:
        return name if name == shape.AUTO else asked.chosen("parallel", name)

    @field_validator("communication")
    @classmethod
    def _is_communication(cls, name: str) -> str:
        return asked.chosen("comm", name)

    @field_validator("mesh")
    @classmethod
    def _is_mesh(cls, mesh: dict[str, int]) -> dict[str, int]:
        known = {axis: "" for name in choices.names("parallel") for axis in shape.axes_of(name)}
        for axis, size in mesh.items():
            if axis not in known:
                raise ValueError(f'"{axis}" is no axis. {choices.suggest(axis, list(known))}')
            if size < 1:
                raise ValueError(f"{axis} is {size}. The smallest allowed is 1.")
        return mesh

    def taken(self) -> dict[str, Choice]:
        taken = {self.recipe: choices.get("recipes", self.recipe)}
        # What auto will choose is not known yet, so the options of all may stand there.
        named = self.options if self.parallelism == shape.AUTO else shape.modules(self)
        taken |= {name: choices.get("parallel", name) for name in named if name in choices.names("parallel")}
        return taken | {self.communication: choices.get("comm", self.communication)}

    def _unused(self, table: str) -> str:
        axes = shape.axes_of(table) if table in choices.names("parallel") else ()
        own = [axis for axis in axes if axis not in shape.DATA_AXES]
        remedy = f"give mesh.{own[0]} a size" if own else f"choose {table}"
        return (
            f"is a table of options that this run doesn't use (recipe {self.recipe}, parallelism "
            f"{self.parallelism}, communication {self.communication}). Remove it, or {remedy}."
        )

    @property
    def length(self) -> int:
        return self.steps

    def check(self, world_size: int, dims: Dims | None = None, *, lacking: bool = False) -> Iterator[Problem]:
        """What of a layout that is given can't work on this many ranks, with the nearest values that can.

        Where it may be "auto" ask training.planning.checking. `dims`: the model's sizes where its data has told the
        vocabulary; else as the recipe's options give them. `lacking`: of a run that was made for more: shares of the
        batch may be uneven.
        """
        assert self.parallelism != shape.AUTO
        for misfit in shape.check(self, world_size, dims, lacking=lacking):
            yield Problem(misfit.field, str(misfit))
        for misfit in communication.check(self, world_size):
            yield Problem(misfit.field, str(misfit))
        yield from self.check_steps()

    def check_steps(self) -> Iterator[Problem]:
        """What can't work on any ranks."""
        if self.warmup_steps >= self.steps > 1:
            yield Problem(
                "warmup_steps",
                f"{self.warmup_steps} is not less than steps = {self.steps}, so the learning rate would never "
                f"reach its value. Try {max(1, self.steps // 10)}.",
            )


def parse(table: Mapping[str, Any]) -> RunConfig:
    """A [run] table as RunConfig; ConfigError names every field that is wrong, as `run.<field>`."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(asked.problems(error, RunConfig)) from error
