"""What runs of every kind are asked for in [run]: the fields that they share, and options as tables named by choices.

A kind's own model (run_config.RunConfig, training.federation.config.FederationConfig) adds its fields. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

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

from training.config import choices
from training.config.choices import Choice, Value
from training.config.counting import counted


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


def named(folder: str, *more: str, kind: str = "") -> Callable[[dict[str, Any]], None]:
    """Puts a folder's modules into the JSON schema, so that a form can offer them: those for this kind of job."""
    return lambda schema: schema.update(enum=[*choices.names(folder, kind=kind), *more])


def chosen(folder: str, name: str, *, kind: str = "") -> str:
    """The name of one of a folder's modules; ValueError with the nearest if there is none for this kind of job."""
    known = choices.names(folder, kind=kind)
    if name not in known:
        why = f"is not for kind = {kind}" if name in choices.names(folder) else "does not exist"
        raise ValueError(f'"{name}" {why}. {choices.suggest(name, known)}')
    return name


Interval = Annotated[int, Field(ge=0)] | Literal["auto"]


# Fields that say what the kind of run counts: `many` of it, steps or rounds.


def saved_every(many: str) -> Any:
    return Field(
        "auto",
        description=f"{many.capitalize()} between checkpoints, or auto: as often as their measured cost and failures "
        "make it best; 0: only at the end and when stopped.",
    )


def kept_every(many: str) -> Any:
    return Field(
        0, ge=0, description=f"A checkpoint at every multiple of so many {many} is made, and kept for good; 0: none."
    )


def flushed_after(many: str) -> Any:
    return Field(
        50, ge=1, le=10_000, description=f"Most {many} that a metric waits on the device before it is reported."
    )


class Asked(BaseModel):
    """The configuration of one run. Frozen: what was validated is what runs."""

    # Descriptions are arguments: pydantic finds docstrings of attributes by reading the source, 40 ms in every rank.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    KIND: ClassVar[str]
    """Of the jobs that are asked for so."""
    BOOKKEEPING: ClassVar[frozenset[str]] = frozenset({
        *("validate_every", "checkpoint_every", "keep_checkpoints", "keep_every", "keep_best", "mtbf_hours"),
        *("flush_seconds", "flush_steps"),
    })  # fmt: skip
    """Fields that decide no number."""

    recipe: str
    seed: int = Field(
        0, ge=0, le=2**32 - 1, description="Of the initial weights, the order of the data and the dropout."
    )
    validate_every: int = Field(100, ge=0, description="Steps between validations; 0: none.")
    checkpoint_every: Interval = saved_every("steps")
    keep_checkpoints: int = Field(
        3,
        ge=1,
        description="How many of the newest checkpoints to keep, beside pinned ones and the one the run started from.",
    )
    keep_every: int = kept_every("steps")
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
    flush_seconds: float = Field(
        1.0,
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="Longest time that a metric waits on the device before it is reported.",
    )
    flush_steps: int = flushed_after("steps")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="The own options of what is chosen, defaults too; written as [run.<name>].",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_tables(cls, data: Any) -> Any:
        """Moves the tables that are named after a choice, [run.<recipe>] and others, into `options`."""
        if not isinstance(data, Mapping):
            return data
        folders = choices.CHOSEN[cls.KIND].values()
        known = {name for folder in folders for name in choices.names(folder)} - set(cls.model_fields)
        tables = {name: value for name, value in data.items() if name in known}
        rest = {name: value for name, value in data.items() if name not in known}
        options = rest.get("options", {})
        if tables and isinstance(options, Mapping):
            if both := [name for name in tables if name in options]:
                fix = "is given here and under run.options. Keep one of them."
                raise ValidationError.from_exception_data(cls.__name__, [line((n,), fix, tables[n]) for n in both])
            rest["options"] = {**options, **tables}
        return rest

    @field_validator("checkpoint_every", mode="wrap")
    @classmethod
    def _is_cadence(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:  # one for each kind that it could be
            text = f'must be "auto", or a whole number of {counted(cls.KIND)}s of at least 0, not {value!r}.'
            raise ValueError(text) from None

    @field_validator("recipe")
    @classmethod
    def _is_recipe(cls, name: str) -> str:
        return chosen("recipes", name, kind=cls.KIND)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        taken = self.taken()
        wrong = [line for table, given in self.options.items() for line in self._wrong_options(taken, table, given)]
        if wrong:
            # Raised inside a validator, these keep their own places: run.language.layers, not run.
            raise ValidationError.from_exception_data(type(self).__name__, wrong)
        filled = {table: choice.with_defaults(self.options.get(table, {})) for table, choice in taken.items()}
        object.__setattr__(self, "options", {table: options for table, options in filled.items() if options})
        return self

    def _wrong_options(self, taken: Mapping[str, Choice], table: str, given: object) -> Iterator[InitErrorDetails]:
        if table not in taken:
            yield line((table,), self._unused(table), given)
        elif not isinstance(given, Mapping):
            yield line((table,), f"must be a table, [run.{table}].", given)
        else:
            for name, message in taken[table].problems(given):
                yield line((table, name), message, given[name])

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The shape people write: options as tables named after what they belong to, nothing that is None or {}."""
        data: dict[str, Any] = handler(self)
        tables = data.pop("options", {})
        written = {name: value for name, value in data.items() if value is not None and value != {}}
        for name, options in tables.items():
            if said := {option: value for option, value in options.items() if value is not None}:
                written[name] = said
        return written

    def taken(self) -> dict[str, Choice]:
        """What this run has chosen, by name: whose options it may give."""
        raise NotImplementedError

    def _unused(self, table: str) -> str:
        """What is wrong with a table of options of something else, and the fix."""
        raise NotImplementedError

    @property
    def counts(self) -> str:
        """What it counts, one of it: "step" or "round"."""
        return counted(self.KIND)

    @property
    def length(self) -> int:
        """Steps of the whole run, or rounds: what a checkpoint's number counts."""
        raise NotImplementedError

    def recipe_options(self) -> dict[str, Value]:
        return self.options_of(self.recipe)

    def options_of(self, name: str) -> dict[str, Value]:
        """Of one of the run's choices."""
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
        return {name: value for name, value in data.items() if name not in self.BOOKKEEPING}


def problems(error: ValidationError, model: type[Asked], prefix: str = "run") -> list[Problem]:
    """Pydantic's errors as problems, each naming its field and the fix."""
    return [_problem(item, model, prefix) for item in error.errors(include_url=False)]


def _problem(item: ErrorDetails, model: type[Asked], prefix: str) -> Problem:
    location = item["loc"]
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        known = sorted(set(model.model_fields) - {"options"})
        message = f"is not a setting of [run]. {choices.suggest(str(location[-1]), known)}"
    return Problem(".".join([prefix, *map(str, location)]), message)


def line(location: tuple[str, ...], message: str, given: object) -> InitErrorDetails:
    """One thing wrong at its own place, for a validator to raise beside others."""
    # The message goes in as a value: it may hold braces, which a template would read.
    kind = PydanticCustomError("option", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=location, input=given)
