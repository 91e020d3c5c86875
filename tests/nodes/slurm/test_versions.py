"""Test which version of Slurm's REST API is used: the newest sufficient one, also while Slurm is upgraded."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from nodes.schedulers.base import SchedulerError
from tests.nodes.slurm.simulated_rest import VERSIONS, SimulatedRest, load, paths
from tests.nodes.slurm.test_request import submission_of

NEWEST = VERSIONS[-1]


def named(version: str, **more: str) -> dict[str, Any]:
    """Return the answer of a slurmrestd that serves the newest recorded paths under other numbers."""
    found = paths(NEWEST).json()["paths"]
    return {path.replace(NEWEST, version): methods for path, methods in found.items()}


def serving(*versions: str) -> SimulatedRest:
    played = SimulatedRest(NEWEST)
    document = {"paths": {path: how for version in versions for path, how in named(version).items()}}
    played.answers["/openapi/v3"] = httpx.Response(200, json=document)
    return played


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        (("v0.0.38",), (0, 0, 38)),
        (("v0.0.36", "v0.0.38", "v0.0.37"), (0, 0, 38)),
        (("v0.0.40", "v0.0.41", "v0.0.42"), (0, 0, 42)),
        (("v0.0.43", "v0.0.44", "v0.0.45", "v0.0.46"), (0, 0, 45)),
        (("v0.0.42", "v0.0.100"), (0, 0, 42)),
        (("v1.0.0", "v0.9.9"), (0, 9, 9)),
    ],
)
def test_the_newest_supported_version_is_spoken(served: tuple[str, ...], chosen: tuple[int, int, int]) -> None:
    assert serving(*served).rest.version == chosen


def test_a_version_that_lacks_what_we_need_is_passed_over() -> None:
    played = serving("v0.0.42")
    document = {"paths": {**named("v0.0.42"), "/slurm/v0.0.43/jobs/": {"get": {}}}}
    played.answers["/openapi/v3"] = httpx.Response(200, json=document)
    assert played.rest.version == (0, 0, 42)


@pytest.mark.parametrize("served", [("v0.0.36", "v0.0.37"), ()])
def test_too_old_a_slurm(served: tuple[str, ...]) -> None:
    played = serving(*served) if served else SimulatedRest(NEWEST)
    played.answers.setdefault("/openapi/v3", httpx.Response(200, json={"paths": {"/other/thing": {}}}))
    with pytest.raises(
        SchedulerError, match=r"Vigil needs v0\.0\.38 or later: Slurm 22\.05\. Upgrade Slurm"
    ) as refused:
        played.slurm.nodes()
    assert refused.value.permanent
    assert ("v0.0.36, v0.0.37" if served else "no Slurm API") in str(refused.value)


UNKNOWN = "v0.0.46"


def of_unknown_version() -> SimulatedRest:
    """Return a slurmrestd that serves an untested version with the shapes of the newest supported one."""
    played = serving(UNKNOWN)
    for name in ("jobs/state", "jobs", "nodes", "partitions"):
        played.answers[f"/slurm/{UNKNOWN}/{name}"] = load(NEWEST, f"busy/slurm-{name.replace('/', '-')}")
    return played


def test_an_unknown_version_with_familiar_shapes_is_read(caplog: pytest.LogCaptureFixture) -> None:
    played = of_unknown_version()
    assert len(played.slurm.nodes()) == 8
    assert {job.name for job in played.slurm.queue()} >= {"gpus", "held"}
    assert "serves only REST v0.0.46 and later" in caplog.text


def test_an_unknown_version_is_never_requested_to_change_anything(tmp_path: Any) -> None:
    played = of_unknown_version()
    changes = (
        lambda: played.rest.submit(submission_of(tmp_path), "#!/bin/sh\n"),
        lambda: played.slurm.cancel("7"),
        lambda: played.slurm.signal("7", "TERM"),
        lambda: played.slurm.drain("dgx01", "fan"),
    )
    for change in changes:
        with pytest.raises(
            SchedulerError, match=r"newer than Vigil supports \(v0\.0\.45\): Vigil submits, cancels and changes nothing"
        ) as refused:
            change()
        assert not refused.value.permanent, "jobs wait for the upgrade"
    assert {request.method for request in played.requests} == {"GET"}


@pytest.mark.parametrize("name", ["nodes", "jobs"])
def test_an_unknown_version_of_other_shapes_is_refused(name: str) -> None:
    """It must not read as an empty cluster."""
    played = of_unknown_version()
    raws = load(NEWEST, f"busy/slurm-{name}").json()[name]
    renamed = [{f"{key}_v2": value for key, value in raw.items() if key not in ("name", "job_id")} | {
        key: raw[key] for key in ("name", "job_id") if key in raw} for raw in raws]  # fmt: skip
    for rows in (renamed, [f"{raw['name']}" for raw in raws]):
        played.answers[f"/slurm/{UNKNOWN}/{name}"] = httpx.Response(200, json={name: rows})
        with pytest.raises(SchedulerError, match=f"its {name} cannot be read"):
            played.rest.nodes() if name == "nodes" else played.rest.jobs()


def test_served_versions_are_requested_once() -> None:
    played = SimulatedRest(NEWEST)
    for _ in range(3):
        played.slurm.nodes()
    assert len(played.requests_to("/openapi/v3")) == 1


@pytest.mark.parametrize("old", [version for version in VERSIONS if version != NEWEST])
def test_an_upgrade_mid_flight(old: str) -> None:
    """The old version's paths suddenly return a plain-text 404: the served versions are requested again."""
    played = SimulatedRest(old)
    assert len(played.slurm.nodes()) == 8
    played.version = NEWEST
    assert len(played.slurm.nodes()) == 8
    assert played.rest.version == tuple(map(int, NEWEST[1:].split(".")))
    assert len(played.requests_to("/openapi/v3")) == 2


def test_a_submission_during_an_upgrade_is_worded_for_the_new_version(tmp_path: Any) -> None:
    """The old form in the new path would be taken, without the GPUs."""
    played = SimulatedRest("v0.0.38")
    played.answers["job/submit"] = _only_new
    assert played.rest.version == (0, 0, 38)
    played.version = NEWEST
    assert played.rest.submit(submission_of(tmp_path, gpus_per_node=2), "#!/bin/sh\n") == "77"
    first, second = (json.loads(request.content) for request in played.requests_to("job/submit"))
    assert (first["job"]["gres"], "script" in first) == ("gpu:2", True)
    assert (second["job"]["tres_per_node"], "script" in second) == ("gres/gpu:2", False)


def _only_new(request: httpx.Request) -> httpx.Response:
    if f"/{NEWEST}/" in request.url.path:
        return httpx.Response(200, json={"job_id": 77, "errors": []})
    return httpx.Response(404, text="Unable find requested URL.")
