"""The whole of Vigil on a real Slurm: jobs of two people, submitted, followed, stopped, lost and gone on with."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.portal import Person, Portal
from tests.stack import REPOSITORY

LANGUAGE = tomllib.loads((REPOSITORY / "examples" / "language.toml").read_text())
SMALL = {"layers": 1, "heads": 2, "head_width": 8, "context": 32}


@pytest.fixture(scope="session")
def portal(slurm: Cluster) -> Iterator[Portal]:
    """One portal for the whole session of a release. Jobs of one test are no concern of another's."""
    made = Portal(slurm)
    try:
        made.start()
        made.make_people()
        yield made
    finally:
        made.close()


@pytest.fixture
def alice(portal: Portal) -> Iterator[Person]:
    person = portal.as_person("alice")
    yield person
    person.client.close()


@pytest.fixture
def bob(portal: Portal) -> Iterator[Person]:
    person = portal.as_person("bob")
    yield person
    person.client.close()


def language(*, resources: Mapping[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    """The example, smaller: two ranks on one node."""
    return {
        **LANGUAGE,
        "tags": [],
        "name": "small",
        "project": "vision",
        "resources": {"nodes": 1, "ranks_per_node": 2, "time_limit": "00:05:00", **(resources or {})},
        "run": {"recipe": "language", "steps": 40, "checkpoint_every": 10, "language": SMALL, **run},
    }


def test_two_nodes_train_over_gloo_and_go_on_from_a_checkpoint(alice: Person) -> None:
    job_id = alice.submit(language(resources={"nodes": 2}))
    done = alice.wait(job_id)
    assert (done["state"], done["progress"]["step"]) == ("completed", 40)
    (first,) = alice.attempts(job_id)
    assert len(first["nodes"]) == 2
    losses = alice.losses(job_id)
    assert sorted(losses) == list(range(1, 41))

    answer = alice.client.post(f"/jobs/{job_id}/resume", json={"steps": 60})
    assert answer.status_code < 300, answer.text
    alice.wait(job_id, "pending", "running")
    done = alice.wait(job_id)
    assert (done["state"], done["progress"]["step"]) == ("completed", 60)
    assert sorted(alice.losses(job_id)) == list(range(1, 61))
    assert alice.losses(job_id)[40] == losses[40]


def test_a_run_is_its_owner_s_alone(portal: Portal, alice: Person) -> None:
    job_id = alice.submit(language(steps=10))
    alice.wait(job_id)
    (run,) = (portal.runs / "vision").glob(f"{job_id}-*")
    token = run / "portal" / "token"
    assert (run / "job" / "attempt-1").stat().st_uid == portal.people.alice.uid
    for person, may in ((portal.people.alice, True), (portal.people.bob, False)):
        command = portal.people.as_user(person.name, "head", "-c", "1", str(token))
        assert (os.spawnvp(os.P_WAIT, command[0], command) == 0) is may
        command = portal.people.as_user(person.name, "ls", str(run / "job" / "checkpoints"))
        assert (os.spawnvp(os.P_WAIT, command[0], command) == 0) is may
    assert portal.key.read_bytes() not in b"".join(path.read_bytes() for path in _files(run))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
