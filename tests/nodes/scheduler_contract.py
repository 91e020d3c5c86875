"""The contract of every scheduler: subclass it and provide a `scheduler` fixture and a `work` folder that jobs reach.

The batch scripts here are plain bash; what they leave in the folder shows what happened.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TypeVar

import pytest

from nodes.schedulers import choose
from nodes.schedulers.base import JobStatus, NodeStatus, Scheduler, SchedulerError, Submission
from tests.waiting import until

T = TypeVar("T")
_keys = itertools.count(int(time.time_ns()))
ENDED = {"completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory"}
NOT_CONSIDERED = {"", "None", "Starting"}  # of a job that waits and was not considered yet


class SchedulerContract:
    """Tests that apply to Slurm and to the local scheduler alike."""

    user = ""  # whose jobs these are
    reservation_user = ""  # the portal's own user
    patience_s = 20.0  # Slurm lets a requeued job wait
    shortest_limit_s, grace_s = 2, 1  # Slurm counts minutes
    apart = "setsid"  # how far from the batch script a process may be and is found nevertheless

    def submission(self, work: Path, script: str, **options: object) -> Submission:
        key = f"{next(_keys):x}"
        folder = work / key
        folder.mkdir()
        folder.chmod(0o777)
        batch = folder / "batch.sh"
        batch.write_text(f"#!/bin/bash\n{script}\n")
        values: dict[str, object] = {
            "key": key,
            "name": "contract",
            "user": self.user,
            "script": str(batch),
            "directory": str(folder),
            "output": str(folder / "output"),
            "time_limit_s": 60,
            "grace_s": self.grace_s,
        }
        return Submission(**{**values, **options})  # type: ignore[arg-type]

    def status(self, scheduler: Scheduler, scheduler_id: str) -> JobStatus:
        return scheduler.status([scheduler_id])[scheduler_id]

    def state(self, scheduler: Scheduler, scheduler_id: str, *wanted: str) -> JobStatus:
        """Wait for one of these states and return the status."""

        def poll() -> JobStatus | None:
            status = self.status(scheduler, scheduler_id)
            return status if status.state in wanted else None

        return until(poll, seconds=self.patience_s)

    def test_runs_and_keeps_the_exit_code(self, scheduler: Scheduler, work: Path) -> None:
        request = self.submission(work, "echo hello; pwd; exit 3")
        status = self.state(scheduler, scheduler.submit(request), *ENDED)
        assert (status.state, status.exit_code, status.key) == ("failed", 3, request.key)
        assert status.submitted_at is not None
        assert status.started_at is not None
        assert status.ended_at is not None
        assert status.submitted_at - 2 <= status.started_at <= status.ended_at
        assert status.nodes
        assert Path(request.output).read_text() == f"hello\n{request.directory}\n"

    def test_completes(self, scheduler: Scheduler, work: Path) -> None:
        status = self.state(scheduler, scheduler.submit(self.submission(work, "true")), *ENDED)
        assert (status.state, status.exit_code, status.restart_count) == ("completed", 0, 0)

    def test_finds_by_key_and_submits_a_key_once(self, scheduler: Scheduler, work: Path) -> None:
        request = self.submission(work, "echo once >> count")
        assert scheduler.find(request.key, user=self.user) is None
        scheduler_id = scheduler.submit(request)
        assert scheduler.find(request.key, user=self.user) == scheduler_id
        self.state(scheduler, scheduler_id, "completed")
        assert scheduler.find(request.key, user=self.user) == scheduler_id
        assert (Path(request.directory) / "count").read_text() == "once\n"

    def test_its_capabilities_are_found_by_its_name(self, scheduler: Scheduler) -> None:
        found = [name for name in choose.NAMES if choose.capabilities_of(name) == scheduler.capabilities]
        assert len(found) == 1, "pages decide by the name in the settings, without opening the scheduler"
        assert found[0] in type(scheduler).__module__

    def test_it_takes_arrays_only_if_it_declares_so(self, scheduler: Scheduler, work: Path) -> None:
        if not scheduler.capabilities.has_arrays:
            with pytest.raises(SchedulerError) as refused:
                scheduler.submit_array(self.submission(work, "true"), [0, 1], at_once=None)
            assert refused.value.permanent

    def test_an_unknown_id_is_missing_from_the_answer(self, scheduler: Scheduler) -> None:
        assert scheduler.status(["987654321"]) == {}
        scheduler.signal("987654321", "TERM", user=self.user)
        scheduler.cancel("987654321", user=self.user)

    def test_signals_the_batch_script(self, scheduler: Scheduler, work: Path) -> None:
        script = "trap 'echo term; exit 4' TERM; trap 'echo usr1' USR1; echo up; while :; do sleep 0.05; done"
        request = self.submission(work, script)
        scheduler_id = scheduler.submit(request)
        output = Path(request.output)
        until(lambda: output.exists() and "up" in output.read_text())
        scheduler.signal(scheduler_id, "USR1", user=self.user)
        until(lambda: "usr1" in output.read_text())
        scheduler.signal(scheduler_id, "TERM", user=self.user)
        status = self.state(scheduler, scheduler_id, *ENDED)
        assert (status.state, status.exit_code) == ("failed", 4)
        scheduler.signal(scheduler_id, "TERM", user=self.user)  # of one that has ended: no error

    def test_cancel_ends_everything(self, scheduler: Scheduler, work: Path) -> None:
        script = f"trap '' TERM; (trap '' TERM; {self.apart} sleep 300 & echo $! > pid; wait) & wait"
        request = self.submission(work, script)
        scheduler_id = scheduler.submit(request)
        pid_file = Path(request.directory) / "pid"
        until(lambda: pid_file.exists() and pid_file.read_text().strip())
        pid = int(pid_file.read_text())
        scheduler.cancel(scheduler_id, user=self.user)
        status = self.state(scheduler, scheduler_id, *ENDED)
        assert status.state == "cancelled"
        until(lambda: not os.path.exists(f"/proc/{pid}"), seconds=5)
        scheduler.cancel(scheduler_id, user=self.user)  # again: no error

    @pytest.mark.slow
    def test_time_limit_with_a_warning(self, scheduler: Scheduler, work: Path) -> None:
        """The batch script, its steps or both get the warning: whoever gets it passes it on."""
        script = "trap 'echo warned > warned' USR1; trap '' TERM; while :; do sleep 0.05; done"
        script = f'srun --ntasks-per-node=1 bash -c "{script}" & {script}'
        request = self.submission(work, script, time_limit_s=self.shortest_limit_s, grace_s=self.grace_s)
        status = self.state(scheduler, scheduler.submit(request), *ENDED)
        assert status.state == "timeout"
        assert (Path(request.directory) / "warned").exists()

    def test_requeue_keeps_the_id(self, scheduler: Scheduler, work: Path) -> None:
        script = (
            'echo "${SLURM_RESTART_COUNT:-0}" >> starts\n'
            '[ "${SLURM_RESTART_COUNT:-0}" -ge 2 ] && exit 0\n'
            'scontrol requeue "$SLURM_JOB_ID"; exit 75'
        )
        request = self.submission(work, script)
        scheduler_id = scheduler.submit(request)
        status = self.state(scheduler, scheduler_id, "completed")
        assert status.restart_count == 2
        assert (Path(request.directory) / "starts").read_text() == "0\n1\n2\n"

    def test_two_nodes_are_two_tasks(self, scheduler: Scheduler, work: Path) -> None:
        task = 'echo "$SLURM_NODEID/$SLURM_NNODES $SLURMD_NODENAME" > task-$SLURM_NODEID; exit $((SLURM_NODEID * 7))'
        request = self.submission(
            work, f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c '{task}'", min_nodes=2, max_nodes=2
        )
        status = self.state(scheduler, scheduler.submit(request), *ENDED)
        assert (status.state, status.exit_code, len(status.nodes)) == ("failed", 7, 2)
        folder = Path(request.directory)
        texts = [(folder / f"task-{node}").read_text().split() for node in range(2)]
        assert [first for first, _ in texts] == ["0/2", "1/2"]
        assert sorted({name for _, name in texts}) == sorted(status.nodes)

    def test_an_environment_from_an_allow_list(
        self, scheduler: Scheduler, work: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_KEY", "not for jobs")
        monkeypatch.setenv("DATABASE_URL", "not for jobs")
        request = self.submission(work, "env", environment={"VIGIL_SUBMISSION": "this one"})
        self.state(scheduler, scheduler.submit(request), "completed")
        found = Path(request.output).read_text()
        assert "not for jobs" not in found
        assert "VIGIL_SUBMISSION=this one\n" in found

    def test_refuses_more_than_there_is(self, scheduler: Scheduler, work: Path) -> None:
        with pytest.raises(SchedulerError) as refused:
            scheduler.submit(self.submission(work, "true", cpus_per_node=100_000))
        assert refused.value.permanent

    def test_describes_its_nodes(self, scheduler: Scheduler) -> None:
        nodes = scheduler.nodes()
        assert nodes
        assert all(node.name and node.cpus and node.memory_mib and node.state for node in nodes)

    def test_what_runs_on_a_drained_node_goes_on_and_nothing_starts(self, scheduler: Scheduler, work: Path) -> None:
        name = scheduler.nodes()[0].name
        request = self.submission(work, "until [ -e end ]; do sleep 0.05; done", required_nodes=(name,))
        running = scheduler.submit(request)
        self.state(scheduler, running, "running")
        scheduler.drain(name, "fan 3")
        try:
            until(lambda: self.node(scheduler, name).state == "draining")
            waiting = scheduler.submit(self.submission(work, "true", required_nodes=(name,)))
            until(lambda: self.status(scheduler, waiting).reason not in NOT_CONSIDERED, seconds=self.patience_s)
            assert self.status(scheduler, running).state == "running"
            (Path(request.directory) / "end").touch()
            assert self.state(scheduler, running, *ENDED).state == "completed"
            until(lambda: self.node(scheduler, name).state == "drained")
            drained = self.node(scheduler, name)
            assert (drained.reason, bool(drained.reason_by)) == ("fan 3", True)
            assert time.time() - 600 < (drained.reason_at or 0) < time.time() + 5
            assert self.status(scheduler, waiting).state == "pending"
        finally:
            scheduler.undrain(name)
        assert self.state(scheduler, waiting, *ENDED).state == "completed"
        assert self.node(scheduler, name).state not in {"drained", "draining"}
        with pytest.raises(SchedulerError):
            scheduler.drain("no-such-node", "fan 3")

    def test_only_jobs_of_the_reservation_start_in_it(self, scheduler: Scheduler, work: Path) -> None:
        name = scheduler.nodes()[0].name
        reservation = f"vigil_test_{next(_keys):x}"
        scheduler.reserve(reservation, [name], seconds=600)
        try:
            scheduler.reserve(reservation, [name], seconds=600)  # an order may be repeated
            assert reservation in {found.name for found in scheduler.reservations()}
            waiting = scheduler.submit(self.submission(work, "true", required_nodes=(name,)))
            until(lambda: self.status(scheduler, waiting).reason not in NOT_CONSIDERED, seconds=self.patience_s)
            inside = self.submission(
                work, "true", required_nodes=(name,), reservation=reservation, user=self.reservation_user
            )
            assert self.state(scheduler, scheduler.submit(inside), *ENDED).state == "completed"
            assert self.status(scheduler, waiting).state == "pending"
        finally:
            scheduler.unreserve(reservation)
        scheduler.unreserve(reservation)
        assert self.state(scheduler, waiting, *ENDED).state == "completed"
        assert reservation not in {found.name for found in scheduler.reservations()}

    def node(self, scheduler: Scheduler, name: str) -> NodeStatus:
        return next(node for node in scheduler.nodes() if node.name == name)
