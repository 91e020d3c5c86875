"""Unpack and pack archives with tar, for tests that damage them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def unpacked(path: Path) -> dict[str, bytes]:
    """Return an archive's members as tar itself unpacks them."""
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def folder(**files: str) -> bytes:
    """Return a folder as people upload it, a tar.gz; `src__model.py` stands for a name with a slash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()
