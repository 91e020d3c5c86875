"""Which version of Slurm's REST API is spoken: the newest that has what is needed, also while Slurm is upgraded."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from nodes.schedulers.base import SchedulerError
from tests.nodes.slurm.playing import VERSIONS, Played, load, paths
from tests.nodes.slurm.test_request import asked

NEWEST = VERSIONS[-1]


def named(version: str, **more: str) -> dict[str, Any]:
    """What a slurmrestd would say that serves the newest recorded paths under other numbers."""
    found = paths(NEWEST).json()["paths"]
    return {path.replace(NEWEST, version): methods for path, methods in found.items()}


def serving(*versions: str) -> Played:
    played = Played(NEWEST)
    document = {"paths": {path: how for version in versions for path, how in named(version).items()}}
    played.answers["/openapi/v3"] = httpx.Response(200, json=document)
    return played


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        (("v0.0.38",), (0, 0, 38)),
        (("v0.0.36", "v0.0.38", "v0.0.37"), (0, 0, 38)),
        (("v0.0.40", "v0.0.41", "v0.0.42"), (0, 0, 42)),
        (("v0.0.42", "v0.0.100"), (0, 0, 100)),
        (("v0.0.45", "v0.1.0"), (0, 1, 0)),
        (("v1.0.0", "v0.9.9"), (1, 0, 0)),
    ],
)
def test_the_newest_version_is_spoken(served: tuple[str, ...], chosen: tuple[int, int, int]) -> None:
    assert serving(*served).rest.version == chosen


def test_a_version_that_lacks_what_we_need_is_passed_over() -> None:
    played = serving("v0.0.42")
    document = {"paths": {**named("v0.0.42"), "/slurm/v0.0.43/jobs/": {"get": {}}}}
    played.answers["/openapi/v3"] = httpx.Response(200, json=document)
    assert played.rest.version == (0, 0, 42)


@pytest.mark.parametrize("served", [("v0.0.36", "v0.0.37"), ()])
def test_too_old_a_slurm(served: tuple[str, ...]) -> None:
    played = serving(*served) if served else Played(NEWEST)
    played.answers.setdefault("/openapi/v3", httpx.Response(200, json={"paths": {"/other/thing": {}}}))
    with pytest.raises(
        SchedulerError, match=r"Vigil needs v0\.0\.38 or later: Slurm 22\.05\. Upgrade Slurm"
    ) as refused:
        played.slurm.nodes()
    assert refused.value.permanent
    assert ("v0.0.36, v0.0.37" if served else "nothing of Slurm's") in str(refused.value)


def test_a_newer_version_with_the_new_shapes_is_read() -> None:
    played = serving("v0.1.0")
    for name in ("jobs", "jobs/state", "nodes", "partitions"):
        told = load(NEWEST, f"busy/slurm-{name.replace('/', '-')}")
        played.answers[f"/slurm/v0.1.0/{name}"] = told
    assert len(played.slurm.nodes()) == 8
    assert {job.name for job in played.slurm.queue()} >= {"gpus", "held"}


def test_what_is_served_is_asked_once() -> None:
    played = Played(NEWEST)
    for _ in range(3):
        played.slurm.nodes()
    assert len(played.asked("/openapi/v3")) == 1


@pytest.mark.parametrize("old", [version for version in VERSIONS if version != NEWEST])
def test_an_upgrade_mid_flight(old: str) -> None:
    """The old version's paths are gone of a sudden, with a plain-text 404: what it serves now is asked anew."""
    played = Played(old)
    assert len(played.slurm.nodes()) == 8
    played.version = NEWEST
    assert len(played.slurm.nodes()) == 8
    assert played.rest.version == tuple(map(int, NEWEST[1:].split(".")))
    assert len(played.asked("/openapi/v3")) == 2


def test_a_submission_during_an_upgrade_is_worded_for_the_new_version(tmp_path: Any) -> None:
    """The old form in the new path would be taken, without the GPUs."""
    played = Played("v0.0.38")
    played.answers["job/submit"] = _only_new
    assert played.rest.version == (0, 0, 38)
    played.version = NEWEST
    assert played.rest.submit(asked(tmp_path, gpus_per_node=2), "#!/bin/sh\n") == "77"
    first, second = (json.loads(request.content) for request in played.asked("job/submit"))
    assert (first["job"]["gres"], "script" in first) == ("gpu:2", True)
    assert (second["job"]["tres_per_node"], "script" in second) == ("gres/gpu:2", False)


def _only_new(request: httpx.Request) -> httpx.Response:
    if f"/{NEWEST}/" in request.url.path:
        return httpx.Response(200, json={"job_id": 77, "errors": []})
    return httpx.Response(404, text="Unable find requested URL.")
