"""Test a job's whole life on this machine: real shims, batch script and launcher, and a program without torch."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from getpass import getuser
from html import unescape
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.disk import logs, rundir
from jobs.following import follow
from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import JobSpec, SweepSpec, write_toml
from jobs.submitting import sweeps
from jobs.submitting.submit import cancel, kill, resume, submit
from nodes.models import Node, NodeOrder
from nodes.schedulers.local import slots
from nodes.schedulers.local.scheduler import LocalScheduler
from portal.models import User
from tests.jobs.pages.reading import text
from tests.lab import a_project, bearer, signed_in, sysadmin
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.django_db]

# Counts, saves every tenth step, and resumes from there; its output shows what happened.
PROGRAM = """\
import os, sys, time, pathlib, vigil_report
vigil_report.stopping()  # from here on a stop is ours to obey
here = vigil_report.resume_path()
start = int(here.read_text()) if here else 0
print("from", start, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
for step in range(start + 1, int(sys.argv[1]) + 1):
    time.sleep(float(sys.argv[2]))
    vigil_report.log(step, loss=1 / step)
    vigil_report.progress(step, int(sys.argv[1]))
    if step % 10 == 0 or vigil_report.stopping():
        state = pathlib.Path(os.environ["VIGIL_ATTEMPT_DIR"]) / ("state." + os.environ["RANK"])
        state.write_text(str(step))
        vigil_report.checkpoint(state, step)
        if vigil_report.stopping():
            print("stopped at", step, flush=True)
            sys.exit(0)
    if len(sys.argv) > 3 and step == int(sys.argv[3]):
        raise ValueError("as asked")
print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, settings: Any) -> None:
    settings.VIGIL_RUNS = tmp_path / "runs"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "scheduler"
    yield root
    scheduler = LocalScheduler(root, cpus=4, gpus=[])
    ids = [str(job_id) for job_id in slots.job_ids(str(root))]
    for scheduler_id in ids:
        scheduler.cancel(scheduler_id)
    until(lambda: all(status.ended_at for status in scheduler.status(ids).values()))
    assert not processes_of(root)


@pytest.fixture
def scheduler(root: Path) -> LocalScheduler:
    return LocalScheduler(root, cpus=4, gpus=[])


@pytest.fixture
def sam() -> User:
    a_project()
    return sysadmin()


def processes_of(root: Path) -> list[psutil.Process]:
    """Return every living process that jobs of this scheduler started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VIGIL_LOCAL_JOB", "").startswith(str(root)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_start(process: psutil.Process) -> bool:
    return any(word.endswith("start.py") for word in process.cmdline()[1:2])


def keeper_of(root: Path, node: int = 0) -> psutil.Process:
    """Return the process that represents the node of the running job: all of the job's processes end with it."""
    for process in processes_of(root):
        with suppress(psutil.Error):
            is_there = process.environ().get("SLURM_NODEID") == str(node)
            if is_there and is_start(process) and not is_start(process.parents()[0]):
                return process
    raise AssertionError(f"nothing runs on node {node}")


def packed(program: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("train.py")
        member.size = len(program)
        archive.addfile(member, io.BytesIO(program.encode()))
    return buffer.getvalue()


def start(user: User, *args: object, **resources: Any) -> Job:
    spec = JobSpec.parse(
        {
            "name": "count",
            "kind": "script",
            "resources": {"time_limit": "00:05:00", **resources},
            "restart": {"max_restarts": 2, "in_place": 1},
            "script": {"directory": ".", "args": [str(argument) for argument in args]},
        }
    )
    job, _ = submit(user, spec, spec_toml=write_toml(spec), code=packed(PROGRAM))
    return job


def newest() -> Attempt:
    return Attempt.objects.select_related("job").latest("number")


def follow_until(scheduler: LocalScheduler, condition: Callable[[], Any], *, seconds: float = PATIENCE_S) -> Any:
    def once() -> Any:
        follow.tick(scheduler)
        return condition()

    return until(once, seconds=seconds, at_most_s=0.5)  # a tick is expensive


def output_lines(attempt: Attempt, rank: int = 0) -> list[str]:
    if not logs.available(attempt):
        return []
    return [line.text for line in logs.read(attempt.job, logs.LogSelection(attempt, rank)).lines]


def printed(attempt: Attempt, text: str) -> bool:
    """Return whether rank 0 has printed a line with this prefix."""
    there = any(log.rank == 0 for log in logs.available(attempt))
    return there and any(line.startswith(text) for line in output_lines(attempt))


def test_from_submission_to_close(sam: User, scheduler: LocalScheduler) -> None:
    job = start(sam, 20, 0.01, ranks_per_node=2)
    attempt = follow_until(scheduler, lambda: Attempt.objects.exclude(closed_at=None).first())
    attempt = newest()
    assert (attempt.state, attempt.cause, attempt.exit_code) == ("completed", "completed", 0)
    assert output_lines(attempt) == ["from 0 rank 0 of 2", "done"]
    assert output_lines(attempt, 1) == ["from 0 rank 1 of 2", "done"]
    assert (attempt.step, attempt.steps) == (20, 20)
    assert list(Checkpoint.objects.values_list("step", flat=True)) == [20, 10]
    assert job.attempts.count() == 1


def test_a_job_waits_while_its_machine_is_drained(sam: User, scheduler: LocalScheduler) -> None:
    """A sysadmin drains and undrains it on the node's page; that page and the job's show it."""
    browser = signed_in(sam)

    def page(path: str) -> str:
        return unescape(re.sub("<[^>]+>", "", text(browser.get(path))))

    follow.tick(scheduler)
    name = Node.objects.get().name
    browser.post(f"/nodes/{name}/drain", {"reason": "fan <3>"})
    follow_until(scheduler, lambda: not NodeOrder.objects.open().exists())
    job = start(sam, 5, 0.01)
    follow_until(scheduler, lambda: newest().reason == "This machine is drained: fan <3> (vigil: sam).")
    follow_until(scheduler, lambda: Node.objects.get().state == "drained")
    why = f"{name} is drained: fan <3> (vigil: sam). Nothing new starts until a sysadmin undrains it."
    assert why in page(f"/jobs/{job.pk}")
    assert bearer(sam).get(f"/api/v1/jobs/{job.pk}/why").json()["text"] == why
    shown = page(f"/nodes/{name}")
    assert f"Not schedulable: drained by {getuser()} " in shown
    assert ": fan <3> (vigil: sam)." in shown
    assert f"{name} is drained: fan <3> (vigil: sam)." in page("/nodes")
    follow_until(scheduler, lambda: "This machine is drained: fan <3> (vigil: sam)." in page("/queue"))
    assert newest().state == "pending"
    browser.post(f"/nodes/{name}/undrain")
    follow_until(scheduler, lambda: newest().state == "completed")
    assert "Not schedulable" not in page(f"/nodes/{name}")


def test_two_nodes_are_two_launchers(sam: User, scheduler: LocalScheduler) -> None:
    start(sam, 10, 0.01, nodes=2, ranks_per_node=1)
    follow_until(scheduler, lambda: newest().ended_at)
    attempt = newest()
    assert attempt.state == "completed"
    assert len(attempt.nodes) == 2
    assert {log.rank for log in logs.available(attempt)} == {0, 1, -1, -2, None}
    assert output_lines(attempt, 1)[0] == "from 0 rank 1 of 2"


def test_an_elastic_job_goes_on_with_one_node_of_two(sam: User, scheduler: LocalScheduler, root: Path) -> None:
    """The leading node is lost: neither batch script nor scheduler nor Vigil restarts anything."""
    start(sam, 60, 0.05, nodes="1:2", ranks_per_node=1)
    follow_until(scheduler, lambda: newest().state == "running" and checkpoint_on_disk(newest()))
    assert len(newest().nodes) == 2
    keeper_of(root).kill()
    follow_until(scheduler, lambda: newest().ended_at)
    attempt = newest()
    assert (attempt.number, attempt.state, attempt.cause) == (1, "completed", "completed")
    assert output_lines(attempt)[0].endswith("rank 0 of 1")
    assert int(output_lines(attempt)[0].split()[1]) >= 10
    follow_until(scheduler, lambda: attempt.events.filter(kind="nodes.lost"))


def test_kill_ends_a_job_that_obeys_nothing(sam: User, scheduler: LocalScheduler, root: Path) -> None:
    """Its launcher and ranks are stopped: no signal that can be ignored would end them."""
    job = start(sam, 6000, 0.05)
    follow_until(scheduler, lambda: newest().state == "running" and printed(newest(), "from"))
    for process in processes_of(root):
        process.send_signal(signal.SIGSTOP)
    cancel(sam, job)
    follow.tick(scheduler)
    assert newest().cancel_signalled_at is not None
    kill(sam, job)
    follow_until(scheduler, lambda: newest().decided_at)
    assert (newest().state, newest().reason) == ("cancelled", "Killed by sam.")
    assert not processes_of(root)


def test_cancel_saves_and_resume_goes_on(sam: User, scheduler: LocalScheduler, root: Path) -> None:
    job = start(sam, 60, 0.05)
    follow_until(scheduler, lambda: newest().state == "running" and printed(newest(), "from"))
    cancel(sam, job)
    follow_until(scheduler, lambda: newest().decided_at)
    attempt = newest()
    assert (attempt.state, attempt.exit_code, attempt.reason) == ("cancelled", 75, "Cancelled by sam.")
    stopped_at = int(output_lines(attempt)[-1].removeprefix("stopped at "))
    assert not processes_of(root)
    job.refresh_from_db()
    second = resume(sam, job)
    assert second.resume_from is not None
    assert second.resume_from.step == stopped_at
    follow_until(scheduler, lambda: newest().ended_at)
    assert (newest().number, newest().state) == (2, "completed")
    assert output_lines(newest())[0] == f"from {stopped_at} rank 0 of 1"


def test_kill_9_of_the_shim_is_a_new_attempt_that_goes_on(sam: User, scheduler: LocalScheduler, root: Path) -> None:
    start(sam, 60, 0.05)
    follow_until(scheduler, lambda: newest().state == "running" and checkpoint_on_disk(newest()))
    shim = slots.read_json(str(root / "jobs" / newest().scheduler_id / "shim.json"))
    assert shim is not None
    os.kill(shim["pid"], signal.SIGKILL)
    follow_until(scheduler, lambda: newest().number == 2)
    first = Attempt.objects.get(number=1)
    assert (first.state, first.cause) == ("node_fail", "node_fail")
    follow_until(scheduler, lambda: newest().ended_at)
    assert newest().state == "completed"
    step = int(output_lines(newest())[0].split()[1])
    assert step >= 10
    assert step % 10 == 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_kill_9_of_the_launcher_is_a_new_incarnation(
    sam: User, scheduler: LocalScheduler, root: Path, nodes: int
) -> None:
    start(sam, 60, 0.05, nodes=nodes, ranks_per_node=1)
    follow_until(scheduler, lambda: newest().state == "running" and checkpoint_on_disk(newest()))
    (launcher,) = (child for child in keeper_of(root).children() if is_start(child))
    launcher.kill()
    follow_until(scheduler, lambda: newest().ended_at)
    assert (newest().number, newest().state) == (1, "completed")
    first, *_ = output_lines(newest())
    assert first.endswith(f"rank 0 of {nodes}")
    assert int(first.split()[1]) >= 10


def test_kill_9_of_who_keeps_the_launcher_is_a_new_attempt(sam: User, scheduler: LocalScheduler, root: Path) -> None:
    start(sam, 60, 0.05)
    follow_until(scheduler, lambda: newest().state == "running" and checkpoint_on_disk(newest()))
    keeper_of(root).kill()
    follow_until(scheduler, lambda: newest().number == 2)
    assert Attempt.objects.get(number=1).cause == "lost"
    follow_until(scheduler, lambda: newest().ended_at)
    assert newest().state == "completed"


def test_the_portal_is_away_while_it_ends(sam: User, scheduler: LocalScheduler, root: Path) -> None:
    """No worker ticks between the start and the end; another process's scheduler then finds everything."""
    start(sam, 20, 0.01)
    follow.tick(scheduler)
    place = root / "jobs" / newest().scheduler_id / "status.json"
    until(lambda: (slots.read_json(str(place)) or {}).get("state") == "completed")
    assert newest().state == "pending"
    later = LocalScheduler(root, cpus=4, gpus=[])
    follow_until(later, lambda: newest().closed_at)
    assert (newest().state, newest().step) == ("completed", 20)
    assert newest().started_at is not None


def test_an_exception_ends_it_with_its_words(sam: User, scheduler: LocalScheduler) -> None:
    start(sam, 60, 0.01, 5)
    follow_until(scheduler, lambda: newest().decided_at)
    attempt = newest()
    assert (attempt.number, attempt.state, attempt.cause) == (1, "failed", "exception")
    assert attempt.reason == "Rank 0: ValueError: as asked"


def test_the_time_limit_is_a_requeue_that_goes_on(sam: User, scheduler: LocalScheduler) -> None:
    """Warned half a minute before the limit, it saves, requests a requeue, and continues as the next attempt."""
    job = start(sam, 40, 0.2, time_limit="00:00:34")
    follow_until(scheduler, lambda: newest().number == 2)
    first = Attempt.objects.get(number=1)
    assert (first.state, first.cause) == ("requeued", "stopped")
    assert newest().scheduler_id == first.scheduler_id
    # A busy machine needs more attempts for it: each has four seconds.
    follow_until(scheduler, lambda: newest().state == "completed", seconds=2 * PATIENCE_S)
    first_steps = [
        int(output_lines(attempt)[0].split()[1]) for attempt in job.attempts.select_related("job").order_by("number")
    ]
    assert first_steps == sorted(first_steps)  # each continued where the attempt before had stopped
    assert first_steps[-1] > 0


def checkpoint_on_disk(attempt: Attempt) -> bool:
    root = rundir.path_of(attempt.job.directory)
    return any(name.startswith("step-") for name in rundir.names_under(root, "job/checkpoints"))


def test_a_python_that_lacks_a_module_names_it(sam: User, scheduler: LocalScheduler, settings: Any) -> None:
    bare = Path(settings.VIGIL_RUNS).parent / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    settings.VIGIL_JOB_ENVIRONMENT = f'python = "{bare}"'
    start(sam, 20, 0.01)
    follow_until(scheduler, lambda: newest().ended_at)
    assert (newest().state, newest().cause, newest().exit_code) == ("failed", "failed", 2)
    assert newest().reason.startswith(f"The job's Python, {bare}/bin/python, has no ")
    assert "Install torch, numpy, psutil and pydantic there, or name another interpreter" in newest().reason


def test_what_the_environment_sets_reaches_every_rank(sam: User, scheduler: LocalScheduler, settings: Any) -> None:
    settings.VIGIL_JOB_ENVIRONMENT = 'env = { MY_OWN = "$(date) two  words" }'
    program = 'import os\nprint(os.environ["MY_OWN"], flush=True)\n'
    spec = JobSpec.parse({"name": "env", "kind": "script", "script": {"directory": "."}})
    submit(sam, spec, spec_toml=write_toml(spec), code=packed(program))
    follow_until(scheduler, lambda: newest().ended_at)
    assert newest().state == "completed"
    assert output_lines(newest()) == ["$(date) two  words"]


def test_a_sweep_of_four_two_at_once(sam: User, scheduler: LocalScheduler) -> None:
    text = (
        'name = "four"\nkind = "script"\n[resources]\ntime_limit = "00:05:00"\n[script]\ndirectory = "."\n'
        "[sweep]\nat_once = 2\n[sweep.over]\n"
        '"script.args" = [["5", "0.05"], ["6", "0.05"], ["7", "0.05"], ["8", "0.05"]]\n'
    )
    sweep, _ = sweeps.submit(sam, SweepSpec.parse_toml(text), spec_toml=text, code=packed(PROGRAM))
    most = 0

    def all_over() -> bool:
        nonlocal most
        handed = Attempt.objects.filter(job__sweep=sweep, ended_at=None).exclude(scheduler_id="")
        most = max(most, handed.count())
        return sweep.is_over()

    follow_until(scheduler, all_over)
    assert (sweep.counts(), most) == ({"completed": 4}, 2)
    for job in sweep.jobs.order_by("sweep_index"):
        (attempt,) = job.attempts.all()
        assert attempt.step == 5 + (job.sweep_index or 0)
        assert (rundir.path_of(job.directory) / "job" / "code" / "train.py").read_text() == PROGRAM
