"""Define a job's specification, by field, with defaults, bounds and the texts of the form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, tzinfo
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jobs.errors import Problem, SpecError
from jobs.spec import restarts, slurm, values
from jobs.spec.code import ClientCode, Code, Script
from jobs.spec.environment import Environment
from jobs.spec.error_messages import problems_of
from jobs.spec.remaining_problems import independent_problems, validate_rest
from jobs.spec.resources import Resources
from jobs.spec.table import SpecTable
from jobs.spec.toml import read_toml
from training.config import choices
from training.config.base import BaseRunConfig
from training.config.run_config import RunConfig
from training.federation import config_checks as federation
from training.federation import custom
from training.federation.config import FederationConfig, with_custom_recipe
from training.planning import checking

RUNS: dict[str, type[BaseRunConfig]] = {model.KIND: model for model in (RunConfig, FederationConfig)}
"""The model of [run], by kind of job."""
MAX_DEPTH = 8  # tables in tables


class Restart(SpecTable):
    """[restart]: how often the job may be restarted after a failure."""

    max_restarts: int = Field(
        default=3, ge=0, le=100, title="Maximum restarts", description="New attempts after failures."
    )
    in_place: int = Field(
        default=3,
        ge=0,
        le=100,
        title="Restarts in place",
        description="Restarts of ranks within an attempt; each checkpoint resets the count.",
    )
    on: restarts.On = Field(
        default_factory=dict,
        max_length=64,
        title="By cause",
        description='Overrides of Vigil’s defaults: "memory.gpu_oom" = "stop", "gpu.*" = "restart".',
    )


_HALF = re.compile("[\ud800-\udfff]")


class JobSpec(SpecTable):
    """A job's specification: what a person requests."""

    name: Annotated[str, AfterValidator(values.name)] = Field(
        title="Name", description="Letters, digits, dots, dashes."
    )
    kind: Literal["distributed", "federated", "script"] = Field(
        default="distributed",
        title="Kind",
        description="distributed: Vigil's trainer. federated: clients train on their own data, in rounds. script: "
        "your own program.",
    )
    project: str = Field(
        default="default", max_length=64, title="Project", description="The project that the job belongs to."
    )
    tags: Annotated[list[str], AfterValidator(values.tags)] = Field(default_factory=list, max_length=50, title="Tags")
    notes: str = Field(default="", max_length=20_000, title="Notes")
    after: Annotated[list[int], Field(max_length=50), AfterValidator(values.after)] = Field(
        default_factory=list, title="After", description="Numbers of jobs that must complete first."
    )
    resources: Resources = Field(default_factory=Resources, title="Resources")
    restart: Restart = Field(default_factory=Restart, title="If it fails")
    environment: Environment = Field(default_factory=Environment, title="Environment")
    run: RunConfig | FederationConfig | None = Field(
        default=None, title="Run", description="What is trained and how, by Vigil (not where kind = script)."
    )
    script: Script | None = Field(default=None, title="Script", description="Your own program (kind = script).")
    client: ClientCode | None = Field(
        default=None,
        title="Client",
        description="Your own clients, algorithm, aggregation, selection or split (kind = federated).",
    )

    @model_validator(mode="before")
    @classmethod
    def _parts_of_kind(cls, data: Any) -> Any:
        """Give every kind its own part; the trainer's may be left out, as all its fields have defaults."""
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key not in {"script", "client"} or value is not None}
            if data.get("kind", "distributed") in RUNS and data.get("run") is None:
                data = {**data, "run": {}}
            if data.get("kind") == "federated" and "client" in data:
                data = {**data, "run": with_custom_recipe(data["run"])}
        return data

    @field_validator("run", mode="before")
    @classmethod
    def _of_its_kind(cls, table: Any, info: ValidationInfo) -> Any:
        """Parse [run] as the table of its kind, so that errors are reported against that alone."""
        model = RUNS.get(info.data.get("kind", ""), RunConfig)
        return model.model_validate(table) if isinstance(table, dict) else table

    @property
    def code(self) -> Code | None:
        """Return the user's own code, or None if only Vigil's runs."""
        return self.script or self.client

    @property
    def entries(self) -> dict[str, str]:
        """Return the files that its code must contain, by the field that names each."""
        if self.script is not None:
            return {"script.entry": self.script.entry}
        if self.client is None or not isinstance(self.run, FederationConfig):
            return {}
        return {f"client.{part.key}": getattr(self.client, part.key) for part in self.run.custom}

    @property
    def world_size(self) -> int:
        """Return the number of ranks at the smallest number of nodes."""
        return self.resources.local_world_size * self.resources.min_nodes

    @classmethod
    def parse(cls, data: dict[str, Any]) -> JobSpec:
        """Parse plain values (JSON, TOML, a form). Raises SpecError with every problem found."""
        if data.get("kind") == "attached":
            fix = "Start it with sbatch, with `vigil attach -- COMMAND` in its script, or `vigil attach NUMBER` later."
            raise SpecError.at("kind", f"attached jobs are jobs that Vigil did not submit. {fix}")
        if problems := list(_unstorable("", data)):
            raise SpecError(problems)
        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(cls._all_problems(data, problems_of(error, cls, data))) from None
        if problems := list(spec._cross_field_problems()):
            raise SpecError(problems)
        return spec

    @classmethod
    def _all_problems(cls, data: dict[str, Any], problems: list[Problem]) -> list[Problem]:
        """Return the problems of single fields, and those that can be found without these."""
        if kind_problems := list(_kind_first(data, problems)):
            return kind_problems
        rest, more = validate_rest(cls, data, problems)
        all_problems = [*problems, *more]
        return (
            [*all_problems, *independent_problems(cls, rest._cross_field_problems(), all_problems, data.get("kind"))]
            if rest is not None
            else all_problems
        )

    @classmethod
    def parse_toml(cls, text: str) -> JobSpec:
        """Parse TOML as a person writes it."""
        return cls.parse(read_toml(text))

    def with_absolute_begin(self, *, now: datetime, zone: tzinfo) -> JobSpec:
        """Return the specification as it is stored once it is submitted: with the moment that "+2h" means now."""
        if not self.resources.begin:
            return self
        begin = slurm.absolute(self.resources.begin, now=now, zone=zone)
        return self.model_copy(update={"resources": self.resources.model_copy(update={"begin": begin})})

    def _cross_field_problems(self) -> list[Problem]:
        """Return the problems that no single field can show."""
        return [*self.resources.cross_field_problems(), *self._kind_problems()]

    def _kind_problems(self) -> list[Problem]:
        if self.client is not None and self.kind != "federated":
            return [Problem("client", "[client] is for kind = federated. Remove it, or change the kind.")]
        if self.kind == "script":
            if self.run is not None:
                return [Problem("run", "[run] configures Vigil's trainer. Remove it, or change the kind.")]
            if self.script is None:
                missing = 'Missing. Write [script] with directory = "." and entry = "train.py".'
                return [Problem("script", missing)]
            return []
        if self.script is not None:
            return [Problem("script", "[script] is for kind = script. Remove it, or change the kind.")]
        if isinstance(self.run, FederationConfig):
            if problems := list(self._client_problems(self.run)):
                return problems
            return [Problem(f"run.{p.field}", p.message) for p in federation.problems(self.run, self.world_size)]
        assert self.run is not None
        full = self.resources.local_world_size * self.resources.max_nodes
        run_problems = list(checking.problems(self.run, full))
        if not run_problems and full != self.world_size:
            # On fewer nodes the shares of a batch may be uneven, and accumulate; the mesh has to fit them all the same.
            run_problems = list(checking.problems(self.run, self.world_size, allow_uneven=True))
        return [Problem(f"run.{p.field}", p.message) for p in run_problems]

    def _client_problems(self, run: FederationConfig) -> Iterator[Problem]:
        if self.client is None and run.custom:
            part = run.custom[0]
            where = f"where {part.file} with {part.functions} is"
            yield Problem("client", f'Missing. Write [client] with directory = ".", {where}.')
        if self.client is not None and not run.custom:
            lines = choices.either([part.line for part in custom.PARTS])
            yield Problem("client", f"It is not used. Write {lines}, or remove it.")


def _kind_first(data: dict[str, Any], problems: list[Problem]) -> Iterator[Problem]:
    """Yield a wrong or missing kind first, and only those problems that do not depend on the kind."""
    run = data.get("run")
    if "kind" not in data and isinstance(run, dict):
        theirs = [name for name in run if name in FederationConfig.model_fields and name not in RunConfig.model_fields]
        if not theirs:
            return
        named, be = ", ".join(theirs[:3]), "is" if len(theirs) == 1 else "are"
        yield Problem("kind", f'Missing, but {named} {be} a federation\'s. Did you mean kind = "federated"?')
    elif not any(problem.field == "kind" for problem in problems):
        return
    yield from (problem for problem in problems if problem.field.partition(".")[0] not in {"run", "script", "client"})


def _unstorable(place: str, value: object, depth: int = 0) -> Iterator[Problem]:
    """Yield strings that no database, environment or argument can hold: with NUL or a lone surrogate.

    No valid value is nested deeply.
    """
    if isinstance(value, str):
        if "\0" in value:
            yield Problem(place, "contains a NUL character. Remove it.")
        elif _HALF.search(value):
            yield Problem(place, "contains a lone surrogate, which is not a character. Remove it.")
    if depth > MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return
    for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(name, str) and _HALF.search(name):
            yield Problem(place, "contains a name with a lone surrogate. Remove it.")
        else:
            yield from _unstorable(f"{place}.{name}".strip("."), inner, depth + 1)
