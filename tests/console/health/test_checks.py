"""Test each check of the portal's health separately: its findings, and no finding when all is well."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from console.health import backup, clock, disk, heartbeats, notifier, processes, run
from console.health.finding import Finding
from console.health.heartbeats import Activity
from nodes.cluster import sync
from nodes.models import Agent, Reading
from nodes.schedulers.base import SchedulerError
from portal.backup import last
from portal.models import Heartbeat, Notice
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db
ROLES = ("web", "follow", "work", "diagnose")


@pytest.fixture(autouse=True)
def _no_report() -> Iterator[None]:
    run._latest = None
    yield
    run._latest = None


def beat(*roles: str) -> None:
    for role in roles:
        heartbeats.report(role, Activity())


def age(role: str, seconds: float) -> None:
    row = Heartbeat.objects.get(role=role)
    Heartbeat.objects.filter(role=role).update(at=row.at - timedelta(seconds=seconds))


def plain(text: str) -> str:
    """Replace non-breaking spaces by plain ones."""
    return text.replace("\u00a0", " ").replace("\u202f", " ")


def codes(found: Iterator[Finding]) -> list[str]:
    return [finding.code for finding in found]


def test_every_role_reports_and_a_silent_one_is_named() -> None:
    beat(*ROLES, "beat")
    assert codes(processes.check()) == []
    age("follow", 45)
    (finding,) = processes.check()
    assert finding.code == "worker.follow"
    assert (
        plain(finding.title) == "The follow worker has not responded for 45 s: jobs are neither started nor followed."
    )
    assert str(os.getpid()) in finding.detail
    assert str(os.getpid()) not in finding.title, "the title is public"


def test_the_task_of_a_silent_worker_is_reported() -> None:
    beat("web", "follow", "diagnose", "beat")
    heartbeats.report("work", Activity(task="jobs.tasks.verify", task_seconds=1900.0))
    age("work", 60)
    (finding,) = processes.check()
    assert "in jobs.tasks.verify for 31 min" in plain(finding.detail)


def test_beat_is_not_blamed_where_no_worker_could_take_its_ticks() -> None:
    beat(*ROLES, "beat")
    for role in ("follow", "work", "diagnose", "beat"):
        age(role, 45)
    assert codes(processes.check()) == ["worker.follow", "worker.work", "worker.diagnose"]
    beat("work")
    assert "beat" in codes(processes.check())


def test_one_silent_process_of_two_is_a_warning_and_forgotten_after_ten_minutes() -> None:
    beat(*ROLES, "beat")
    there = {"role": "web", "host": "web2", "pid": 1}
    Heartbeat.objects.create(**there, at=timezone.now() - timedelta(minutes=5))
    (finding,) = processes.check()
    assert (finding.level, finding.code) == ("warning", "process.web")
    Heartbeat.objects.filter(host="web2").update(at=timezone.now() - timedelta(minutes=11))
    assert codes(processes.check()) == []


def test_a_predecessor_that_was_killed_is_not_missed() -> None:
    beat(*ROLES, "beat")
    pid = 2**22 + 1  # beyond the largest that Linux gives
    Heartbeat.objects.filter(role="work").update(pid=pid)
    age("work", 100)
    beat("work")
    assert codes(processes.check()) == []
    assert not Heartbeat.objects.filter(pid=pid).exists()


def test_disk_nearly_full_and_full(monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> None:
    settings.VIGIL_HOME = settings.VIGIL_RUNS = tmp_path
    gib = 1024**3
    rooms = {
        "a large disk with much left": (disk.DiskSpace(50 * gib, 10_000 * gib, 9, 10), []),
        "a small one that is half empty": (disk.DiskSpace(4 * gib, 8 * gib, 9, 10), []),
        "nearly full": (disk.DiskSpace(3 * gib, 100 * gib, 9, 10), ["warning"] * 2),
        "few inodes": (disk.DiskSpace(50 * gib, 100 * gib, 5, 1000), ["warning"] * 2),
        "full": (disk.DiskSpace(gib // 10, 100 * gib, 9, 10), ["error"] * 2),
        "no inode": (disk.DiskSpace(50 * gib, 100 * gib, 0, 1000), ["error"] * 2),
        "without inodes (btrfs)": (disk.DiskSpace(50 * gib, 100 * gib, 0, 0), []),
    }
    for what, (room, levels) in rooms.items():
        monkeypatch.setattr(disk, "disk_space", lambda path, room=room: room)
        assert [f.level for f in disk.check() if f.code in {"disk.home", "disk.runs"}] == levels, what


def test_a_file_system_that_hangs_is_reported_and_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    settings.VIGIL_RUNS = tmp_path / "hangs"
    hangs, real = threading.Event(), os.statvfs
    monkeypatch.setattr(disk, "PATIENCE_S", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda path: (path == settings.VIGIL_RUNS and hangs.wait(20), real(tmp_path))[1])
    for _ in range(2):
        (finding,) = [finding for finding in disk.check() if finding.code == "disk.runs"]
        assert (finding.level, finding.title) == ("error", "VIGIL_RUNS cannot be reached.")
    assert sum(thread.name == "disk" for thread in threading.enumerate()) == 1, "no second thread waits"
    hangs.set()
    disk._Probe.running[settings.VIGIL_RUNS].join(20)
    assert [finding for finding in disk.check() if finding.title.endswith("cannot be reached.")] == []


def test_an_old_backup_and_none(settings: Any, tmp_path: Path) -> None:
    settings.VIGIL_HOME = tmp_path
    settings.VIGIL_BACKUP_HOURS = None
    assert codes(backup.check()) == [], "nobody said how often"
    settings.VIGIL_BACKUP_HOURS = 26.0
    (finding,) = backup.check()
    assert finding.title == "No backup has been made yet."
    assert finding.remedy.startswith("Make one now with `vigil backup FILE`")
    assert "printed" not in finding.remedy, "nothing has run yet"
    last.note(tmp_path, Path("/backups/vigil.tar.gz"))
    assert codes(backup.check()) == []
    (tmp_path / last.NAME).write_text(json.dumps({"at": time.time() - 30 * 3600, "file": "/backups/vigil.tar.gz"}))
    (finding,) = backup.check()
    assert plain(finding.title) == "The newest backup is 1 d 6 h old."
    assert "/backups" not in finding.title
    assert finding.remedy.endswith("what its last run printed.")


def test_clocks_of_nodes_and_machines() -> None:
    beat(*ROLES)
    assert codes(clock.check()) == []
    now = timezone.now()
    Agent.objects.create(node="dgx-01", heard_at=now, clock_offset_s=0.2)
    Agent.objects.create(node="dgx-02", heard_at=now, clock_offset_s=300.0)
    Agent.objects.create(node="dgx-03", heard_at=now - timedelta(hours=1), clock_offset_s=300.0)
    (finding,) = clock.check()
    assert plain(finding.title) == "The clock of 1 node differs from the portal's by more than a minute."
    assert plain(finding.detail) == "dgx-02 (+300 s)."
    Agent.objects.filter(node="dgx-01").update(clock_offset_s=299.0)
    (finding,) = clock.check()
    assert finding.title == "The portal's clock differs from every node's by more than a minute."
    Agent.objects.all().delete()
    Heartbeat.objects.filter(role="work").update(clock_offset_s=20.0)
    (finding,) = clock.check()
    assert finding.code == "clock.process.work"


def test_the_clock_of_slurm(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follow worker reads slurmctld's clock every five minutes; /readyz reports it."""
    monkeypatch.setattr(run, "CHECKS", {"clock": clock.check})

    def warnings() -> list[tuple[str, str]]:
        run._latest = None
        found = client.get("/readyz").json()["warnings"]
        return [(finding["code"], plain(finding["message"])) for finding in found]

    for behind_s in (None, 0.0, 4.0, -4.0):
        sync.read(ScriptedScheduler(behind_s=behind_s), Reading.Part.CLOCK)
        assert warnings() == [], behind_s
    for behind_s, apart in ((91.0, "1 min 30 s"), (-90.0, "1 min 30 s")):
        sync.read(ScriptedScheduler(behind_s=behind_s), Reading.Part.CLOCK)
        (warning,) = warnings()
        assert warning == ("clock.slurm", f"The clocks of Vigil's follow worker and of slurmctld are {apart} apart.")
    sync.read(ScriptedScheduler(broken=SchedulerError("Slurm did not answer for 10 s.")), Reading.Part.CLOCK)
    assert warnings(), "it has not been set meanwhile"
    Reading.objects.update(read_at=timezone.now() - clock.SCHEDULER_FRESH)
    assert warnings() == []


def test_what_lasts_is_notified_once_and_withdrawn() -> None:
    finding = Finding("disk", "disk.home", "warning", "The disk of VIGIL_HOME is nearly full.", "/var: 1 GB.", "Do.")
    watcher = notifier.Notifier()
    watcher.update(run.Report((finding,), time.monotonic()))
    assert not Notice.objects.exists(), "a restart takes a minute: nobody is woken for that"
    watcher.since["disk.home"] -= notifier.LASTS_S
    for _ in range(2):
        watcher.update(run.Report((finding,), time.monotonic()))
    notice = Notice.objects.get()
    assert (notice.kind, notice.audience, notice.tone) == ("portal.health", "sysadmins", "warn")
    other = notifier.Notifier()  # of a web process on a machine with a disk of its own
    other.update(run.Report((), time.monotonic()))
    assert Notice.objects.active().exists(), "it sees nothing wrong, and takes nothing back"
    successor = notifier.Notifier()
    Notice.objects.update(last_raised_at=timezone.now() - notifier.WITHDRAW_AFTER + timedelta(seconds=20))
    successor.update(run.Report((finding,), time.monotonic()))
    Notice.objects.update(last_raised_at=timezone.now() - notifier.WITHDRAW_AFTER + timedelta(seconds=20))
    other.update(run.Report((), time.monotonic()))
    assert Notice.objects.get().raised_at == notice.raised_at, "a restart of web makes no news of it"
    Notice.objects.update(last_raised_at=timezone.now() - notifier.WITHDRAW_AFTER - timedelta(seconds=1))
    other.update(run.Report((), time.monotonic()))
    assert not Notice.objects.active().exists(), "nobody sees it any more"


def test_beat_is_not_blamed_for_a_redis_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("processes", "beat", "error", "Beat."), Finding("redis", "redis", "error", "Redis.")]
    monkeypatch.setattr(run, "CHECKS", {"processes": lambda: found})
    assert [finding.code for finding in run.make().findings] == ["redis"]


def test_a_check_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise ValueError("?")

    well = Finding("redis", "redis", "error", "Redis does not answer.")
    monkeypatch.setattr(run, "CHECKS", {"disk": broken, "redis": lambda: [well]})
    assert [finding.code for finding in run.make().findings] == ["redis", "disk"], "the worst comes first"
