"""Turn files into a checkpoint, or mark a checkpoint: durable, by one rename."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from training import manifest as manifests
from training.checkpoint.pruning import remove
from training.manifest import CheckpointError, Manifest, UnreadableManifest


def commit(staging: Path, manifest: Manifest, *, check_fence: Callable[[], None]) -> None:
    """Turn `staging`, whose files are written and fsynced, into the checkpoint `manifest.name` in the same folder."""
    _write_durably(staging / manifests.COMMITTED, manifest.dump())
    _fsync_folder(staging)
    check_fence()
    target = staging.with_name(manifest.name)
    move_aside(target)
    os.rename(staging, target)
    _fsync_folder(target.parent)


def mark_verified(checkpoint: Path) -> None:
    """Mark a checkpoint as read back. Raises OSError if the mark cannot be written: then it counts as not verified."""
    _write_durably(checkpoint / manifests.VERIFIED, f"{time.time()}\n")


def mark_damaged(checkpoint: Path, reason: object) -> None:
    """Mark a checkpoint as damaged, so that it is never resumed from."""
    with suppress(OSError):
        _write_durably(checkpoint / manifests.DAMAGED, f"{reason}\n")


def move_aside(target: Path) -> None:
    """Rename the checkpoint of the same step on another branch to a name with its generation: step-400.g2."""
    if not target.exists():
        return
    try:
        generation = manifests.read(target).generation
    except UnreadableManifest:
        raise  # it may well be intact
    except CheckpointError:
        remove(target)
        return
    aside = target.with_name(f"{target.name}.g{generation}")
    if aside.exists():
        remove(aside)
    os.rename(target, aside)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
