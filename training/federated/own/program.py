"""Somebody's own files of a federation: where they are, and what is in them.

They are run inside the allocation, as the job's user, like a script's (training.launch.snapshot); the portal never
opens them. What they define is checked here by name, before anything is trained.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from training.config import choices
from training.config.asked import ConfigError, Problem
from training.config.choices import Value


@dataclass(frozen=True)
class Program:
    """The files, and where what comes of them is kept."""

    folder: Path
    job_dir: Path
    entry: str = "client.py"
    algorithm: str = "algorithm.py"

    def data_folder(self, *told: object) -> Path:
        """Where the clients' data are kept: another place once the files, or what they are told, are others."""
        digest = hashlib.sha256(repr(told).encode())
        for path in sorted(self.folder.rglob("*.py")):
            digest.update(f"{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        return self.job_dir / "data" / digest.hexdigest()[:16]


class Functions:
    """The functions of one file, each called with those of the run's options that it declares as keyword-only."""

    def __init__(
        self, program: Program, field: str, *, names: Iterable[str], needed: Iterable[str], options: Mapping[str, Value]
    ) -> None:
        """`field`: that of [client] which names the file. ConfigError where it lacks what it needs, or knows no such
        option; what the file itself raises is passed on."""
        file = getattr(program, field)
        self.file = file
        self._module = _imported(program.folder, file, field)
        functions = {name: getattr(self._module, name, None) for name in names}
        self._functions = {name: found for name, found in functions.items() if callable(found)}
        if lacking := [name for name in needed if name not in self._functions]:
            there = ", ".join(f"{name}()" for name in self._functions) or "none that Vigil knows"
            raise ConfigError([
                Problem(f"client.{field}", f"{file} has no function {lacking[0]}(); there is {there}. Write one.")
            ])
        self._options = {name: _declared(found, options) for name, found in self._functions.items()}
        self._check_known(options)

    def _check_known(self, options: Mapping[str, Value]) -> None:
        known = sorted({name for found in self._functions.values() for name in _keywords(found)})
        table = "client" if self.file_is_client else "own"
        wrong = [
            Problem(f"run.{table}.{name}", f"{self.file} has no such option. {choices.suggest(name, known)}")
            for name in options
            if name not in known
        ]
        if wrong:
            raise ConfigError(wrong)

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def constant(self, name: str, default: Any) -> Any:
        return getattr(self._module, name, default)

    def call(self, name: str, *arguments: Any) -> Any:
        return self._functions[name](*arguments, **self._options[name])
