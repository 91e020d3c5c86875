"""Data made once and kept for all jobs: whole or not there, made by the first that needs it.

A maker works in a hidden folder beside the place, which it touches as it goes, and renames it at the end. Others wait
while a hidden folder is being touched; of two that started at the same moment, the first to rename wins. What a dead
maker has left is removed: at once if it died on this machine, else when nobody has touched it for a while.
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
from training.corpus.shards import INDEX, is_whole

ABANDONED_SECONDS = 120
"""Longer than any maker goes without touching its folder."""
LOOK_SECONDS = 0.5
DAMAGED = ".damaged"

Tell = Callable[[], None]


def keep(place: Path, make: Callable[[Path, Tell], None], tell: Tell) -> None:
    """Sees to it that `place` is whole: made by `make(folder, touch)` here, or by somebody else meanwhile."""
    while True:
        _wait_for_others(place, tell)
        if _is_there(place) or _was_kept(place, make, tell):
            return


def _is_there(place: Path) -> bool:
    """Whole, for us to read. What may not be read is not damaged but somebody else's, and stays: DataError."""
    if is_whole(place):
        return True
    try:
        open(place / INDEX, "rb").close()
    except PermissionError:
        message = f"{place} is somebody else's, and may not be read here. Have them share it, or name another folder."
        raise DataError(message, "shards_folder") from None
    except OSError:
        pass
    return False


def _was_kept(place: Path, make: Callable[[Path, Tell], None], tell: Tell) -> bool:
    """Makes it; False where our folder was taken away meanwhile, as we were stopped for so long that we seemed dead."""
    staging = place.with_name(f".{place.name}.{_machine()}.{os.getpid()}.{os.urandom(4).hex()}")
    began = False
    try:
        staging.mkdir(parents=True)
        began = True

        def touch() -> None:
            os.utime(staging)
            tell()

        make(staging, touch)
        _put_in_place(staging, place)
        return True
    except OSError as error:
        if began and not staging.exists():
            return False
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            message = f"{place.parent} can't be written to ({error.strerror}). Name another folder."
            raise DataError(message, "shards_folder") from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        message = f"{place.parent} has no room for the tokens ({error.strerror}). Free some, or name another folder."
        raise DataError(message, "shards_folder") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _wait_for_others(place: Path, tell: Tell) -> None:
    """Waits until the place is whole, or nobody is making it."""
    while not is_whole(place) and _is_being_made(place):
        tell()
        time.sleep(LOOK_SECONDS)


def _is_being_made(place: Path) -> bool:
    """Whether somebody is making it, by the file system's own clock; what was left by those that died is removed."""
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
    """Whether a hidden folder's maker lived where its process would be seen, and is not."""
    *_, machine, pid, _random = name.removesuffix(DAMAGED).split(".")
    return machine == _machine() and pid.isdigit() and not os.path.exists(f"/proc/{pid}")


def _machine() -> str:
    """Where a process id means something: this boot of this machine, in this namespace."""
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
        if not _is_there(place):  # damaged: out of the way with it; who has it open keeps what it has
            damaged = staging.with_name(staging.name + DAMAGED)
            os.rename(place, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(staging, place)


def cache_dir(run_dir: Path) -> Path:
    """Where data made once is kept for all jobs; the job's own folder where the shared one can't be written.

    VIGIL_CACHE if set, else `.cache` beside the projects of the run root (a run is <root>/<project>/<name>), else,
    standalone, `.cache` beside the run.
    """
    wanted = [Path(found)] if (found := os.environ.get("VIGIL_CACHE")) else []
    wanted.append((run_dir.parent.parent if "VIGIL_RUN_DIR" in os.environ else run_dir.parent) / ".cache")
    for folder in wanted:
        try:
            folder.mkdir(mode=0o2770, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    own = run_dir / "job" / "cache"
    with suppress(OSError):  # the data may go elsewhere; whoever does write to it says why not
        own.mkdir(parents=True, exist_ok=True)
    return own
