"""A user's files of a federation: where they are, and which functions they define.

They run inside the allocation as the job's user, like those of a script (training.launch.snapshot); the portal never
opens them. What they define is checked by name before anything is trained.
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
from training.config.base import ConfigError, Problem
from training.config.choices import Value
from training.federation import custom

OPTION_TABLES = {part.key: part.choice for part in custom.PARTS}
"""The table of [run] with a file's options, by the field of [client] that names the file."""

NO_ARGUMENTS: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True)
class UserCode:
    """The user's files, and the folder of the job."""

    folder: Path
    job_dir: Path
    entry: str = custom.CLIENT.file
    algorithm: str = custom.ALGORITHM.file
    aggregation: str = custom.AGGREGATION.file
    selection: str = custom.SELECTION.file
    split: str = custom.SPLIT.file

    def data_folder(self, *key: object) -> Path:
        """Return the folder for the clients' data, which depends on the content of the files and on `key`."""
        digest = hashlib.sha256(repr(key).encode())
        for path in sorted(self.folder.rglob("*.py")):
            if path.is_file():  # an editor's lock file is a dangling link
                digest.update(f"{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        return self.job_dir / "data" / digest.hexdigest()[:16]


class UserFunctions:
    """The functions of one file, each called with those of the run's options that it declares as keyword-only."""

    def __init__(
        self,
        user_code: UserCode,
        field: str,
        *,
        names: Iterable[str],
        required: Iterable[str],
        options: Mapping[str, Value],
        provided: Mapping[str, Sequence[str]] = NO_ARGUMENTS,
    ) -> None:
        """Import the file that [client] names in `field`, and bind the options of its table of [run].

        `provided`: by function, the arguments that Vigil passes if the function has such parameters and no option has
        that name. ConfigError if a required function is missing, or an option unknown. What the file raises is passed
        on.
        """
        self.file, self._field = getattr(user_code, field), field
        self._module = _imported(user_code.folder, self.file, field)
        functions = {name: getattr(self._module, name, None) for name in names}
        self._functions = {name: found for name, found in functions.items() if callable(found)}
        if missing := [name for name in required if name not in self._functions]:
            there = ", ".join(f"{name}()" for name in self._functions) or "none that Vigil knows"
            raise ConfigError(
                [Problem(f"client.{field}", f"{self.file} has no function {missing[0]}(), but {there}. Write one.")]
            )
        self._provided = {
            name: [
                argument
                for argument in provided.get(name, ())
                if argument not in options and argument in _parameters(found)
            ]
            for name, found in self._functions.items()
        }
        self._options = {name: _declared_options(found, options) for name, found in self._functions.items()}
        self._check_option_names(options)
        self._check_required_options(options)

    def _check_option_names(self, options: Mapping[str, Value]) -> None:
        keywords = [_keywords(found) for found in self._functions.values()]
        if None in keywords:
            return
        accepted = sorted({name for found in keywords if found for name in found})
        problems = [
            Problem(
                f"run.{OPTION_TABLES[self._field]}.{name}",
                f"{self.file} has no such option. {_suggestion(name, accepted)}",
            )
            for name in options
            if name not in accepted
        ]
        if problems:
            raise ConfigError(problems)

    def _check_required_options(self, options: Mapping[str, Value]) -> None:
        table = f"run.{OPTION_TABLES[self._field]}"
        problems = [
            Problem(f"{table}.{parameter.name}", f"is missing, and {name}() of {self.file} has no default for it.")
            for name, function in self._functions.items()
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
            if parameter.name not in options and parameter.name not in self._provided[name]
        ]
        if problems:
            raise ConfigError(problems)

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    @property
    def module(self) -> ModuleType:
        return self._module

    def call(self, name: str, *arguments: Any, **provided: Any) -> Any:
        """Call the function with these arguments, its options, and those of `provided` that it has parameters for."""
        more = {argument: provided[argument] for argument in self._provided[name]}
        with _exits_are_errors(f"{name}() of {self.file}"):
            return self._functions[name](*arguments, **self._options[name], **more)


@contextmanager
def _exits_are_errors(what: str) -> Iterator[None]:
    """Raise RuntimeError for sys.exit(): exit code 0 would end the rank silently, as if it had finished."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{what} ended the process (exit code {error.code}). Let it return, or raise.") from error


def _imported(folder: Path, file: str, field: str) -> ModuleType:
    """Import the file once per process, under its own name.

    It can import modules from its folder and the top folder.
    """
    root = folder.resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        there = ", ".join(sorted(path_of_file.name for path_of_file in root.glob("*.py"))[:5]) or "no Python file"
        raise ConfigError([Problem(f"client.{field}", f"{file} is not in the directory. It has {there}.")])
    name, imported = path.stem, sys.modules.get(path.stem)
    if name in sys.stdlib_module_names or (imported is not None and getattr(imported, "__file__", None) != str(path)):
        name = f"user_{name}"  # a file called random.py, or torch.py, must not replace that module
        imported = sys.modules.get(name)
    if imported is not None and getattr(imported, "__file__", None) == str(path):
        return imported
    for place in (str(root), str(path.parent)):
        if place not in sys.path:
            sys.path.insert(0, place)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for any import: pickles, and modules that import it in turn, find it
    try:
        with _exits_are_errors(file):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of its parameters, without `*args` and `**options`."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds]


def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of its keyword-only parameters; None if it takes **options."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def _declared_options(function: Callable[..., Any], options: Mapping[str, Value]) -> dict[str, Value]:
    names = _keywords(function)
    return {name: value for name, value in options.items() if names is None or name in names}


def _suggestion(name: str, accepted: list[str]) -> str:
    if accepted:
        return choices.suggest(name, accepted)
    return f"Options are keyword-only arguments of its functions: write `*, {name}=…`, or take it out."
