"""Print every sentence that a person can see, with its place, so that they can be reviewed together.

    python -m tests.language.sentences [PATH …]

PATH limits it to files below it. It reads templates, strings of Python and JavaScript, the failure catalogue and the
runbooks. A string counts as a sentence if it has two words; `{…}` stands for what is filled in.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.language.measure import ROOT, Place

PYTHON = (
    "console",
    "diagnosis",
    "gpus",
    "jobs",
    "nodes",
    "portal",
    "training",
    "vigil_cli",
    "vigil_core",
    "vigil_report.py",
)
VISIBLE_ATTRIBUTES = frozenset({"title", "placeholder", "aria-label", "alt", "data-empty", "data-confirm"})
_SENTENCE = re.compile(r"[A-Za-z]{2,}\S*\s+\S*[A-Za-z]{2,}")
_NOT_PROSE = re.compile(
    r"\s*(?:(?:SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|WITH|BEGIN|AFTER|PRAGMA|ON CONFLICT|FROM|WHERE)\b|#!)"
)
_TEMPLATE_TAG = re.compile(r"{%.*?%}|{#.*?#}|{{.*?}}", re.DOTALL)
_JAVASCRIPT_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"|\'((?:[^\'\\\n]|\\.)*)\'|`((?:[^`\\]|\\.)*)`')


def of_python(path: Path) -> Iterator[Place]:
    """Yield the strings of a module except docstrings, patterns and statements of SQL."""
    tree = ast.parse(path.read_text())
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    skipped = _documentation(tree) | {id(argument) for argument in _patterns(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (id(node) not in parts and id(node) not in skipped):
            yield from _place(path, getattr(node, "lineno", 1), _text(node))


def of_template(path: Path) -> Iterator[Place]:
    """Yield the text and the visible attributes of a template."""
    text = path.read_text()
    plain = _TEMPLATE_TAG.sub(lambda match: "{…}" + "\n" * match[0].count("\n"), text)
    if path.suffix != ".html":
        for number, line in enumerate(plain.splitlines(), 1):
            yield from _place(path, number, line)
        return
    parser = _Visible()
    parser.feed(plain)
    for number, message in parser.found:
        yield from _place(path, number, message)


def of_javascript(path: Path) -> Iterator[Place]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.lstrip().startswith(("//", "*", "/*")):
            for match in _JAVASCRIPT_STRING.finditer(line):
                yield from _place(path, number, next(group for group in match.groups() if group is not None))


def of_markdown(path: Path) -> Iterator[Place]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield from _place(path, number, line)


def of_catalogue(path: Path) -> Iterator[Place]:
    """Yield the texts of a file of failures that are shown: not its patterns, examples and look-alikes."""
    for text in _shown(tomllib.loads(path.read_text())):
        yield from _place(path, 1, text)


READERS: Mapping[str, Callable[[Path], Iterable[Place]]] = {
    "templates/**/*.html": of_template,
    "templates/**/*.txt": of_template,
    "static/**/*.js": of_javascript,
    "diagnosis/catalogue/*.toml": of_catalogue,
    "docs/runbooks/*.md": of_markdown,
    **{f"{name}/**/*.py" if not name.endswith(".py") else name: of_python for name in PYTHON},
}
"""By the files of the tree that hold sentences, what reads them."""


def sentences(below: Iterable[Path] = (ROOT,)) -> Iterator[Place]:
    """Yield all sentences of files below these folders."""
    folders = [path.resolve() for path in below]
    for pattern, read in READERS.items():
        for path in sorted(ROOT.glob(pattern)):
            is_ours = "migrations" not in path.parts and "vendor" not in path.parts
            if is_ours and any(path.is_relative_to(folder) for folder in folders):
                yield from read(path)


class _Visible(HTMLParser):
    """Collects what a browser shows of a page, by line; a paragraph with tags in it is one text."""

    HIDDEN = frozenset({"script", "style"})
    INLINE = frozenset({"a", "b", "code", "em", "i", "span", "strong", "small", "kbd", "time", "abbr"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[int, str]] = []
        self._hidden, self._line, self._text = 0, 1, ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.INLINE:
            self._flush()
        self._hidden += tag in self.HIDDEN
        self.found += [(self.getpos()[0], text) for name, text in attributes if name in VISIBLE_ATTRIBUTES and text]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.INLINE:
            self._flush()
        self._hidden -= tag in self.HIDDEN

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._text.strip():
            self._line = self.getpos()[0]
        self._text += data

    def close(self) -> None:
        self._flush()
        super().close()

    def _flush(self) -> None:
        self.found.append((self._line, self._text))
        self._text = ""


def _place(path: Path, line: int, text: str | None) -> Iterator[Place]:
    """Yield the text as a place if it is a sentence."""
    plain = " ".join((text or "").split())
    if _SENTENCE.search(plain) and not _NOT_PROSE.match(plain):
        yield Place(str(path.relative_to(ROOT)), line, plain)


def _text(node: ast.AST) -> str | None:
    """Return a string's text, with {…} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join((_text(value) or "") if isinstance(value, ast.Constant) else "{…}" for value in node.values)
    return None


def _documentation(tree: ast.AST) -> set[int]:
    """Return the ids of docstrings, and of strings that document a constant or a field."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _patterns(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the arguments of re.compile and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            for argument in node.args:
                yield from ast.walk(argument)


def _shown(entry: Any, name: str = "") -> Iterator[str]:
    if isinstance(entry, dict):
        for key, value in entry.items():
            yield from _shown(value, key)
    elif isinstance(entry, list):
        for value in entry:
            yield from _shown(value, name)
    elif isinstance(entry, str) and name not in {"pattern", "example", "look_alike", "source", "name"}:
        yield entry


if __name__ == "__main__":
    for place in sentences([Path(argument) for argument in sys.argv[1:]] or [ROOT]):
        print(place)
