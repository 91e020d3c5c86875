"""The configuration of a federated run. Portal and ranks validate it before anything is allocated; no torch.

[run]
recipe = "tabular"
rounds = 30
clients = 10
algorithm = "fedavg"
split = "dirichlet"
[run.dirichlet]       # the options of a chosen module (see training.config.choices)
alpha = 0.3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from training.config import base, choices
from training.config.base import BaseRunConfig, ConfigError
from training.config.choices import Choice
from training.federation import custom
from training.federation.custom import CustomPart

FOLDERS = choices.CHOICE_FIELDS["federated"]
MAX_FILTERS = 4


def _filter_names(schema: dict[str, Any]) -> None:
    """Add the names of all filters to the JSON schema, so that a form can offer them."""
    schema["items"]["enum"] = choices.names(FOLDERS["filters"])


class FederationConfig(BaseRunConfig):
    """The [run] table of kind "federated". A round corresponds to a step of the trainer."""

    KIND: ClassVar[str] = "federated"

    recipe: str = Field(
        "tabular",
        json_schema_extra=base.schema_enum("recipes", kind=KIND),
        description="The model to train, and its data.",
    )
    rounds: int = Field(
        30, ge=1, le=1_000_000, description="Exchanges between the server and clients; each makes one new global model."
    )
    clients: int = Field(10, ge=1, le=100_000, description="Number of clients that the data is divided among.")
    per_round: int | None = Field(None, ge=1, description="Clients that train in a round; empty: all.")
    epochs: int | None = Field(None, ge=1, le=10_000, description="Passes over a client's data per round; empty: one.")
    local_steps: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Instead of epochs: local steps per round.",
    )
    batch: int = Field(
        32, ge=1, le=1_000_000, description="Samples per local step; at most the client's number of samples."
    )
    learning_rate: float = Field(
        0.1, gt=0, le=100, allow_inf_nan=False, description="Learning rate of the local steps."
    )
    client_lr_schedule: str = Field(
        "constant",
        json_schema_extra=base.schema_enum(FOLDERS["client_lr_schedule"]),
        description="How the clients' learning rate changes from round to round.",
    )
    client_momentum: float = Field(
        0.0,
        ge=0,
        le=0.999,
        allow_inf_nan=False,
        description="Heavy-ball momentum of the local steps, as in torch.optim.SGD; it starts at zero in every round.",
    )
    client_weight_decay: float = Field(
        0.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Weight decay of the clients' local steps, as in torch.optim.SGD.",
    )
    ridge: float = Field(
        0.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="λ of L2 regularisation: λ/2 times the squared weights is added to each loss.",
    )
    algorithm: str = Field(
        "fedavg",
        json_schema_extra=base.schema_enum(FOLDERS["algorithm"]),
        description="What clients compute and send, and how the server uses it.",
    )
    aggregation: str = Field(
        "mean",
        json_schema_extra=base.schema_enum(FOLDERS["aggregation"]),
        description="How the updates of a round are combined.",
    )
    selection: str = Field(
        "uniform",
        json_schema_extra=base.schema_enum(FOLDERS["selection"]),
        description="Which clients take part in a round.",
    )
    split: str = Field(
        "iid",
        json_schema_extra=base.schema_enum(FOLDERS["split"]),
        description="How samples are divided among clients.",
    )
    class_imbalance: float = Field(
        1.0,
        ge=1,
        le=10_000,
        allow_inf_nan=False,
        description="How many times as many samples of the first class are trained on as of the last: a long tail over "
        "all clients together, made by leaving samples out before they are split; 1: all are used.",
    )
    pace: str = Field(
        "rounds",
        json_schema_extra=base.schema_enum(FOLDERS["pace"]),
        description="Which clients the server waits for, and how long.",
    )
    adapters: str = Field(
        "none",
        json_schema_extra=base.schema_enum(FOLDERS["adapters"]),
        description="Which weights are trained and sent.",
    )
    transport: str = Field(
        "ranks",
        json_schema_extra=base.schema_enum(FOLDERS["transport"]),
        description="Where clients run, and how they are reached.",
    )
    filters: list[str] = Field(
        default_factory=list,
        max_length=MAX_FILTERS,
        json_schema_extra=_filter_names,
        description="Filters applied to an update before it is sent, in this order.",
    )
    attack: str = Field(
        "none",
        json_schema_extra=base.schema_enum(FOLDERS["attack"]),
        description="How some clients attack the model, to test a robust aggregation.",
    )
    attackers: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, max_length=10_000, description="Numbers of the clients that attack, instead of a share."
    )
    attacker_share: float = Field(
        0.2, gt=0, lt=1, allow_inf_nan=False, description="Share of all clients that attack, drawn by the seed."
    )
    dtype: Literal["fp32", "fp64", "bf16"] = Field(
        "fp32", description="Data type of weights and arithmetic; bf16: of the arithmetic only."
    )
    validate_every: int = Field(1, ge=0, description="Rounds between validations; 0: none.")
    finetune_steps: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Steps of fine-tuning on each client's data, on a copy, for a second evaluation; 0: none.",
    )
    checkpoint_every: base.Interval = base.checkpoint_every_field("rounds")
    keep_every: int = base.keep_every_field("rounds")
    flush_steps: int = base.flush_steps_field("rounds")

    @model_validator(mode="before")
    @classmethod
    def _default_split(cls, data: Any) -> Any:
        return with_recipe_split(data) if isinstance(data, Mapping) else data

    @model_validator(mode="before")
    @classmethod
    def _default_epochs(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("epochs") is None and data.get("local_steps") is None:
            return {**data, "epochs": 1}
        return data

    @model_validator(mode="before")  # the last of these, which pydantic runs first
    @classmethod
    def _accept_custom_names(cls, data: Any) -> Any:
        return custom.with_stored_names(data) if isinstance(data, Mapping) else data

    @field_validator(
        "algorithm",
        "aggregation",
        "selection",
        "split",
        "pace",
        "adapters",
        "transport",
        "client_lr_schedule",
        "attack",
    )
    @classmethod
    def _is_choice(cls, name: str, info: Any) -> str:
        return base.check_choice(FOLDERS[info.field_name], name)

    @field_validator("filters")
    @classmethod
    def _are_filters(cls, names: list[str]) -> list[str]:
        for name in names:
            base.check_choice(FOLDERS["filters"], name)
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'names "{twice[0]}" twice. Keep one of them.')
        return names

    @model_validator(mode="after")
    def _check_epochs_or_steps(self) -> Self:
        if self.epochs is not None and self.local_steps is not None:
            raise ValidationError.from_exception_data(
                type(self).__name__,
                [
                    base.option_error(
                        ("local_steps",), "is given as well as epochs. Keep one of them.", self.local_steps
                    )
                ],
            )
        return self

    def chosen(self) -> dict[str, Choice]:
        named = {folder: getattr(self, field) for field, folder in FOLDERS.items() if field != "filters"}
        taken = {name: choices.get(folder, name) for folder, name in named.items()}
        return taken | {name: choices.get(FOLDERS["filters"], name) for name in self.filters}

    def _unused_table_message(self, table: str) -> str:
        field = next(field for field, folder in FOLDERS.items() if table in choices.names(folder))
        remedy = f'add "{table}" to filters' if field == "filters" else f'write {field} = "{table}"'
        return f"is a table of options that this run does not use. Remove it, or {remedy}."

    @property
    def custom(self) -> tuple[CustomPart, ...]:
        """Return the parts that come from the user's files."""
        return custom.chosen(dict(self))

    @property
    def length(self) -> int:
        return self.rounds

    @property
    def selected(self) -> int:
        """Return the number of clients that are selected in a round."""
        return self.clients if self.per_round is None else self.per_round


def with_custom_recipe(run: Any) -> Any:
    """Return [run] of a job with a [client] table, with recipe = "client".

    Not if another recipe is named, or [client] brings the algorithm or the split.
    """
    if not isinstance(run, Mapping) or "recipe" in run or {custom.ALGORITHM, custom.SPLIT} & {*custom.chosen(run)}:
        return run
    return {**run, "recipe": custom.CLIENT.choice}


def with_recipe_split(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return [run] with split = "column" if client.py brings the recipe and no split is named.

    data(client) is then the split.
    """
    is_custom = custom.CLIENT in custom.chosen(run) and run.get("split") is None
    return {**run, "split": "column"} if is_custom else run


def parse(table: Mapping[str, Any]) -> FederationConfig:
    """Return the configuration of a [run] table; ConfigError names every wrong field as `run.<field>`."""
    try:
        return FederationConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(base.problems(error, FederationConfig)) from error


def markdown_list(field: str) -> Iterator[str]:
    """Yield the lines of a Markdown list: the choices of a field, and the options of each with their defaults."""
    written = {part.choice: part.written for part in custom.PARTS if part.field == field}
    for name, choice in choices.describe(FOLDERS[field]).items():
        label = f"`{name}`" if written.get(name, name) == name else f"`{written[name]}` (shown as `{name}`)"
        options = ", ".join(f"`{option.name}` {_as_toml(option.default)}" for option in choice.options)
        suffix = f" Options: {options}." if options else ""
        yield from choices.list_item(f"{label}: {choice.description.rstrip('.')}.{suffix}")


def _as_toml(value: object) -> str:
    """Return a default as TOML writes it."""
    return str(value).lower() if isinstance(value, bool) else "left out" if value is None else str(value)
