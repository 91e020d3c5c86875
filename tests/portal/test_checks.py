"""Test what a site is warned of at its start, because it would misbehave later."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from console.site import checks


def ids(found: list[Any]) -> list[str]:
    return [message.id for message in found]


@pytest.mark.parametrize(("kind", "expected"), [("nfs4", ["vigil.E001"]), ("lustre", ["vigil.E001"]), ("ext4", [])])
def test_sqlite_is_refused_on_network_file_systems(
    monkeypatch: pytest.MonkeyPatch, settings: Any, kind: str, expected: list[str]
) -> None:
    monkeypatch.setattr(checks, "file_system", lambda path: kind)
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/home/vigil.sqlite3"}
    monkeypatch.setitem(settings.DATABASES, "default", database)
    assert ids(checks.database_is_local(None)) == expected


def test_file_system_is_that_of_the_longest_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /home rw,nosuid shared:1 - nfs4 filer:/home rw\n"
        "23 22 0:41 / /home/a\\040b rw - xfs /dev/sdb rw\n"
    )
    monkeypatch.setattr(checks.Path, "read_text", lambda self: mounts)
    assert checks.file_system(Path("/")) == "ext4"
    assert checks.file_system(Path("/home/ada/vigil")) == "nfs4"
    assert checks.file_system(Path("/home/a b/vigil")) == "xfs"
    assert checks.file_system(Path("/homework")) == "ext4"


def test_run_root_is_made_closed_to_others(settings: Any, tmp_path: Path) -> None:
    settings.VIGIL_HOME, settings.VIGIL_RUNS = tmp_path, tmp_path / "runs"
    assert "vigil.W001" not in ids(checks.runs_can_be_written(None))
    settings.VIGIL_RUNS.chmod(0o755)
    assert "vigil.W001" in ids(checks.runs_can_be_written(None))


def test_run_root_that_cannot_be_made_is_an_error(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings.VIGIL_HOME, settings.VIGIL_RUNS = tmp_path / "file", tmp_path / "file" / "runs"
    assert ids(checks.runs_can_be_written(None)) == ["vigil.E002"]


def test_a_configured_run_root_is_waited_for(settings: Any, tmp_path: Path) -> None:
    """Its file system may not be mounted yet: made in its place, it would fill a disk that no node sees."""
    settings.VIGIL_RUNS = tmp_path / "runs"
    assert ids(checks.runs_can_be_written(None)) == ["vigil.W004"]
    assert not settings.VIGIL_RUNS.exists()


def test_a_run_root_that_cannot_be_shared_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    settings.VIGIL_RUNS = tmp_path
    monkeypatch.setattr(os, "getxattr", refuse)
    assert "vigil.W005" not in ids(checks.runs_can_be_written(None))
    settings.VIGIL_LOCAL_USER = "nobody"
    assert "vigil.W005" in ids(checks.runs_can_be_written(None))
    monkeypatch.undo()
    assert "vigil.W005" not in ids(checks.runs_can_be_written(None))


def test_little_room_is_mentioned(monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> None:
    settings.VIGIL_RUNS = tmp_path
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=1024**3))
    (found,) = checks.runs_can_be_written(None)
    assert "1.07 GB" in found.msg


@pytest.mark.parametrize(
    ("url", "loopback", "expected"),
    [
        ("http://127.0.0.1:8000", True, []),
        ("https://vigil.lab.example", False, []),
        ("http://vigil.lab.example", False, ["vigil.E003"]),
    ],
)
def test_plain_http_off_loopback_is_refused(settings: Any, url: str, loopback: bool, expected: list[str]) -> None:
    settings.VIGIL_PUBLIC_URL, settings.ON_LOOPBACK = url, loopback
    assert ids(checks.people_can_sign_in(None)) == expected


@pytest.mark.parametrize(
    ("named", "there", "expected"), [(False, False, ["vigil.W003"]), (False, True, []), (True, False, [])]
)
def test_torch_is_missed_where_jobs_would_run(
    monkeypatch: pytest.MonkeyPatch, named: bool, there: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object() if there else None)
    if named:
        monkeypatch.setenv("VIGIL_JOB_PYTHON", "/another/container/bin/python")
    assert ids(checks.trainer_is_installed(None)) == expected


def test_redis_that_does_not_answer_is_named(settings: Any, tmp_path: Path) -> None:
    settings.REDIS_URL = f"unix://{tmp_path}/redis.sock"
    assert ids(checks.redis_answers(None)) == ["vigil.E004"]


def test_prepare_stops_at_an_error_before_it_touches_anything(settings: Any) -> None:
    settings.VIGIL_PUBLIC_URL, settings.ON_LOOPBACK = "http://vigil.lab.example", False
    with pytest.raises(CommandError, match="VIGIL_BEHIND_PROXY"):
        call_command("prepare")


def test_a_home_that_is_open_to_others_is_reported(settings: Any, tmp_path: Path) -> None:
    settings.VIGIL_HOME = tmp_path
    tmp_path.chmod(0o700)
    assert not checks.home_is_closed(None)
    tmp_path.chmod(0o711)
    assert ids(checks.home_is_closed(None)) == ["vigil.W007"]
    settings.VIGIL_LOCAL_USER = "nobody"
    assert ids(checks.home_is_closed(None)) == ["vigil.E007"]


def test_rows_of_restarts_that_do_not_hold_are_refused(settings: Any) -> None:
    settings.VIGIL_RESTART_ON = '"gpu.*" = "explode"'
    assert ids(checks.restart_rules_are_valid(None)) == ["vigil.E009"]
    settings.VIGIL_RESTART_ON = '"gpu.*" = "restart"'
    assert not checks.restart_rules_are_valid(None)
