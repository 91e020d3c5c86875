"""The configuration of a training run, validated before allocation by the portal and by `python -m training`; no torch.

[run]
recipe = "language"
steps = 400
[run.language]        # the recipe's own options, and [run.ddp] the parallelism's (see training.config.choices)
layers = 4
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from training.config import base, choices, shape
from training.config.base import BaseRunConfig, ConfigError, Problem
from training.config.choices import Choice

WARMUP_STEPS = 20


class RunConfig(BaseRunConfig):
    """The configuration of our own trainer."""

    KIND: ClassVar[str] = "distributed"
    BOOKKEEPING: ClassVar[frozenset[str]] = BaseRunConfig.BOOKKEEPING | {
        *("validation_batches", "check_weights_every", "micro_batch"),
        *("sample_seconds", "profile_at", "profile_steps"),
    }

    recipe: str = Field(
        "language",
        json_schema_extra=base.schema_enum("recipes", kind=KIND),
        description="The model to train, and its data.",
    )
    parallelism: str = Field(
        "ddp",
        json_schema_extra=base.schema_enum("parallel", shape.AUTO),
        description="How the ranks share a batch. auto: chosen together with the mesh, by the model's size and the "
        "memory of a rank.",
    )
    communication: str = Field(
        "plain",
        json_schema_extra=base.schema_enum("comm"),
        description="How replicas average their gradients, or how often they synchronise.",
    )
    mesh: dict[str, int] = Field(
        default_factory=dict,
        description="Ranks along each axis (pp, dp, shard, cp, tp); the parallelism's own axis takes the remaining "
        "ones.",
    )
    steps: int = Field(200, ge=1, le=100_000_000, description="Optimizer steps.")
    global_batch: int = Field(
        32,
        ge=1,
        le=1_000_000,
        description="Samples per step over all ranks; fixed for the whole run, even when ranks are lost.",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="Samples per rank and forward pass. If omitted: a rank's whole share, without accumulation.",
    )
    learning_rate: float = Field(
        3e-4, gt=0, le=100, allow_inf_nan=False, description="Peak learning rate, at the end of the warm-up."
    )
    warmup_steps: int = Field(
        WARMUP_STEPS,
        ge=0,
        description="Steps over which the learning rate rises linearly, before it falls along a cosine.",
    )
    min_learning_rate_ratio: float = Field(
        0.1, ge=0, le=1, allow_inf_nan=False, description="Where the cosine ends, as a fraction of the learning rate."
    )
    weight_decay: float = Field(
        0.1, ge=0, le=10, allow_inf_nan=False, description="Weight decay of AdamW, on matrices only."
    )
    clip: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest global gradient norm. With guards a lower bound: they clip at the usual norm + 4 standard "
        "deviations where that is larger. 0: no clipping, with or without guards.",
    )
    guards: bool = Field(
        True,
        description="Clip at the usual gradient norm + 4 standard deviations where that is above clip, skip steps "
        "above "
        "20 times the usual norm, stop a run that has diverged, report stragglers.",
    )
    check_weights_every: int = Field(
        2000,
        ge=0,
        description="Steps between checks that all ranks have the same weights and compute the same results, which "
        "find "
        "broken hardware. A check takes less time than ten steps, so 2,000 costs below 0.5 %; 0: none.",
    )
    validation_batches: int = Field(
        8, ge=1, description="Global batches per validation, spread over the validation data."
    )
    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = Field(
        "fp32",
        description="Data type of the arithmetic; weights and optimizer state are always float32. fp8: for the "
        "products "
        "in blocks, the rest in bf16.",
    )
    fp8_scaling: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise", description="For fp8: one scale per tensor (faster), or one per row (closer to bf16)."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations to recompute in the backward pass instead of storing them. none; selective: all but "
        "products and attention; full: all but each block's input (a third more arithmetic, least memory).",
    )
    compile: bool = Field(
        False, description="Compile blocks with torch.compile: a minute or more at each start, then faster steps."
    )
    sample_seconds: float = Field(
        60.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Minimum time between two steps that rank 0 traces to find the bottleneck; tracing takes under "
        "0.5 % "
        "of the time in any case. 0: none.",
    )
    profile_at: int = Field(
        0, ge=0, description="First step that torch.profiler records on rank 0; 0: only profiles requested later."
    )
    profile_steps: int = Field(5, ge=1, le=100, description="Number of steps in such a profile.")

    @model_validator(mode="before")
    @classmethod
    def _shorten_warmup(cls, data: Any) -> Any:
        """Shorten the default warm-up for a run that is too short for it, unless it was set explicitly."""
        if isinstance(data, Mapping) and "warmup_steps" not in data and type(steps := data.get("steps")) is int:
            return {**data, "warmup_steps": min(WARMUP_STEPS, max(0, steps // 5))}
        return data

    @field_validator("parallelism")
    @classmethod
    def _check_parallelism(cls, name: str) -> str:
        return name if name == shape.AUTO else base.check_choice("parallel", name)

    @field_validator("communication")
    @classmethod
    def _check_communication(cls, name: str) -> str:
        return base.check_choice("comm", name)

    @field_validator("mesh")
    @classmethod
    def _check_mesh(cls, mesh: dict[str, int]) -> dict[str, int]:
        axes = {axis: "" for name in choices.names("parallel") for axis in shape.axes_of(name)}
        for axis, size in mesh.items():
            if axis not in axes:
                raise ValueError(f'"{axis}" is not an axis. {choices.suggest(axis, list(axes))}')
            if size < 1:
                raise ValueError(f"{axis} is {size}. The smallest allowed is 1.")
        return mesh

    def chosen(self) -> dict[str, Choice]:
        chosen = {self.recipe: choices.get("recipes", self.recipe)}
        # It is not known yet what auto will choose, so options of every parallelism are allowed.
        candidates = self.options if self.parallelism == shape.AUTO else shape.modules(self.parallelism, self.mesh)
        chosen |= {name: choices.get("parallel", name) for name in candidates if name in choices.names("parallel")}
        return chosen | {self.communication: choices.get("comm", self.communication)}

    def _unused_table_message(self, table: str) -> str:
        axes = shape.axes_of(table) if table in choices.names("parallel") else ()
        model_axes = [axis for axis in axes if axis not in shape.DATA_AXES]
        remedy = f"give mesh.{model_axes[0]} a size" if model_axes else f"choose {table}"
        return (
            f"is a table of options that this run does not use (recipe {self.recipe}, parallelism "
            f"{self.parallelism}, communication {self.communication}). Remove it, or {remedy}."
        )

    @property
    def length(self) -> int:
        return self.steps

    def check_steps(self) -> Iterator[Problem]:
        """Yield what cannot work on any number of ranks."""
        if self.warmup_steps >= self.steps > 1:
            yield Problem(
                "warmup_steps",
                f"{self.warmup_steps} is not less than steps = {self.steps}, so the learning rate would never "
                f"reach its value. Try {max(1, self.steps // 10)}.",
            )


def parse(table: Mapping[str, Any]) -> RunConfig:
    """Parse a [run] table. Raises ConfigError, which names every invalid field as `run.<field>`."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(base.problems(error, RunConfig)) from error
