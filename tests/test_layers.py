"""Check what import-linter's contracts do not: that they name every package, that packages without rows read none, and
that no modules import each other in a circle.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS_AND_REQUESTS = ("django.db", "django.http", "django.shortcuts", "django.contrib")


def test_the_first_contract_orders_every_package_of_the_site() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {package.strip() for layer in contracts[0]["layers"] for package in layer.split(":")}
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    assert named == packages - {"bench", "tests", "training"}


@pytest.mark.parametrize("package", ["jobs/presenting", "nodes/scheduling"])
def test_a_package_without_rows_imports_no_rows_and_no_requests(package: str) -> None:
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith(ROWS_AND_REQUESTS)], path


def test_jobs_presenting_imports_no_models() -> None:
    """`jobs.presenting` takes facts: importing all of it without Django's settings fails if a model is imported."""
    files = [path for path in (REPOSITORY / "jobs/presenting").rglob("*.py") if path.stem != "__init__"]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):  # also what is imported for the type checker only
            if isinstance(node, ast.ImportFrom):
                assert not {*(node.module or "").split(".")} & {"models", "gathering", "views"}, path
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
    command = f"import sys, {', '.join(names)}"
    found = "found = [name for name in sys.modules if name.endswith('.models') and not name.startswith('django')]"
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", f"{command}; {found}; sys.exit(', '.join(found) or 0)"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_slurm_helpers_for_benches_need_no_settings() -> None:
    """A benchmark is no Django process: importing a model would end it at its start."""
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    command = [sys.executable, "-c", "import tests.slurm.portal, tests.slurm.test_push"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for the type checker count: a circle of types is a circle to whoever reads it. None is allowed."""
    circle = first_circle(imports_of_modules())
    assert not circle, f"Move what these share to a module of its own: {' -> '.join(circle)}"


def test_a_circle_is_found() -> None:
    assert set(first_circle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()})) == {"a", "b", "c"}


def imports_of_modules() -> dict[str, set[str]]:
    """Return which modules of the product each of them imports, wherever in its file."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    files = [path for package in contracts["root_packages"] for path in (REPOSITORY / package).rglob("*.py")]
    names = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }
    return {name: set(_imported(ast.parse(path.read_text()), names.keys())) - {name} for name, path in names.items()}


def _imported(tree: ast.Module, names: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from submodules & {*names} or {node.module}


def first_circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
