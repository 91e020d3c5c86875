"""Test shared file systems: their latency, measured by processes that nothing waits for."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nodes.agent import mounts
from nodes.agent.disks import label
from nodes.agent.mounts import MountProbes
from tests.nodes.agent.hanging import FileSystem, NoFuse, hanging
from tests.waiting import until


@pytest.fixture
def probes() -> Iterator[MountProbes]:
    found = MountProbes()
    yield found
    found.close()


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FileSystem]:
    try:
        with hanging(tmp_path / "nfs01") as system:
            yield system
    except NoFuse:
        pytest.skip("no FUSE here")


def polled_kinds(mounts: MountProbes) -> list[str]:
    return [event["kind"] for event in mounts.poll(time.time())]


def test_a_mount_that_answers_is_timed(probes: MountProbes, tmp_path: Path) -> None:
    assert probes.values() == {}, "a mount that was not probed yet does not hang"
    probes.start_probes((str(tmp_path),))
    until(lambda: polled_kinds(probes) or probes.values())
    (took,) = probes.values().values()
    assert took is not None
    assert 0 <= took < 2000
    assert probes.failing() == []


def test_a_mount_that_fails_is_slow_with_a_reason(probes: MountProbes, tmp_path: Path) -> None:
    path = str(tmp_path / "gone")
    probes.start_probes((path,))
    (event,) = until(lambda: probes.poll(time.time()))
    assert (event["kind"], event["mount"], event["problem"]) == ("mount.slow", label(path), "No such file or directory")
    assert probes.values() == {f"mount_ms:{label(path)}": None}
    assert probes.failing() == [(path, "cannot be read: No such file or directory")]


def test_a_mount_that_hangs_and_recovers(
    probes: MountProbes, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "SLOW_SECONDS", 0.2)
    path = str(file_system.path)
    hung = time.time()
    probes.start_probes((path,))
    (slow,) = until(lambda: probes.poll(time.time()))
    assert (slow["kind"], slow["mount"]) == ("mount.slow", label(path))
    assert abs(slow["since"] - hung) < 1.0
    assert probes.values() == {f"mount_ms:{label(path)}": None}
    for _ in range(3):
        probes.start_probes((path,))
        assert polled_kinds(probes) == [], "it is reported once"
    file_system.well.set()
    # The question that hung has taken too long; the next one has not.
    reports: list[str] = []
    until(lambda: probes.start_probes((path,)) or reports.extend(polled_kinds(probes)) or reports)
    assert reports == ["mount.well"]
    assert probes.values()[f"mount_ms:{label(path)}"] is not None


def test_a_hanging_probe_is_retried_with_a_second_and_no_third(
    probes: MountProbes, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "RETRY_SECONDS", 0.05)
    path = str(file_system.path)
    until(lambda: probes.start_probes((path,)) or len(probes._mounts[path].probes) == 2)
    began = time.monotonic()
    until(lambda: probes.start_probes((path,)) or time.monotonic() - began > 0.3)  # in which a third would come
    assert len(probes._mounts[path].probes) == 2


def test_a_probe_holds_no_lock_of_the_agent(probes: MountProbes, file_system: FileSystem, tmp_path: Path) -> None:
    """It may never end, and another agent must be able to start meanwhile."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    probes.start_probes((str(file_system.path),))
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


def test_a_mount_that_was_unmounted_is_forgotten(probes: MountProbes, file_system: FileSystem, tmp_path: Path) -> None:
    probes.start_probes((str(file_system.path),))
    (probe,) = probes._mounts[str(file_system.path)].probes
    probes.start_probes((str(tmp_path),))
    file_system.well.set()  # until then nothing may be able to end it
    until(lambda: not psutil.pid_exists(probe.pid) or psutil.Process(probe.pid).status() == psutil.STATUS_ZOMBIE)
    until(lambda: polled_kinds(probes) or probes.values())
    assert list(probes.values()) == [f"mount_ms:{label(str(tmp_path))}"]
    os.waitpid(probe.pid, 0)


def test_a_mount_that_was_slow_before_this_agent_began(tmp_path: Path) -> None:
    since = time.time() - 60
    probes = MountProbes(slow={label(str(tmp_path)): since, "/gone": since})
    (gone,) = probes.start_probes((str(tmp_path),))
    assert (gone["kind"], gone["mount"], gone["problem"]) == ("mount.well", "/gone", "no longer mounted")
    (well,) = until(lambda: probes.poll(time.time()))
    assert (well["kind"], well["mount"]) == ("mount.well", label(str(tmp_path)))
    assert 60 <= well["seconds"] < 90


def test_a_mount_that_is_slow_and_then_unmounted(probes: MountProbes, tmp_path: Path) -> None:
    probes.start_probes((str(tmp_path / "gone"),))
    until(lambda: polled_kinds(probes))
    (well,) = probes.start_probes(())
    assert (well["kind"], well["problem"]) == ("mount.well", "no longer mounted")
    assert probes.start_probes(()) == []
