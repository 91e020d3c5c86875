"""Test the local scheduler: the contract, and further features."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.schedulers.base import JobStatus, Scheduler, SchedulerError
from nodes.schedulers.choose import SchedulerSettings, open_scheduler
from nodes.schedulers.local import job_user, processes, shim, slots
from nodes.schedulers.local.machine import LocalGpu
from nodes.schedulers.local.scheduler import LocalScheduler
from tests.nodes.scheduler_contract import ENDED, SchedulerContract
from tests.waiting import until

NEVER_DRAINED = "0d0f589518c03d7d89edfb4df38b48807ae7906d"
"""The last commit whose watchers do not know that a machine may be drained."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "scheduler"
    _end_all(tmp_path / "scheduler")


@pytest.fixture
def scheduler(root: Path) -> LocalScheduler:
    return LocalScheduler(root, cpus=2, gpus=[])


def _end_all(root: Path) -> None:
    """End all jobs after a test."""
    scheduler = LocalScheduler(root, cpus=1, gpus=[])
    ids = [str(job_id) for job_id in slots.job_ids(str(root))]
    for scheduler_id in ids:
        scheduler.cancel(scheduler_id)
    until(lambda: all(status.state in ENDED for status in scheduler.status(ids).values()))


class TestLocal(SchedulerContract):
    def shim_pid(self, root: Path, scheduler_id: str) -> int:
        shim_process = slots.read_json(str(root / "jobs" / scheduler_id / "shim.json"))
        assert shim_process is not None
        assert processes.is_same(shim_process)
        return int(shim_process["pid"])

    def running(self, scheduler: Scheduler, work: Path, **options: object) -> tuple[str, int]:
        """A job that sleeps, and the pid of something that it started."""
        request = self.submission(work, "sleep 300 & echo $! > pid; wait", **options)
        scheduler_id = scheduler.submit(request)
        pid_file = Path(request.directory) / "pid"
        until(lambda: pid_file.exists() and pid_file.read_text().strip())
        self.state(scheduler, scheduler_id, "running")  # the script may be quicker than the shim's own note
        return scheduler_id, int(pid_file.read_text())

    def test_queues_first_come_first_served(self, scheduler: LocalScheduler, work: Path) -> None:
        first, _ = self.running(scheduler, work, cpus_per_node=2)
        second = scheduler.submit(self.submission(work, "sleep 300", cpus_per_node=2))
        third = scheduler.submit(self.submission(work, "sleep 300", cpus_per_node=1))
        assert until(lambda: self.status(scheduler, second).reason) == "Waits for 2 CPUs; 0 of 2 are free."
        assert until(lambda: self.status(scheduler, third).reason) == "Priority"
        node = scheduler.nodes()[0]
        assert (node.state, node.cpus, node.cpus_used) == ("allocated", 2, 2)
        assert node.plays_many
        report = {job.scheduler_id: job for job in scheduler.queue()}
        assert [report[job].state for job in (first, second, third)] == ["running", "pending", "pending"]
        assert (report[first].nodes, report[first].cpus, report[first].reason) == ((node.name,), 2, "")
        started, ends = report[first].started_at, report[first].ends_at
        assert started
        assert ends == pytest.approx(started + 60)
        assert (report[second].cpus, report[third].reason) == (2, "Priority")
        assert {job.partition for job in report.values()} == {scheduler.partitions()[0].name}
        scheduler.cancel(first)
        self.state(scheduler, second, "running")
        assert self.status(scheduler, third).state == "pending"
        scheduler.cancel(third)
        assert self.state(scheduler, third, *ENDED).state == "cancelled"
        scheduler.cancel(second)
        self.state(scheduler, second, *ENDED)
        until(lambda: scheduler.nodes()[0].state == "idle")

    def test_gpus_are_shared_out_and_split_over_nodes(self, root: Path, work: Path) -> None:
        scheduler = LocalScheduler(root, cpus=8, gpus=[LocalGpu(str(i), "H100") for i in range(4)])
        holder, _ = self.running(scheduler, work, gpus_per_node=1)
        task = "bash -c 'echo $CUDA_VISIBLE_DEVICES > gpus-$SLURM_NODEID'"
        request = self.submission(
            work, f"echo $CUDA_VISIBLE_DEVICES; srun {task}", gpus_per_node=1, min_nodes=2, max_nodes=4
        )
        status = self.state(scheduler, scheduler.submit(request), *ENDED)
        assert status.state == "completed"
        assert len(status.nodes) == 3  # as many as were free
        assert Path(request.output).read_text() == "1,2,3\n"
        folder = Path(request.directory)
        assert [(folder / f"gpus-{node}").read_text().strip() for node in range(3)] == ["1", "2", "3"]
        until(lambda: len(scheduler.queue()) == 1)  # it leaves the queue once its last word is on disk
        node = scheduler.nodes()[0]
        assert (node.gpus_used, node.gpus_allocated) == (1, (0,))
        assert [job.gpu_indices for job in scheduler.queue()] == [{node.name: (0,)}]
        assert (scheduler.nodes()[0].gpus, scheduler.nodes()[0].gpu_type) == (4, "H100")
        scheduler.cancel(holder)

    def test_the_exit_status_is_stored_though_nobody_watched(self, root: Path, work: Path) -> None:
        """Submitted by a process that ends at once; found by another that never saw it."""
        request = self.submission(work, "sleep 0.2; exit 9")
        program = (
            "import sys; from pathlib import Path; from nodes.schedulers.base import Submission;"
            "from nodes.schedulers.local.scheduler import LocalScheduler;"
            f"print(LocalScheduler(Path({str(root)!r}), cpus=2, gpus=[]).submit(Submission("
            f"key={request.key!r}, name='x', user='', script={request.script!r}, directory={request.directory!r},"
            f" output={request.output!r}, time_limit_s=60, grace_s=5)))"
        )
        repository = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True
        )
        later = LocalScheduler(root, cpus=2, gpus=[])
        status = self.state(later, done.stdout.strip(), *ENDED)
        assert (status.state, status.exit_code) == ("failed", 9)
        assert later.find(request.key) == done.stdout.strip()

    @pytest.mark.slow
    def test_kill_9_of_the_shim_is_a_lost_node_and_leaves_nothing(
        self, scheduler: LocalScheduler, root: Path, work: Path
    ) -> None:
        scheduler_id, pid = self.running(scheduler, work, cpus_per_node=2)
        waiting = scheduler.submit(self.submission(work, "true", cpus_per_node=2))
        os.kill(self.shim_pid(root, scheduler_id), signal.SIGKILL)
        status = self.state(scheduler, scheduler_id, *ENDED)
        assert status.state == "node_fail"
        assert "watcher was killed" in status.reason
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        self.state(scheduler, waiting, "completed")  # the slots of the dead are free

    def test_after_a_restart_of_the_machine(self, scheduler: LocalScheduler, root: Path, work: Path) -> None:
        """A boot id that is not this one: nothing is signalled, the job is lost."""
        scheduler_id, pid = self.running(scheduler, work)
        os.kill(self.shim_pid(root, scheduler_id), signal.SIGKILL)
        place = root / "jobs" / scheduler_id
        slots.write_json(str(place / "shim.json"), {"pid": os.getpid(), "start_time": 1, "boot_id": "another"})
        status = self.state(scheduler, scheduler_id, *ENDED)
        assert (status.state, status.reason) == ("node_fail", "The machine was rebooted.")
        os.kill(pid, signal.SIGKILL)

    def test_a_stopped_shim_is_not_taken_for_dead(self, scheduler: LocalScheduler, root: Path, work: Path) -> None:
        scheduler_id, pid = self.running(scheduler, work)
        shim_pid = self.shim_pid(root, scheduler_id)
        os.kill(shim_pid, signal.SIGSTOP)
        try:
            assert self.status(scheduler, scheduler_id).state == "running"
        finally:
            os.kill(shim_pid, signal.SIGCONT)
        scheduler.cancel(scheduler_id)
        self.state(scheduler, scheduler_id, "cancelled")
        assert not os.path.exists(f"/proc/{pid}")

    def test_a_submit_that_died_before_the_shim_is_finished(
        self, scheduler: LocalScheduler, work: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = self.submission(work, "true")
        with monkeypatch.context() as patch:
            patch.setattr(LocalScheduler, "_start", lambda self, job_id: None)
            scheduler_id = scheduler.submit(request)
        assert self.status(scheduler, scheduler_id).state == "pending"
        assert scheduler.submit(request) == scheduler_id
        self.state(scheduler, scheduler_id, "completed")

    def test_a_script_that_cannot_start_has_the_reason(self, scheduler: LocalScheduler, work: Path) -> None:
        request = self.submission(work, "true", directory=str(work / "gone"))
        status = self.state(scheduler, scheduler.submit(request), *ENDED)
        assert (status.state, status.exit_code) == ("failed", 126)
        assert "No such file" in status.reason

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("srun --overlap true", "srun: the local scheduler does not support --overlap"),
            ("scontrol hold 1", "knows only"),
        ],
    )
    def test_what_it_only_imitates_it_refuses(
        self, scheduler: LocalScheduler, work: Path, line: str, message: str
    ) -> None:
        request = self.submission(work, line)
        assert self.state(scheduler, scheduler.submit(request), *ENDED).state == "failed"
        assert message in Path(request.output).read_text()

    def test_a_planted_link_as_output_is_not_followed(self, scheduler: LocalScheduler, work: Path) -> None:
        request = self.submission(work, "echo written")
        victim = work / "victim"
        victim.write_text("mine")
        Path(request.output).symlink_to(victim)
        assert self.state(scheduler, scheduler.submit(request), *ENDED).state == "failed"
        assert victim.read_text() == "mine"

    def test_what_waited_before_a_drain_waits_on_and_starts_at_once_after(
        self, scheduler: LocalScheduler, root: Path, work: Path
    ) -> None:
        """No process of the portal informs the watchers: the one that drains may be gone and replaced."""
        here = scheduler.nodes()[0].name
        first, _ = self.running(scheduler, work, cpus_per_node=2)
        waiting = [scheduler.submit(self.submission(work, "true", cpus_per_node=2)) for _ in range(2)]
        assert until(lambda: self.status(scheduler, waiting[1]).reason) == "Priority"
        scheduler.drain(here, "fan 3 (vigil: ops).")
        for scheduler_id in waiting:
            self.waits_for(scheduler, scheduler_id, "This machine is drained: fan 3 (vigil: ops).")
        assert self.status(scheduler, first).state == "running"
        later = LocalScheduler(root, cpus=2, gpus=[])
        assert later.nodes()[0].state == "draining"
        scheduler.cancel(first)
        until(lambda: later.nodes()[0].state == "drained")
        later.drain(here, "fans 3 and 4")
        self.waits_for(later, waiting[0], "This machine is drained: fans 3 and 4.")
        node = LocalScheduler(root, cpus=2, gpus=[]).nodes()[0]
        assert (node.reason, node.reason_by) == ("fans 3 and 4", pwd.getpwuid(os.geteuid()).pw_name)
        later.undrain(here)
        for scheduler_id in waiting:
            assert self.state(scheduler, scheduler_id, *ENDED).state == "completed"
        assert until(lambda: scheduler.nodes()[0].state == "idle")
        assert scheduler.nodes()[0].reason == ""

    def waits_for(self, scheduler: Scheduler, scheduler_id: str, reason: str) -> None:
        until(lambda: self.status(scheduler, scheduler_id).reason == reason)
        assert self.status(scheduler, scheduler_id).state == "pending"

    def test_a_job_that_is_queued_again_waits_for_the_undrain(self, scheduler: LocalScheduler, work: Path) -> None:
        first = 'until [ -e go ]; do sleep 0.02; done; scontrol requeue "$SLURM_JOB_ID"; exit 75'
        request = self.submission(work, f'[ -n "$SLURM_RESTART_COUNT" ] && exit 0; {first}')
        scheduler_id = scheduler.submit(request)
        self.state(scheduler, scheduler_id, "running")
        here = scheduler.nodes()[0].name
        scheduler.drain(here, "fan 3")
        (Path(request.directory) / "go").touch()
        self.waits_for(scheduler, scheduler_id, "This machine is drained: fan 3.")
        scheduler.undrain(here)
        assert self.state(scheduler, scheduler_id, *ENDED).state == "completed"

    def test_what_cannot_be_drained(self, scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        here = scheduler.nodes()[0].name
        for refused, text in (
            (lambda: scheduler.undrain(here), f"{here} is not drained."),
            (lambda: scheduler.undrain("dgx-99"), f"The local scheduler's only node is {here}."),
            (lambda: scheduler.drain(f"{here}-0", "fan"), f"The local scheduler's only node is {here}."),
        ):
            with pytest.raises(SchedulerError) as report:
                refused()
            assert report.value.permanent
            assert str(report.value).endswith(text)

        def full(path: str, value: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(slots, "write_json", full)
        with pytest.raises(SchedulerError, match="No space left on device") as report:
            scheduler.drain(here, "fan")
        assert not report.value.permanent, "it is carried out once there is room"
        assert scheduler.nodes()[0].state == "idle"

    @pytest.mark.slow
    @pytest.mark.exhaustive
    def test_a_watcher_of_the_version_before_waits_for_the_undrain(
        self, scheduler: LocalScheduler, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was started before an upgrade, and knows nothing of drained machines."""
        archive = ["git", "archive", NEVER_DRAINED, "nodes/__init__.py", "nodes/schedulers"]
        packed = subprocess.run(archive, cwd=Path(__file__).parents[2], capture_output=True, check=False)
        assert packed.returncode == 0, "the repository's history is not here: clone it whole"
        subprocess.run(["tar", "-x", "-C", tmp_path], input=packed.stdout, check=True)
        with monkeypatch.context() as patch:
            patch.setattr(shim, "__file__", str(tmp_path / "nodes/schedulers/local/shim.py"))
            first, _ = self.running(scheduler, work, cpus_per_node=2)
            waiting = scheduler.submit(self.submission(work, "true", cpus_per_node=2))
        here = scheduler.nodes()[0].name
        self.waits_for(scheduler, waiting, "Waits for 2 CPUs; 0 of 2 are free.")
        scheduler.drain(here, "fan 3")
        self.waits_for(scheduler, waiting, "Resources")
        assert self.status(scheduler, first).state == "running"
        scheduler.cancel(first)
        until(lambda: scheduler.nodes()[0].state == "drained")
        newer = scheduler.submit(self.submission(work, "true", cpus_per_node=2))
        self.waits_for(scheduler, newer, "This machine is drained: fan 3.")
        self.waits_for(scheduler, waiting, "Resources")
        scheduler.undrain(here)
        for scheduler_id in (waiting, newer):
            assert self.state(scheduler, scheduler_id, *ENDED).state == "completed"

    def test_starts_quickly(self, scheduler: LocalScheduler, work: Path) -> None:
        """The time runs from the request to the script's first command; the limit allows for a busy machine."""
        taken = []
        for _ in range(5):
            started = time.monotonic()
            status: JobStatus = self.state(scheduler, scheduler.submit(self.submission(work, "true")), "completed")
            taken.append(time.monotonic() - started)
            assert status.exit_code == 0
        assert min(taken) < 0.5


def test_settings_in_plain_values(tmp_path: Path) -> None:
    scheduler = open_scheduler(SchedulerSettings(home=tmp_path, local_cpus="7", local_gpus="none"))
    node = scheduler.nodes()[0]
    assert (node.cpus, node.gpus, node.state) == (7, 0, "idle")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts jobs as somebody else")


@needs_root
class TestAnotherUser:
    """VIGIL_LOCAL_USER: jobs run as somebody who can read neither the portal's home nor its processes."""

    @pytest.fixture
    def work(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="vigil-work-") as name:
            os.chmod(name, 0o711)
            yield Path(name)

    @pytest.fixture
    def scheduler(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> LocalScheduler:
        monkeypatch.setattr(job_user, "check_reach", lambda *_: None)  # the checkout may lie anywhere
        return LocalScheduler(root, cpus=2, gpus=[], user="nobody")

    @pytest.mark.lengthy
    def test_runs_as_it_and_ends_with_its_shim(self, scheduler: LocalScheduler, root: Path, work: Path) -> None:
        contract = SchedulerContract()
        script = f"id -un; echo $HOME; cat {root}/capacity.json; sleep 300 & echo $! > pid; wait"
        request = contract.submission(work, script)
        for path in (Path(request.directory), Path(request.script)):
            shutil.chown(path, "nobody")
        scheduler_id = scheduler.submit(request)
        pid_file = Path(request.directory) / "pid"
        until(lambda: pid_file.exists() and pid_file.read_text().strip())
        lines = Path(request.output).read_text().splitlines()
        assert lines[0] == "nobody"
        assert "Permission denied" in lines[2]
        shim_process = slots.read_json(str(root / "jobs" / scheduler_id / "shim.json"))
        assert shim_process is not None
        os.kill(shim_process["pid"], signal.SIGKILL)
        assert contract.state(scheduler, scheduler_id, *ENDED).state == "node_fail"
        until(lambda: not os.path.exists(f"/proc/{int(pid_file.read_text())}"))

    def test_names_the_folder_that_it_may_not_enter(self, root: Path, work: Path) -> None:
        os.chmod(work, 0o700)
        scheduler = LocalScheduler(root, cpus=2, gpus=[], user="nobody")
        with pytest.raises(SchedulerError, match=f"nobody cannot enter {work}. Set VIGIL_RUNS"):
            scheduler.submit(SchedulerContract().submission(work, "true"))

    def test_an_unknown_user(self, root: Path, work: Path) -> None:
        scheduler = LocalScheduler(root, cpus=2, gpus=[], user="nobody-of-this-name")
        with pytest.raises(SchedulerError, match="no such Unix user"):
            scheduler.submit(SchedulerContract().submission(work, "true"))
