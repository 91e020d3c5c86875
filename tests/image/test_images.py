"""Test what the images contain, and what they must not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.image import pip
from tests.image.container import inspect

PORTAL_LIMIT_MB = 600


def output_of(*command: str) -> str:
    """Return the output of a program that may find nothing."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_the_portals_image_is_small(root: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = int(output_of("du", "--summarize", "--bytes", str(root)).split()[0]) / 1e6
    with capsys.disabled():
        print(f"\nvigil:{target} is {size:.0f} MB")
    assert target != "portal" or size <= PORTAL_LIMIT_MB


def test_only_the_trainers_has_torch(root: Path, target: str) -> None:
    packages = {path.name for path in root.glob("opt/vigil/lib/python3.*/site-packages/*")}
    assert "django" in packages
    assert {"torch", "peft", "tokenizers"} & packages == (
        {"torch", "peft", "tokenizers"} if target == "trainer" else set()
    )


def test_nothing_is_in_it_that_only_builds_and_tests_need(root: Path) -> None:
    ours = {path.name for path in (root / "srv/vigil").iterdir()}
    assert {"console", "diagnosis", "gpus", "jobs", "nodes", "portal", "training", "vigil_cli", "vigil_core"} <= ours
    assert {"static", "templates", "manage.py", "vigil_report.py"} <= ours
    assert not ours & {"tests", "bench", "var", ".git", ".ci", ".venv", "Makefile"}
    steps = {"entrypoint.sh", "image.sh", "install.sh", "progress.py"}
    assert {path.name for path in (root / "srv/vigil/docker").iterdir()} == steps
    assert not [program for program in ("cc", "gcc", "g++", "make", "ld") if (root / "usr/bin" / program).exists()]
    assert not list(root.glob("opt/vigil/lib/python3.*/site-packages/*pytest*"))
    # Empty files are locks, and where something was mounted.
    for folder in ("root/.cache", "var/lib/apt/lists", "var/cache/apt/archives", "tmp", "run/secrets"):
        left = [path for path in (root / folder).rglob("*") if path.is_file() and path.stat().st_size]
        assert not left, left


def test_its_user_can_change_nothing_of_it(root: Path, target: str) -> None:
    assert inspect(f"vigil:{target}").user == "vigil"
    folders = [str(root / name) for name in ("opt", "srv", "usr")]
    assert output_of("find", *folders, "!", "-type", "l", "(", "-uid", "10001", "-o", "-perm", "-o+w", ")") == ""


def test_code_comes_compiled(root: Path) -> None:
    """The folder is read-only later, so without these files every start would compile everything."""
    sources = [
        *(path for name in ("console", "jobs", "portal") for path in (root / "srv/vigil" / name).rglob("*.py")),
        *root.glob("opt/vigil/lib/python3.*/site-packages/django/*/*.py"),
    ]
    assert len(sources) > 200
    missing = [path for path in sources if not list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))]
    assert not missing, missing[:5]


def test_it_does_not_reveal_where_its_packages_came_from(root: Path) -> None:
    folders = [str(root / name) for name in ("etc", "home", "opt", "root", "srv", "tmp", "var")]
    if words := [word for source in pip.sources() for word in ("-e", source)]:
        assert output_of("grep", "-rlF", *words, *folders) == ""
    # Not even where it was mounted.
    assert {path.name for path in (root / "opt").iterdir()} == {"postgresql", "vigil"}
