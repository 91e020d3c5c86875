"""A complete Vigil on a private Slurm: the portal runs as an unprivileged Unix user, alice and bob are two others.

It runs in the cluster's room, as on a login node: Slurm's commands are in its /usr, and it may do with them what its
user's AdminLevel allows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from nodes.schedulers.base import ENDED
from tests import steady
from tests.slurm.cluster import Cluster
from tests.slurm.people import PORTAL, People
from tests.slurm.room import as_user
from tests.stack import REPOSITORY, Stack
from tests.waiting import until

FEDERATED = tomllib.loads((REPOSITORY / "examples" / "federated.toml").read_text())
LANGUAGE = tomllib.loads((REPOSITORY / "examples" / "language.toml").read_text())
SMALL = {"layers": 1, "heads": 2, "head_width": 8, "context": 32}
_MAKE_PEOPLE = """
import json, sys
from portal.models import Membership, Project, Token, User
secrets = {}
for name, account in json.loads(sys.argv[1]).items():
    project, _ = Project.objects.get_or_create(slug=account, defaults={"slurm_account": account})
    user, _ = User.objects.get_or_create(username=name, defaults={"slurm_user": "vigil-" + name})
    Membership.objects.get_or_create(user=user, project=project)
    secrets[name] = Token.issue(user, "test")[1]
print(json.dumps(secrets))
"""


class Portal(Stack):
    """`vigil up` as the portal's Unix user. `alice` works in the project vision, `bob` in speech."""

    def __init__(self, slurm: Cluster, **environment: Any) -> None:
        self.slurm, self.people = slurm, People()
        self.runs = Path(tempfile.mkdtemp(prefix="vigil-runs-"))
        key_folder = Path(tempfile.mkdtemp(prefix="vigil-key-"))
        self.key = key_folder / "jwt.key"
        shutil.copyfile(slurm.layout.jwt_key, self.key)
        super().__init__(
            VIGIL_RUNS=str(self.runs), VIGIL_SCHEDULER="slurm", VIGIL_SLURM_URL=slurm.url,
            VIGIL_SLURM_KEY_FILE=str(self.key), VIGIL_SLURM_USER=PORTAL, VIGIL_NETWORK_INTERFACE="lo",
            SLURM_CONF=str(slurm.layout.slurm_conf), **environment,
        )  # fmt: skip
        self.environment["HOME"] = str(self.home)
        self.environment["PATH"] += ":/usr/sbin:/usr/bin:/sbin:/bin"
        portal = self.people.portal
        for path, group, mode in (
            (self.home, portal.gid, 0o700), (key_folder, portal.gid, 0o700), (self.key, portal.gid, 0o600),
            (self.runs, self.people.group, 0o2710),
        ):  # fmt: skip
            os.chown(path, portal.uid, group)
            path.chmod(mode)
        self._secrets: dict[str, str] = {}

    def command(self, *words: str) -> list[str]:
        assert self.slurm.room
        return self.slurm.room.enter(*as_user(PORTAL, sys.executable, *words), folder=self.checkout)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.runs, ignore_errors=True)
        shutil.rmtree(self.key.parent, ignore_errors=True)

    def make_people(self) -> None:
        """Create alice and bob with tokens; the portal's own user may use every project."""
        accounts = json.dumps({"alice": "vision", "bob": "speech"})
        program = f"import django; django.setup()\n{_MAKE_PEOPLE}"
        done = subprocess.run(
            self.command("-c", program, accounts), cwd=REPOSITORY, text=True, check=True, stdout=subprocess.PIPE,
            env={**self.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"},
        )  # fmt: skip
        self._secrets = json.loads(done.stdout)

    def secret_of(self, name: str) -> str:
        """Return the person's API token."""
        return self._secrets[name]

    def as_person(self, name: str) -> Person:
        headers = {"Authorization": f"Bearer {self.secret_of(name)}"}
        return Person(
            self,
            httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30, trust_env=False, verify=False),
        )


class Person:
    """A person who uses the portal over REST."""

    def __init__(self, portal: Portal, client: httpx.Client) -> None:
        self.portal, self.client = portal, client

    def submit(self, spec: Mapping[str, Any]) -> int:
        answer = self.client.post("/jobs", **steady.upload(spec))
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def job(self, job_id: int) -> dict[str, Any]:
        answer = self.client.get(f"/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def attempts(self, job_id: int) -> list[dict[str, Any]]:
        return list(self.client.get(f"/jobs/{job_id}/attempts").json()["items"])

    def wait(self, job_id: int, *states: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait until the job is in one of these states (default: until it has ended), and return it."""
        wanted = frozenset(states) or ENDED

        def poll() -> dict[str, Any] | None:
            found = self.job(job_id)
            return found if found["state"] in wanted else None

        try:
            found = until(poll, f"job {job_id} to be {' or '.join(sorted(wanted))}", seconds=timeout_s)
        except AssertionError as error:
            body = json.dumps(self.job(job_id), indent=1)
            raise AssertionError(f"{error}; it is {body}\n{self.logs_of(job_id)}") from None
        assert found is not None
        return found

    def logs_of(self, job_id: int) -> str:
        """Return what the job's launchers, ranks and shippers wrote, to see why it does not proceed."""
        logs = sorted(self.portal.runs.glob(f"*/{job_id}-*/job/attempt-*/logs/*.log"))
        return "\n".join(
            f"{log.parent.parent.name}/{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs
        )

    def wait_for_step(self, job_id: int, step: int, timeout_s: float = 90.0) -> dict[str, Any]:
        """Wait until the job has reported this step, and return it."""

        def poll() -> dict[str, Any] | None:
            found = self.job(job_id)
            assert found["state"] not in ENDED, f"it has ended: {found}"
            return found if (found["progress"]["step"] or 0) >= step else None

        found = until(poll, f"step {step} of job {job_id}", seconds=timeout_s)
        assert found is not None
        return found

    def losses(self, job_id: int) -> dict[int, float]:
        """Return the line of record of rank 0."""
        answer = self.client.get(f"/jobs/{job_id}/series", params={"name": "loss", "points": 20_000}).json()
        item = answer["items"][0]
        return dict(zip(item["step"], item["value"], strict=True))

    def checkpoints(self, job_id: int) -> list[dict[str, Any]]:
        return list(self.client.get(f"/jobs/{job_id}/checkpoints").json()["items"])

    def cancel(self, job_id: int) -> None:
        answer = self.client.post(f"/jobs/{job_id}/cancel")
        assert answer.status_code < 300, answer.text


@contextmanager
def portal_on(slurm: Cluster, **environment: str) -> Iterator[Portal]:
    """Start a portal with its people."""
    portal = Portal(slurm, **environment)
    try:
        portal.start(timeout_s=180)
        portal.make_people()
        yield portal
    finally:
        portal.close()


def script(steps: int, *, seconds: float = 0.05, every: int = 100, **resources: Any) -> dict[str, Any]:
    """Return a spec of two ranks on one node that compute nothing, for tests of everything around a job."""
    options = {"time_limit": "00:05:00", **resources}
    return steady.spec(steps, seconds=seconds, every=every, project="vision", resources=options)


def federated(*, resources: Mapping[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    """Return the federated example on two ranks of one node."""
    return {
        **FEDERATED,
        "tags": [],
        "name": "federated",
        "project": "vision",
        "resources": {"nodes": 1, "ranks_per_node": 2, "time_limit": "00:05:00", **(resources or {})},
        "run": {**FEDERATED["run"], **run},
    }


def language(*, resources: Mapping[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    """Return a smaller language example on two ranks of one node."""
    return {
        **LANGUAGE,
        "tags": [],
        "name": "small",
        "project": "vision",
        "resources": {"nodes": 1, "ranks_per_node": 2, "time_limit": "00:05:00", **(resources or {})},
        "run": {"recipe": "language", "steps": 40, "checkpoint_every": 10, "language": SMALL, **run},
    }
