"""Shared file systems: how long they take, asked by processes that nobody waits for."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nodes.agent import mounts as asking
from nodes.agent.disks import label
from nodes.agent.mounts import Mounts
from tests.nodes.agent.hanging import FileSystem, NoFuse, hanging
from tests.waiting import until


@pytest.fixture
def probes() -> Iterator[Mounts]:
    found = Mounts()
    yield found
    found.close()


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FileSystem]:
    try:
        with hanging(tmp_path / "nfs01") as system:
            yield system
    except NoFuse:
        pytest.skip("no FUSE here")


def looked(mounts: Mounts) -> list[str]:
    return [event["kind"] for event in mounts.look(time.time())]


def test_one_that_answers_is_timed(probes: Mounts, tmp_path: Path) -> None:
    assert probes.values() == {}, "one that was not asked yet does not hang"
    probes.ask((str(tmp_path),))
    until(lambda: looked(probes) or probes.values())
    (took,) = probes.values().values()
    assert took is not None
    assert 0 <= took < 2000
    assert probes.unwell() == []


def test_one_that_fails_is_slow_with_a_reason(probes: Mounts, tmp_path: Path) -> None:
    path = str(tmp_path / "gone")
    probes.ask((path,))
    (event,) = until(lambda: probes.look(time.time()))
    assert (event["kind"], event["mount"], event["problem"]) == ("mount.slow", label(path), "No such file or directory")
    assert probes.values() == {f"mount_ms:{label(path)}": None}
    assert probes.unwell() == [(path, "can't be read: No such file or directory")]


def test_one_that_hangs_and_is_well_again(
    probes: Mounts, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "SLOW_SECONDS", 0.2)
    path = str(file_system.path)
    hung = time.time()
    probes.ask((path,))
    (slow,) = until(lambda: probes.look(time.time()))
    assert (slow["kind"], slow["mount"]) == ("mount.slow", label(path))
    assert abs(slow["since"] - hung) < 1.0
    assert probes.values() == {f"mount_ms:{label(path)}": None}
    for _ in range(3):
        probes.ask((path,))
        assert looked(probes) == [], "it is told once"
    file_system.well.set()
    # The question that hung has taken too long; the next one has not.
    told: list[str] = []
    until(lambda: probes.ask((path,)) or told.extend(looked(probes)) or told)
    assert told == ["mount.well"]
    assert probes.values()[f"mount_ms:{label(path)}"] is not None


def test_one_more_is_asked_beside_one_that_hangs_and_no_third(
    probes: Mounts, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "AGAIN_SECONDS", 0.05)
    path = str(file_system.path)
    until(lambda: probes.ask((path,)) or len(probes._mounts[path].probes) == 2)
    began = time.monotonic()
    until(lambda: probes.ask((path,)) or time.monotonic() - began > 0.3)  # in which a third would come
    assert len(probes._mounts[path].probes) == 2


def test_who_asks_holds_no_lock_of_the_agents(probes: Mounts, file_system: FileSystem, tmp_path: Path) -> None:
    """It may never end, and another agent is to start beside it."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    probes.ask((str(file_system.path),))
    (probe,) = probes._mounts[str(file_system.path)].probes
    until(lambda: len(psutil.Process(probe.pid).open_files()) == 0)
    os.close(lock)
    other = os.open(tmp_path / "lock", os.O_RDWR)
    until(lambda: _is_free(other))
    os.close(other)


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_one_that_is_mounted_no_more_is_forgotten(probes: Mounts, file_system: FileSystem, tmp_path: Path) -> None:
    probes.ask((str(file_system.path),))
    (probe,) = probes._mounts[str(file_system.path)].probes
    probes.ask((str(tmp_path),))
    file_system.well.set()  # until then nothing may be able to end it
    until(lambda: not psutil.pid_exists(probe.pid) or psutil.Process(probe.pid).status() == psutil.STATUS_ZOMBIE)
    until(lambda: looked(probes) or probes.values())
    assert list(probes.values()) == [f"mount_ms:{label(str(tmp_path))}"]
    os.waitpid(probe.pid, 0)


def test_one_that_was_slow_before_this_agent_began(tmp_path: Path) -> None:
    since = time.time() - 60
    probes = Mounts(slow={label(str(tmp_path)): since, "/gone": since})
    (gone,) = probes.ask((str(tmp_path),))
    assert (gone["kind"], gone["mount"], gone["problem"]) == ("mount.well", "/gone", "it is mounted no more")
    (well,) = until(lambda: probes.look(time.time()))
    assert (well["kind"], well["mount"]) == ("mount.well", label(str(tmp_path)))
    assert 60 <= well["seconds"] < 90


def test_one_that_is_slow_and_then_mounted_no_more(probes: Mounts, tmp_path: Path) -> None:
    probes.ask((str(tmp_path / "gone"),))
    until(lambda: looked(probes))
    (well,) = probes.ask(())
    assert (well["kind"], well["problem"]) == ("mount.well", "it is mounted no more")
    assert probes.ask(()) == []
