"""Measure how far the code's names and docstrings are from plain English.

    python -m tests.language.measure

prints the figures that `test_language.py` limits, and the worst places of each kind.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "bench", "console", "diagnosis", "gpus", "jobs", "nodes", "portal", "training", "vigil_cli", "vigil_core",
    "vigil_report.py",
)  # fmt: skip

DIALECT = frozenset(
    {
        "told", "tell", "telling", "tells", "say", "said", "says", "saying", "ask", "asked", "asks", "asking", "look",
        "looks", "looked", "looking", "seen", "heard", "known", "kept", "held", "mine", "own", "one", "anew", "beside",
        "befall", "whose",
    }
)  # fmt: skip
"""Everyday words that this project once used as names where the field has a noun (see CONTRIBUTING, Language)."""

FRAGMENT = re.compile(
    r"(?:Of|What|Whether|Who|Whose|How|Where|When|Which|That|Those|As|With|Without|By|From|For|To|In|On|Each|Every|One"
    r"|All|Nothing|Nobody)\b"
)
"""How a docstring opens that has neither subject nor verb: "Of a job that …" instead of "Return a job's …"."""

_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class Place:
    """A name or docstring that reads oddly."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass
class Language:
    """The measure of one or more files."""

    names: int = 0
    docstrings: int = 0
    words: Counter[str] = field(default_factory=Counter)
    odd_names: list[Place] = field(default_factory=list)
    fragments: list[Place] = field(default_factory=list)
    classes: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))

    @property
    def dialect_per_1000(self) -> float:
        """Return the dialect words per 1,000 names that are bound: functions, classes, arguments and variables."""
        return 1000 * sum(self.words.values()) / max(self.names, 1)

    @property
    def fragments_percent(self) -> float:
        return 100 * len(self.fragments) / max(self.docstrings, 1)

    @property
    def repeated_classes(self) -> dict[str, list[Place]]:
        """Return the places of each class name that is defined in more than one place."""
        return {name: places for name, places in self.classes.items() if len(places) > 1}

    def read(self, path: Path) -> None:
        """Add one Python file."""
        file = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            for name, line in _bound(node):
                self._add_name(name, Place(file, line, name))
            if isinstance(node, ast.ClassDef):
                self.classes[node.name].append(Place(file, node.lineno, node.name))
            if isinstance(node, _Documented):
                self._add_docstring(file, node)

    def _add_name(self, name: str, place: Place) -> None:
        self.names += 1
        dialect = [word for word in map(str.lower, _WORD.findall(name)) if word in DIALECT]
        self.words.update(dialect)
        if dialect:
            self.odd_names.append(place)

    def _add_docstring(self, file: str, node: _Documented) -> None:
        text = ast.get_docstring(node)
        if not text:
            return
        self.docstrings += 1
        if FRAGMENT.match(text):
            self.fragments.append(Place(file, getattr(node, "lineno", 1), text.splitlines()[0]))


def measure(packages: Sequence[str] = PACKAGES) -> Language:
    """Return the language of these packages, without migrations; by default of all, without tests."""
    found = Language()
    for path in files(packages):
        found.read(path)
    return found


def files(packages: Sequence[str] = PACKAGES) -> Iterator[Path]:
    for package in packages:
        path = ROOT / package
        inside = [path] if path.is_file() else sorted(path.rglob("*.py"))
        yield from (item for item in inside if "migrations" not in item.parts)


def worst_files(places: list[Place], most: int = 20) -> list[tuple[str, int]]:
    """Return the files with most of these places, most first."""
    return Counter(place.file for place in places).most_common(most)


def _bound(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a node binds, except `self`, `cls` and `_`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg) and node.arg not in {"self", "cls", "_"}:
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "_":
        yield node.id, node.lineno


def main() -> None:
    tests = measure(["tests"])
    print(f"tests: {tests.dialect_per_1000:.1f} dialect words per 1,000 names, most in")
    for file, count in worst_files(tests.odd_names):
        print(f"  {count:4} {file}")
    found = measure()
    print(f"{found.dialect_per_1000:.1f} dialect words per 1,000 names ({found.names:,} names)")
    print(f"{found.fragments_percent:.1f} % of {found.docstrings:,} docstrings without subject or verb")
    print(f"{len(found.repeated_classes)} class names defined more than once")
    for title, places in (("names", found.odd_names), ("docstrings", found.fragments)):
        print(f"\nMost odd {title}:")
        for file, count in worst_files(places):
            print(f"  {count:4} {file}")
    print("\nClass names by how often they are defined:")
    for name, places in sorted(found.repeated_classes.items(), key=lambda item: -len(item[1]))[:20]:
        print(f"  {len(places):4} {name}: {', '.join(place.file for place in places[:4])}")


if __name__ == "__main__":
    main()
