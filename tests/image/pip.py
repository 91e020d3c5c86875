"""Pass this machine's pip configuration to a build as a secret and mounts; no image keeps any of it."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SCOPES = ("global", "install", ":env:")
"""Of pip's configuration, what an installation reads; the last one wins."""


def settings() -> dict[str, str]:
    """Return the options in pip's files and environment variables on this machine."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, str] = {}
    for scope in SCOPES:
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(f"{scope}."):
                found[name.removeprefix(f"{scope}.")] = str(ast.literal_eval(value))
    return found


def sources() -> set[str]:
    """Return the addresses and folders from which packages come, if this machine has its own."""
    options = ("index-url", "extra-index-url", "find-links")
    return {word for option in options for word in settings().get(option, "").split()}


@contextmanager
def configuration() -> Iterator[list[str]]:
    """Return arguments for buildah that give a build this machine's access to packages."""
    configured = settings()
    # Under meaningless names: a layer keeps the empty folders that things were mounted on.
    lent = {path: f"/run/lent/{number}" for number, path in enumerate(sorted(_paths(configured.values())))}
    file = configparser.RawConfigParser()
    file["global"] = {name: _renamed(value, lent).replace("\n", "\n    ") for name, value in configured.items()}
    with tempfile.NamedTemporaryFile("w", prefix="vigil-pip-", suffix=".conf") as written:
        file.write(written)
        written.flush()
        yield [
            f"--secret=id=pip.conf,src={written.name}",
            *(f"--volume={path}:{place}:ro" for path, place in lent.items()),
        ]


def _paths(values: Iterable[str]) -> set[str]:
    """Return files and folders of this machine that the settings name."""
    words = re.findall(r"(?:^|\s|file://)(/[^\s:]+)", "\n".join(values))
    found = [Path(word) for word in words if Path(word).exists()]
    # An index is full of links into neighbouring folders.
    return {str(path.parent if path.name == "simple" else path) for path in found}


def _renamed(value: str, lent: dict[str, str]) -> str:
    for path in sorted(lent, key=len, reverse=True):
        value = re.sub(rf"(^|\s|//){re.escape(path)}(?=[\s/]|$)", rf"\g<1>{lent[path]}", value)
    return value
