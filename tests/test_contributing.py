"""Check CONTRIBUTING.md: adding a thing to a copy of the tree takes exactly the files that its list names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from filecmp import cmp
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from nodes.schedulers import choose
from tests.additions import failures, health, site, training
from tests.additions.addition import Addition
from vigil_cli.main import main

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = (
    "console", "diagnosis", "docs", "gpus", "jobs", "nodes", "portal", "static", "templates", "training", "vigil_cli",
    "vigil_core", "tests", "CONTRIBUTING.md", "README.md", "pyproject.toml", "vigil_report.py", "manage.py",
)  # fmt: skip
NOT_COPIED = ("tests/logs", "tests/nodes/slurm/recorded")  # large, and nothing is added there
ALL = (*training.ALL, *failures.ALL, *health.ALL, *site.ALL)
ADDITIONS = {addition.thing: addition for addition in ALL}
RUN_CHECKS = """
import json, sys, traceback
import tests.environment
import django
django.setup()
failed = {}
for thing, check in json.load(sys.stdin).items():
    try:
        exec(check, {})
    except BaseException:
        failed[thing] = traceback.format_exc()
json.dump(failed, sys.stdout)
"""


@cache
def table() -> dict[str, frozenset[str]]:
    """Return the list "To add a …": each thing, and the patterns of the files that it takes."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = re.sub(r"\n  +", " ", text.partition("## To add a")[2].partition("\n## ")[0])
    rows = re.findall(r"(?m)^- \*\*(.+?)\*\*: (.+?) Test: ", section)
    return {thing: frozenset(map(_pattern, re.findall(r"`([^`]+/[^`]+)`", files))) for thing, files in rows}


def _pattern(path: str) -> str:
    return re.sub(r"<\w+>", "*", path)


def test_every_row_has_an_example_and_every_example_a_row() -> None:
    assert [*table()] == [*ADDITIONS]


@pytest.mark.parametrize("addition", ALL, ids=lambda addition: addition.thing)
def test_an_example_takes_the_files_that_its_row_names(addition: Addition) -> None:
    patterns = table()[addition.thing]
    assert not {path for path in addition.paths if not any(fnmatch(path, pattern) for pattern in patterns)}
    assert not {pattern for pattern in patterns if not any(fnmatch(path, pattern) for path in addition.paths)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    _copy_tree(copy)
    for addition in ALL:
        _add(addition, copy)
    return copy


class TestCopyWithEachAddition:
    def test_has_them_all_and_they_work(self, copy: Path) -> None:
        checks = {addition.thing: addition.check for addition in ALL}
        done = subprocess.run(
            [sys.executable, "-c", RUN_CHECKS],
            cwd=copy, env=_environment(), input=json.dumps(checks), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "\n".join(json.loads(done.stdout).values()) == ""

    def test_passes_the_tests_that_guard_them(self, copy: Path) -> None:
        guards = sorted({guard for addition in ALL for guard in addition.guards})
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *guards],
            cwd=copy, env=_environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]

    def test_differs_in_the_named_files_only(self, copy: Path) -> None:
        changed = {path for path in _files(copy) if not _is_same(path, copy)}
        assert changed == {path for addition in ALL for path in addition.paths}


def _files(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and not {"__pycache__", ".mypy_cache"} & {*path.parts}:
            name = path.relative_to(root).as_posix()
            if name.partition("/")[0] in COPIED:
                yield name


def _is_same(path: str, copy: Path) -> bool:
    return (REPOSITORY / path).is_file() and cmp(REPOSITORY / path, copy / path, shallow=True)


def _copy_tree(copy: Path) -> None:
    """Copy compiled modules too: a check would compile for seconds."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(REPOSITORY)
        return {name for name in names if (inside / name).as_posix() in NOT_COPIED}

    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, copy_function=_copy_file, ignore=ignore)
        else:
            _copy_file(str(source), str(copy / name))


def _copy_file(source: str, target: str) -> str:
    """Link compiled modules, which nothing writes in place; copy the others, or a check could change the original."""
    if source.endswith(".pyc"):
        with suppress(OSError):
            os.link(source, target, follow_symlinks=False)
            return target
    return str(shutil.copy2(source, target))


def _add(addition: Addition, copy: Path) -> None:
    for path, text in addition.files.items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        assert not (copy / path).exists(), path
        (copy / path).write_text(text.removeprefix("\n"))
    for path in addition.edits:
        text = (copy / path).read_text()
        for edit in addition.edits_of(path):
            if not edit.old:
                text += edit.new
                continue
            assert text.count(edit.old) == 1, f"{path} has {edit.old!r} {text.count(edit.old)} times"
            text = text.replace(edit.old, edit.new)
        (copy / path).write_text(text)


def _environment() -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VIGIL_"))}
    return outer | {"DJANGO_SETTINGS_MODULE": "portal.settings", "PYTHONDONTWRITEBYTECODE": "1"}


def test_every_setting_is_documented() -> None:
    page = (REPOSITORY / "docs/reference/settings.md").read_text()
    names = re.findall(r'\b(?:env|flag|amount)\("(\w+)"', (REPOSITORY / "portal/settings.py").read_text())
    assert [name for name in names if name not in page] == []


def test_every_scheduler_is_documented() -> None:
    page = (REPOSITORY / "docs/reference/settings.md").read_text()
    assert [name for name in choose.NAMES if f"`{name}`" not in page] == []


def test_every_command_is_documented() -> None:
    pages = "".join(path.read_text() for path in (REPOSITORY / "docs").rglob("*.md"))
    assert [name for name in main.commands if f"vigil {name}" not in pages] == []
