"""Back up and restore PostgreSQL: pg_dump of one snapshot, and a restore in one transaction."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from portal.backup.archive import Progress
from portal.backup.sqlite import by_app
from portal.run.preflight import StartRefused

OLD_SCHEMA_PREFIX = "before_restore_"  # prefix of the schemas that hold the tables from before a restore
_GET = "install postgresql-client-{0}, or put the folder of its programs first on PATH"


@dataclass(frozen=True)
class PostgresServer:
    """A connection, and the options with which programs connect: all but the password, which others could read."""

    connection: psycopg.Connection[tuple[Any, ...]]
    address: str

    @property
    def major(self) -> int:
        return self.connection.info.server_version // 10_000

    def query(self, query: LiteralString) -> list[tuple[Any, ...]]:
        """Return the rows and leave nothing open, so that no lock of ours blocks what follows."""
        rows = self.connection.execute(query).fetchall()
        self.connection.rollback()
        return rows


@contextlib.contextmanager
def connect(database: Mapping[str, Any]) -> Iterator[PostgresServer]:
    """Connect to the server that DATABASE_URL describes."""
    wanted = {
        "dbname": database["NAME"], "user": database["USER"], "password": database["PASSWORD"],
        "host": database["HOST"], "port": database["PORT"], **database["OPTIONS"],
    }  # fmt: skip
    wanted = {name: value for name, value in wanted.items() if value}
    try:
        connection = psycopg.connect(**wanted)
    except psycopg.Error as error:
        raise StartRefused(f"the database at DATABASE_URL does not answer: {_last_line(str(error))}.") from None
    with contextlib.closing(connection):
        public = {name: value for name, value in wanted.items() if "password" not in name}
        yield PostgresServer(connection, psycopg.conninfo.make_conninfo("", **public))


def dump(server: PostgresServer, target: Path, progress: Progress) -> tuple[dict[str, list[str]], int]:
    """Dump into a file of pg_dump's custom format.

    Return the migrations that are applied in the same snapshot, and pg_dump's version.
    """
    version = _version("pg_dump")
    if version < server.major:
        raise StartRefused(f"pg_dump is version {version} and the server {server.major}: {_GET.format(server.major)}.")
    connection = server.connection
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.read_only = True
    try:
        rows: Any = connection.execute("SELECT app, name FROM django_migrations ORDER BY id").fetchall()
    except psycopg.errors.UndefinedTable:
        raise StartRefused(
            "the database at DATABASE_URL is not Vigil's, or was never started: nothing to back up."
        ) from None
    row = connection.execute("SELECT pg_export_snapshot(), pg_database_size(current_database())").fetchone()
    assert row
    command = [
        "pg_dump", "--format=custom", "--compress=1", "--no-owner", "--no-privileges", "--no-password",
        f"--exclude-schema={OLD_SCHEMA_PREFIX}*", f"--snapshot={row[0]}", f"--file={target}",
        f"--dbname={server.address}",
    ]  # fmt: skip
    with _Program(command, server) as program:
        while program.process.poll() is None:
            time.sleep(0.05)
            progress(target.stat().st_size if target.exists() else 0, 0)
        program.finish()
    connection.rollback()
    return by_app(rows), version


def refuse_version(dumped_by: int) -> None:
    """Refuse a dump whose format this pg_restore does not know."""
    version = _version("pg_restore")
    if version < dumped_by:
        needed = _GET.format(dumped_by)
        raise StartRefused(
            f"this backup was made by pg_dump {dumped_by} and pg_restore is version {version}: {needed}."
        )


def refuse_others(server: PostgresServer) -> None:
    """Refuse if other connections use the database: a portal on another machine has its lock elsewhere."""
    ((others,),) = server.query(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    if others:
        count = "1 other connection uses" if others == 1 else f"{others} other connections use"
        raise StartRefused(f"{count} this database: stop every portal and every other user of it.")


def table_count(server: PostgresServer) -> int:
    """Return how many tables the database has."""
    ((found,),) = server.query("SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()")
    return int(found)


def restore(server: PostgresServer, dumped: Path, stamp: str, progress: Progress) -> str:
    """Restore a dump in one transaction; return the schema in which the old tables stay, or "".

    The commit is sent from here, and only after pg_restore succeeded: a script that is cut short is rolled back.
    """
    schema, moves = _moves(server, stamp)
    unpacking = _Program(["pg_restore", "--no-owner", "--no-privileges", "--file=-", str(dumped)], server)
    taking = _Program(["psql", "-X", "-q", "-w", "-v", "ON_ERROR_STOP=1", "-d", server.address], server, fed=True)
    with unpacking, taking:
        source, sink = unpacking.process.stdout, taking.process.stdin
        assert source
        assert sink
        try:
            sink.write(f"BEGIN;\n{moves}\n".encode())
            head = source.read(1 << 16)
            if server.major < 17:  # newer programs set options that older servers do not know
                head = head.replace(b"\nSET transaction_timeout = 0;\n", b"\n", 1)
            sink.write(head)
            done = len(head)
            while piece := source.read(1 << 20):
                sink.write(piece)
                done += len(piece)
                progress(done, 0)
            unpacking.finish()
            sink.write(b"\nCOMMIT;\n")
            sink.close()
            taking.finish()
        except BrokenPipeError:
            taking.finish()
    return schema


def _moves(server: PostgresServer, stamp: str) -> tuple[str, str]:
    """Return a schema for the existing tables, and the SQL that moves them there, immediate whatever their size.

    Trigger functions move too: the dump brings its own with the same names.
    """
    rows = server.query(
        "SELECT relkind, relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE nspname = current_schema() AND relkind IN ('r', 'p', 'v', 'm', 'S') AND NOT EXISTS"
        # A serial column's sequence moves with its table.
        " (SELECT 1 FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i', 'e')) ORDER BY relname"
    )
    rows += server.query(
        "SELECT 'f', p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
        " WHERE nspname = current_schema() AND prorettype = 'trigger'::regtype AND NOT EXISTS"
        " (SELECT 1 FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e') ORDER BY proname"
    )
    if not rows:
        return "", ""
    schema = f"{OLD_SCHEMA_PREFIX}{stamp}".lower()
    kinds = {"v": "VIEW", "m": "MATERIALIZED VIEW", "S": "SEQUENCE", "f": "FUNCTION"}
    lines = [sql.SQL("CREATE SCHEMA {};").format(sql.Identifier(schema))]
    for kind, name in rows:
        move = sql.SQL(f"ALTER {kinds.get(kind, 'TABLE')} {{}} SET SCHEMA {{}};")
        lines.append(move.format(sql.Identifier(name), sql.Identifier(schema)))
    text = sql.SQL("\n").join(lines).as_string(server.connection)
    return schema, text


class _Program:
    """Run one of PostgreSQL's programs with its password in the environment; kill it if it is left running."""

    def __init__(self, command: list[str], server: PostgresServer, *, fed: bool = False) -> None:
        path = shutil.which(command[0])
        if path is None:
            raise StartRefused(f"{command[0]} is not on PATH: {_GET.format(server.major)}.")
        environment = {**os.environ, "PGAPPNAME": "vigil"}
        if server.connection.info.password:
            environment["PGPASSWORD"] = server.connection.info.password
        self.name = command[0]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (not a pipe, which could fill up)
        self.process = subprocess.Popen(
            [path, *command[1:]],
            env=environment,
            stdin=subprocess.PIPE if fed else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if fed else subprocess.PIPE,
            stderr=self.errors,
        )

    def finish(self) -> None:
        """Wait for the program to end; on failure raise StartRefused with its own message."""
        if self.process.wait():
            self.errors.seek(0)
            raise StartRefused(f"{self.name} failed: {_last_line(self.errors.read().decode(errors='replace'))}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _version(program: str) -> int:
    """Return the major version of one of PostgreSQL's programs on PATH."""
    path = shutil.which(program)
    if path is None:
        raise StartRefused(f"{program} is not on PATH: install postgresql-client of the server's version.")
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\) (\d+)", output)
    if found is None:
        raise StartRefused(f"{path} does not print its version ({output.strip()[:100]}): install postgresql-client.")
    return int(found[1])


def _last_line(output: str) -> str:
    """Return the first line that reports an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return (wrong or lines[-1:] or ["no reason given"])[0].rstrip(".")[:400]
