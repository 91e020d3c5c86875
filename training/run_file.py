"""The file that a run is described in: a run.toml, or a whole job spec, as far as the trainer cares."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import run_config
from training.config.base import ConfigError, Problem
from training.config.run_config import RunConfig
from training.federation import config as federation
from training.federation import custom
from training.federation.config import FederationConfig


@dataclass(frozen=True)
class ClientFiles:
    """What [client] names."""

    directory: Path | None
    """Where they are, of a run that is started by hand; None: the launcher knows."""
    names: Mapping[str, str]
    """The files, by the field of [client] that names each."""


@dataclass(frozen=True)
class RunFile:
    """A run.toml or a whole job spec, as far as the trainer cares."""

    name: str
    config: RunConfig | FederationConfig
    on_cpu: bool
    """The job asked for no GPU, so none is used even where there is one."""
    mtbf_hours: float | None = None
    """Hours between failures of the job's nodes together, as the portal has seen them."""
    nodes: int = 1
    """The most nodes that it may have."""
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    """GPUs that were asked for; 0: none, or it is not said."""
    least_share: float = 0.0
    """Of a federation: the part of all samples that must have counted for it to complete."""
    data_roots: tuple[str, ...] | None = None
    """The folders that alone it may read of what it names; None: any."""
    client: ClientFiles | None = None
    """Somebody's own files of a federation."""

    def of_trainer(self, *, what: str) -> RunConfig:
        """The configuration of a distributed run; ConfigError for one of another kind. `what`: is only for those."""
        if isinstance(self.config, RunConfig):
            return self.config
        message = f'is "{self.config.KIND}", and {what} is for kind = "{RunConfig.KIND}" only.'
        raise ConfigError([Problem("kind", message)])


def load(path: Path) -> RunFile:
    """Reads a run.toml or a job spec; ConfigError with dotted field names if it can't be run."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError([Problem(str(path), f"can't be read: {why}.")]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(path), f"is not TOML: {error}.")]) from error
    if not isinstance(data.get("run"), dict):
        raise ConfigError([Problem("run", 'is missing. Write a table [run] with at least recipe = "language".')])
    allocation = data.get("launch", data.get("resources", {}))
    allocation = allocation if isinstance(allocation, dict) else {}
    client = _client(path, data["client"]) if isinstance(data.get("client"), dict) else None
    run = data["run"] if client is None else federation.with_custom_recipe(data["run"])
    hours, gpus = allocation.get("mtbf_hours"), allocation.get("gpus_per_node")
    share = allocation.get("least_share")
    return RunFile(
        str(data.get("name", path.stem)),
        parse(str(data.get("kind", RunConfig.KIND)), run),
        on_cpu=allocation.get("gpus_per_node") == 0,
        mtbf_hours=float(hours) if isinstance(hours, int | float) and hours > 0 else None,
        least_share=float(share) if isinstance(share, int | float) and 0 < share <= 1 else 0.0,
        nodes=_most(allocation.get("max_nodes", allocation.get("nodes"))),
        ranks_per_node=_most(allocation.get("gpus_per_node")) if gpus else _most(allocation.get("ranks_per_node")),
        gpus_per_node=_most(gpus) if gpus else 0,
        data_roots=_roots(allocation),
        client=client,
    )


def parse(kind: str, table: Mapping[str, Any]) -> RunConfig | FederationConfig:
    """[run] of a job of this kind; ConfigError names every field that is wrong, as `run.<field>`."""
    return federation.parse(table) if kind == FederationConfig.KIND else run_config.parse(table)


def _client(path: Path, table: Mapping[str, object]) -> ClientFiles:
    """A whole job spec says where they are, from where it lies itself."""
    names = {part.key: str(table.get(part.key, part.file)) for part in custom.PARTS}
    directory = table.get("directory")
    return ClientFiles(path.absolute().parent / str(directory) if directory else None, names)


def _roots(allocation: Mapping[str, object]) -> tuple[str, ...] | None:
    """What makes no sense lets nothing be read."""
    if "data_roots" not in allocation:
        return None
    found = allocation["data_roots"]
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _most(count: object) -> int:
    """The most that `4` or `"2:4"` allows; 1 for what makes no sense, which is the job spec's to refuse."""
    text = str(count).rpartition(":")[2]
    return max(1, int(text)) if text.isdecimal() else 1
