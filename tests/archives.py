"""Archives taken apart and put together by tar itself, for tests that spoil them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def unpacked(path: Path) -> dict[str, bytes]:
    """An archive's members, as tar itself sees them."""
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
    """A folder as people upload it, a tar.gz; names with a slash as `src__model.py`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()
