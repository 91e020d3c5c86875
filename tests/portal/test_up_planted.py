"""Test failures injected into a complete `vigil up`, all at once: each is diagnosed and decided within ten seconds."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import planted
from tests.endings import Ending, Endings, endings_of
from tests.file_systems import small_file_system
from tests.nvml import StandIn
from tests.planted import Planted
from tests.stack import REPOSITORY, Stack
from tests.training.federated.failing_clients import CLIENTS
from tests.training.federated.failing_clients import RECIPE as CLIENTS_RECIPE
from tests.training.federated.failing_clients import RUN as FEDERATION
from tests.training.guards.planted import PLANTED as RECIPE
from tests.training.guards.planted import sample_at
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # all of it is in the first test's time

HOST = os.uname().nodename.split(".")[0]
ROOT = os.geteuid() == 0
AT_ONCE = 12  # ranks that run at a time
# Jobs that are not decided on yet: a lab's fail one by one, and a burst of them would be measured, not the portal.
UNDECIDED = 4
PATIENCE_S = 400.0


@dataclass(frozen=True)
class Trained(Planted):
    """A job of Vigil's trainer, on a recipe with numbers that go wrong as requested."""

    goes_wrong: Mapping[str, int | str] = field(default_factory=dict)
    steps: int = 600
    ranks: int = 1  # torch takes each of them seconds to import

    def spec(self, **resources: Any) -> dict[str, Any]:
        run = {
            "recipe": "planted", "global_batch": 16, "learning_rate": 3e-3, "warmup_steps": 5, "validate_every": 0,
            "checkpoint_every": 50, "keep_checkpoints": 20, "flush_steps": 7, "steps": self.steps,
            "planted": dict(self.goes_wrong),
        }  # fmt: skip
        stored = {name: part for name, part in super().spec(**resources).items() if name != "script"}
        return {**stored, "kind": "distributed", "run": run}


@dataclass(frozen=True)
class Federated(Trained):
    """A federation with clients that fail as requested."""

    pace: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, **resources: Any) -> dict[str, Any]:
        payload = {"checkpoint_every": 1, **self.pace, "planted_clients": dict(self.goes_wrong)}
        return {**super().spec(**resources), "kind": "federated", "run": {**FEDERATION, **payload}}


ENDLESS = {
    "deaf to its time limit": Planted("deaf", *planted.TOO_LATE),
    "node lost": Planted("endless", "scheduler.node_fail", r"Restarted from the beginning as attempt 2"),
    "cancelled": planted.CANCELLED,
    "hung": Trained("hung", *planted.HUNG, rank=1, ranks=2, steps=10**6),
}
PLANTED = {
    "ended by the warning": Planted("endless", *planted.TOO_LATE),
    "exception": planted.EXCEPTION,
    **planted.ANYWHERE,
    "nan": Trained(
        "nan", "numerics.nan", r"the same would happen again.* Its folder numerics/ ",
        goes_wrong={"nan": sample_at(30, 11)},
    ),
    "diverged": Trained(
        "diverged", "numerics.divergence", r"Restarted from step \d+ with half the learning rate as attempt 2",
        goes_wrong={"worse": 300},
    ),
    "all clients failed": Federated(
        "all-clients", "federated.clients", r"^All clients failed .*happen again",
        goes_wrong={"raising": ",".join(map(str, range(CLIENTS))), "later": 1},
    ),
    "quorum lost": Federated(
        "quorum", "federated.quorum", r"^Too few clients .* Restarted from .* as attempt 2",
        goes_wrong={"raising": "5,6,7", "since": 3},
        pace={"pace": "deadline", "deadline": {"quorum": 0.75, "quantile": 1.0}},
    ),
    "some clients failed": Federated(
        "some-clients", "", r"^$", goes_wrong={"raising": "5", "since": 3, "until": 4, "nan": "2"},
    ),
}  # fmt: skip
GPU_LOST = ("gpu.off_bus", r"too few nodes are left without it\.$")
FULL_DISK = ("storage.full", r"Not restarted: the same would happen again\.")
HOST_MEMORY = ("memory.host_oom", r"Restarted from step 10 as attempt 2")
SINGLE_GPU = {"gpus_per_node": 1, "ranks_per_node": None}
# Where control groups of memory are made, and what sets their limit: by the first version, and by the second.
LIMITS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}
SHORT = {"time_limit": "00:00:36"}
OPTIONS = {"deaf to its time limit": SHORT, "ended by the warning": SHORT, "hung": {"begin": "+8s"}}


@dataclass
class Site:
    """The portal, its jobs by the name of what was planted in them, and what the stand-ins of its machine report."""

    stack: Stack
    kernel_log: Path
    folder: Path
    jobs: dict[str, int] = field(default_factory=dict)
    planted: dict[str, Planted] = field(default_factory=dict)
    endings: Endings = field(default_factory=dict)

    def submit(self, name: str, what: Planted, **resources: Any) -> None:
        request = what.spec(**resources)
        body = {"json": {"spec": request}} if isinstance(what, Trained) else planted.upload(request)
        with self.stack.client() as client:
            answer = client.post("/api/v1/jobs", **body)
        assert answer.status_code == 201, answer.text
        self.jobs[name], self.planted[name] = int(answer.json()["id"]), what

    def attempts(self, name: str) -> list[dict[str, Any]]:
        with self.stack.client() as client:
            return list(client.get(f"/api/v1/jobs/{self.jobs[name]}/attempts").json()["items"])

    def wait(self, name: str, field_name: str, number: int = 1) -> dict[str, Any]:
        """An attempt, once it has that."""

        def found() -> dict[str, Any] | None:
            return next((item for item in self.attempts(name) if item["number"] == number and item[field_name]), None)

        attempt = until(found, f"{field_name} of attempt {number} of {name}", PATIENCE_S)
        assert attempt is not None
        return attempt

    def is_decided(self, name: str) -> bool:
        return any(attempt["number"] == 1 and attempt["decided_at"] for attempt in self.attempts(name))

    def has_room(self) -> bool:
        """Return whether few enough of the planted failures still wait for a decision."""
        return sum(not self.is_decided(name) for name in self.jobs if name not in ENDLESS) < UNDECIDED

    def running(self, name: str) -> None:
        """Wait until it has done a few steps."""
        until(lambda: (self.attempts(name)[0]["step"] or 0) >= 8, f"steps of {name}", PATIENCE_S)

    def ending(self, name: str, number: int = 1) -> Ending:
        return self.endings[self.jobs[name], number]

    def run_directory(self, name: str) -> Path:
        (found,) = until(lambda: list((self.stack.home / "runs").glob(f"*/{self.jobs[name]}-*")), "its folder")
        return Path(found)


@pytest.fixture(scope="module")
def site(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Inject all failures, and wait until each attempt has ended and is decided."""
    folder = tmp_path_factory.mktemp("planted")
    gpus, log = StandIn(folder), folder / "kmsg"
    log.touch()
    stack = Stack(
        prepared_home,
        **gpus.environment,
        PYTHONPATH=with_recipe(folder),
        VIGIL_LOCAL_ENVIRONMENT="NVML_STATE,PYTHONPATH",
        VIGIL_LOCAL_CPUS=str(AT_ONCE),
        VIGIL_AGENT_KMSG=str(log),
        VIGIL_AGENT_MOUNTS="none",
    )
    created = Site(stack, log, folder)
    try:
        stack.start()
        with ExitStack() as places:
            plant(created, places)
        created.endings = endings_of(stack)
        yield created
    finally:
        stack.close()


def with_recipe(folder: Path) -> str:
    """Return a PYTHONPATH by which every Python of the portal and its jobs finds the recipes, too."""
    recipes = folder / "recipes"
    recipes.mkdir()
    (recipes / "planted.py").write_text(RECIPE)
    (recipes / "planted_clients.py").write_text(CLIENTS_RECIPE)
    text = f"import training.recipes\ntraining.recipes.__path__.append({str(recipes)!r})\n"
    (folder / "sitecustomize.py").write_text(text)
    return f"{REPOSITORY}:{folder}"


def plant(site: Site, places: ExitStack) -> None:
    for name, what in ENDLESS.items():
        site.submit(name, what, **OPTIONS.get(name, {}))
        if name == "hung":
            planted.set_patience(site.run_directory(name))
    until(lambda: "ready to diagnose" in site.stack.log("diagnose"), "what diagnoses to be there", PATIENCE_S)
    for name, what in PLANTED.items():
        until(site.has_room, f"fewer jobs, so that {name} can be planted", PATIENCE_S)
        site.submit(name, what, **OPTIONS.get(name, {}))
    site.submit("gpu lost", Planted("gpu_lost", *GPU_LOST, words=(str(site.folder / "lost"),)), **SINGLE_GPU)
    if ROOT:
        disk = places.enter_context(small_file_system(site.folder / "disk", "256k"))
        site.submit("full disk", Planted("full_disk", *FULL_DISK, words=(str(disk),)))
    site.running("node lost")
    os.kill(watcher_of(site, "node lost"), signal.SIGKILL)
    site.running("cancelled")
    with site.stack.client() as client:
        assert client.post(f"/api/v1/jobs/{site.jobs['cancelled']}/cancel").status_code == 202
    site.running("hung")
    planted.rank_of(site.run_directory("hung"), 1).send_signal(signal.SIGSTOP)
    site.running("gpu lost")
    planted.write_xid(site.kernel_log)
    (site.folder / "lost").touch()
    for name in ("killed", "killed once", "hung"):  # the kernel counts by machine whom it kills for memory
        site.wait(name, "decided_at")
    if (group := places.enter_context(small_memory())) is not None:
        site.submit("host memory", Planted("host_memory", *HOST_MEMORY, words=(str(group),)))
    for name in site.jobs:
        site.wait(name, "decided_at")
    site.wait("checkpoint", "decided_at", number=2)


def watcher_of(site: Site, name: str) -> int:
    """Return the process id of the local scheduler's watcher, which represents its node."""
    scheduler_id = site.attempts(name)[0]["scheduler_id"]
    path = site.stack.home / "local-scheduler" / "jobs" / scheduler_id / "shim.json"
    return int(json.loads(path.read_text())["pid"])


@contextmanager
def small_memory() -> Iterator[Path | None]:
    """Return a control group of 64 MiB; None where none can be created."""
    created = next((created for root, limit in LIMITS.items() if (created := _limited(root, limit))), None)
    try:
        yield created
    finally:
        if created is not None:
            until(lambda: not (created / "cgroup.procs").read_text(), "the control group to be empty")
            created.rmdir()


def _limited(root: Path, limit: str) -> Path | None:
    path = root / f"vigil-planted-{os.getpid()}"
    if not ROOT or not (root / "cgroup.procs").exists():
        return None
    with suppress(OSError):
        path.mkdir()
        try:
            (path / limit).write_text(str(64 << 20))
        except OSError:
            path.rmdir()
            raise
        return path
    return None


ALL = [*ENDLESS, *PLANTED, "gpu lost", "full disk", "host memory"]


@pytest.mark.parametrize("name", ALL)
def test_is_found_out_and_decided_on_in_time(site: Site, name: str) -> None:
    if name not in site.jobs:
        pytest.skip("it takes root, and control groups that root may make")
    site.planted[name].check(site.ending(name))


def test_a_checkpoint_that_cannot_be_read_is_gone_back_behind(site: Site) -> None:
    planted.CORRUPT.check(site.ending("checkpoint", 2))


def test_the_machine_that_lost_a_gpu_is_named(site: Site) -> None:
    (incident,) = site.ending("gpu lost").incidents
    assert incident.node == HOST


def test_a_rank_that_was_killed_once_was_started_again_in_place(site: Site) -> None:
    (attempt,) = site.attempts("killed once")
    assert (attempt["state"], attempt["incarnation"]) == ("completed", 1)


def test_a_federation_names_the_client_that_all_others_failed_like(site: Site) -> None:
    (incident,) = site.ending("all clients failed").incidents
    assert re.search(r"failed: client \d: LookupError: the disk of owner \d is gone\.$", incident.says)
    (attempt,) = site.attempts("all clients failed")
    assert "LookupError: the disk of owner" in json.dumps(attempt)


def test_a_post_mortem_shows_what_clients_dropped_out_of(site: Site) -> None:
    with site.stack.client() as client:
        payload = client.get(f"/api/v1/jobs/{site.jobs['quorum lost']}/postmortem", params={"attempt": 1}).json()
    body = json.dumps(payload)
    assert re.search(r"client 5 dropped out in round 3: LookupError: the disk of owner 5 is gone", body)
    assert "planted_clients.py" in body


def test_clients_that_fail_alone_are_named_and_the_run_completes(site: Site) -> None:
    (attempt,) = site.attempts("some clients failed")
    assert attempt["state"] == "completed"
    with site.stack.client() as client:
        payload = client.get(f"/api/v1/jobs/{site.jobs['some clients failed']}/events", params={"limit": 200}).json()
    events = {item["kind"]: item["data"] for item in payload["items"] if item["kind"].startswith("client.")}
    assert (events["client.dropped"]["step"], events["client.dropped"]["client"]) == (3, 5)
    assert "LookupError: the disk of owner 5 is gone" in events["client.dropped"]["traceback"]
    assert (events["client.quarantined"]["step"], events["client.quarantined"]["client"]) == (3, 2)
