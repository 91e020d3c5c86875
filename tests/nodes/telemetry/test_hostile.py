"""Test agents and exporters that lie: reports are bounded, harm nobody else, and are shown as plain text."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from nodes.models import Gpu, GpuUse, Holding, NodeEvent
from nodes.telemetry import allocations, dcgm, merge
from nodes.telemetry.wire import EVENTS_PER_BATCH
from tests.nodes.telemetry.reporting import START, UUIDS, Machine
from tests.waiting import PATIENCE_S
from vigil_core.exposition import samples

HOSTILE = "</script><script>alert(1)</script>\u202e\x00\x1b]0;x\x07"


@pytest.fixture
def machine(db: None) -> Machine:
    machine = Machine()
    assert machine.post(machine.facts(time.time())).status_code == 200
    return machine


def post_events(machine: Machine, *events: dict[str, Any]) -> None:
    parts = [list(events[at : at + EVENTS_PER_BATCH]) for at in range(0, len(events), EVENTS_PER_BATCH)]
    answer = machine.post(*({"at": int(time.time()), "n": 0, "events": part} for part in parts))
    assert answer.status_code == 200, answer.content


def test_names_of_processes_mounts_and_agents_are_words(machine: Machine, admin_client: Client) -> None:
    mount = "disk_used_mib:/<script>alert(1)</script>\u202e"
    host = {mount: 1e308, mount.replace("used", "total"): 1e308, "cpu_percent": -1e308, "uptime_s": 1e308}
    batch = machine.batch(int(time.time()) - 10, gpu_percent=3, host=host)
    process = {"gpu": UUIDS[0], "pid": 1, "user": f"<b>{HOSTILE}", "name": HOSTILE, "job": f"<i>{HOSTILE}"[:64]}
    assert (
        machine.post(batch | {"processes": [process]}, agent=f"1\u202e\x1b{HOSTILE[:30]}".replace("\0", "")).status_code
        == 200
    )
    allocations.update()
    for page in ("/nodes/dgx-01", "/cluster", "/cluster/dgx-01/0", "/agents", "/waste"):
        answer = admin_client.get(page)
        shown = answer.content.decode()
        assert answer.status_code == 200
        for bad in ("<script>alert", "\u202e", "\x1b", "\0", "Infinity"):
            assert bad not in shown, (page, bad)
    (stored, *_) = machine.agent.processes
    assert all(stored[name].isprintable() for name in ("name", "user"))
    assert stored["job"] == ""


@pytest.mark.parametrize("value", [1e12, 1e11, -1, 1e300, "9", None, True])
def test_a_time_that_cannot_be_is_none(machine: Machine, admin_client: Client, value: object) -> None:
    now = time.time()
    post_events(
        machine,
        *({"kind": kind, "at": now, "mount": "/x", "since": value, "last_at": value} for kind in ("xid", "mount.slow")),
    )
    assert admin_client.get("/nodes/dgx-01").status_code == 200
    assert NodeEvent.objects.filter(kind="mount.slow").exists()
    assert all(abs(event.at.timestamp() - now) < 1 for event in NodeEvent.objects.all())


def test_an_event_of_the_future_is_of_now(machine: Machine) -> None:
    post_events(machine, {"kind": "xid", "at": 32_000_000_000.0, "xid": 79})
    assert NodeEvent.objects.get().at.timestamp() < time.time() + 2 * 3600


def test_counts_add_up_to_what_metrics_can_report(machine: Machine, settings: Any) -> None:
    settings.VIGIL_METRICS_TOKEN = "t"
    for _ in range(2):
        post_events(
            machine,
            *(
                {"kind": "xid", "at": time.time(), "xid": 79, "text": "a" * i, "count": 2**53 - 1}
                for i in range(1, 700)
            ),
        )
    assert Client().get("/metrics", headers={"Authorization": "Bearer t"}).status_code == 200


def test_events_of_days_gone_by_do_not_fill_the_database(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodes.telemetry.events.MAX_OLD", 50)
    post_events(machine, *({"kind": "xid", "at": 86_400.0 * day, "text": "long ago"} for day in range(100)))
    post_events(machine, {"kind": "xid", "at": time.time(), "text": "now"})
    assert NodeEvent.objects.count() == 51


def test_no_more_is_used_than_is_allocated(machine: Machine) -> None:
    gpu = Gpu.objects.get(uuid=UUIDS[0])
    machine.fill(START, START + 1_100, gpu_percent=2**31 - 1)
    since = datetime.fromtimestamp(START - 10, UTC)
    Holding.objects.create(gpu=gpu, agent=machine.agent, scheduler_id="7", user="ada", source="scheduler", since=since)
    merge.merge()
    use = GpuUse.objects.get(scheduler_id="7")
    assert 0 < use.used_s <= use.held_s


def test_a_machine_that_reports_past_years_keeps_none_waiting(monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    liar, honest = Machine("liar", gpus=UUIDS[:1]), Machine("honest", gpus=UUIDS[1:2])
    assert liar.post(*(liar.batch(START - 10**8 + 2_000 * i, gpu_percent=1) for i in range(30))).status_code == 200
    honest.fill(START, START + 1_100, gpu_percent=5)
    turns: list[int] = []

    def merged(agent_id: int, _: int) -> int:
        turns.append(agent_id)
        return 0

    monkeypatch.setattr(merge, "merge_window", merged)
    merge.merge()
    assert honest.agent.pk in turns[:2]
    assert len(turns) > 30


@pytest.mark.parametrize(
    "line", ["a" * 8_190 + "{", "a" + " " * 8_000 + "{", "a{" + "}" * 8_000, "a 1" + " " * 8_000 + "x"]
)
def test_a_line_of_an_exporter_costs_little(line: str) -> None:
    before = time.process_time()
    assert not list(samples("\n".join([line] * 20)))
    assert time.process_time() - before < 0.5


@pytest.fixture
def trickle() -> Iterator[str]:
    """Return the address of an exporter with endless headers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                there, _ = server.accept()
                with there:
                    there.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                    while True:
                        there.sendall(b"x")
                        time.sleep(0.02)
            except OSError:  # the client has had enough
                return

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"


def test_an_exporter_with_endless_headers_is_dropped(trickle: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="does not end"):
        dcgm.fetch(trickle, began + 0.3)
    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"agent": "1.0"', b'"agent": "\xff"'),
        (b'"kind": "xid"', b'"kind": "xid", "text": "\xc3"'),
        (b'"host": {', b'"host": {"\x80": 1, '),
        (b'"processes": [', b'"processes": [{"gpu": "GPU-1", "pid": 1, "name": "\xe2\x82"}, '),
    ],
)
def test_bytes_that_are_no_utf_8_are_refused(machine: Machine, old: bytes, new: bytes) -> None:
    """These used to be answered with 500: msgspec raises an error that is not one of its classes."""
    batch = {"at": int(time.time()), "n": 0, "events": [{"kind": "xid", "at": 1.0}], "host": {}, "processes": []}
    whole = {"version": 1, "stream": machine.stream, "first": machine.next, "boot_id": "", "sent_at": 1.0}
    body = json.dumps({**whole, "agent": "1.0", "batches": [batch]}).encode()
    assert old in body
    answer = machine.send(body.replace(old, new))
    assert answer.status_code == 400, answer.content
    assert "UTF-8" in answer.json()["detail"]


def test_a_post_of_millions_of_empty_lists_is_refused_before_it_is_read(machine: Machine) -> None:
    assert machine.send(b'{"columns": {"a": [' + b"[]," * 5_000_000 + b"[]]}}").status_code == 413
