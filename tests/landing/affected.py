"""Find the tests that a change can break, so that a landing need not run all others.

    python -m tests.landing.affected            print the test files affected since the last full run, or "all"
    python -m tests.landing.affected --record   note this commit as fully tested (`make test-all` does, when it passes)

The unit is a package or module two levels down (`jobs.waiting`, `training.guards`), here called a package. A test file
is affected if it changed itself, or if a package changed that

- it is named after (tests/jobs/waiting tests jobs.waiting),
- it imports, directly or through helpers under tests/, or runs in processes that such a helper starts, or
- one of those packages imports.

Changes that may affect anything (settings, dependencies, fixtures of all tests) affect every file. Of the files that
are not affected a landing still runs the first test of each and a quarter of the rest, in turn; of slow tests the first
of each folder and a quarter of the files (`selected`).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tests.landing.parts import ROOT, is_in_part

RECORD = ROOT / ".ci" / "fully-tested"
"""The last commit that passed `make test-all`; absent: every landing runs everything."""

PACKAGES = (
    "console", "diagnosis", "gpus", "jobs", "nodes", "portal", "training", "vigil_cli", "vigil_core", "vigil_report",
)  # fmt: skip
EVERYTHING = (
    ".ci/run", "Makefile", "pyproject.toml", "requirements", "docker/install.sh", "manage.py", "portal/settings.py",
    "tests/conftest.py", "tests/environment.py", "tests/landing/",
)  # fmt: skip
"""Paths, or their beginnings, that any test may depend on."""
ALWAYS = ("tests/test_", "tests/landing/", "tests/language/")
"""Tests of the tree as a whole: its layers, its documents, its language."""
SHOWN = ("console.pages", "jobs.views", "portal.accounts", "portal.notices")
OTHER = {
    "templates/": SHOWN,
    "static/": SHOWN,
    "docs/": ("console.pages", "diagnosis"),
    "docker/": ("docker",),
    "examples/": ("jobs.spec", "training.federated"),
    "tests/logs": ("diagnosis", "vigil_core"),
    "tests/nvml/": ("gpus", "nodes.agent"),
}
"""Packages that read files other than Python, by the beginnings of their paths."""
PORTAL = ("console.up", "console.web", "console.worker", "console.asgi", "console.site", "portal.run", "nodes.agent")
TRAINER = (
    "training.__main__",
    "training.trainer",
    "training.parameter_server_trainer",
    "training.loop",
    "training.launch",
)
STARTED = {
    "tests/stack.py": PORTAL,
    "tests/slurm/portal.py": PORTAL,
    "tests/training/launching.py": TRAINER,
    "tests/training/ranks.py": TRAINER,
}
"""Packages that run in processes which these helpers start, and which no import of a test leads to."""


def package_of(module: str) -> str:
    """Return the package of a dotted module: `jobs.waiting` for `jobs.waiting.limits`, `diagnosis` for all of it."""
    parts = module.split(".")
    return ".".join(parts[: 1 if parts[0] in {"diagnosis", "gpus", "vigil_cli", "vigil_core", "vigil_report"} else 2])


def module_of(path: str) -> str:
    """Return the dotted module of a Python file's path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Imports:
    """The packages that each package imports, and those that each test file uses."""

    by_package: Mapping[str, frozenset[str]]
    by_test: Mapping[str, frozenset[str]]

    def affected(self, packages: Iterable[str]) -> set[str]:
        """Return the test files that a change of these packages affects."""
        changed = {*packages}
        reached = changed | {package for package, imported in self.by_package.items() if imported & changed}
        return {file for file, used in self.by_test.items() if used & reached}


@cache
def read_imports() -> Imports:
    """Read the imports of every file of this tree: of our packages, and of tests with what their helpers import."""
    by_package: defaultdict[str, set[str]] = defaultdict(set)
    for folder in PACKAGES:
        for path in _python(folder):
            module = module_of(path)
            by_package[package_of(module)] |= {package_of(name) for name in _imported(path) if _is_ours(name)}
    tests = _python("tests")
    helpers = {module_of(path): path for path in tests}
    used = {path: frozenset(_used(path, helpers)) for path in tests if path.rpartition("/")[2].startswith("test_")}
    return Imports({package: frozenset(imported - {package}) for package, imported in by_package.items()}, used)


def _python(folder: str) -> list[str]:
    if (ROOT / f"{folder}.py").is_file():
        return [f"{folder}.py"]
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("*.py"))]


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


@cache
def _imported(path: str) -> frozenset[str]:
    """Return the modules that a file imports anywhere in it; `from a import b` counts as a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _used(path: str, helpers: Mapping[str, str]) -> set[str]:
    """Return the packages that a test file imports, itself or through helpers, and those it is named after."""
    packages, visited, todo = _namesakes(path), {path}, [path]
    while todo:
        path = todo.pop()
        packages.update(STARTED.get(path, ()))
        for name in _imported(path):
            if _is_ours(name):
                packages.add(package_of(name))
            for module in (name, name.rpartition(".")[0]):
                helper = helpers.get(module)
                if helper and helper not in visited and helper != "tests/conftest.py":
                    visited.add(helper)
                    todo.append(helper)
    return packages


def _namesakes(path: str) -> set[str]:
    """Return the packages that a test file is named after: tests/jobs/pages/test_a.py tests what shows pages."""
    parts = path.split("/")[1:-1]
    if parts[:1] == ["browser"] or "pages" in parts:
        return {*SHOWN}
    if parts[:1] == ["image"]:
        return {"docker"}
    return {package_of(".".join(parts[:2]))} if parts else set()


def changed_since(commit: str) -> set[str] | None:
    """Return the paths that changed since a commit; None if the history does not reach back to it."""
    if _git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return None
    return {*_git("diff", "--name-only", commit, "HEAD").stdout.splitlines()}


def affected_by(changed: Iterable[str]) -> set[str] | None:
    """Return the test files that changed paths affect; None: all of them."""
    paths = {*changed}
    if any(path.startswith(EVERYTHING) for path in paths):
        return None
    imports = read_imports()
    packages = {package_of(module_of(path)) for path in paths if path.endswith(".py") and _is_ours(path.split("/")[0])}
    packages |= {package_of(path.replace("/", ".")) for path in paths if _is_ours(path.split("/")[0])}
    packages |= {
        reader for path in paths for start, readers in OTHER.items() if path.startswith(start) for reader in readers
    }
    helpers = {module_of(path) for path in paths if path.startswith("tests/") and path.endswith(".py")}
    tests = {path for path in paths if path in imports.by_test}
    tests |= {file for file in imports.by_test if helpers & _helpers_of(file)}
    tests |= {file for file in imports.by_test if file.startswith(ALWAYS)}
    tests |= {file for file in imports.by_test if any(_is_data_of(file, path) for path in paths)}
    return tests | imports.affected(packages)


def _helpers_of(file: str) -> set[str]:
    """Return the modules under tests/ that a test file imports directly."""
    names = {name for name in _imported(file) if name.startswith("tests")}
    return names | {name.rpartition(".")[0] for name in names}


def _is_data_of(file: str, path: str) -> bool:
    """Return whether a path is data in the folder of a test file: recorded answers, logs."""
    return not path.endswith(".py") and path.startswith("tests/") and path.startswith(file.rpartition("/")[0] + "/")


def selected(nodeids: Iterable[str], affected: set[str] | None, part: str, *, slow: Container[str] = ()) -> set[str]:
    """Return the tests to run: those in affected files, a smoke test of everything else, and a part of the rest.

    The smoke test is the first test of a file. Of tests in `slow`, whose files start a portal, ranks or a Slurm, it is
    the first of a folder, and the part is of files: a file with most of its tests left out costs nearly as much.

    `part`: which quarter of the rest, such as "1/4".
    """
    found, units = set(), set()
    for nodeid in nodeids:
        file = nodeid.partition("::")[0]
        unit = f"{file.rpartition('/')[0]}/ (slow)" if nodeid in slow else file
        is_in_turn = is_in_part(file if nodeid in slow else nodeid, part)
        if affected is None or file in affected or unit not in units or is_in_turn:
            found.add(nodeid)
        units.add(unit)
    return found


def since_last_full_run() -> set[str] | None:
    """Return the test files that are affected since the last full run; None: all of them."""
    if not RECORD.is_file():
        return None
    changed = changed_since(RECORD.read_text().strip())
    return None if changed is None else affected_by(changed)


def record() -> None:
    """Note HEAD as fully tested."""
    if _git("status", "--porcelain", "--untracked-files=no").stdout.strip():
        print("Not noted as fully tested: files differ from HEAD.")
        return
    RECORD.write_text(_git("rev-parse", "HEAD").stdout)
    print(f"Noted in {RECORD.relative_to(ROOT)}: commit it.")


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    else:
        found = since_last_full_run()
        print("all" if found is None else "\n".join(sorted(found)))
