"""Test the cluster on the command line, with scripted answers of a portal."""

import json
from datetime import datetime
from types import SimpleNamespace

import httpx
import pytest

from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401
from vigil_cli.drains import one_node

READING = {"read_at": "2026-01-31T12:00:00Z", "error": "", "failing_since": None}
NODE = {
    "name": "dgx-01", "state": "mixed", "takes_jobs": True, "reason": "", "reason_by": "", "reason_at": None,
    "partitions": ["gpu", "long"], "features": ["nvlink"], "cpus": 128, "cpus_used": 4, "gpus": 8, "gpus_used": 2,
    "gpu_type": "h100", "gpus_allocated": [0, 3], "memory_mib": 2048, "memory_used_mib": 1024, "load": 3.5,
    "booted_at": None, "order": None, "reading": READING,
}  # fmt: skip
ORDER = {
    "id": 5, "node": "dgx-01", "action": "drain", "reason": "fan", "state": "asked", "outcome": "",
    "requested_by": "ops", "requested_at": "2026-01-31T12:00:00Z", "ended_at": None,
}  # fmt: skip
QUEUED = {
    "scheduler_id": "77", "job": 7, "name": "wren", "user": "mira", "state": "pending", "partition": "gpu",
    "node_count": 2, "gpus": 16, "position": 3, "waiting": 12, "starts_at": "2026-01-31T12:00:00Z", "ends_at": None,
    "why": "Priority: jobs ahead of it start first.", "nodes": [],
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(one_node, "POLL_S", 0)


def test_nodes_and_a_single_node(portal):  # noqa: F811
    portal.answers["GET", "nodes"] = {"items": [NODE], "reading": READING}
    portal.answers["GET", "nodes/dgx-01"] = NODE
    lines = vigil("nodes", "--partition", "gpu").stdout.splitlines()
    assert lines[1].split() == ["dgx-01", "mixed", "gpu,long", "4/128", "2/8", "h100", "1/2"]
    assert portal.asked[0].url.params["partition"] == "gpu"
    assert "2 of 8 h100" in vigil("node", "dgx-01").stdout
    assert json.loads(vigil("node", "dgx-01", "--json").stdout) == NODE


def test_no_node_of_a_state_is_no_empty_cluster(portal):  # noqa: F811
    portal.answers["GET", "nodes"] = {"items": [], "reading": READING}
    assert vigil("nodes", "--state", "drained").stdout.startswith("No matching nodes. `vigil nodes` lists all.\n")
    assert "has not reported any yet" in vigil("nodes").stdout


def test_a_silent_scheduler_is_reported_next_to_its_last_answer(portal):  # noqa: F811
    reading = {**READING, "error": "Slurm did not answer for 10 s."}
    portal.answers["GET", "nodes"] = {"items": [NODE], "reading": reading}
    result = vigil("nodes", "--json")
    assert json.loads(result.stdout)["items"]
    assert "the scheduler does not answer" in result.stderr
    assert "Slurm did not answer for 10 s." in result.stderr


def test_unreadable_parts_are_reported_below_the_table(portal):  # noqa: F811
    reading = {**READING, "unreadable": 1, "unreadable_text": "1 node could not be read and is left out."}
    portal.answers["GET", "nodes"] = {"items": [NODE], "reading": reading}
    assert vigil("nodes").stdout.rstrip().endswith("1 node could not be read and is left out.")


def test_drain_waits_for_the_answer_of_the_scheduler(portal):  # noqa: F811
    portal.answers["POST", "nodes/dgx-01/drain"] = ORDER
    silent = {**ORDER, "outcome": "Slurm did not answer for 10 s."}
    done = {**ORDER, "state": "done"}
    portal.answers["GET", "nodes/dgx-01/orders"] = [{"items": [order]} for order in (ORDER, silent, silent, done)]
    result = vigil("drain", "dgx-01", "--reason", "fan")
    assert json.loads(portal.asked[0].content) == {"reason": "fan", "replace": False}
    assert result.stderr.count("Retrying.") == 1
    assert "dgx-01 accepts no new jobs" in result.stderr


def test_a_script_undrains_a_node_that_somebody_else_drained_only_with_replace(portal):  # noqa: F811
    taken = problem(409, "dgx-01 is drained by root: RMA 4711. Send `replace` as true to undrain it all the same.")
    body = {**json.loads(taken.content), "type": "urn:vigil:problem:drained"}
    portal.answers["POST", "nodes/dgx-01/undrain"] = httpx.Response(409, json=body)
    result = vigil("undrain", "dgx-01", status=1)
    assert "dgx-01 is drained by root: RMA 4711. Add --replace to undrain it anyway." in result.stderr
    portal.answers["POST", "nodes/dgx-01/undrain"] = {**ORDER, "action": "undrain"}
    portal.answers["GET", "nodes/dgx-01/orders"] = {"items": [{**ORDER, "action": "undrain", "state": "done"}]}
    vigil("undrain", "dgx-01", "--replace")
    assert json.loads(portal.asked[1].content) == {"replace": True}
    vigil("undrain", "dgx-01", "--reason", "new fan")
    assert json.loads(portal.asked[3].content) == {"replace": False, "reason": "new fan"}


def test_a_person_replaces_the_drain_that_was_shown(portal, monkeypatch):  # noqa: F811
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(one_node, "sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    monkeypatch.setattr(one_node.click, "confirm", lambda *_, **__: True)
    taken = problem(409, "dgx-01 is drained by root: RMA 4711. Send `replaces` …")
    body = {**json.loads(taken.content), "type": one_node.DRAINED}
    portal.answers["POST", "nodes/dgx-01/undrain"] = [httpx.Response(409, json=body), {**ORDER, "state": "done"}]
    portal.answers["GET", "nodes/dgx-01"] = {**NODE, "reason": "RMA 4711"}
    assert "dgx-01 is drained by root: RMA 4711." in vigil("undrain", "dgx-01").stderr
    assert json.loads(portal.asked[-1].content) == {"replace": False, "replaces": "RMA 4711"}


def test_undrain_that_is_refused(portal):  # noqa: F811
    portal.answers["POST", "nodes/dgx-01/undrain"] = {**ORDER, "action": "undrain"}
    refused = {**ORDER, "action": "undrain", "state": "refused", "outcome": "Invalid node state specified"}
    portal.answers["GET", "nodes/dgx-01/orders"] = {"items": [refused]}
    result = vigil("undrain", "dgx-01", "--json", status=1)
    assert json.loads(result.stdout) == refused
    assert "Invalid node state specified" in result.stderr


def test_an_order_that_takes_longer(portal, monkeypatch):  # noqa: F811
    monkeypatch.setattr(one_node, "WAIT_S", 0)
    portal.answers["POST", "nodes/dgx-01/drain"] = ORDER
    assert "keeps trying" in vigil("drain", "dgx-01", "--reason", "fan", status=1).stderr
    portal.answers["POST", "nodes/dgx-01/drain"] = problem(403, "Only sysadmins drain nodes. Ask one of them.")
    assert "Only sysadmins" in vigil("drain", "dgx-01", "--reason", "fan", status=1).stderr
    assert "--reason" in vigil("drain", "dgx-01", status=2).stderr


def test_queue(portal):  # noqa: F811
    portal.answers["GET", "queue"] = [
        {"items": [QUEUED], "next": "c", "reading": READING},
        {"items": [{**QUEUED, "state": "running", "nodes": ["dgx-01"], "position": None}] * 2, "next": "d",
         "reading": READING},
    ]  # fmt: skip
    lines = vigil("queue", "--mine", "--state", "pending", "-n", "2").stdout.splitlines()
    assert len(lines) == 4
    assert "wren (#7)" in lines[1]
    assert "3/12" in lines[1]
    assert "Priority: jobs ahead of it start first." in lines[1]
    assert lines[2].endswith("dgx-01")
    assert lines[3].startswith("As of 2026-01-31 ")
    assert portal.asked[0].url.params["mine"] == "true"
    assert portal.asked[1].url.params["cursor"] == "c"
    portal.answers["GET", "queue"] = {"items": [], "next": None, "reading": READING}
    assert "queue is empty" in vigil("queue").stdout
    assert vigil("queue", "--user", "mira").stdout.startswith("No matching jobs.")


def test_licenses(portal):  # noqa: F811
    matlab = {"name": "matlab", "total": 1500, "used": 3, "reserved": 0, "free": 1497}
    portal.answers["GET", "licenses"] = {"items": [matlab], "reading": READING}
    lines = vigil("licenses").stdout.splitlines()
    assert lines[1].split() == ["matlab", "1,500", "3", "0", "1,497"]
    portal.answers["GET", "licenses"] = {"items": [], "reading": READING}
    assert "manages no licenses" in vigil("licenses").stdout


def test_how_old_an_answer_is(portal):  # noqa: F811
    now = datetime.now().astimezone()
    fresh = {**READING, "read_at": now.isoformat()}
    unseen = {"unsubmitted": 1, "newer": 0, "text": "1 job of yours has not been handed to the scheduler yet."}
    portal.answers["GET", "nodes"] = {"items": [NODE], "reading": fresh}
    portal.answers["GET", "queue"] = {"items": [], "next": None, "reading": fresh, "unseen": unseen}
    as_of = f"As of {now:%H:%M:%S}."
    assert vigil("nodes").stdout.splitlines()[-1] == as_of
    assert vigil("queue").stdout.splitlines() == ["The queue is empty.", as_of, unseen["text"]]
    assert vigil("queue", "--mine").stdout.splitlines()[1:] == [as_of, unseen["text"]]
    assert json.loads(vigil("queue", "--json").stdout) == {"items": [], "reading": fresh, "unseen": unseen}
    portal.answers["GET", "queue"] = {"items": [], "next": None, "reading": {**READING, "read_at": None}}
    assert "has not been polled yet" in vigil("queue").stdout
