"""Test post-mortems on the command line: the cause, the cost, as Markdown, and the list."""

import json

import pytest

from tests.vigil_cli.commands import JOB, nowhere, portal, vigil  # noqa: F401

POSTMORTEM = {
    "job": 7, "attempt": 2, "cause": "data.corrupt", "evidence_cause": "program.exception", "confidence": 0.9,
    "owner": "researcher", "says": "Corrupt data: I saw it.", "advice": "Fetch it anew.",
    "follows": "It goes on.",
    "evidence": [{"file": "0.1.log", "line": 5, "text": "KeyError: 'label'", "role": "root", "cause": "x", "count": 1}],
    "runner_up": None, "ruled_out": [], "not_seen": [], "frame": "", "url": "http://portal/jobs/7/postmortem?attempt=2",
    "overruled": {"cause": "data.corrupt", "by": "mira", "at": "2026-01-31T12:00:00Z", "why": "I saw it."},
    "figures": {
        "steps_lost": 312, "resume_step": 41_000, "gpu_hours": 9.4, "money": 19.8, "currency": "€",
        "detect_seconds": 4.0, "resume_seconds": 262.0, "catch_up_seconds": None,
    },
}  # fmt: skip
ROW = {
    "job": 7, "attempt": 2, "cause": "gpu.ecc", "confidence": 0.97, "is_overruled": False, "node": "dgx-03",
    "says": "GPU memory error (ECC).", "at": "2026-01-31T12:00:00Z",
}  # fmt: skip


@pytest.fixture(autouse=True)
def answers(nowhere, portal):  # noqa: F811
    portal.answers["GET", "jobs/7/postmortem"] = POSTMORTEM
    portal.answers["GET", "jobs/7"] = JOB
    portal.answers["GET", "postmortems"] = {"items": [ROW, {**ROW, "is_overruled": True}], "next": None}


def test_shows_the_cause_and_the_cost():
    output = vigil("postmortem", "7").stdout
    assert "data.corrupt by mira: I saw it." in output
    assert "The evidence pointed to program.exception, 90% confidence" in output
    assert "Training resumed after: 4 min 22 s" in output
    assert "Caught up" not in output
    assert "Steps lost: 312, since 41,000" in output
    assert "Cost: 9.4 GPU-hours, €19.80" in output
    assert json.loads(vigil("postmortem", "7", "--json").stdout) == POSTMORTEM
    assert "Choose one of" in vigil("postmortem", "7", "--json", "--markdown", status=2).stderr


def test_shows_the_evidence_as_it_is(portal):  # noqa: F811
    portal.answers["GET", "jobs/7/postmortem"] = {
        **POSTMORTEM, "cause": "gpu.off_bus", "confidence": 0.96, "owner": "sysadmin", "overruled": None,
        "evidence": [{"file": "kernel of dgx-03", "line": 0, "text": "Xid 79", "role": "root", "cause": "gpu.off_bus"}],
    }  # fmt: skip
    output = vigil("postmortem", "7").stdout
    assert "gpu.off_bus · 96% confidence · sysadmin" in output
    assert "kernel of dgx-03\n    Xid 79" in output


def test_lists_what_went_wrong(portal):  # noqa: F811
    output = vigil("postmortems", "--owner", "sysadmin", "--node", "dgx-03", "--draft").stdout
    assert "7.2  gpu.ecc         97%  dgx-03  GPU memory error (ECC)." in output
    assert "a person" in output
    params = portal.asked[-1].url.params
    assert (params["owner"], params["node"], params["published"]) == ("sysadmin", "dgx-03", "false")
    portal.answers["GET", "postmortems"] = {"items": [], "next": None}
    assert "No incidents." in vigil("postmortems").stdout
