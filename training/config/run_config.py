"""What a run is: validated before anything is allocated, by the portal and by `python -m training` alike; no torch.

[run]
recipe = "language"
steps = 400
[run.language]        # the recipe's own options, and [run.ddp] the parallelism's (see training.config.choices)
layers = 4
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from training.config import choices, communication, shape
from training.config.choices import Choice, Value
from training.config.dims import Dims


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the field by its dotted path, and what to do about it."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ConfigError(ValueError):
    """A configuration that can't be run; `problems` says why, field by field."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[Self], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # rank 0 sends it to the others


def _names(kind: str, *more: str) -> Callable[[dict[str, Any]], None]:
    """Puts a folder's modules into the JSON schema, so that a form can offer them."""
    return lambda schema: schema.update(enum=[*choices.names(kind), *more])


WARMUP_STEPS = 20


class RunConfig(BaseModel):
    """The trainer's own configuration. Frozen: what was validated is what runs."""

    # Descriptions are arguments: pydantic finds docstrings of attributes by reading the source, 40 ms in every rank.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    recipe: str = Field("language", json_schema_extra=_names("recipes"), description="What is trained, on what data.")
    parallelism: str = Field(
        "ddp",
        json_schema_extra=_names("parallel", shape.AUTO),
        description="What is done with the ranks that the batch is divided over; auto: chosen with the mesh, by the "
        "model's size and a rank's memory.",
    )
    communication: str = Field(
        "plain", json_schema_extra=_names("comm"), description="How replicas average their gradients, or stay apart."
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
    seed: int = Field(
        0, ge=0, le=2**32 - 1, description="Of the initial weights, the order of the data and the dropout."
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
    validate_every: int = Field(100, ge=0, description="Steps between validations; 0: none.")
    validation_batches: int = Field(8, ge=1, description="Global batches per validation; spread over its data.")
    checkpoint_every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Steps between checkpoints, or auto: as often as their measured cost and failures make it best; "
        "0: only at the end and when stopped.",
    )
    keep_checkpoints: int = Field(
        3,
        ge=1,
        description="How many of the newest checkpoints to keep, beside pinned ones and the one the run started from.",
    )
    keep_every: int = Field(
        0, ge=0, description="A checkpoint at every multiple of so many steps is made, and kept for good; 0: none."
    )
    keep_best: int = Field(
        0,
        ge=0,
        le=1000,
        description="How many checkpoints with the lowest validation losses are made and kept, too; 0: none.",
    )
    mtbf_hours: float | None = Field(
        None,
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="Hours between failures of the run's nodes together, for checkpoint_every = auto; left out: as the "
        "portal has seen them, else 24 for each node.",
    )
    determinism: Literal["bitwise", "scientific", "fast"] = Field(
        "bitwise",
        description="bitwise: the same run gives the same losses, bit for bit, at the cost of slower kernels on a GPU; "
        "scientific: same data, weights and dropout, kernels may add in another order; fast: kernels are chosen by "
        "trying them, and float32 products may be rounded to TF32.",
    )
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
    flush_seconds: float = Field(
        1.0,
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="Longest time that a metric waits on the device before it is reported.",
    )
    flush_steps: int = Field(
        50, ge=1, le=10_000, description="Most steps that a metric waits on the device before it is reported."
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
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="The own options of recipe, parallelism and communication, defaults too; written as [run.<name>].",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_tables(cls, data: Any) -> Any:
        """Moves [run.<recipe>], [run.<parallelism>] and [run.<communication>] into `options`."""
        if not isinstance(data, Mapping):
            return data
        known = {name for kind in choices.CHOSEN.values() for name in choices.names(kind)} - set(cls.model_fields)
        tables = {name: value for name, value in data.items() if name in known}
        rest = {name: value for name, value in data.items() if name not in known}
        options = rest.get("options", {})
        if tables and isinstance(options, Mapping):
            if both := [name for name in tables if name in options]:
                fix = "is given here and under run.options. Keep one of them."
                raise ValidationError.from_exception_data("RunConfig", [_line((n,), fix, tables[n]) for n in both])
            rest["options"] = {**options, **tables}
        return rest

    @model_validator(mode="before")
    @classmethod
    def _shorten_warmup(cls, data: Any) -> Any:
        """A run too short for the usual warm-up gets a shorter one, unless somebody asked for it by number."""
        if isinstance(data, Mapping) and "warmup_steps" not in data and type(steps := data.get("steps")) is int:
            return {**data, "warmup_steps": min(WARMUP_STEPS, max(0, steps // 5))}
        return data

    @field_validator("checkpoint_every", mode="wrap")
    @classmethod
    def _is_cadence(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:  # one for each kind that it could be
            raise ValueError(f'must be "auto", or a whole number of steps of at least 0, not {value!r}.') from None

    @field_validator("recipe")
    @classmethod
    def _is_recipe(cls, name: str) -> str:
        return _chosen("recipes", name)

    @field_validator("parallelism")
    @classmethod
    def _is_parallelism(cls, name: str) -> str:
        return name if name == shape.AUTO else _chosen("parallel", name)

    @field_validator("communication")
    @classmethod
    def _is_communication(cls, name: str) -> str:
        return _chosen("comm", name)

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

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        chosen = {self.recipe: choices.get("recipes", self.recipe)}
        # What auto will choose is not known yet, so the options of all may stand there.
        asked = self.options if self.parallelism == shape.AUTO else shape.modules(self)
        chosen |= {name: choices.get("parallel", name) for name in asked if name in choices.names("parallel")}
        chosen |= {self.communication: choices.get("comm", self.communication)}
        wrong = [line for table, given in self.options.items() for line in self._wrong_options(chosen, table, given)]
        if wrong:
            # Raised inside a validator, these keep their own places: run.language.layers, not run.
            raise ValidationError.from_exception_data("RunConfig", wrong)
        filled = {table: choice.with_defaults(self.options.get(table, {})) for table, choice in chosen.items()}
        object.__setattr__(self, "options", {table: options for table, options in filled.items() if options})
        return self

    def _wrong_options(self, chosen: Mapping[str, Choice], table: str, given: object) -> Iterator[InitErrorDetails]:
        if table not in chosen:
            axes = shape.axes_of(table) if table in choices.names("parallel") else ()
            own = [axis for axis in axes if axis not in shape.DATA_AXES]
            remedy = f"give mesh.{own[0]} a size" if own else f"choose {table}"
            message = (
                f"is a table of options that this run doesn't use (recipe {self.recipe}, parallelism "
                f"{self.parallelism}, communication {self.communication}). Remove it, or {remedy}."
            )
            yield _line((table,), message, given)
        elif not isinstance(given, Mapping):
            yield _line((table,), f"must be a table, [run.{table}].", given)
        else:
            for name, message in chosen[table].problems(given):
                yield _line((table, name), message, given[name])

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The shape people write: options as tables named after what they belong to, nothing that is None."""
        data: dict[str, Any] = handler(self)
        tables = data.pop("options", {})
        if not data["mesh"]:
            del data["mesh"]
        written = {name: value for name, value in data.items() if value is not None}
        for name, options in tables.items():
            if said := {option: value for option, value in options.items() if value is not None}:
                written[name] = said
        return written

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

    def recipe_options(self) -> dict[str, Value]:
        return dict(self.options.get(self.recipe, {}))

    def options_of(self, name: str) -> dict[str, Value]:
        """Of one of the run's parallelisms, or of its communication."""
        return dict(self.options.get(name, {}))

    def hash(self) -> str:
        """Of everything that decides the numbers a run computes; a checkpoint remembers it."""
        return hashlib.sha256(json.dumps(self.numerics(), sort_keys=True).encode()).hexdigest()[:16]

    def numerics(self) -> dict[str, Any]:
        """The fields that decide the numbers; how often things are written or reported doesn't."""
        data = self.model_dump()
        own = choices.get("recipes", self.recipe).constants.get("BOOKKEEPING", ())
        if isinstance(own, tuple) and self.recipe in data:
            data[self.recipe] = {name: value for name, value in data[self.recipe].items() if name not in own}
        return {name: value for name, value in data.items() if name not in BOOKKEEPING}


BOOKKEEPING = {
    *("validate_every", "validation_batches", "checkpoint_every", "keep_checkpoints", "check_weights_every"),
    *("keep_every", "keep_best", "mtbf_hours"),
    *("flush_seconds", "flush_steps", "micro_batch"),
    *("sample_seconds", "profile_at", "profile_steps"),
}


def parse(table: Mapping[str, Any]) -> RunConfig:
    """A [run] table as RunConfig; ConfigError names every field that is wrong, as `run.<field>`."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(problems(error)) from error


def problems(error: ValidationError, prefix: str = "run") -> list[Problem]:
    """Pydantic's errors as problems, each naming its field and the fix."""
    return [_problem(item, prefix) for item in error.errors(include_url=False)]


def _problem(item: ErrorDetails, prefix: str) -> Problem:
    location = item["loc"]
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        known = sorted(set(RunConfig.model_fields) - {"options"})
        message = f"is not a setting of [run]. {choices.suggest(str(location[-1]), known)}"
    return Problem(".".join([prefix, *map(str, location)]), message)


def _line(location: tuple[str, ...], message: str, given: object) -> InitErrorDetails:
    # The message goes in as a value: it may hold braces, which a template would read.
    kind = PydanticCustomError("option", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=location, input=given)


def _chosen(kind: str, name: str) -> str:
    known = choices.names(kind)
    if name not in known:
        raise ValueError(f'"{name}" does not exist. {choices.suggest(name, known)}')
    return name
