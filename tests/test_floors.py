"""What the contracts of import-linter cannot say: that they name every room, and what a pure room leaves alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS_AND_REQUESTS = ("django.db", "django.http", "django.shortcuts", "django.contrib")


def test_the_first_contract_orders_every_package_of_the_site() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {package.strip() for layer in contracts[0]["layers"] for package in layer.split(":")}
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    assert named == packages - {"bench", "tests", "training"}


@pytest.mark.parametrize("room", ["jobs/presenting", "nodes/scheduling"])
def test_a_pure_room_reads_no_rows_and_no_requests(room: str) -> None:
    for path in (REPOSITORY / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith(ROWS_AND_REQUESTS)], path


def test_words_and_drawings_know_no_models() -> None:
    """`jobs.presenting` takes facts: importing all of it without Django's settings fails on any model on the way."""
    for path in (REPOSITORY / "jobs/presenting").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):  # also what is imported for the type checker only
            if isinstance(node, ast.ImportFrom):
                assert not {*(node.module or "").split(".")} & {"models", "gathering", "views"}, path
    names = [path.stem for path in (REPOSITORY / "jobs/presenting").glob("*.py") if path.stem != "__init__"]
    command = f"import sys, {', '.join(f'jobs.presenting.{name}' for name in names)}"
    found = "found = [name for name in sys.modules if name.endswith('.models') and not name.startswith('django')]"
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", f"{command}; {found}; sys.exit(', '.join(found) or 0)"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_benches_take_of_the_tests_of_slurm_needs_no_settings() -> None:
    """A bench is no Django process: an import of models on its way would end it at its start."""
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    command = [sys.executable, "-c", "import tests.slurm.portal, tests.slurm.test_push"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
