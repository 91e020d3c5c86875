"""Test backup and restore on PostgreSQL, in private clusters."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.postgres import postgres
from tests.stack import Stack

MakeStack = Callable[..., Stack]
pytestmark = pytest.mark.slow
PASSWORD = "not-for-ps"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(scope="module")
def prepared(cluster: str) -> str:
    """The name of a database after a first start, to copy."""
    stack = Stack(DATABASE_URL=cluster)
    try:
        stack.prepare()
    finally:
        stack.close()
    return "vigil"


@pytest.fixture
def database(cluster: str, prepared: str) -> Iterator[Callable[..., str]]:
    """Make databases and return their DATABASE_URL, with a password that the server does not require."""
    created: list[str] = []

    def make(*, empty: bool = False) -> str:
        name = f"vigil_{len(created)}"
        created.append(name)
        # Not from the one that is copied: two cannot be at it at once.
        template = "template1" if empty else prepared
        run(cluster.replace("/vigil?", "/postgres?"), f"CREATE DATABASE {name} TEMPLATE {template}")
        return cluster.replace("vigil@/vigil?", f"vigil:{PASSWORD}@/{name}?")

    yield make
    for name in created:
        run(cluster, f"DROP DATABASE {name} WITH (FORCE)")


def run(url: str, command: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(command)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


def slugs(url: str, schema: str = "public") -> set[object]:
    return {row[0] for row in run(url, f"SELECT slug FROM {schema}.portal_project")}


def add_project(url: str, slug: str) -> None:
    columns = "slug, title, slurm_account, job_environment, restart_on, is_default, created_at"
    run(url, f"INSERT INTO portal_project ({columns}) VALUES ('{slug}', '', '', '', '', false, now())")


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert PASSWORD not in done.stderr
    return done.stderr


@pytest.mark.sampled(2)
def test_round_trip_into_an_empty_and_a_full_database(
    make_stack: MakeStack, database: Callable[..., str], tmp_path: Path
) -> None:
    first, second, path = database(), database(empty=True), tmp_path / "vigil.tar.gz"
    stack = make_stack(fresh=True, DATABASE_URL=first)
    add_project(first, "heron")
    done = stack.vigil("backup", str(path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["database"] == "postgresql"

    other = make_stack(fresh=True, DATABASE_URL=second)
    assert "was never started" in refusal(other.vigil("backup", str(tmp_path / "none")))
    done = other.vigil("restore", str(path))
    assert done.returncode == 0, done.stderr
    assert slugs(second) == {"default", "heron"}
    assert (other.home / "secret_key").read_text() == (stack.home / "secret_key").read_text()
    add_project(second, "new")

    add_project(first, "late")
    assert "tables is there already" in refusal(stack.vigil("restore", str(path)))
    with psycopg.connect(first) as somebody:
        assert "1 other connection" in refusal(stack.vigil("restore", str(path), "--force"))
        somebody.rollback()
    done = stack.vigil("restore", str(path), "--force", "--json")
    assert done.returncode == 0, done.stderr
    (stored,) = json.loads(done.stdout)["previous_data"]
    schema = stored.split()[2]
    assert slugs(first) == {"default", "heron"}
    assert slugs(first, schema) == {"default", "heron", "late"}
    # The previous data is not part of the next backup.
    again = tmp_path / "again.tar.gz"
    assert stack.vigil("backup", str(again)).returncode == 0
    other.vigil("restore", str(again), "--force")
    assert not run(second, f"SELECT 1 FROM pg_namespace WHERE nspname = '{schema}'")


def test_restore_that_breaks_off_changes_nothing(
    make_stack: MakeStack, database: Callable[..., str], tmp_path: Path
) -> None:
    url, path = database(), tmp_path / "vigil.tar.gz"
    stack = make_stack(fresh=True, DATABASE_URL=url)
    assert stack.vigil("backup", str(path)).returncode == 0
    add_project(url, "late")
    (stack.home / "secret_key").write_text("of today")
    # The output of pg_restore is cut off, and its exit status is that of a failure.
    programs(stack, tmp_path, pg_restore='"$REAL" "$@" | head -c 30000; [ "$1" = --version ] || exit 3')
    refused = refusal(stack.vigil("restore", str(path), "--force"))
    assert "pg_restore failed" in refused
    assert slugs(url) == {"default", "late"}
    assert (stack.home / "secret_key").read_text() == "of today"
    assert not run(url, "SELECT 1 FROM pg_namespace WHERE nspname LIKE 'before_restore%'")


def test_password_is_on_no_command_line(make_stack: MakeStack, database: Callable[..., str], tmp_path: Path) -> None:
    url, path, commands = database(), tmp_path / "vigil.tar.gz", tmp_path / "commands"
    stack = make_stack(fresh=True, DATABASE_URL=url)
    noting = f'echo "$0 $@ PGPASSWORD=${{#PGPASSWORD}}" >>{commands}; exec "$REAL" "$@"'
    programs(stack, tmp_path, pg_dump=noting, pg_restore=noting, psql=noting)
    assert stack.vigil("backup", str(path)).returncode == 0
    done = stack.vigil("restore", str(path), "--force")
    assert done.returncode == 0, done.stderr
    text = commands.read_text()
    assert all(f"/{name} -" in text for name in ("pg_dump", "pg_restore", "psql"))
    assert f"PGPASSWORD={len(PASSWORD)}" in text
    assert PASSWORD not in text
    assert b"not-for-ps" not in path.read_bytes()


def test_programs_that_are_too_old_or_missing_are_named(
    make_stack: MakeStack, database: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "vigil.tar.gz"
    stack = make_stack(fresh=True, DATABASE_URL=database())
    assert stack.vigil("backup", str(path)).returncode == 0
    programs(
        stack, tmp_path, pg_dump='echo "pg_dump (PostgreSQL) 9.6.24"', pg_restore='echo "pg_restore (PostgreSQL) 9.6"'
    )
    refused = refusal(stack.vigil("backup", str(tmp_path / "other")))
    assert "pg_dump is version 9 and the server" in refused
    assert "postgresql-client-" in refused
    assert "pg_restore is version 9" in refusal(stack.vigil("restore", str(path), "--force"))
    stack.environment["PATH"] = str(tmp_path / "nowhere")
    assert "pg_dump is not on PATH" in refusal(stack.vigil("backup", str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_other_kind_of_database_is_refused(make_stack: MakeStack, database: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "vigil.tar.gz"
    stack = make_stack(fresh=True, DATABASE_URL=database())
    assert stack.vigil("backup", str(path)).returncode == 0
    refused = refusal(make_stack(fresh=True).vigil("restore", str(path)))
    assert "a backup of PostgreSQL cannot be restored into SQLite: set DATABASE_URL" in refused


def test_server_that_does_not_answer_is_a_sentence(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(fresh=True, DATABASE_URL=f"postgresql://vigil:{PASSWORD}@127.0.0.1:1/vigil")
    assert "does not answer" in refusal(stack.vigil("backup", str(tmp_path / "file")))


def programs(stack: Stack, folder: Path, **scripts: str) -> None:
    """Put programs of ours before PostgreSQL's; $REAL is the one that they stand for."""
    fakes = folder / "programs"
    fakes.mkdir(exist_ok=True)
    for name, script in scripts.items():
        real = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        (fakes / name).write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
        (fakes / name).chmod(0o755)
    stack.environment["PATH"] = f"{fakes}:{os.environ['PATH']}"
