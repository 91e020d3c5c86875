"""Data that is made once and shared by all jobs: complete or absent, made by the first job that needs it.

A maker works in a hidden folder next to the target, touches it as it proceeds, and renames it at the end. Others wait
while a hidden folder is being touched; of two that started at the same moment, the first to rename wins. Folders of
dead makers are removed: at once if the maker died on this machine, else once they have not been touched for a while.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from training.corpus.errors import DataError
from training.corpus.shards import INDEX, is_complete

ABANDONED_SECONDS = 120
"""Longer than any maker goes without touching its folder."""
POLL_SECONDS = 0.5
DAMAGED = ".damaged"

OnProgress = Callable[[], None]


def ensure(place: Path, make: Callable[[Path, OnProgress], None], on_progress: OnProgress) -> None:
    """Make sure that `place` is complete: made by `make(folder, touch)` here, or by another process meanwhile."""
    while True:
        _wait_for_others(place, on_progress)
        if _is_available(place) or _try_make(place, make, on_progress):
            return


def _is_available(place: Path) -> bool:
    """Return whether it is complete and readable. Raises DataError if it belongs to somebody else: it may be intact."""
    if is_complete(place):
        return True
    try:
        open(place / INDEX, "rb").close()
    except PermissionError:
        message = f"{place} belongs to another user and cannot be read. Have it shared, or name another folder."
        raise DataError(message, "shards_folder") from None
    except OSError:
        pass
    return False


def _try_make(place: Path, make: Callable[[Path, OnProgress], None], on_progress: OnProgress) -> bool:
    """Make the data; return False if our folder was removed meanwhile, because we were suspended and seemed dead."""
    staging = place.with_name(f".{place.name}.{_machine()}.{os.getpid()}.{os.urandom(4).hex()}")
    has_begun = False
    try:
        staging.mkdir(parents=True)
        has_begun = True

        def touch() -> None:
            os.utime(staging)
            on_progress()

        make(staging, touch)
        _put_in_place(staging, place)
        return True
    except OSError as error:
        if has_begun and not staging.exists():
            return False
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            message = f"{place.parent} can't be written to ({error.strerror}). Name another folder."
            raise DataError(message, "shards_folder") from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        message = f"{place.parent} has no space for the tokens ({error.strerror}). Free some, or name another folder."
        raise DataError(message, "shards_folder") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _wait_for_others(place: Path, on_progress: OnProgress) -> None:
    """Wait until the data is complete, or nobody is making it."""
    while not is_complete(place) and _is_being_made(place):
        on_progress()
        time.sleep(POLL_SECONDS)


def _is_being_made(place: Path) -> bool:
    """Return whether another process is making it, by the file system's clock; remove what dead makers left."""
    alive = False
    now = _now(place.parent)
    for folder in place.parent.glob(f".{place.name}.*"):
        with suppress(OSError):
            if now - folder.stat().st_mtime < ABANDONED_SECONDS and not _is_dead(folder.name):
                alive = True
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return alive


def _is_dead(name: str) -> bool:
    """Return whether the maker of a hidden folder ran where its process would be visible, but is not."""
    *_, machine, pid, _random = name.removesuffix(DAMAGED).split(".")
    return machine == _machine() and pid.isdigit() and not os.path.exists(f"/proc/{pid}")


def _machine() -> str:
    """Identify where a process id is meaningful: this boot of this machine, in this namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]


def _now(folder: Path) -> float:
    probe = folder / f".clock.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()


def _put_in_place(staging: Path, place: Path) -> None:
    try:
        os.rename(staging, place)
    except OSError:
        if not place.exists():
            raise
        if not _is_available(place):  # damaged: move it away; processes that have it open are not affected
            damaged = staging.with_name(staging.name + DAMAGED)
            os.rename(place, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(staging, place)


def cache_dir(run_dir: Path) -> Path:
    """Return the folder for shared data, or the job's own folder if the shared one is not writable.

    VIGIL_CACHE if set, else `.cache` next to the projects of the run root (a run is <root>/<project>/<name>), else,
    standalone, `.cache` next to the run.
    """
    candidates = [Path(configured)] if (configured := os.environ.get("VIGIL_CACHE")) else []
    candidates.append((run_dir.parent.parent if "VIGIL_RUN_DIR" in os.environ else run_dir.parent) / ".cache")
    for folder in candidates:
        try:
            folder.mkdir(mode=0o2770, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    job_cache = run_dir / "job" / "cache"
    with suppress(OSError):  # the data may not need it; a later write reports the problem
        job_cache.mkdir(parents=True, exist_ok=True)
    return job_cache
