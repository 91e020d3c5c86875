"""The configuration that runs of every kind share, [run], and options as tables named after choices. No torch.

The model of a kind (run_config.RunConfig, training.federation.config.FederationConfig) adds its fields.
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
from training.config.progress_unit import progress_unit


@dataclass(frozen=True)
class Problem:
    """A mistake in a configuration: the field by its dotted path, and what to do about it."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ConfigError(ValueError):
    """An invalid configuration; `problems` lists why, field by field."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[Self], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # so that it can be pickled: rank 0 sends it to the others


def schema_enum(folder: str, *more: str, kind: str = "") -> Callable[[dict[str, Any]], None]:
    """Return a function that lists a folder's modules for this kind of job in the JSON schema, for forms to offer."""
    return lambda schema: schema.update(enum=[*choices.names(folder, kind=kind), *more])


def check_choice(folder: str, name: str, *, kind: str = "") -> str:
    """Return `name` if it is a module of the folder for this kind of job.

    Else raise ValueError with the nearest name.
    """
    available = choices.names(folder, kind=kind)
    if name not in available:
        why = f"is not for kind = {kind}" if name in choices.names(folder) else "does not exist"
        raise ValueError(f'"{name}" {why}. {choices.suggest(name, available)}')
    return name


Interval = Annotated[int, Field(ge=0)] | Literal["auto"]


# Fields whose description names the run's unit of progress: `units`, "steps" or "rounds".


def checkpoint_every_field(units: str) -> Any:
    return Field(
        "auto",
        description=f"{units.capitalize()} between checkpoints. auto: as often as is best given their measured cost "
        "and the "
        "failure rate; 0: only at the end and when stopped.",
    )


def keep_every_field(units: str) -> Any:
    return Field(
        0, ge=0, description=f"Save a checkpoint at every multiple of this many {units} and never delete it; 0: none."
    )


def flush_steps_field(units: str) -> Any:
    return Field(
        50,
        ge=1,
        le=10_000,
        description=f"Maximum number of {units} for which a metric stays on the device before it is reported.",
    )


class BaseRunConfig(BaseModel):
    """The configuration of one run. Frozen: what was validated is what runs."""

    # Descriptions are arguments: pydantic finds docstrings of attributes by reading the source, 40 ms in every rank.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    KIND: ClassVar[str]
    """The kind of job that this model configures."""
    BOOKKEEPING: ClassVar[frozenset[str]] = frozenset({
        *("validate_every", "checkpoint_every", "keep_checkpoints", "keep_every", "keep_best", "mtbf_hours"),
        *("flush_seconds", "flush_steps"),
    })  # fmt: skip
    """Fields that do not affect the computed numbers."""

    recipe: str
    seed: int = Field(
        0, ge=0, le=2**32 - 1, description="Seed of the initial weights, the order of the data and the dropout."
    )
    validate_every: int = Field(100, ge=0, description="Steps between validations; 0: none.")
    checkpoint_every: Interval = checkpoint_every_field("steps")
    keep_checkpoints: int = Field(
        3,
        ge=1,
        description="How many of the newest checkpoints to keep, besides pinned ones and the one the run started from.",
    )
    keep_every: int = keep_every_field("steps")
    keep_best: int = Field(
        0,
        ge=0,
        le=1000,
        description="How many checkpoints with the lowest validation losses to save and keep as well; 0: none.",
    )
    mtbf_hours: float | None = Field(
        None,
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="Mean hours between failures of the run's nodes together, for checkpoint_every = auto. If "
        "omitted: as "
        "observed by the portal, else 24 per node.",
    )
    determinism: Literal["bitwise", "scientific", "fast"] = Field(
        "bitwise",
        description="bitwise: the same run gives the same losses, bit for bit, at the cost of slower kernels on a GPU; "
        "scientific: same data, weights and dropout, but kernels may add in another order; fast: the fastest kernels "
        "are chosen by trial, and float32 products may be rounded to TF32.",
    )
    flush_seconds: float = Field(
        1.0,
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="Longest time that a metric stays on the device before it is reported.",
    )
    flush_steps: int = flush_steps_field("steps")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the chosen modules, including defaults; written as [run.<name>].",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_tables(cls, data: Any) -> Any:
        """Move the tables that are named after a choice, [run.<recipe>] and others, into `options`."""
        if not isinstance(data, Mapping):
            return data
        folders = choices.CHOICE_FIELDS[cls.KIND].values()
        choice_names = {name for folder in folders for name in choices.names(folder)} - set(cls.model_fields)
        tables = {name: value for name, value in data.items() if name in choice_names}
        rest = {name: value for name, value in data.items() if name not in choice_names}
        options = rest.get("options", {})
        if tables and isinstance(options, Mapping):
            if duplicates := [name for name in tables if name in options]:
                fix = "is given here and under run.options. Keep one of them."
                raise ValidationError.from_exception_data(
                    cls.__name__, [option_error((n,), fix, tables[n]) for n in duplicates]
                )
            rest["options"] = {**options, **tables}
        return rest

    @field_validator("checkpoint_every", mode="wrap")
    @classmethod
    def _check_cadence(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:  # it has one error per accepted type
            text = f'must be "auto", or a whole number of {progress_unit(cls.KIND)}s of at least 0, not {value!r}.'
            raise ValueError(text) from None

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, name: str) -> str:
        return check_choice("recipes", name, kind=cls.KIND)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        chosen = self.chosen()
        errors = [line for table, given in self.options.items() for line in self._option_errors(chosen, table, given)]
        if errors:
            # Raised inside a validator, these keep their own locations: run.language.layers, not run.
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        filled = {table: choice.with_defaults(self.options.get(table, {})) for table, choice in chosen.items()}
        object.__setattr__(self, "options", {table: options for table, options in filled.items() if options})
        return self

    def _option_errors(self, chosen: Mapping[str, Choice], table: str, given: object) -> Iterator[InitErrorDetails]:
        if table not in chosen:
            yield option_error((table,), self._unused_table_message(table), given)
        elif not isinstance(given, Mapping):
            yield option_error((table,), f"must be a table, [run.{table}].", given)
        else:
            for name, message in chosen[table].problems(given):
                yield option_error((table, name), message, given[name])

    @model_serializer(mode="wrap")
    def _flatten(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the form that people write: options as tables named after their choice, without None and {}."""
        data: dict[str, Any] = handler(self)
        tables = data.pop("options", {})
        written = {name: value for name, value in data.items() if value is not None and value != {}}
        for name, options in tables.items():
            if written_options := {option: value for option, value in options.items() if value is not None}:
                written[name] = written_options
        return written

    def chosen(self) -> dict[str, Choice]:
        """Return the choices of this run by name: the modules whose options it may set."""
        raise NotImplementedError

    def _unused_table_message(self, table: str) -> str:
        """Return what is wrong with a table of options that belongs to no choice of this run, and the fix."""
        raise NotImplementedError

    @property
    def unit(self) -> str:
        """Its unit of progress: "step" or "round"."""
        return progress_unit(self.KIND)

    @property
    def length(self) -> int:
        """Steps (or rounds) of the whole run: what a checkpoint's number counts."""
        raise NotImplementedError

    def recipe_options(self) -> dict[str, Value]:
        return self.options_of(self.recipe)

    def options_of(self, name: str) -> dict[str, Value]:
        """Return the options of one of the run's choices."""
        return dict(self.options.get(name, {}))

    def hash(self) -> str:
        """Return a hash of everything that affects the numbers a run computes; checkpoints store it."""
        return hashlib.sha256(json.dumps(self.numerics(), sort_keys=True).encode()).hexdigest()[:16]

    def numerics(self) -> dict[str, Any]:
        """Return the fields that affect the computed numbers; how often things are written or reported does not."""
        data = self.model_dump()
        recipe_bookkeeping = choices.get("recipes", self.recipe).constants.get("BOOKKEEPING", ())
        if isinstance(recipe_bookkeeping, tuple) and self.recipe in data:
            data[self.recipe] = {
                name: value for name, value in data[self.recipe].items() if name not in recipe_bookkeeping
            }
        return {name: value for name, value in data.items() if name not in self.BOOKKEEPING}


def problems(error: ValidationError, model: type[BaseRunConfig], prefix: str = "run") -> list[Problem]:
    """Convert pydantic's errors to problems, each naming its field and the fix."""
    return [_problem(item, model, prefix) for item in error.errors(include_url=False)]


def _problem(item: ErrorDetails, model: type[BaseRunConfig], prefix: str) -> Problem:
    location = item["loc"]
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        fields = sorted(set(model.model_fields) - {"options"})
        message = f"is not a setting of [run]. {choices.suggest(str(location[-1]), fields)}"
    return Problem(".".join([prefix, *map(str, location)]), message)


def option_error(location: tuple[str, ...], message: str, given: object) -> InitErrorDetails:
    """Return an error at its own location, for a validator to raise together with others."""
    # The message is passed as a value: as a template, its braces would be interpreted.
    kind = PydanticCustomError("option", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=location, input=given)
