"""Pack a script's folder for upload: the files git tracks, as they are now, or all files where there is no git."""

from __future__ import annotations

import gzip
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 50 * 1000 * 1000
MAX_UNPACKED = 500 * 1000 * 1000
DIRTY = "VIGIL.dirty"  # among the archive's headers: the files differ from the commit that it names
SKIPPED = frozenset({".git", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"})


class Unpackable(Exception):
    """Raised when the folder cannot be sent. The message says why, and what to do."""


@dataclass
class PackedCode:
    """Hold a tar.gz of a folder, and the names of the files that were left out."""

    code: bytes
    files: int
    left_out: list[str] = field(default_factory=list)


def pack(directory: Path) -> PackedCode:
    """Return the folder as a tar.gz: the same bytes for the same files."""
    root = directory.resolve()
    if not root.is_dir():
        raise Unpackable(f"{directory} is not a folder.")
    tracked = _git_files(root)
    names = tracked.files if tracked else _all_files(root)
    if not names:
        raise Unpackable(f"{directory} is empty.")
    inner = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=inner, mode="w", pax_headers=_origin(root) if tracked else {}) as archive:
        for name in sorted(set(names)):
            total += _add(archive, root, name)
            if total > MAX_UNPACKED:
                raise Unpackable(f"{directory} contains more than 500 MB. Keep data and weights out of it.")
    code = gzip.compress(inner.getvalue(), mtime=0)
    if len(code) > MAX_BYTES:
        raise Unpackable(f"{directory} packs to {len(code) / 1e6:.0f} MB; the limit is 50 MB. {_largest(root, names)}")
    return PackedCode(code, len(names), tracked.untracked if tracked else [])


@dataclass
class _GitFiles:
    files: list[str]
    untracked: list[str]


def _git_files(root: Path) -> _GitFiles | None:
    """Return the files that git tracks and those it does not; None without a repository or tracked files."""
    files = _git_names(root, "ls-files", "-z", "--cached")
    if not files:
        return None
    there = [name for name in files if os.path.lexists(root / name) and not _is_submodule(root / name)]
    return _GitFiles(there, _git_names(root, "ls-files", "-z", "--others", "--exclude-standard") or [])


def _origin(root: Path) -> dict[str, str]:
    """Return tar headers: the files' commit, as `git get-tar-commit-id` reads it, and whether they differ from it."""
    head = _run_git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if head is None or head.returncode != 0:
        return {}  # nothing is committed yet
    only_ours = ("--untracked-files=no", "--ignore-submodules=all", "--", ".")
    changed = _run_git(
        root, "--no-optional-locks", "status", "--porcelain", *only_ours, settings=_without_programs(root)
    )
    dirty = {DIRTY: "1"} if changed is None or changed.returncode != 0 or changed.stdout else {}
    return {"comment": head.stdout.decode().strip(), **dirty}


def _without_programs(root: Path) -> dict[str, str]:
    """Return git settings that disable this repository's filters: an untrusted folder would run its own programs."""
    found = _run_git(root, "config", "--show-scope", "--name-only", "-z", "--get-regexp", r"^filter\.")
    words = found.stdout.decode(errors="surrogateescape").split("\0") if found is not None else []
    theirs = {name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in {"local", "worktree"}}
    values = {name: "false" if name.endswith(".required") else "" for name in sorted(theirs)}
    settings = {"GIT_CONFIG_COUNT": str(len(values))}
    for number, (name, value) in enumerate(values.items()):
        settings |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return settings


def _run_git(
    root: Path, *arguments: str, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes] | None:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *arguments]
    environment = {**os.environ, **(settings or {})}
    try:
        return subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env=environment)
    except FileNotFoundError:
        return None


def _git_names(root: Path, *arguments: str) -> list[str] | None:
    done = _run_git(root, *arguments)
    if done is None:
        return None
    if done.returncode == 0:
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    if b"not a git repository" in done.stderr:
        return None
    raise Unpackable(f"git could not list {root}: {done.stderr.decode(errors='replace').strip()}")


def _is_submodule(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _all_files(root: Path) -> list[str]:
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in [*files, *links]]
    return names


def _add(archive: tarfile.TarFile, root: Path, name: str) -> int:
    """Add one file or link to the archive and return its size in bytes."""
    path = root / name
    mode = path.lstat().st_mode
    member = tarfile.TarInfo(name)
    if stat.S_ISLNK(mode):
        member.type, member.linkname = tarfile.SYMTYPE, _link(root, path, name)
        archive.addfile(member)
        return 0
    if not stat.S_ISREG(mode):
        raise Unpackable(f"{name} is not a file, a folder or a link. Remove it from the folder.")
    _refuse_outside_link(root, path, name)
    data = path.read_bytes()
    member.size, member.mode = len(data), 0o755 if mode & 0o100 else 0o644
    archive.addfile(member, io.BytesIO(data))
    return len(data)


def _link(root: Path, path: Path, name: str) -> str:
    target = os.readlink(path)
    ends = Path(os.path.normpath(path.parent / target))
    if os.path.isabs(target) or not ends.is_relative_to(root) or not path.resolve().is_relative_to(root):
        raise Unpackable(f"{name} is a link to {target}, outside the folder. Replace it with the file itself.")
    return target


def _refuse_outside_link(root: Path, path: Path, name: str) -> None:
    if not path.parent.resolve().is_relative_to(root):
        raise Unpackable(
            f"{name} is behind a link that leads outside the folder. Replace the link with the folder itself."
        )


def _largest(root: Path, names: list[str]) -> str:
    sizes = sorted(((root / name).lstat().st_size, name) for name in names)[-3:]
    return "Largest: " + ", ".join(f"{name} ({size / 1e6:.0f} MB)" for size, name in reversed(sizes)) + "."
