"""List the modules that a run may choose from (training/recipes, training/parallel, …) and their options.

A choice is one file. Its name in the configuration is the module's name, the first line of its docstring is its
description, and its options are the keyword-only arguments of its entry functions, with types and literal defaults.
A module with many options lists them as the fields of a dataclass instead, which its entry function takes as `options`.
Everything is read with `ast`, without importing: the portal can list modules that need torch to run, and a folder that
is added to a package's `__path__` is listed like our own.
"""

import ast
import contextlib
import difflib
import functools
import importlib
import keyword
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Value = int | float | bool | str | None

ENTRY_FUNCTIONS = {
    "recipes": ("prepare", "build"),
    "parallel": ("apply",),
    "comm": ("exchange",),
    "federated.algorithms": ("aggregate", "run_round", "train"),
    "federated.aggregation": ("combine",),
    "federated.selection": ("select",),
    "federated.split": ("view", "divide"),
    "federated.pace": ("schedule",),
    "federated.learning_rate": ("factor",),
    "federated.attack": ("relabel", "forge"),
    "federated.adapters": ("adapt",),
    "federated.transport": ("exchange",),
    "federated.filters": ("send",),
}
"""By folder, the functions whose keyword-only arguments are a choice's options. Every module defines the last one."""
CHOICE_FIELDS = {
    "distributed": {"recipe": "recipes", "parallelism": "parallel", "communication": "comm"},
    "federated": {
        "recipe": "recipes",
        "algorithm": "federated.algorithms",
        "aggregation": "federated.aggregation",
        "selection": "federated.selection",
        "split": "federated.split",
        "pace": "federated.pace",
        "client_lr_schedule": "federated.learning_rate",
        "attack": "federated.attack",
        "adapters": "federated.adapters",
        "transport": "federated.transport",
        "filters": "federated.filters",
    },
}
"""By kind of job, the fields of [run] that name a module (or several in a list), with the module's folder."""

OPTIONS = "options"
"""The positional argument of an entry function that takes all options at once, as a dataclass of its module."""
RANGE = re.compile(r"(?P<low>[-+\d.e]*?)\.\.(?P<high>[-+\d.e]*)")
PATH = re.compile(r"(?:(?P<words>[a-z0-9]+(?:, [a-z0-9]+)*) or )?a path")
MAX_PATH_CHARACTERS = MAX_CHARACTERS = 4096


class ChoiceError(ValueError):
    """A module in a choices folder breaks the rules for options; the message names file and argument."""


@dataclass(frozen=True)
class Option:
    """One keyword-only argument or dataclass field: `name: Annotated[int, "1..64", "what it is"] = 4`."""

    name: str
    type: str
    """int, float, bool or str."""
    default: Value
    optional: bool = False
    values: tuple[Value, ...] = ()
    """Values that a Literal allows; empty: any value of the type."""
    low: float | None = None
    high: float | None = None
    description: str = ""
    is_path: bool = False
    """Annotated "a path" or "word or a path": only its form is checked here; it is opened inside the allocation."""
    words: tuple[str, ...] = ()
    """Words that may be written instead of a path."""

    def problem(self, value: object) -> str | None:
        """Return what is wrong with this value, with the fix; None if it is valid."""
        if value is None:
            return None if self.optional else f"must be {self._type_text()}."
        if not self._has_type(value):
            return f"must be {self._type_text()}, not {value!r}."
        if self.values and value not in self.values:
            return f"is {value!r}. Choose {either([str(v) for v in self.values])}."
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.low is not None and value < self.low:
                return f"is {value}. The smallest allowed is {self.low:g}."
            if self.high is not None and value > self.high:
                return f"is {value}. The largest allowed is {self.high:g}."
        return self._path_problem(value) if self.is_path and isinstance(value, str) else None

    def _path_problem(self, value: str) -> str | None:
        if value in self.words:
            return None
        if value.startswith(("/", "~/")) and len(value) <= MAX_PATH_CHARACTERS and value.isprintable():
            return None
        words = "".join(f'"{word}", ' for word in self.words)
        return f"is {value!r:.100}. Write {words.removesuffix(', ')}{' or ' if words else ''}an absolute path."

    def _has_type(self, value: object) -> bool:
        if self.type == "float":  # NaN would pass every bound
            return type(value) is int or (isinstance(value, float) and math.isfinite(value))
        return type(value) is {"int": int, "bool": bool, "str": str}[self.type]

    def _type_text(self) -> str:
        return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}[self.type]


@dataclass(frozen=True)
class Choice:
    """One module of a choices folder."""

    name: str
    description: str
    options: tuple[Option, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    """Upper-case module constants with literal values, for example a parallelism's AXES."""

    @property
    def is_open(self) -> bool:
        """Whether it takes options of any name, because they are for a user's code, which alone knows them."""
        return self.constants.get("OPEN") is True

    def is_for(self, kind: str) -> bool:
        """Return whether jobs of this kind may choose it."""
        return self.constants.get("KIND", kind) == kind

    def problems(self, given: Mapping[str, object]) -> list[tuple[str, str]]:
        """Return (option, what is wrong and the fix) for each invalid value."""
        options = {option.name: option for option in self.options}
        found = []
        for name, value in given.items():
            if name not in options and self.is_open:
                found += [(name, message) for message in _custom_option_problems(name, value)]
            elif name not in options:
                found.append((name, f"is not an option of {self.name}. {suggest(name, list(options))}"))
            elif message := options[name].problem(value):
                found.append((name, message))
        return found

    def with_defaults(self, given: Mapping[str, Value]) -> dict[str, Value]:
        declared = {
            option.name: _as_type(given.get(option.name, option.default), option.type) for option in self.options
        }
        return {**declared, **given, **declared} if self.is_open else declared


def _custom_option_problems(name: str, value: object) -> Iterator[str]:
    """Yield what is wrong with an option for a user's code, as far as that can be checked here."""
    if not name.isidentifier() or keyword.iskeyword(name):
        yield "cannot be the name of an argument. Take letters, digits and underscores."
    elif not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        yield f"must be a number, a string, true or false, not {value!r:.100}."
    elif isinstance(value, str) and len(value) > MAX_CHARACTERS:
        yield f"has {len(value):,} characters. At most {MAX_CHARACTERS:,} are allowed."


_cache: ContextVar[dict[tuple[str, ...], Any] | None] = ContextVar("_cache", default=None)


@contextlib.contextmanager
def caching() -> Iterator[None]:
    """Read each folder only once inside this context: a plan asks tens of thousands of times."""
    token = _cache.set({} if (outer := _cache.get()) is None else outer)
    try:
        yield
    finally:
        _cache.reset(token)


def cached(key: tuple[str, ...], read: Callable[[], T]) -> T:
    """Return the result of `read`, cached inside `caching`."""
    cache = _cache.get()
    if cache is None:
        return read()
    if key not in cache:
        cache[key] = read()
    found: T = cache[key]
    return found


def names(folder: str, *, kind: str = "") -> list[str]:
    """Return the modules of `training/<folder>/`, sorted; with `kind`, only those that such jobs may choose."""
    modules = sorted(_files(folder))
    return [name for name in modules if get(folder, name).is_for(kind)] if kind else modules


def describe(folder: str) -> dict[str, Choice]:
    """Return every choice of a folder by name."""
    return {name: get(folder, name) for name in names(folder)}


def get(folder: str, name: str) -> Choice:
    """Return one choice. Raises KeyError if there is no such module."""
    return cached(("choice", folder, name), lambda: _read_choice(folder, name))


def _read_choice(folder: str, name: str) -> Choice:
    file = _files(folder)[name]
    return _read(file, ENTRY_FUNCTIONS[folder], file.stat().st_mtime_ns)


def suggest(wrong: str, valid: list[str]) -> str:
    """Return `Did you mean "layers"?`, or the list of valid names."""
    close = difflib.get_close_matches(wrong, valid, n=1)
    if close:
        return f'Did you mean "{close[0]}"?'
    return f"There {'is' if len(valid) == 1 else 'are'}: {', '.join(valid)}." if valid else "It has no options."


def _files(folder: str) -> dict[str, Path]:
    return cached(("files", folder), lambda: _list_files(folder))


def _list_files(folder: str) -> dict[str, Path]:
    """Return a folder's files by module name; it is listed again only when a file was added or removed."""
    folders = tuple(importlib.import_module(f"training.{folder}").__path__)
    return _list_folders(folders, tuple(os.stat(folder).st_mtime_ns for folder in folders))


@functools.lru_cache(maxsize=64)
def _list_folders(folders: tuple[str, ...], _mtimes_ns: tuple[int, ...]) -> dict[str, Path]:
    files = (file for folder in folders for file in Path(folder).glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


@functools.lru_cache(maxsize=256)
def _read(file: Path, entry: tuple[str, ...], _mtime_ns: int) -> Choice:
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in entry}
    if entry[-1] not in functions:
        raise ChoiceError(f"{file}: no function `{entry[-1]}`, which every module in {file.parent.name}/ has")
    options: dict[str, Option] = {}
    for function in functions.values():
        for name, annotation, default in [*_keywords(function), *_fields_of_options(tree, function)]:
            if name in options:
                raise ChoiceError(f"{file}: {name}: an option of two functions. Let one of them have it")
            options[name] = _option(file, name, annotation, default)
    return Choice(file.stem, _first_line(tree), tuple(options.values()), _constants(tree))


def _first_line(tree: ast.Module) -> str:
    lines = (ast.get_docstring(tree) or "").splitlines()
    return lines[0] if lines else ""


def _constants(tree: ast.Module) -> dict[str, object]:
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.isupper() and isinstance(node, ast.Assign | ast.AnnAssign):
            try:
                found[target.id] = ast.literal_eval(node.value) if node.value else None
            except ValueError:
                continue
    return found


Declared = tuple[str, ast.expr | None, ast.expr | None]
"""An option's name, annotation and default, as its module declares it."""


def _keywords(function: ast.FunctionDef) -> Iterator[Declared]:
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        yield argument.arg, argument.annotation, default


def _fields_of_options(tree: ast.Module, function: ast.FunctionDef) -> Iterator[Declared]:
    """Yield the fields of the module's class by which a positional argument `options` is annotated, if there is one."""
    annotations = {ast.unparse(a.annotation) for a in function.args.args if a.arg == OPTIONS and a.annotation}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in annotations:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id, item.annotation, item.value


def _option(file: Path, name: str, annotation: ast.expr | None, default: ast.expr | None) -> Option:
    where = f"{file}: {name}"
    if annotation is None or default is None:
        raise ChoiceError(f"{where}: an option needs a type and a default")
    try:
        value: Value = ast.literal_eval(default)
    except ValueError:
        raise ChoiceError(f"{where}: an option's default must be a literal, not `{ast.unparse(default)}`") from None
    annotation, notes = _unwrap(annotation)
    kind, optional, values = _parse_type(where, annotation)
    low, high, path, description = _parse_notes(notes)
    words = tuple(path["words"].split(", ")) if path and path["words"] else ()
    return Option(name, kind, value, optional, values, low, high, description, path is not None, words)


def _unwrap(annotation: ast.expr) -> tuple[ast.expr, list[str]]:
    """Split `Annotated[X, "a", "b"]` into X and its strings."""
    if not _is_generic(annotation, "Annotated"):
        return annotation, []
    inner = annotation.slice  # type: ignore[attr-defined]
    assert isinstance(inner, ast.Tuple)
    notes = [n.value for n in inner.elts[1:] if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return inner.elts[0], notes


def _parse_type(where: str, annotation: ast.expr) -> tuple[str, bool, tuple[Value, ...]]:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        kind, _, values = _parse_type(where, annotation.left)
        return kind, True, values
    if _is_generic(annotation, "Literal"):
        literal = ast.literal_eval(annotation.slice)  # type: ignore[attr-defined]
        values = literal if isinstance(literal, tuple) else (literal,)
        return type(values[0]).__name__, False, values
    if isinstance(annotation, ast.Name) and annotation.id in {"int", "float", "bool", "str"}:
        return annotation.id, False, ()
    raise ChoiceError(
        f"{where}: an option is int, float, bool, str, a Literal, or one of them | None, not {ast.unparse(annotation)}"
    )


def _parse_notes(notes: list[str]) -> tuple[float | None, float | None, re.Match[str] | None, str]:
    """Return the lowest and highest value, the match of "a path", and the description."""
    low = high = path = None
    description = ""
    for note in notes:
        if match := RANGE.fullmatch(note):
            low, high = (float(match[end]) if match[end] else None for end in ("low", "high"))
        elif match := PATH.fullmatch(note):
            path = match
        else:
            description = note
    return low, high, path, description


def _is_generic(annotation: ast.expr, name: str) -> bool:
    return isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).split(".")[-1] == name


def _as_type(value: Value, kind: str) -> Value:
    return float(value) if kind == "float" and isinstance(value, int) and not isinstance(value, bool) else value


def either(words: Sequence[str]) -> str:
    """Join words: "a", "a or b", "a, b or c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def list_item(text: str) -> list[str]:
    """Return the lines of an item of a Markdown list, as the documents have it: at most 120 characters each."""
    import textwrap  # only documents need it, and every rank imports this module

    return textwrap.wrap(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
