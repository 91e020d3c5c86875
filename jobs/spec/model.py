"""A job's specification, by field: what there is to ask for, with defaults, bounds and the words of the form."""

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
from jobs.spec.mending import mended, standing
from jobs.spec.part import Part
from jobs.spec.resources import Resources
from jobs.spec.toml import read_toml
from jobs.spec.wording import problems_of
from training.config import choices
from training.config.asked import Asked
from training.config.run_config import RunConfig
from training.federation import config_checks as federation
from training.federation import custom
from training.federation.config import FederationConfig, with_custom_recipe
from training.planning import checking

RUNS: dict[str, type[Asked]] = {model.KIND: model for model in (RunConfig, FederationConfig)}
"""What [run] is, by kind of job."""
MAX_DEPTH = 8  # tables in tables


class Restart(Part):
    """How often it may be started anew after a failure."""

    max_restarts: int = Field(
        default=3, ge=0, le=100, title="Restarts at most", description="New attempts after a failure."
    )
    in_place: int = Field(
        default=3,
        ge=0,
        le=100,
        title="In place",
        description="Restarts of ranks within an attempt; each checkpoint refills it.",
    )
    on: restarts.On = Field(
        default_factory=dict,
        max_length=64,
        title="By cause",
        description='What follows a cause, where not what Vigil does: "memory.gpu_oom" = "stop", "gpu.*" = "restart".',
    )


_HALF = re.compile("[\ud800-\udfff]")


class JobSpec(Part):
    """What a person asks for."""

    name: Annotated[str, AfterValidator(values.name)] = Field(
        title="Name", description="Letters, digits, dots, dashes."
    )
    kind: Literal["distributed", "federated", "script"] = Field(
        default="distributed",
        title="Kind",
        description="distributed: Vigil's trainer. federated: clients that train apart, in rounds. script: a program "
        "of your own.",
    )
    project: str = Field(default="default", max_length=64, title="Project", description="Who it belongs to.")
    tags: Annotated[list[str], AfterValidator(values.tags)] = Field(default_factory=list, max_length=50, title="Tags")
    notes: str = Field(default="", max_length=20_000, title="Notes")
    after: Annotated[list[int], Field(max_length=50), AfterValidator(values.after)] = Field(
        default_factory=list, title="After", description="Jobs that must have completed first, by number."
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
        """Every kind has its own part; the trainer's may be left out, it has defaults for everything."""
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
        """A table is read as what its kind asks for, so that what is wrong is told of that alone."""
        model = RUNS.get(info.data.get("kind", ""), RunConfig)
        return model.model_validate(table) if isinstance(table, dict) else table

    @property
    def code(self) -> Code | None:
        """What comes along of somebody's own; None: Vigil's code alone is run."""
        return self.script or self.client

    @property
    def entries(self) -> dict[str, str]:
        """The files that its code has to have, by the field that names each."""
        if self.script is not None:
            return {"script.entry": self.script.entry}
        if self.client is None or not isinstance(self.run, FederationConfig):
            return {}
        return {f"client.{part.key}": getattr(self.client, part.key) for part in self.run.custom}

    @property
    def world_size(self) -> int:
        """Ranks in all, at the smallest number of nodes."""
        return self.resources.local_world_size * self.resources.min_nodes

    @classmethod
    def parse(cls, data: dict[str, Any]) -> JobSpec:
        """Reads plain values (JSON, TOML, a form), or raises SpecError with every problem found."""
        if data.get("kind") == "attached":
            fix = "Start it with sbatch, with `vigil attach -- COMMAND` in its script, or `vigil attach NUMBER` later."
            raise SpecError.at("kind", f"attached jobs are those that Vigil did not submit. {fix}")
        if problems := list(_unkeepable("", data)):
            raise SpecError(problems)
        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(cls._all_problems(data, problems_of(error, cls, data))) from None
        if problems := list(spec._across()):
            raise SpecError(problems)
        return spec

    @classmethod
    def _all_problems(cls, data: dict[str, Any], problems: list[Problem]) -> list[Problem]:
        """The problems of single fields, and what can be told without these."""
        if told := list(_of_what_kind(data, problems)):
            return told
        rest, more = mended(cls, data, problems)
        found = [*problems, *more]
        return [*found, *standing(cls, rest._across(), found, data.get("kind"))] if rest is not None else found

    @classmethod
    def parse_toml(cls, text: str) -> JobSpec:
        """Reads TOML as a person writes it."""
        return cls.parse(read_toml(text))

    def settled(self, *, now: datetime, zone: tzinfo) -> JobSpec:
        """The specification as it is kept once it is submitted: with the moment that "+2h" means now."""
        if not self.resources.begin:
            return self
        begin = slurm.absolute(self.resources.begin, now=now, zone=zone)
        return self.model_copy(update={"resources": self.resources.model_copy(update={"begin": begin})})

    def _across(self) -> list[Problem]:
        """What no single field can tell."""
        return [*self.resources.across(), *self._across_kind()]

    def _across_kind(self) -> list[Problem]:
        if self.client is not None and self.kind != "federated":
            return [Problem("client", "[client] is for kind = federated. Take it out, or change the kind.")]
        if self.kind == "script":
            if self.run is not None:
                return [Problem("run", "[run] is what Vigil trains. Take it out, or change the kind.")]
            if self.script is None:
                missing = 'Missing. Write [script] with directory = "." and entry = "train.py".'
                return [Problem("script", missing)]
            return []
        if self.script is not None:
            return [Problem("script", "[script] is for kind = script. Take it out, or change the kind.")]
        if isinstance(self.run, FederationConfig):
            if problems := list(self._across_client(self.run)):
                return problems
            told = federation.problems(self.run, self.world_size)
            return [Problem(f"run.{p.field}", p.message) for p in told]
        assert self.run is not None
        full = self.resources.local_world_size * self.resources.max_nodes
        found = list(checking.problems(self.run, full))
        if not found and full != self.world_size:
            # On fewer nodes the shares of a batch may be uneven, and accumulate; the mesh has to fit them all the same.
            found = list(checking.problems(self.run, self.world_size, lacking=True))
        return [Problem(f"run.{p.field}", p.message) for p in found]

    def _across_client(self, run: FederationConfig) -> Iterator[Problem]:
        if self.client is None and run.custom:
            part = run.custom[0]
            where = f"where {part.file} with {part.functions} is"
            yield Problem("client", f'Missing. Write [client] with directory = ".", {where}.')
        if self.client is not None and not run.custom:
            lines = choices.either([part.line for part in custom.PARTS])
            yield Problem("client", f"Nothing uses it. Write {lines}, or take it out.")


def _of_what_kind(data: dict[str, Any], problems: list[Problem]) -> Iterator[Problem]:
    """Where the kind is wrong, or a federation's is left out: that, and what is wrong whatever the kind is."""
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


def _unkeepable(place: str, value: object, depth: int = 0) -> Iterator[Problem]:
    """Strings with what no database, environment or argument can hold: NUL, or half of a pair of surrogates.

    Nothing valid lies deep.
    """
    if isinstance(value, str):
        if "\0" in value:
            yield Problem(place, "has a NUL character in it. Take it out.")
        elif _HALF.search(value):
            yield Problem(place, "has half of a surrogate pair in it, which is no character. Take it out.")
    if depth > MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return
    for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(name, str) and _HALF.search(name):
            yield Problem(place, "has a name with half of a surrogate pair in it. Take it out.")
        else:
            yield from _unkeepable(f"{place}.{name}".strip("."), inner, depth + 1)
