"""Locate this installation of Vigil: a checkout, or a wheel in an environment's site-packages. No Django here."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder of our packages: the checkout's, or site-packages."""
IS_CHECKOUT = (ROOT / "manage.py").is_file()
SITE_FILES = ROOT / "console" / "data"
"""Templates, static files and documents: links in a checkout, the files themselves in a wheel."""


def default_home() -> Path:
    """Return the folder of the portal's data: VIGIL_HOME, else the checkout's var/, else the user's data folder."""
    if home := os.environ.get("VIGIL_HOME"):
        return Path(home)
    if IS_CHECKOUT:
        return ROOT / "var"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "vigil"


def site_files(name: str) -> Path:
    """Return the folder of templates, static or docs."""
    return (SITE_FILES / name).resolve()


def manage(*arguments: str) -> list[str]:
    """Return the command of one of Django's management commands."""
    return [sys.executable, "-m", "console.manage", *arguments]


def version() -> str:
    """Return this Vigil's version. In a checkout that is pyproject.toml's: pip knows the last installation's."""
    if IS_CHECKOUT and (project := ROOT / "pyproject.toml").is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    for distribution in ("vigil", "vigil-client"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
