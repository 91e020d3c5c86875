"""Build the images of docker/Dockerfile without a container engine: with buildah, each step in a chroot.

No registry is used: base images are built from Debian packages (standins/Dockerfile) on a Debian that debootstrap
creates once. Everything is stored in var/image.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.image import compose, pip
from tests.image.storage import RUN, Failed, buildah, images, run
from tests.stack import REPOSITORY

TARGETS = ("portal", "trainer")
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
STANDINS = Path(__file__).with_name("standins")
DEBIAN = "debian-made-here:latest"


def build() -> None:
    """Build every image that the site needs; repeat a step only if something has changed since the last time."""
    if DEBIAN not in images():
        _timed("Debian 12, once", make_debian)
    for image in sorted(bases()):
        _timed(image, partial(build_standin, image))
    for target in TARGETS:
        _timed(f"vigil:{target}", partial(build_target, target))
    buildah("rmi", "--prune")  # what older builds left; what the next may go on from stays


def _timed(what: str, step: Callable[[], None]) -> None:
    began = time.monotonic()
    step()
    print(f"{what:32} {time.monotonic() - began:6.1f} s", flush=True)


def bases() -> set[str]:
    """Return the images that would come from a registry."""
    text = DOCKERFILE.read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    return {*re.findall(r"^FROM (\S+)", text, re.MULTILINE), *compose.images()} - stages


def make_debian() -> None:
    """Create a Debian from debootstrap's mirror or DEBOOTSTRAP_MIRROR, in memory, as dpkg syncs each file to disk."""
    mirror = [word for word in [os.environ.get("DEBOOTSTRAP_MIRROR", "")] if word]
    with tempfile.TemporaryDirectory(dir=RUN) as folder:
        root = Path(folder, "root")
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(root), *mirror)
        for left in (root / "var/lib/apt/lists", root / "var/cache/apt", root / "var/log"):
            shutil.rmtree(left)
            left.mkdir()
        commit(root, DEBIAN)


def commit(root: Path, image: str) -> None:
    """Make an image with one layer out of a folder."""
    container = buildah("from", "scratch").strip()
    try:
        buildah("copy", "--quiet", container, str(root), "/")
        buildah("commit", "--quiet", container, image)
    finally:
        buildah("rm", container)


def build_standin(image: str) -> None:
    stage = image.partition(":")[0]
    if f" AS {stage}\n" not in (STANDINS / "Dockerfile").read_text():
        raise Failed(f"Nothing stands in for {image}: add a stage `{stage}` to {STANDINS / 'Dockerfile'}")
    _bud(f"--target={stage}", f"--tag={image}", str(STANDINS))


def build_target(target: str) -> None:
    with pip.configuration() as lent:
        _bud(*lent, f"--file={DOCKERFILE}", f"--target={target}", f"--tag=vigil:{target}", str(REPOSITORY))


def _bud(*arguments: str) -> None:
    buildah("bud", "--isolation=chroot", "--layers", "--pull=never", *arguments)
