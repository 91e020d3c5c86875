"""Somebody's own files of a federation: where they are, and what is in them.

They are run inside the allocation, as the job's user, like a script's (training.launch.snapshot); the portal never
opens them. What they define is checked here by name, before anything is trained.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from training.config import choices
from training.config.asked import ConfigError, Problem
from training.config.choices import Value
from training.federation import custom

TABLES = {part.key: part.choice for part in custom.PARTS}
"""By the field of [client] that names a file, the table of [run] with its options."""

NOTHING: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True)
class Program:
    """The files, and where what comes of them is kept."""

    folder: Path
    job_dir: Path
    entry: str = custom.CLIENT.file
    algorithm: str = custom.ALGORITHM.file
    aggregation: str = custom.AGGREGATION.file
    selection: str = custom.SELECTION.file
    split: str = custom.SPLIT.file

    def data_folder(self, *told: object) -> Path:
        """Where the clients' data are kept: another place once the files, or what they are told, are others."""
        digest = hashlib.sha256(repr(told).encode())
        for path in sorted(self.folder.rglob("*.py")):
            if path.is_file():  # an editor's lock is a link to nowhere
                digest.update(f"{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        return self.job_dir / "data" / digest.hexdigest()[:16]


class Functions:
    """The functions of one file, each called with those of the run's options that it declares as keyword-only."""

    def __init__(
        self,
        program: Program,
        field: str,
        *,
        names: Iterable[str],
        needed: Iterable[str],
        options: Mapping[str, Value],
        provided: Mapping[str, Sequence[str]] = NOTHING,
    ) -> None:
        """`field`: that of [client] which names the file; `options`: its table of [run]; `provided`: by function the
        names of arguments that Vigil passes to it if it has such parameters, and no option has that name.

        ConfigError where it lacks what it needs, or knows no such option. What the file itself raises is passed on.
        """
        self.file, self._field = getattr(program, field), field
        self._module = _imported(program.folder, self.file, field)
        functions = {name: getattr(self._module, name, None) for name in names}
        self._functions = {name: found for name, found in functions.items() if callable(found)}
        if lacking := [name for name in needed if name not in self._functions]:
            there = ", ".join(f"{name}()" for name in self._functions) or "none that Vigil knows"
            raise ConfigError(
                [Problem(f"client.{field}", f"{self.file} has no function {lacking[0]}(), but {there}. Write one.")]
            )
        self._provided = {
            name: [one for one in provided.get(name, ()) if one not in options and one in _parameters(found)]
            for name, found in self._functions.items()
        }
        self._options = {name: _declared(found, options) for name, found in self._functions.items()}
        self._check_known(options)
        self._check_needed(options)

    def _check_known(self, options: Mapping[str, Value]) -> None:
        keywords = [_keywords(found) for found in self._functions.values()]
        if None in keywords:
            return
        known = sorted({name for found in keywords if found for name in found})
        wrong = [
            Problem(f"run.{TABLES[self._field]}.{name}", f"{self.file} has no such option. {_nearest(name, known)}")
            for name in options
            if name not in known
        ]
        if wrong:
            raise ConfigError(wrong)

    def _check_needed(self, options: Mapping[str, Value]) -> None:
        table = f"run.{TABLES[self._field]}"
        wrong = [
            Problem(f"{table}.{one.name}", f"is missing, and {name}() of {self.file} has no default for it.")
            for name, function in self._functions.items()
            for one in inspect.signature(function).parameters.values()
            if one.kind is one.KEYWORD_ONLY and one.default is one.empty
            if one.name not in options and one.name not in self._provided[name]
        ]
        if wrong:
            raise ConfigError(wrong)

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    @property
    def module(self) -> ModuleType:
        return self._module

    def call(self, name: str, *arguments: Any, **provided: Any) -> Any:
        """Call the function with these arguments, its options, and those of `provided` that it has parameters for."""
        more = {one: provided[one] for one in self._provided[name]}
        with _exits_are_errors(f"{name}() of {self.file}"):
            return self._functions[name](*arguments, **self._options[name], **more)


@contextmanager
def _exits_are_errors(what: str) -> Iterator[None]:
    """Raise RuntimeError for sys.exit(): exit code 0 would end the rank without a word, as if it had finished."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{what} ended the process (exit code {error.code}). Let it return, or raise.") from error


def _imported(folder: Path, file: str, field: str) -> ModuleType:
    """The file as a module by its own name, once a process; it finds those beside it and those at the top."""
    root = folder.resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        there = ", ".join(sorted(one.name for one in root.glob("*.py"))[:5]) or "no Python file"
        raise ConfigError([Problem(f"client.{field}", f"{file} is not in the directory. It has {there}.")])
    name, known = path.stem, sys.modules.get(path.stem)
    if name in sys.stdlib_module_names or (known is not None and getattr(known, "__file__", None) != str(path)):
        name = f"own_{name}"  # a file called random.py, or torch.py, takes nobody's place
        known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    for place in (str(root), str(path.parent)):
        if place not in sys.path:
            sys.path.insert(0, place)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for any import: what is pickled, or imports it in turn, finds it
    try:
        with _exits_are_errors(file):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names by which it may be given something: not `**options`, which are the run's."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds]


def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of its keyword-only arguments; None: it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


def _declared(function: Callable[..., Any], options: Mapping[str, Value]) -> dict[str, Value]:
    names = _keywords(function)
    return {name: value for name, value in options.items() if names is None or name in names}


def _nearest(name: str, known: list[str]) -> str:
    if known:
        return choices.suggest(name, known)
    return f"Options are keyword-only arguments of its functions: write `*, {name}=…`, or take it out."
