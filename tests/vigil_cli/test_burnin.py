"""`vigil burnin` starts a burn-in, follows it, and exits with 1 unless every node passed."""

# ruff: noqa: F811 (fixtures that are imported)
from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401
from vigil_cli import burnin


def burn_in(**changes: Any) -> dict[str, Any]:
    node = {"node": "dgx-03", "verdict": "", "findings": [], "outcome": "", "tests": 0, "failures": 0}
    return {
        "id": 7, "state": "waiting", "detail": "Waits for jobs on dgx-03 to end.", "problem": "", "progress": None,
        "url": "http://portal/burnins/7", "nodes": [{**node, **changes.pop("node", {})}], **changes,
    }  # fmt: skip


FAILED = burn_in(
    state="ended", detail="",
    node={"verdict": "failed", "outcome": "Drained.", "findings": [
        {"text": "GPU 3: matrix products differ from those of 7 other GPUs.", "is_warning": False},
        {"text": "Copy host to GPU 2: 12.1 GB/s, peers 24.8.", "is_warning": False},
    ]},
)  # fmt: skip


def test_follows_it_to_the_verdict(portal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burnin, "POLL_S", 0)
    running = burn_in(state="running", detail="", progress=0.52, node={"failures": 1})
    portal.answers = {
        ("POST", "burnins"): burn_in(),
        ("GET", "burnins/7"): [
            burn_in(), running, *[httpx.ConnectError("refused")] * 4, httpx.Response(502), running, FAILED
        ],
    }  # fmt: skip
    result = vigil("burnin", "dgx-03", "--for", "10m", status=1)
    assert json.loads(portal.asked[0].content) == {"nodes": ["dgx-03"], "seconds": 600, "may_undrain": False}
    assert result.stderr.replace("\N{NO-BREAK SPACE}", " ").splitlines() == [
        "Burn-in 7: http://portal/burnins/7", "Waits for jobs on dgx-03 to end.", "Running tests, 50 %, 1 test failed.",
    ]  # fmt: skip
    assert "GPU 3: matrix products differ from those of 7 other GPUs." in result.stdout
    assert "dgx-03: Copy host to GPU 2: 12.1 GB/s, peers 24.8." in result.stdout


def test_requires_agreement(portal: Any) -> None:
    drained = problem(409, "dgx-03 is drained: fan 3. Send `may_undrain`: true to agree.")
    body = {**json.loads(drained.content), "type": "urn:vigil:problem:drained"}
    portal.answers = {("POST", "burnins"): httpx.Response(409, json=body)}
    assert "dgx-03 is drained: fan 3. Add --may-undrain to agree." in vigil("burnin", "dgx-03", status=1).stderr


@pytest.mark.parametrize("duration", ["10", "m", "ten", "1e3m", "-5m", "999999999m"])
def test_refuses_a_duration(portal: Any, duration: str) -> None:
    assert "is not a duration" in vigil("burnin", "dgx-03", f"--for={duration}", status=2).stderr
    assert not portal.asked


def test_refuses_more_than_a_year(portal: Any) -> None:
    assert "367d is longer than a year." in vigil("burnin", "dgx-03", "--for=367d", status=2).stderr
    assert not portal.asked


def test_without_waiting(portal: Any) -> None:
    portal.answers = {("POST", "burnins"): burn_in()}
    shown = vigil("burnin", "dgx-03", "--for", "2h", "--no-wait", "--json")
    assert json.loads(shown.stdout)["id"] == 7
    assert shown.stderr == "Burn-in 7: http://portal/burnins/7\n"
    assert json.loads(portal.asked[0].content)["seconds"] == 7_200
