"""Test that the site, the client and the agent share one version, which the changelog describes."""

from __future__ import annotations

import tomllib
from pathlib import Path

from nodes.agent.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


def test_everything_that_is_released_has_the_version_of_the_changelog() -> None:
    projects = (ROOT / "pyproject.toml", ROOT / "packaging" / "client" / "pyproject.toml")
    versions = {tomllib.loads(project.read_text())["project"]["version"] for project in projects}
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = [line for line in changelog.splitlines() if line.startswith("## ") and line != "## Unreleased"]
    assert versions == {VERSION}
    assert released[0].startswith(f"## {VERSION} – ")
