"""Read the file that describes a run: a run.toml, or a complete job specification, as far as the trainer uses it."""

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
    """The files that [client] names."""

    directory: Path | None
    """Where they are, for a run that is started manually; None: known to the launcher."""
    names: Mapping[str, str]
    """The files, by the field of [client] that names each."""


@dataclass(frozen=True)
class RunFile:
    """A run.toml or a complete job specification, as far as the trainer uses it."""

    name: str
    config: RunConfig | FederationConfig
    on_cpu: bool
    """Whether the job requested no GPU, so that none is used even if there is one."""
    mtbf_hours: float | None = None
    """Hours between failures of the job's nodes together, as observed by the portal."""
    nodes: int = 1
    """Maximum number of nodes."""
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    """Number of GPUs requested; 0: none, or not specified."""
    least_share: float = 0.0
    """For a federation: the fraction of all samples that must have counted for it to complete."""
    data_roots: tuple[str, ...] | None = None
    """The only folders from which data may be read; None: any."""
    client: ClientFiles | None = None
    """The user's own files of a federation."""

    def trainer_config(self, *, what: str) -> RunConfig:
        """Return the configuration of a distributed run.

        Raises ConfigError for other kinds; `what` is only for these.
        """
        if isinstance(self.config, RunConfig):
            return self.config
        message = f'is "{self.config.KIND}", and {what} is for kind = "{RunConfig.KIND}" only.'
        raise ConfigError([Problem("kind", message)])


def load(path: Path) -> RunFile:
    """Read a run.toml or a job specification. Raises ConfigError with dotted field names if it is invalid."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError([Problem(str(path), f"can't be read: {reason}.")]) from error
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
        nodes=_maximum(allocation.get("max_nodes", allocation.get("nodes"))),
        ranks_per_node=_maximum(allocation.get("gpus_per_node"))
        if gpus
        else _maximum(allocation.get("ranks_per_node")),
        gpus_per_node=_maximum(gpus) if gpus else 0,
        data_roots=_roots(allocation),
        client=client,
    )


def parse(kind: str, table: Mapping[str, Any]) -> RunConfig | FederationConfig:
    """Parse [run] for a job of this kind. Raises ConfigError, which names every invalid field as `run.<field>`."""
    return federation.parse(table) if kind == FederationConfig.KIND else run_config.parse(table)


def _client(path: Path, table: Mapping[str, object]) -> ClientFiles:
    """Return the user's files; a job specification gives their directory relative to its own location."""
    names = {part.key: str(table.get(part.key, part.file)) for part in custom.PARTS}
    directory = table.get("directory")
    return ClientFiles(path.absolute().parent / str(directory) if directory else None, names)


def _roots(allocation: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the data roots; an invalid value allows nothing to be read."""
    if "data_roots" not in allocation:
        return None
    roots = allocation["data_roots"]
    return tuple(map(str, roots)) if isinstance(roots, list) else ()


def _maximum(count: object) -> int:
    """Return the maximum that `4` or `"2:4"` allows; 1 for invalid values, which the job specification refuses."""
    text = str(count).rpartition(":")[2]
    return max(1, int(text)) if text.isdecimal() else 1
