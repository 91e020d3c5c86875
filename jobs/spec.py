"""A job's specification: one class for the form, the API and the CLI, with errors that name the field and the fix.

Nothing here imports Django: `vigil submit --set` changes a spec's text with it, and the portal checks it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

import tomlkit
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jobs.broken import explain
from jobs.errors import Problem, SpecError
from jobs.mending import mended, standing
from jobs.wording import problems_of
from training.config import RunConfig

MAX_DEPTH = 8  # tables in tables
MAX_BYTES = 64 * 1024
STOP_SECONDS = 30  # what stopping needs at least, before a write of this job was measured (PROTOCOLS §2)
_LIMIT = re.compile(r"(?:(?P<days>\d{1,3})-)?(?P<hours>\d{1,4}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)\Z")
_NODES = re.compile(r"(\d{1,5}):(\d{1,5})\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@^~+-]{0,199}\Z")
_SECRET = re.compile(r"https://[^/]*@|ssh://[^/@]*:[^/]*@")
_GIT = re.compile(r"(?:https://|ssh://)[A-Za-z0-9][\w.@:~/+%-]{2,500}\Z")
# Set by the launcher for every rank: a spec that sets them would break the run in strange ways.
_OURS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
_LOADER = {"LD_PRELOAD", "LD_AUDIT", "BASH_ENV", "ENV", "PYTHONSTARTUP"}


def seconds_of(limit: str) -> int:
    """The seconds of "HH:MM:SS" or "D-HH:MM:SS"."""
    match = _LIMIT.match(limit)
    if not match:
        raise ValueError(f'"{limit}" is not a time limit. Write {_suggest_limit(limit)}.')
    days, hours, minutes, seconds = (int(part or 0) for part in match.group("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def limit_of(seconds: int) -> str:
    """ "HH:MM:SS", or "D-HH:MM:SS" from a day on."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _suggest_limit(text: str) -> str:
    """What the person may have meant: "12 hours" is 12:00:00, "90" is 01:30:00 (minutes, as in Slurm)."""
    units = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
    found = re.findall(r"(\d{1,5})\s*([dhms])", text.lower())
    seconds = sum(int(number) * units[unit] for number, unit in found)
    if not found and text.strip().isdigit() and len(text.strip()) < 7:
        seconds = int(text) * 60
    return limit_of(seconds) if seconds else "HH:MM:SS, such as 12:00:00, or 2-00:00:00 for two days"


def _time_limit(value: str) -> str:
    seconds = seconds_of(value)
    if seconds <= STOP_SECONDS:
        raise ValueError(
            f"{value} leaves no time to run: stopping with a last checkpoint alone needs {STOP_SECONDS} s."
            f" Write at least {limit_of(60)}."
        )
    return value


def _nodes(value: object) -> object:
    if isinstance(value, str):
        match = _NODES.match(value)
        if not match:
            raise ValueError(f'"{value}" is not a number of nodes. Write 2, or "2:4" for two to four.')
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise ValueError(f'"{value}": the first number must be at least 1 and not above the second.')
    elif isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= 10_000:
        raise ValueError(f"{value} is not a number of nodes: at least 1, at most 10,000.")
    return value


def _name(value: str) -> str:
    if not _NAME.match(value) or ".." in value:
        raise ValueError(
            f'"{value[:80]}" cannot be a name. Take letters, digits, dots, dashes and underscores,'
            " at most 64, beginning with a letter or a digit."
        )
    return value


def _entry(value: str) -> str:
    path = PurePosixPath(value)
    if not value or path.is_absolute() or ".." in path.parts or "\\" in value or not value.isprintable():
        raise ValueError(f'"{value[:80]}" must be a file inside the directory, written like train.py or src/train.py.')
    return str(path)


def _python(value: str) -> str:
    if value and (not PurePosixPath(value).is_absolute() or not value.isprintable()):
        raise ValueError(
            f'"{value[:80]}" must be the absolute path of an interpreter or a virtual environment, such as'
            " /home/me/.venv/bin/python; leave it empty for the portal's own."
        )
    return value


def _git(value: str) -> str:
    if value and not _GIT.match(value):
        raise ValueError(f'"{value[:80]}" is not fetched. Write an https:// or ssh:// address of a repository.')
    if _SECRET.match(value):
        raise ValueError(
            "The address holds a password or a token, which everybody in the project would read. Take it out: git asks"
            " your credential helper where the job runs, or write ssh://."
        )
    return value


def _ref(value: str) -> str:
    if value and (not _REF.match(value) or ".." in value):
        raise ValueError(f'"{value[:80]}" cannot be a ref. Write a branch, a tag or a commit, such as main.')
    return value


def _environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f'"{name[:80]}" cannot be the name of a variable. Take letters, digits and underscores.')
        if name in _OURS or name in _LOADER or name.startswith(("VIGIL_", "SLURM_", "TORCHELASTIC_")):
            raise ValueError(f"{name} is set by Vigil or the scheduler. Take it out.")
        if "\0" in text:
            raise ValueError(f"{name} holds a zero byte. Take it out.")
    return value


def _tags(value: list[str]) -> list[str]:
    for tag in value:
        if not re.match(r"[\w.:/+-]{1,64}\Z", tag):
            raise ValueError(f'"{tag[:80]}" cannot be a tag. Take letters, digits and . _ : / + -, at most 64.')
    return list(dict.fromkeys(value))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False, hide_input_in_errors=True)


class Resources(_Model):
    """What the scheduler is asked for."""

    nodes: Annotated[int | str, BeforeValidator(_nodes)] = Field(
        default=1, title="Nodes", description='How many, or "min:max" for an elastic job.'
    )
    gpus_per_node: int = Field(
        default=0, ge=0, le=64, title="GPUs a node", description="One rank a GPU; 0 runs on CPUs."
    )
    ranks_per_node: int = Field(default=1, ge=1, le=1024, title="Ranks a node", description="Where there are no GPUs.")
    cpus_per_rank: int = Field(
        default=1, ge=1, le=1024, title="CPUs a rank", description="Cores for each rank's process."
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        allow_inf_nan=False,
        title="Memory a node (GiB)",
        description="Empty: the scheduler's default.",
    )
    time_limit: Annotated[str, AfterValidator(_time_limit)] = Field(
        default="01:00:00", title="Time limit", description="HH:MM:SS or D-HH:MM:SS, for each attempt."
    )

    @property
    def min_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.split(":")[1])

    @property
    def local_world_size(self) -> int:
        """Ranks on each node."""
        return self.gpus_per_node or self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.local_world_size * self.cpus_per_rank

    @property
    def memory_mib_per_node(self) -> int | None:
        return None if self.memory_gib is None else max(1, round(self.memory_gib * 1024))

    @property
    def time_limit_seconds(self) -> int:
        return seconds_of(self.time_limit)


class Restart(_Model):
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


class Script(_Model):
    """Somebody's own program, one process a rank, with torchrun's environment."""

    directory: str = Field(
        default="", max_length=4096, title="Directory", description="Packed and sent by `vigil submit`."
    )
    git: Annotated[str, AfterValidator(_git)] = Field(default="", title="Git URL", description="https:// or ssh://")
    ref: Annotated[str, AfterValidator(_ref)] = Field(
        default="", title="Git ref", description="A branch, a tag or a commit."
    )
    entry: Annotated[str, AfterValidator(_entry)] = Field(
        default="train.py", max_length=500, title="Program", description="The file to run, inside the directory."
    )
    args: list[str] = Field(default_factory=list, max_length=1000, title="Arguments")
    env: Annotated[dict[str, str], AfterValidator(_environment)] = Field(
        default_factory=dict, max_length=200, title="Environment", description="Variables that the program sees."
    )
    python: Annotated[str, AfterValidator(_python)] = Field(
        default="",
        max_length=4096,
        title="Python",
        description="Interpreter or virtual environment; empty: the portal's own.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.git and self.directory:
            raise ValueError("directory and git are both given. Keep one of them.")
        if not self.git and not self.directory:
            raise ValueError('The program comes from nowhere. Give directory = "." or git = "https://…" and a ref.')
        if self.git and not self.ref:
            raise ValueError('git needs a ref: ref = "main", a tag or a commit.')
        return self


class JobSpec(_Model):
    """What a person asks for."""

    name: Annotated[str, AfterValidator(_name)] = Field(title="Name", description="Letters, digits, dots, dashes.")
    kind: Literal["distributed", "script"] = Field(
        default="distributed", title="Kind", description="distributed: Vigil's trainer. script: a program of your own."
    )
    project: str = Field(default="default", max_length=64, title="Project", description="Who it belongs to.")
    tags: Annotated[list[str], AfterValidator(_tags)] = Field(default_factory=list, max_length=50, title="Tags")
    notes: str = Field(default="", max_length=20_000, title="Notes")
    resources: Resources = Field(default_factory=Resources, title="Resources")
    restart: Restart = Field(default_factory=Restart, title="If it fails")
    run: RunConfig | None = Field(
        default=None, title="Run", description="The trainer's configuration (kind = distributed)."
    )
    script: Script | None = Field(default=None, title="Script", description="Your own program (kind = script).")

    @model_validator(mode="before")
    @classmethod
    def _parts_of_kind(cls, data: Any) -> Any:
        """Every kind has its own part; the trainer's may be left out, it has defaults for everything."""
        if isinstance(data, dict) and data.get("kind", "distributed") == "distributed":
            if data.get("run") is None:
                data = {**data, "run": {}}
            if data.get("script") is None:
                data = {key: value for key, value in data.items() if key != "script"}
        return data

    @property
    def world_size(self) -> int:
        """Ranks in all, at the smallest number of nodes."""
        return self.resources.local_world_size * self.resources.min_nodes

    @classmethod
    def parse(cls, data: dict[str, Any]) -> JobSpec:
        """From plain values (JSON, TOML, a form), or SpecError with every problem found."""
        if data.get("kind") == "federated":
            raise SpecError.at("kind", "federated jobs are not here yet. Take distributed or script.")
        if problems := list(_nul("", data)):
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
        rest, more = mended(cls, data, problems)
        found = [*problems, *more]
        return [*found, *standing(cls, rest._across(), found)] if rest is not None else found

    @classmethod
    def parse_toml(cls, text: str) -> JobSpec:
        """From TOML as a person writes it."""
        return cls.parse(read_toml(text))

    def _across(self) -> list[Problem]:
        """What no single field can tell."""
        if self.kind == "script":
            if self.run is not None:
                return [Problem("run", "[run] is for kind = distributed. Take it out, or change the kind.")]
            if self.script is None:
                missing = 'Missing. Write [script] with directory = "." and entry = "train.py".'
                return [Problem("script", missing)]
            return []
        if self.script is not None:
            return [Problem("script", "[script] is for kind = script. Take it out, or change the kind.")]
        assert self.run is not None
        worlds = dict.fromkeys((self.world_size, self.resources.local_world_size * self.resources.max_nodes))
        for world_size in worlds:
            if found := [Problem(f"run.{p.field}", p.message) for p in self.run.check(world_size)]:
                return found
        return []


def _nul(place: str, value: object, depth: int = 0) -> Iterator[Problem]:
    """Strings with a NUL in them: no database, environment or argument can hold one. Nothing valid lies deep."""
    if isinstance(value, str) and "\0" in value:
        yield Problem(place, "has a NUL character in it. Take it out.")
    if depth > MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return
    for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _nul(f"{place}.{name}".strip("."), inner, depth + 1)


def read_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text of sane size, or SpecError with the line."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError.at(
            "", f"The specification is larger than {MAX_BYTES // 1024} KB. Keep code and data out of it."
        )
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError.at("", explain(text, error)) from None


def write_toml(spec: JobSpec, *, defaults: bool = False) -> str:
    """The spec as text. Without `defaults`, only what differs from them and what a reader looks for first."""
    always = {"name", "kind", "project", "resources.nodes", "resources.gpus_per_node", "resources.time_limit"}
    always |= {"resources.ranks_per_node"} if not spec.resources.gpus_per_node else set()
    always |= {"restart.max_restarts", "run.recipe", "run.steps", "script.entry"}
    plain = spec.model_dump(mode="json", exclude_none=True)
    base = {} if defaults else _defaults(spec)
    document = tomlkit.document()
    _write(document, plain, base, always, "")
    return tomlkit.dumps(document)


def _defaults(spec: JobSpec) -> dict[str, Any]:
    """The defaults of everything that has one, in the shape of a dumped spec."""
    base = JobSpec.model_construct(name="").model_dump(mode="json", exclude_none=True)
    base["run"] = RunConfig.model_validate(_choices(spec)).model_dump(mode="json", exclude_none=True)
    base["script"] = Script.model_construct().model_dump(mode="json", exclude_none=True)
    return base


def _choices(spec: JobSpec) -> dict[str, str]:
    """What a run chose: other options have other defaults."""
    return {"recipe": spec.run.recipe, "parallelism": spec.run.parallelism} if spec.run else {}


def _write(
    into: tomlkit.TOMLDocument | tomlkit.items.Table, values: dict[str, Any], base: Any, always: set[str], at: str
) -> None:
    """Plain values first, then tables: TOML has no way back out of a table."""
    base = base if isinstance(base, dict) else {}
    for key, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
        path = f"{at}.{key}" if at else key
        if isinstance(value, dict):
            table = tomlkit.table()
            _write(table, value, base.get(key), always, path)
            if len(table):
                into.add(key, table)
        elif path in always or key not in base or base[key] != value:
            into.add(key, _multiline(value))


def _multiline(value: Any) -> Any:
    if isinstance(value, str) and "\n" in value:
        return tomlkit.string(value, multiline=True)
    return value


def set_values(text: str, values: dict[str, Any]) -> str:
    """The same text with some values changed ({"run.steps": 400}); comments and order stay."""
    read_toml(text)  # says what is wrong in our words, and bounds what tomlkit is given
    document = tomlkit.parse(text)
    for path, value in values.items():
        *tables, key = path.split(".")
        place: Any = document
        for depth, name in enumerate(tables):
            place = place.setdefault(name, tomlkit.table())
            if not hasattr(place, "setdefault"):
                raise SpecError.at(".".join(tables[: depth + 1]), "This is a value, not a table.")
        place[key] = value
    return tomlkit.dumps(document)
