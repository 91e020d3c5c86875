"""Test that the project of the client names every package that it ships: setuptools leaves out what is not named."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_package_of_the_command_line_is_left_out() -> None:
    project = tomllib.loads((ROOT / "packaging" / "client" / "pyproject.toml").read_text())
    named = {name for name in project["tool"]["setuptools"]["packages"] if not name.startswith("training")}
    files = [path for name in ("diagnosis", "vigil_cli", "vigil_core") for path in (ROOT / name).rglob("__init__.py")]
    assert named == {".".join(path.relative_to(ROOT).parent.parts) for path in files}
