"""Run buildah with a private store in var/image, separate from the machine's images."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stack import REPOSITORY

FOLDER = REPOSITORY / "var" / "image"
RUN = FOLDER / "run"


class Failed(Exception):
    """A build program failed; the message is the end of its output."""


def run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stdout + done.stderr).strip().splitlines()
        raise Failed("\n".join([f"`{' '.join(command)[:300]}` failed:", *text[-40:]]))
    return done.stdout


def buildah(*arguments: str) -> str:
    locations = ("--root", str(FOLDER / "storage"), "--runroot", str(RUN), "--storage-driver", "overlay")
    return run("buildah", *locations, *arguments)


def images() -> set[str]:
    names = buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()
    return {name.removeprefix("localhost/") for name in names}


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    """Mount the root of a new container of the image; anything written there is discarded."""
    container = buildah("from", "--pull=never", image).strip()
    try:
        yield Path(buildah("mount", container).strip())
    finally:
        buildah("umount", container)
        buildah("rm", container)
