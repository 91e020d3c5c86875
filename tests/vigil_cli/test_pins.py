"""Test `vigil pin` and `vigil unpin`."""

import json

import httpx

from tests.vigil_cli.commands import JOB, nowhere, portal, problem, vigil  # noqa: F401

STEP_4 = {
    "id": 1, "step": 4, "name": "step-4", "generation": 1, "state": "verified", "problem": "", "resumable": True,
    "bytes": 4_000_000, "seconds": 1.25, "parent_step": None, "consumed_samples": 48, "world_size": 1, "attempt": 1,
    "pinned": True, "created_at": "2026-01-31T12:00:00Z",
}  # fmt: skip


def test_pins_by_name_or_step(portal):  # noqa: F811
    portal.answers["PATCH", "jobs/7/checkpoints/step-4"] = STEP_4
    for name in ("step-4", "4"):
        assert vigil("pin", "7", name).output == "Pinned step-4 of #7.\n"
        assert json.loads(portal.asked[-1].content) == {"pinned": True}
    assert vigil("unpin", "7", "4").output == "Unpinned step-4 of #7.\n"
    assert json.loads(portal.asked[-1].content) == {"pinned": False}
    assert json.loads(vigil("pin", "7", "4", "--json").output) == STEP_4


def test_retries_once_and_shows_the_refusal(portal):  # noqa: F811
    detail = "Not pinned. step-4 of #7 has been pruned: there is nothing left to keep."
    portal.answers["PATCH", "jobs/7/checkpoints/step-4.g1"] = [httpx.ConnectError("away"), problem(409, detail)]
    assert vigil("pin", "7", "step-4.g1", status=1).stderr == f"vigil: {detail}\n"


def test_a_name_never_leads_elsewhere(portal):  # noqa: F811
    portal.answers["PATCH", "jobs/7/checkpoints/../../8"] = problem(404, "#7 has no checkpoint ../../8.")
    assert "has no checkpoint" in vigil("pin", "7", "../../8", status=1).stderr
    assert portal.asked[-1].url.raw_path == b"/api/v1/jobs/7/checkpoints/..%2F..%2F8"


def test_the_list_names_them_and_marks_the_pinned(portal):  # noqa: F811
    other = {**STEP_4, "step": 8, "name": "step-8.g1", "pinned": False}
    portal.answers["GET", "jobs/7/checkpoints"] = {"items": [other, STEP_4], "next": None}
    portal.answers["GET", "jobs/7"] = JOB
    head, first, second = vigil("checkpoints", "7").output.splitlines()
    assert head.split()[:3] == ["STEP", "NAME", "STATE"]
    assert first.split()[:3] == ["8", "step-8.g1", "verified"]
    assert second.split()[:4] == ["4", "step-4", "verified,", "pinned"]


def test_wrong_usage(portal):  # noqa: F811
    vigil("pin", "7", status=2)
    vigil("pin", "x", "step-4", status=2)
