"""Test `vigil backup` and `vigil restore` from outside: what is restored, what is refused, what a kill leaves."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from portal.backup import files, sqlite
from tests.archives import packed, unpacked
from tests.stack import REPOSITORY, Stack
from tests.waiting import until

MakeStack = Callable[..., Stack]


@pytest.fixture(scope="module")
def made(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A backup of a home after its first start."""
    stack = Stack(prepared_home)
    path = tmp_path_factory.mktemp("backup") / "vigil.tar.gz"
    try:
        done = stack.vigil("backup", str(path))
        assert done.returncode == 0, done.stderr
        yield path
    finally:
        stack.close()


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The refusal, which is one sentence and no traceback."""
    assert done.returncode == 1, done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("vigil: ")
    return done.stderr


# Round trip


PASSWORD = "eight herons stand"


def send(web: httpx.Client, address: str, data: dict[str, str]) -> httpx.Response:
    """Fill in a form."""
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', web.get(address).text)
    assert token
    return web.post(address, data={**data, "csrfmiddlewaretoken": token[1]}).raise_for_status()


@contextmanager
def browser(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, follow_redirects=True, timeout=30, trust_env=False) as web:
        yield web


@pytest.mark.slow
def test_what_was_there_comes_back_while_others_write_on(make_stack: MakeStack, tmp_path: Path) -> None:
    stack, path = make_stack(), tmp_path / "vigil.tar.gz"
    stack.start()
    with browser(stack) as web, stack.client() as client:
        send(web, stack.sign_in_url, {})
        send(web, "/accounts/password/new/", {"new_password1": PASSWORD, "new_password2": PASSWORD})
        session, name = dict(web.cookies), client.get("/api/v1/me").json()["username"]
        secret = client.post("/api/v1/tokens", json={"name": "laptop"}).json()["secret"]
    stop, names = threading.Event(), list[str]()

    def write() -> None:
        with stack.client() as client:
            while not stop.is_set():
                name = f"token {len(names)}"
                client.post("/api/v1/tokens", json={"name": name}).raise_for_status()
                names.append(name)
                time.sleep(0.02)  # to write on, not to keep the machine from all else

    writers = threading.Thread(target=write)
    writers.start()
    try:
        until(lambda: len(names) > 20, "rows")
        before = len(names)
        done = stack.vigil("backup", str(path), "--json")
        after = len(names)
        until(lambda: len(names) > after + 5, "writes after the backup")
    finally:
        stop.set()
        writers.join()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == str(stack.home / "runs")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "stop it first" in refusal(stack.vigil("restore", str(path), "--force"))
    stack.stop()

    other = make_stack(fresh=True)
    other.port = stack.port  # the same site to the browser
    done = other.vigil("restore", str(path))
    assert done.returncode == 0, done.stderr
    assert "Run directories were in" in done.stdout
    for file in ("vigil.sqlite3", "secret_key"):
        assert (other.home / file).stat().st_mode & 0o777 == 0o600
    other.start()
    answer = httpx.get(f"{other.url}/api/v1/tokens", headers={"Authorization": f"Bearer {secret}"}, trust_env=False)
    there = {item["name"] for item in answer.raise_for_status().json()["items"]}
    assert set(names[:before]) <= there
    assert set(names[after + 5 :]).isdisjoint(there)
    with browser(other) as web:
        web.cookies.update(session)
        assert web.get("/me/").raise_for_status().url.path == "/me/", "the session is still good"
    with browser(other) as web:
        send(web, "/accounts/login/", {"login": name, "password": PASSWORD})
        assert web.get("/me/").raise_for_status().url.path == "/me/", "so is the password"


@pytest.mark.slow
def test_force_keeps_what_was_there_and_its_key(make_stack: MakeStack, made: Path) -> None:
    stack = make_stack()
    database = stack.home / "vigil.sqlite3"
    (stack.home / "secret_key").write_text("another key")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "INSERT INTO portal_project (slug, title, slurm_account, job_environment, restart_on, is_default,"
            " created_at) VALUES ('kept', '', '', '', '', 0, '2026-01-01')"
        )
        connection.commit()
    refused = refusal(stack.vigil("restore", str(made)))
    assert "is there already" in refused
    assert "--force" in refused
    done = stack.vigil("restore", str(made), "--force", "--json")
    assert done.returncode == 0, done.stderr
    old, key = json.loads(done.stdout)["previous_data"]
    assert Path(key).read_text() == "another key"
    assert (stack.home / "secret_key").read_bytes() == unpacked(made)["secret_key"]
    for path, projects in ((old, {"default", "kept"}), (database, {"default"})):
        with closing(sqlite3.connect(path)) as connection:
            assert {row[0] for row in connection.execute("SELECT slug FROM portal_project")} == projects


@pytest.mark.slow
def test_damaged_database_is_moved_aside_with_its_log_and_replaced(make_stack: MakeStack, made: Path) -> None:
    stack = make_stack()
    database = stack.home / "vigil.sqlite3"
    database.write_bytes(b"no database" * 1000)
    log = stack.home / "vigil.sqlite3-wal"
    log.write_bytes(b"left")
    done = stack.vigil("restore", str(made), "--force", "--json")
    assert done.returncode == 0, done.stderr
    old = Path(json.loads(done.stdout)["previous_data"][0])
    assert old.read_bytes() == b"no database" * 1000
    assert not log.exists()
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.15, 0.45, 0.7, 0.9, 1.1])
@pytest.mark.sampled(5)
def test_kill_leaves_the_old_or_the_new(make_stack: MakeStack, made: Path, after_s: float) -> None:
    stack = make_stack()
    database = stack.home / "vigil.sqlite3"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE portal_project SET title = 'old'")
        connection.commit()
    process = subprocess.Popen(
        [sys.executable, "-m", "vigil_cli.main", "restore", str(made), "--force"],
        cwd=REPOSITORY, env=stack.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT title FROM portal_project").fetchone()[0] in {"old", "Default"}
    again = stack.vigil("restore", str(made), "--force")
    assert again.returncode == 0, again.stderr
    assert not list(stack.home.glob(".restore-*")), "the killed one's folder is cleared"


@pytest.mark.slow
def test_database_behind_a_link_is_replaced_there(make_stack: MakeStack, made: Path, tmp_path: Path) -> None:
    stack, there = make_stack(), tmp_path / "large.sqlite3"
    link = stack.home / "vigil.sqlite3"
    link.rename(there)
    link.symlink_to(there)
    done = stack.vigil("restore", str(made), "--force", "--json")
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert Path(json.loads(done.stdout)["previous_data"][0]).parent == tmp_path


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_leaves_in_somebodys_home_is_theirs(make_stack: MakeStack, made: Path, tmp_path: Path) -> None:
    stack = make_stack(fresh=True)
    os.chown(stack.home, 12345, 12345)
    assert "no such database" in refusal(stack.vigil("backup", str(tmp_path / "none")))
    assert "cannot be read" in refusal(stack.vigil("restore", str(tmp_path / "none")))
    assert stack.vigil("restore", str(made)).returncode == 0
    owners = {path.name: path.stat().st_uid for path in stack.home.iterdir()}
    assert owners.keys() >= {"vigil.sqlite3", "secret_key", "up.lock"}
    assert set(owners.values()) == {12345}, owners


# Refused before anything changes


@pytest.mark.slow
def test_refusals_of_backup(make_stack: MakeStack, made: Path, tmp_path: Path) -> None:
    stack, path = make_stack(fresh=True), tmp_path / "vigil.tar.gz"
    assert "no such database" in refusal(stack.vigil("backup", str(path)))
    path.write_text("mine")
    assert "--force" in refusal(stack.vigil("backup", str(path)))
    assert path.read_text() == "mine"
    assert "is a folder" in refusal(stack.vigil("backup", str(tmp_path)))
    os.mkfifo(tmp_path / "pipe")
    assert "is not a plain file" in refusal(stack.vigil("backup", str(tmp_path / "pipe"), "--force"))
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "pipe").unlink()
    assert "no such folder:" in refusal(stack.vigil("backup", str(tmp_path / "no" / "file")))
    (stack.home / "vigil.sqlite3").touch()
    assert "was never started" in refusal(stack.vigil("backup", str(tmp_path / "empty")))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["vigil.tar.gz"]


@pytest.mark.slow
@pytest.mark.sampled(3)
def test_backup_of_the_code_before_is_migrated(make_stack: MakeStack, tmp_path: Path) -> None:
    stack, other, path = make_stack(), make_stack(fresh=True), tmp_path / "vigil.tar.gz"
    environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "jobs", "0007"], cwd=REPOSITORY, env=environment, check=True
    )
    done = stack.vigil("backup", str(path))
    assert done.returncode == 0, done.stderr
    done = other.vigil("restore", str(path))
    assert done.returncode == 0, done.stderr
    before, after = (sqlite.migrations(home / "vigil.sqlite3")["jobs"] for home in (stack.home, other.home))
    assert before[-1].startswith("0007")
    assert after[: len(before)] == before
    assert after[len(before)].startswith("0008")


@pytest.mark.slow
def test_backups_of_another_kind_newer_ones_and_other_files_are_refused(
    make_stack: MakeStack, made: Path, tmp_path: Path
) -> None:
    stack = make_stack(fresh=True)
    members = unpacked(made)
    manifest = json.loads(members["manifest.json"])

    def changed(**values: object) -> str:
        members["manifest.json"] = json.dumps({**manifest, **values}).encode()
        return refusal(stack.vigil("restore", str(packed(tmp_path / "changed.tar.gz", members))))

    assert "newer Vigil (99.0)" in changed(vigil="99.0")
    assert "newer Vigil" in changed(format=2)
    assert "newer Vigil" in changed(
        migrations={**manifest["migrations"], "jobs": ["0001_initial", "9999_from_the_future"]}
    )
    assert "newer Vigil" in changed(migrations={**manifest["migrations"], "hovercraft": ["0001_initial"]})
    digests = [{**member, "sha256": "0" * 64} for member in manifest["members"]]
    assert "is damaged" in changed(members=digests)
    assert "cannot be read" in refusal(stack.vigil("restore", str(tmp_path / "none")))
    assert "cannot be read" in refusal(stack.vigil("restore", str(tmp_path)))
    stack.environment["DATABASE_URL"] = "postgresql://vigil@127.0.0.1:1/vigil"
    refused = refusal(stack.vigil("restore", str(made)))
    assert "a backup of SQLite cannot be restored into PostgreSQL" in refused
    assert "unset DATABASE_URL" in refused
    assert not (stack.home / "vigil.sqlite3").exists()


# The parts


def test_copy_is_consistent_while_another_process_writes(tmp_path: Path) -> None:
    source = tmp_path / "source.sqlite3"
    with closing(sqlite3.connect(source, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("CREATE TABLE a (n INTEGER, filling BLOB)")
        writer.execute("CREATE TABLE b (n INTEGER)")
        writer.execute("BEGIN")
        writer.executemany("INSERT INTO a VALUES (?, zeroblob(3000))", [(n,) for n in range(8000)])
        writer.execute("INSERT INTO b VALUES (8000)")
        writer.execute("COMMIT")
        progress = []

        def write(done: int, total: int) -> None:
            """Between two pieces of the copy: both tables change together."""
            progress.append(done)
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("INSERT INTO a VALUES (-1, zeroblob(3000))")
            writer.execute("UPDATE b SET n = n + 1")
            writer.execute("COMMIT")

        sqlite.copy(source, tmp_path / "copy.sqlite3", write)
    assert len(progress) > 3, "in pieces, and not restarted by each write"
    assert len(progress) < 100
    with closing(sqlite3.connect(tmp_path / "copy.sqlite3")) as copied:
        assert copied.execute("SELECT count(*) FROM a").fetchone() == copied.execute("SELECT n FROM b").fetchone()
    assert not (tmp_path / "copy.sqlite3-wal").exists()


def test_log_of_a_database_that_was_removed_is_not_replayed(tmp_path: Path) -> None:
    database, log, staged = (tmp_path / name for name in ("vigil.sqlite3", "vigil.sqlite3-wal", "staged"))
    for path, table in ((database, "removed"), (staged, "restored")):
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"CREATE TABLE {table} (n INTEGER)")
            if path == database:
                left = log.read_bytes()
    database.unlink()
    log.write_bytes(left)  # as a portal that was killed leaves it
    assert sqlite.put_in_place(staged, database, "now") is None
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("restored",)]


def test_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.00000000.part").write_bytes(b"of one that was killed")
    with files.atomic_file(path, replace=False) as file:
        file.write(b"first")
        assert not path.exists()
        with files.atomic_file(path, replace=False) as quicker:
            quicker.write(b"quicker")
        assert path.read_bytes() == b"quicker"
        path.unlink()
    assert path.read_bytes() == b"first"
    with pytest.raises(ZeroDivisionError), files.atomic_file(path, replace=True):
        1 / 0  # noqa: B018
    with pytest.raises(FileExistsError), files.atomic_file(path, replace=False) as file:
        file.write(b"second")
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_long_copy_reports_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    progress_messages = files.ProgressMessages("Copying")
    progress_messages(1, 2)
    assert not capsys.readouterr().err
    progress_messages.next = time.monotonic()
    progress_messages(10**9, 2 * 10**9)
    progress_messages(2 * 10**9, 2 * 10**9)
    assert capsys.readouterr().err == "Copying: 50% of 2.00 GB\n"
