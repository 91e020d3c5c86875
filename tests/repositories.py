"""Create folders and git repositories for tests, without any user's git configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files by their relative names; return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def git(root: Path, *arguments: str) -> str:
    """Run git and return its output."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()
