"""`vigil restore`: replace the portal's database and key by a backup, or change nothing. Imports no Django."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Self
from urllib.parse import quote

from portal.backup import archive, files, postgres, sqlite
from portal.backup.archive import BackupManifest
from portal.backup.make import give_to_owner, kind_of
from portal.run.preflight import StartRefused, lock_home, note_owner
from vigil_core import installation
from vigil_core.environment import env

STOP_IT = "stop it first; `vigil up` releases its home when it has stopped."
NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


@dataclass(frozen=True)
class RestoreResult:
    """The result of a restore: where the old database and key are now, and notes for the person."""

    manifest: BackupManifest
    set_aside: list[str]
    notes: list[str]


def restore(settings: ModuleType, path: Path, *, force: bool = False) -> RestoreResult:
    """Restore the backup. Raises StartRefused with a sentence if that is impossible."""
    home: Path = settings.VIGIL_HOME
    try:
        with lock_home(home, STOP_IT):
            note_owner(home, "`vigil restore`")
            with archive.open_archive(path.absolute()) as reader:
                return _restore(settings, reader, force)
    except sqlite3.Error as error:
        raise StartRefused(f"the backup's database cannot be used: {error}. Use another backup.") from None
    except OSError as error:
        raise StartRefused(f"the backup cannot be restored: {error}.") from None


def _restore(settings: ModuleType, reader: archive.ArchiveReader, force: bool) -> RestoreResult:
    manifest, home = reader.manifest, settings.VIGIL_HOME
    _refuse_other_kind(settings, manifest)
    code_migrations = _code_migrations()
    _refuse_newer(manifest, reader.path, code_migrations)
    is_behind = _has_unknown(code_migrations, manifest.migrations)
    sqlite_or_postgres = _Sqlite if manifest.database == "sqlite" else _Postgres
    place = sqlite_or_postgres(settings, manifest, is_behind=is_behind)
    with place:
        if (there := place.there()) and not force:
            raise StartRefused(f"{there} already: with --force it is set aside under another name.")
        with files.scratch(home, "restore") as folder:
            archive.require_space(manifest.bytes, folder)
            reader.unpack(folder, files.ProgressMessages("Unpacking and checking"))
            # To the microsecond: a restore that is killed and repeated within a second gets a stamp of its own.
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
            set_aside = place.put_in_place(folder, stamp)
            notes = _take_key(settings, folder / archive.SECRET_KEY, set_aside, stamp)
        (home / "prepared").unlink(missing_ok=True)
        place.after()
    return RestoreResult(manifest, set_aside, [*notes, *_about_runs(settings, manifest)])


def _refuse_other_kind(settings: ModuleType, manifest: BackupManifest) -> None:
    there, here = NAMES[manifest.database], NAMES[kind_of(settings)]
    if there != here:
        remedy = "unset DATABASE_URL" if there == "SQLite" else "set DATABASE_URL to a PostgreSQL database"
        raise StartRefused(f"a backup of {there} cannot be restored into {here}: {remedy} to run Vigil on it.")


# Backups from newer versions


def _refuse_newer(manifest: BackupManifest, path: Path, code_migrations: Mapping[str, list[str]]) -> None:
    """Refuse a database of a newer version: it has tables that this code does not know."""
    theirs, ours = _numbers(manifest.vigil), _numbers(installation.version())
    if theirs > ours or (theirs == ours and _has_unknown(manifest.migrations, code_migrations)):
        versions = f"a newer Vigil ({manifest.vigil}) than this one ({installation.version()})"
        raise StartRefused(f"{path} was made by {versions}: upgrade this one first.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _has_unknown(applied: Mapping[str, list[str]], code_migrations: Mapping[str, list[str]]) -> bool:
    """Return whether a migration was applied that this code does not have."""
    return any(set(names) - set(code_migrations.get(app, ())) for app, names in applied.items())


def _code_migrations() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(_manage(["known_migrations"], {}))
    return found


def _manage(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Run a management command and return its output."""
    command = installation.manage(*arguments)
    whole = {**os.environ, "DJANGO_SETTINGS_MODULE": "portal.settings", **environment}
    done = subprocess.run(command, env=whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StartRefused(f"`manage.py {arguments[0]}` failed: {last}")
    return done.stdout


def _migrate(environment: Mapping[str, str]) -> None:
    _manage(["migrate", "--no-input", "--verbosity", "0"], environment)


# Putting it in place


class _Sqlite:
    """Migrate the backup in a copy before it replaces the old database, which a failure leaves untouched."""

    def __init__(self, settings: ModuleType, manifest: BackupManifest, *, is_behind: bool) -> None:
        self.is_behind = is_behind
        self.home: Path = settings.VIGIL_HOME
        # Resolved: a link to a larger disk stays a link, and the new database belongs where it points.
        self.database = Path(settings.DATABASES["default"]["NAME"]).resolve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def there(self) -> str:
        return f"{self.database} is there" if self.database.exists() else ""

    def put_in_place(self, folder: Path, stamp: str) -> list[str]:
        staged = folder / archive.DATABASES["sqlite"]
        if self.is_behind:
            _migrate({"DATABASE_URL": f"sqlite://{quote(str(staged))}"})
        sqlite.fold_log(staged)
        if self.database.parent.stat().st_dev != folder.stat().st_dev:
            staged = sqlite.staging_path(staged, self.database)
        give_to_owner(staged, self.home)
        aside = sqlite.put_in_place(staged, self.database, stamp)
        return [str(aside)] if aside else []

    def after(self) -> None:
        pass


class _Postgres:
    """Restore the backup in one transaction, which also moves the old tables aside; migrations follow."""

    def __init__(self, settings: ModuleType, manifest: BackupManifest, *, is_behind: bool) -> None:
        self.settings, self.manifest, self.is_behind = settings, manifest, is_behind

    def __enter__(self) -> Self:
        postgres.refuse_version(self.manifest.dump_version)
        self.stack = ExitStack()
        self.server = self.stack.enter_context(postgres.connect(self.settings.DATABASES["default"]))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def there(self) -> str:
        postgres.refuse_others(self.server)
        found = postgres.table_count(self.server)
        return f"a database with {found} tables is there" if found else ""

    def put_in_place(self, folder: Path, stamp: str) -> list[str]:
        dumped = folder / archive.DATABASES["postgresql"]
        progress = files.ProgressMessages("Restoring the database")
        schema = postgres.restore(self.server, dumped, stamp.replace("-", "_"), progress)
        return [f"the schema {schema} of the database"] if schema else []

    def after(self) -> None:
        if not self.is_behind:
            return
        try:
            _migrate({})
        except StartRefused as error:
            raise StartRefused(
                f"the backup is in place, but older than this Vigil and not brought up to date: {error}"
            ) from None


def _take_key(settings: ModuleType, staged: Path, set_aside: list[str], stamp: str) -> list[str]:
    """Restore the key that signed the backup's sessions; a key in the environment takes precedence over a file."""
    key = settings.VIGIL_HOME / "secret_key"
    if env("SECRET_KEY"):
        if staged.read_text() == settings.SECRET_KEY:
            return []
        return ["SECRET_KEY of the environment differs from the backup's: everybody must sign in again."]
    if set_aside and key.exists() and key.read_text() != staged.read_text():
        aside = key.with_name(f"secret_key.before-{stamp}")
        os.link(key, aside)
        set_aside.append(str(aside))
    give_to_owner(staged, settings.VIGIL_HOME)
    os.replace(staged, key)
    files.sync(key.parent)
    return []


def _about_runs(settings: ModuleType, manifest: BackupManifest) -> list[str]:
    """Explain that logs and checkpoints are not part of a backup, and name those that are missing."""
    if manifest.runs != str(settings.VIGIL_RUNS):
        return [f"Run directories were in {manifest.runs}; this site expects them in {settings.VIGIL_RUNS}."]
    if not settings.VIGIL_RUNS.is_dir():
        return [f"Missing: {settings.VIGIL_RUNS}: jobs have no logs or checkpoints until it is back."]
    return []
