"""Test removing what jobs created: whatever its modes, depth and links, and nothing outside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jobs.disk import trash


def test_it_is_emptied_of_what_its_owner_may_not_write(settings: Any) -> None:
    """The folder has read-only files, as git-annex leaves them, and a folder that its owner may not enter."""
    with TemporaryDirectory() as root:  # pytest's own is root's alone
        settings.VIGIL_RUNS = Path(root)
        treasure, gone = Path(root) / "treasure", Path(root) / trash.TRASH / "gone"
        for path in (treasure / "kept", gone / "objects" / "key" / "data", gone / "closed" / "inner" / "data"):
            path.parent.mkdir(parents=True)
            path.write_text("x")
        (gone / "objects" / "link").symlink_to(treasure)
        for path, mode in ((gone / "objects/key", 0o555), (gone / "closed", 0), (gone, 0o555), (treasure, 0o555)):
            path.chmod(mode)
        with nobody(Path(root)):
            trash.empty()
        assert not gone.exists()
        assert (treasure / "kept").exists()
        assert treasure.stat().st_mode & 0o777 == 0o555
        treasure.chmod(0o755)


def test_a_tree_deeper_than_a_stack_leaves_the_trash_too(settings: Any, tmp_path: Path) -> None:
    """The entries after it are removed, too."""
    settings.VIGIL_RUNS = tmp_path
    there = tmp_path / trash.TRASH
    for name in ("deep", "other"):
        (there / name).mkdir(parents=True)
    folder = os.open(there / "deep", os.O_RDONLY)
    for _ in range(1500):
        os.symlink("/etc", "link", dir_fd=folder)
        os.mkdir("inner", dir_fd=folder)
        inner = os.open("inner", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    trash.empty()
    assert os.listdir(there) == []


@contextmanager
def nobody(root: Path) -> Iterator[None]:
    """Not root for a while, where tests run as root; everything below `root` is theirs then."""
    if os.geteuid() != 0:
        yield
        return
    for folder, names, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in [*names, *files])):
            os.chown(path, 12345, 12345, follow_symlinks=False)
    os.seteuid(12345)
    try:
        yield
    finally:
        os.seteuid(0)
