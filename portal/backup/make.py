"""`vigil backup`: one consistent archive of the database and its key, while the portal runs. Imports no Django."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from portal.backup import archive, files, last, sqlite
from portal.backup.archive import BackupManifest, Kind
from portal.run.preflight import StartRefused
from vigil_core import installation


@dataclass(frozen=True)
class BackupResult:
    """Describes a finished backup."""

    path: Path
    bytes: int
    manifest: BackupManifest
    seconds: float


def backup(settings: ModuleType, path: Path, *, force: bool = False) -> BackupResult:
    """Write the archive. Raises StartRefused with a sentence if that is impossible."""
    began = time.monotonic()
    path = path.absolute()
    _refuse_target(path, force)
    try:
        with files.scratch(settings.VIGIL_HOME, "backup") as folder:
            manifest = _collect(settings, folder)
            with files.atomic_file(path, replace=force) as file:
                archive.write(file, manifest, folder, files.ProgressMessages("Writing the archive"))
    except FileExistsError:
        raise _is_there(path) from None
    except sqlite3.Error as error:
        raise StartRefused(
            f"the database cannot be copied: {error}. Is it in use by another program, or damaged?"
        ) from None
    except OSError as error:
        raise StartRefused(f"the backup cannot be written: {error}.") from None
    last.note(settings.VIGIL_HOME, path)
    return BackupResult(path, path.stat().st_size, manifest, time.monotonic() - began)


def _refuse_target(path: Path, force: bool) -> None:
    if path.is_dir():
        raise StartRefused(f"{path} is a folder: name a file in it, for example {path / 'vigil.tar.gz'}.")
    if not path.parent.is_dir():
        raise StartRefused(f"no such folder: {path.parent}: make it, or name another file.")
    if path.exists() and not path.is_file():
        raise StartRefused(f"{path} is not a plain file: name another file.")
    if path.exists() and not force:
        raise _is_there(path)


def _is_there(path: Path) -> StartRefused:
    return StartRefused(f"{path} exists already: name another file, or replace it with --force.")


def kind_of(settings: ModuleType) -> Kind:
    return "sqlite" if settings.DATABASES["default"]["ENGINE"].endswith("sqlite3") else "postgresql"


def _collect(settings: ModuleType, folder: Path) -> BackupManifest:
    """Collect what is backed up in a folder, and return its manifest."""
    kind, database = kind_of(settings), settings.DATABASES["default"]
    target = folder / archive.DATABASES[kind]
    progress = files.ProgressMessages("Copying the database")
    dump_version = 0
    if kind == "sqlite":
        sqlite.copy(Path(database["NAME"]), target, progress)
        try:
            applied, version = sqlite.migrations(target), sqlite3.sqlite_version
        except sqlite3.OperationalError:
            raise StartRefused(
                f"{database['NAME']} is not a Vigil home, or was never started: nothing to back up."
            ) from None
    else:
        from portal.backup import postgres

        with postgres.connect(database) as server:
            applied, dump_version = postgres.dump(server, target, progress)
            version = str(server.major)
    key = folder / archive.SECRET_KEY
    key.touch(mode=0o600)
    key.write_text(settings.SECRET_KEY)
    checking = files.ProgressMessages("Computing digests")
    return BackupManifest(
        format=archive.FORMAT,
        vigil=installation.version(),
        made_at=datetime.now(UTC).replace(microsecond=0),
        database=kind,
        database_version=version,
        dump_version=dump_version,
        migrations=applied,
        runs=str(settings.VIGIL_RUNS),
        members=[archive.describe(path, checking) for path in (key, target)],
    )


def give_to_owner(path: Path, home: Path) -> None:
    """Give files that root created in a user's home to that user."""
    if os.geteuid() == 0:
        owner = home.stat()
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def give_home_to_owner(settings: ModuleType) -> None:
    """Give the home's owner the files that root created: the portal does not run as root and could not start."""
    home: Path = settings.VIGIL_HOME
    for path in (home / "up.lock", home / "secret_key", home / "runs", home / last.NAME):
        with contextlib.suppress(OSError):
            found = path.lstat()
            # The owner controls the home's contents: no link placed there may change the owner of a file elsewhere.
            is_single = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
            if found.st_uid == 0 and is_single:
                give_to_owner(path, home)
