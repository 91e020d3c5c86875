"""Test the check of a PostgreSQL server's disk: done on the same machine, reported as unchecked on another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection
from django.test import Client

from console.health import database_disk, disk, run
from console.health.database_disk import ELSEWHERE, HIDDEN

pytestmark = pytest.mark.django_db
NOT_CHECKED = "The disk of the database is not checked: its server is another machine."
postgres = pytest.mark.skipif("connection.vendor != 'postgresql'")


@pytest.fixture(autouse=True)
def _no_report() -> Iterator[None]:
    run._latest = None
    yield
    run._latest = None


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "disk_space", lambda path: disk.DiskSpace(1024**4, 1024**4, 9, 10))
    monkeypatch.setattr(connection, "vendor", "postgresql")
    monkeypatch.setattr(database_disk, "data_directory", lambda: ELSEWHERE)
    monkeypatch.setattr(run, "CHECKS", {"disk": disk.check})


def test_a_server_elsewhere_is_listed_as_unchecked_and_warns_nobody(client: Client, elsewhere: None) -> None:
    response = client.get("/readyz")
    found = response.json()
    assert found["unchecked"] == [{"check": "disk", "code": "disk.database", "message": NOT_CHECKED}]
    assert "disk.database" not in [finding["code"] for finding in found["warnings"] + found["errors"]]
    text = client.get("/readyz", headers={"Accept": "text/plain"}).content.decode()
    assert f"unchecked: {NOT_CHECKED}" in text


def test_the_command_lists_it_with_what_to_do(elsewhere: None, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("check_portal")
    printed = capsys.readouterr().out
    assert f"– {NOT_CHECKED}\n    → Watch the free space of its data directory there." in printed
    assert "✓ disk" in printed


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("/var/run/postgresql", True), ("", True), ("localhost", True), ("::1", True), ("db.lab.example", False),
     ("10.0.0.7", False)],
)  # fmt: skip
def test_which_servers_are_on_this_machine(host: str, is_local: bool) -> None:
    assert database_disk.is_local(host) is is_local


@postgres
def test_the_disk_of_a_server_on_this_machine_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = database_disk.data_directory()
    assert isinstance(folder, Path)
    assert (folder / "PG_VERSION").is_file()
    real, gib = disk.disk_space, 1024**3
    full = disk.DiskSpace(gib // 10, 100 * gib, 9, 10)
    monkeypatch.setattr(disk, "disk_space", lambda path: full if path == folder else real(path))
    (finding,) = [finding for finding in disk.check() if finding.code == "disk.database"]
    assert (finding.level, finding.title) == ("error", "The disk of the database is full.")


@postgres
def test_a_disk_that_filled_up_is_named_while_the_server_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(database_disk.data_directory(), Path)
    gib = 1024**3
    monkeypatch.setattr(disk, "disk_space", lambda path: disk.DiskSpace(gib // 10, 100 * gib, 9, 10))

    def refuse() -> None:
        raise OperationalError("could not connect: No space left on device")

    monkeypatch.setattr(connection, "ensure_connection", refuse)
    titles = [finding.title for finding in run._run("disk")]
    assert titles == [f"The disk of {name} is full." for name in ("VIGIL_HOME", "VIGIL_RUNS", "the database")]


@postgres
def test_a_user_who_may_not_see_the_folder_needs_a_grant() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE bare; SET LOCAL ROLE bare")  # both end with the test's transaction
    assert database_disk.data_directory() == HIDDEN


@postgres
def test_a_folder_that_is_not_here_is_unchecked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(database_disk, "data_directory", lambda: tmp_path / "in-a-container")
    (finding,) = [finding for finding in disk.check() if finding.code == "disk.database"]
    assert finding.level == "unchecked"
