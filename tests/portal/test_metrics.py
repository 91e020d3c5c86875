"""Test /metrics as a scraper reads it: access, content, silent sources, and Vigil's own activity."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jobs import lease, tasks
from jobs.following import idle
from jobs.following.tick_metrics import KEY
from nodes.models import Agent, HealthEntry, Node, NodeEvent, QueuedJob
from portal import process_counters, publish
from portal.http.counting import RequestCounter
from tests.jobs.reporting import Spooled, attempt_of, frame, send
from tests.jobs.waste.idling import allocated_job, machine
from tests.nodes.telemetry.reporting import Machine
from tests.redis import redis_up
from tests.stack import Stack
from tests.waiting import until
from vigil_core import exposition
from vigil_core.exposition import Family

TOKEN = "a token of prometheus's own"
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def _token(settings: Any) -> None:
    settings.VIGIL_METRICS_TOKEN = TOKEN


@pytest.fixture
def server(tmp_path: Path, settings: Any) -> Iterator[redis.Redis]:
    """Provide a private Redis."""
    with redis_up(tmp_path / "redis") as created:
        settings.REDIS_URL = created.url
        publish.connection.cache_clear()
        yield publish.connection()
    publish.connection.cache_clear()


def scrape(query: str = "") -> Found:
    answer = Client().get(f"/metrics{query}", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.documentation and family.type in {"gauge", "counter"} for family in families)
    rows = [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert len({row[:2] for row in rows}) == len(rows), "no series twice"
    return {(name, labels): value for name, labels, value in rows}


def value_of(found: Found, name: str, **labels: str) -> float | None:
    """The one sample of this name that has these labels; None: there is none."""
    (value,) = [v for (n, given), v in found.items() if n == name and labels.items() <= dict(given).items()] or [None]
    return value


@pytest.mark.django_db
class TestWhoMay:
    def get(self, **headers: str) -> Any:
        return Client().get("/metrics", headers=headers)

    def test_there_is_no_such_address_without_a_token_set(self, settings: Any) -> None:
        settings.VIGIL_METRICS_TOKEN = ""
        assert self.get(Authorization="Bearer ").status_code == 404
        assert self.get().status_code == 404

    @pytest.mark.parametrize(
        "given", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é", TOKEN]
    )
    def test_a_wrong_token_is_refused(self, given: str) -> None:
        answer = self.get(Authorization=given) if given else self.get()
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert "vigil_" not in answer.text
        assert TOKEN not in answer.text

    def test_nothing_can_be_posted(self) -> None:
        assert Client().post("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 405


@pytest.mark.django_db
class TestCluster:
    def test_a_machine_with_its_gpus(self) -> None:
        item = machine(2, gpu_percent=[40, 0])
        batch = item.batch(int(time.time()) - 5, gpu_percent=[[40] * 10, [0] * 10], memory_mib=1024, temperature_c=61)
        item.post(batch)
        allocated_job("7", [0])
        found = scrape()
        gpu = {"node": "dgx-01", "gpu": "0", "uuid": item.gpus[0]}
        assert value_of(found, "vigil_agent_up", node="dgx-01") == 1
        assert value_of(found, "vigil_gpu_utilization_ratio", **gpu) == 0.4
        assert value_of(found, "vigil_gpu_memory_used_bytes", **gpu) == 1024**3
        assert value_of(found, "vigil_gpu_temperature_celsius", **gpu) == 61
        assert value_of(found, "vigil_gpu_power_watts", **gpu) is None, "not reported is not 0"
        assert value_of(found, "vigil_gpu_allocated", **gpu) == 1
        assert value_of(found, "vigil_gpu_allocated", gpu="1") == 0

    def test_a_silent_machine_has_no_gauges_but_its_counters_stay(self) -> None:
        item = machine(1, gpu_percent=40)
        item.post(item.event("xid", time.time(), gpu=item.gpus[0], xid=79, text="fallen", seq=5, count=3))
        Agent.objects.update(heard_at=timezone.now() - timedelta(minutes=1))
        found = scrape()
        assert value_of(found, "vigil_agent_up", node="dgx-01") == 0
        assert not [name for name, _ in found if name.startswith("vigil_gpu_") and "xid" not in name]
        assert value_of(found, "vigil_gpu_xid_total", node="dgx-01", gpu="0", uuid=item.gpus[0], xid="79") == 3

    def test_the_agent_of_a_node_that_was_taken_away_disappears_after_a_week(self) -> None:
        machine(1)
        Agent.objects.update(heard_at=timezone.now() - timedelta(days=8))
        assert value_of(scrape(), "vigil_agent_up", node="dgx-01") == 0, "without nodes the scheduler was not read"
        Node.objects.update_or_create(name="dgx-02", defaults={"state": "idle"})
        Node.objects.filter(name="dgx-01").delete()
        assert value_of(scrape(), "vigil_agent_up", node="dgx-01") is None
        Agent.objects.update(heard_at=timezone.now() - timedelta(days=6))
        assert value_of(scrape(), "vigil_agent_up", node="dgx-01") == 0

    def test_findings_that_escalated_are_counted_by_rule(self) -> None:
        name = "vigil_health_rule_escalated"
        for node, severity in (("dgx-01", "warning"), ("dgx-02", "critical"), ("dgx-03", "critical")):
            now = timezone.now()
            HealthEntry.objects.create(
                node=node, rule="thermal-slowdown", title="Hot", state="open", severity=severity, action="drain",
                first_seen=now, last_seen=now, opened_at=now,
            )  # fmt: skip
        assert value_of(scrape(), name, rule="thermal-slowdown") == 2
        assert value_of(scrape(), name, rule="unknown-xid") == 0
        assert value_of(scrape(), name, rule="row-remap-failed") is None, "critical from the start"

    def test_xids_are_counted_by_gpu_and_number(self) -> None:
        item = machine(2)
        for seq, (gpu, xid, text) in enumerate([(0, 13, "a"), (0, 13, "b"), (0, 94, "a"), (1, 13, "a")], 1):
            item.post(item.event("xid", time.time(), gpu=item.gpus[gpu], xid=xid, text=text, seq=seq))
        item.post(item.event("xid", time.time(), xid=62, text="of no GPU that is known", seq=9, count=2))
        found = {
            (dict(labels)["gpu"], dict(labels)["xid"]): value
            for (name, labels), value in scrape().items()
            if name == "vigil_gpu_xid_total"
        }
        assert found == {("0", "13"): 2, ("0", "94"): 1, ("1", "13"): 1, ("", "62"): 2}
        assert NodeEvent.objects.count() == 5

    def test_counters_of_critical_errors_start_at_0(self) -> None:
        """Prometheus sees no increase in a series that begins at 1: the first error would raise no alert."""
        item = machine(2)
        places = [{"node": item.node, "gpu": str(index)} for index in range(2)]
        found = scrape()
        assert [value_of(found, "vigil_gpu_critical_xid_total", **place) for place in places] == [0, 0]
        assert [value_of(found, "vigil_nvswitch_sxid_total", fatal=fatal) for fatal in ("no", "yes")] == [0, 0]
        item.post(item.event("xid", time.time(), gpu=item.gpus[1], xid=79, text="off", seq=1))
        item.post(item.event("xid", time.time(), gpu=item.gpus[1], xid=13, text="a program's own", seq=2))
        for seq, fatal in ((3, True), (4, None)):
            item.post(item.event("sxid", time.time(), sxid=20034 + seq, text=f"{fatal}", seq=seq, fatal=fatal))
        found = scrape()
        assert [value_of(found, "vigil_gpu_critical_xid_total", **place) for place in places] == [0, 1]
        assert [value_of(found, "vigil_nvswitch_sxid_total", fatal=fatal) for fatal in ("no", "yes")] == [1, 1]

    def test_nodes_and_the_queue(self) -> None:
        Node.objects.create(name="dgx-01", state="mixed", partitions=["gpu"])
        allocated_job("7", [0], partition="gpu")
        QueuedJob.objects.create(scheduler_id="8", name="a", state="pending", partition="gpu", tasks=40)
        QueuedJob.objects.create(scheduler_id="9", name="b", state="pending", partition="gpu")
        found = scrape()
        assert value_of(found, "vigil_node_state", node="dgx-01", state="mixed") == 1
        assert value_of(found, "vigil_queue_jobs", partition="gpu", state="pending") == 41
        assert value_of(found, "vigil_queue_jobs", partition="gpu", state="running") == 1

    def test_hostile_names_break_no_line(self) -> None:
        nasty = 'a"} 1\nvigil_agent_up{node="forged\\'
        QueuedJob.objects.create(scheduler_id="8", name="a", state="pending", partition=nasty)
        found = scrape()
        assert value_of(found, "vigil_queue_jobs", state="pending") == 1
        assert ("partition", nasty) in [pair for _, labels in found for pair in labels]
        assert value_of(found, "vigil_agent_up") is None

    def test_the_number_of_queries_does_not_grow_with_machines(self, django_assert_max_num_queries: Any) -> None:
        for number in range(6):
            machine(2, node=f"dgx-{number:02}")
        scrape("?only=cluster")  # reads checks of the portal itself, which stay valid for seconds
        with django_assert_max_num_queries(17):  # on PostgreSQL another reads its clock
            assert value_of(scrape("?only=cluster"), "vigil_agent_up", node="dgx-03") == 1


@pytest.mark.django_db
class TestVigilItself:
    def difference(self, name: str, before: Found, **labels: str) -> float:
        return (value_of(scrape("?only=process"), name, **labels) or 0) - (value_of(before, name, **labels) or 0)

    def test_what_agents_post(self, django_capture_on_commit_callbacks: Any) -> None:
        before, item = scrape("?only=process"), Machine()
        with django_capture_on_commit_callbacks(execute=True):
            item.post(item.batch(int(time.time()) - 10, gpu_percent=50, watts=300), item.batch(int(time.time())))
            item.post(item.batch(int(time.time())), first=40)
        item.send(b"{")
        item.send(b"{}", token="wrong")
        telemetry = {"kind": "telemetry"}
        assert self.difference("vigil_intake_posts_total", before, outcome="taken", **telemetry) == 2
        assert self.difference("vigil_intake_posts_total", before, outcome="refused", **telemetry) == 2
        assert self.difference("vigil_intake_batches_total", before, **telemetry) == 2, "one post brought nothing new"
        assert self.difference("vigil_intake_values_total", before, **telemetry) == 2 * 10 * 2

    def test_what_launchers_post(self, django_capture_on_commit_callbacks: Any) -> None:
        before, attempt = scrape("?only=process"), attempt_of()
        spooled = Spooled().log(1, loss=2.5, watts=300).log(2, loss=2.4)
        with django_capture_on_commit_callbacks(execute=True):
            assert send(attempt, frame(spooled)).status_code == 200
            assert send(attempt, frame(spooled)).status_code == 200
        assert send(attempt, frame(spooled), secret="another's").status_code == 401
        reports = {"kind": "reports"}
        assert self.difference("vigil_intake_posts_total", before, outcome="taken", **reports) == 2
        assert self.difference("vigil_intake_posts_total", before, outcome="refused", **reports) == 1
        assert self.difference("vigil_intake_batches_total", before, **reports) == 2
        assert self.difference("vigil_intake_values_total", before, **reports) == 3

    def test_each_process_reports_its_name(self, settings: Any) -> None:
        settings.VIGIL_METRICS_PROCESS = "web-2"
        process_counters.count_request("GET", 200, 0.01)
        found = scrape("?only=process")
        assert {dict(labels).get("process") for _, labels in found} == {"web-2"}
        assert not [name for name, _ in scrape("?only=cluster") if name.startswith(("vigil_http", "vigil_intake"))]

    def test_a_missing_redis_is_reported_and_nothing_else_fails(self, settings: Any, tmp_path: Path) -> None:
        settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
        publish.connection.cache_clear()
        found = scrape()
        publish.connection.cache_clear()
        assert value_of(found, "vigil_redis_up") == 0
        assert value_of(found, "vigil_task_queue_length") is None

    def test_tasks_that_wait_and_the_followers_tick(self, server: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        server.rpush("work", b"a", b"b")
        assert value_of(scrape(), "vigil_follower_ticks_total") is None
        monkeypatch.setattr(idle, "_query_bool", lambda *parameters: True)
        tasks.follow()
        tasks.follow()
        found = scrape()
        assert value_of(found, "vigil_redis_up") == 1
        assert value_of(found, "vigil_task_queue_length", queue="work") == 2
        assert value_of(found, "vigil_task_queue_length", queue="follow") == 0
        assert value_of(found, "vigil_follower_ticks_total") == 2
        assert 0 < (value_of(found, "vigil_follower_tick_seconds") or 0) < 60
        assert abs(time.time() - (value_of(found, "vigil_follower_tick_timestamp_seconds") or 0)) < 60
        other = lease.take("follow")
        assert other is not None
        tasks.follow()
        assert value_of(scrape(), "vigil_follower_ticks_total") == 2, "somebody else is at it"

    def test_nothing_is_written_while_metrics_are_disabled(self, server: redis.Redis, settings: Any) -> None:
        settings.VIGIL_METRICS_TOKEN = ""
        tasks.wake()
        assert not server.exists(KEY)


class TestRequests:
    def handle(self, status: int | None, method: str = "GET") -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            if status == 0:
                raise OSError("broken")
            if status is not None:
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b""})

        async def send(message: Any) -> None: ...

        asyncio.run(RequestCounter(application)({"type": "http", "method": method}, None, send))  # type: ignore[arg-type]

    def counts(self) -> dict[tuple[str, ...], float]:
        families = {family.name: family for family in process_counters.families("web")}
        return {labels[1:]: value for labels, value in families["vigil_http_requests_total"].samples}

    @pytest.mark.parametrize(
        ("status", "method", "labels"),
        [(200, "GET", ("GET", "2xx")), (413, "POST", ("POST", "4xx")), (503, "PURGE'\n", ("other", "5xx"))],
    )
    def test_are_counted_by_class(self, status: int, method: str, labels: tuple[str, str]) -> None:
        before = self.counts().get(labels, 0)
        self.handle(status, method)
        assert self.counts()[labels] == before + 1

    def test_failed_requests_are_counted_and_abandoned_ones_are_not(self) -> None:
        before = sum(self.counts().values())
        self.handle(None)
        assert sum(self.counts().values()) == before
        with pytest.raises(OSError, match="broken"):
            self.handle(0)
        assert sum(self.counts().values()) == before + 1


class TestFormat:
    @given(st.lists(st.text(st.characters(codec="utf-8")), min_size=2, max_size=2), st.floats())
    def test_any_label_and_value_comes_back(self, labels: list[str], value: float) -> None:
        family = Family("x_total", "counter", 'a "b" \\ c\nd', ("one", "two"), [(tuple(labels), value)])
        text = exposition.render([family])
        (sample,) = exposition.samples(text)
        assert (sample.name, list(sample.labels.values())) == ("x_total", labels)
        assert repr(sample.value) == repr(float(value))
        if not re.search("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029\r]", "".join(labels)):  # where the stranger splits lines
            ((theirs,),) = [found.samples for found in text_string_to_metric_families(text)]
            assert (theirs.name, list(theirs.labels.values())) == ("x_total", labels)

    @pytest.mark.parametrize(
        "line",
        [
            "", "# HELP a b", "a", "a b", 'a{x="1" 1', 'a{x=1} 1', 'a{="1"} 1', "1a 1",
            'a{x="1"}', 'a{x="\\"} 1', "a{,} 1",
            "a 1 2 3", "é 1", "a\x001", f"a {'9' * 10_000}", 'a{' + ",".join(f'x{i}="1"' for i in range(65)) + "} 1",
        ],
    )  # fmt: skip
    def test_what_is_no_sample_is_left_out(self, line: str) -> None:
        assert [sample.name for sample in exposition.samples(f"good 1\n{line}\nalso_good 2 1395066363000\r\n")] == [
            "good",
            "also_good",
        ]

    def test_of_endless_lines_a_hundred_thousand_are_read(self) -> None:
        assert sum(1 for _ in exposition.samples("a 1\n" * 200_000)) == exposition.MAX_LINES


@pytest.mark.slow
def test_a_whole_portal_is_scraped(make_stack: Callable[..., Stack]) -> None:
    """Its agent posts, pages are requested, and a job makes the follower tick."""
    stack = make_stack(VIGIL_METRICS_TOKEN=TOKEN, VIGIL_METRICS_PROCESS="web-1")
    stack.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}

    def scrape() -> Found:
        answer = httpx.get(f"{stack.url}/metrics", headers=headers, timeout=30)
        assert answer.status_code == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    assert httpx.get(f"{stack.url}/metrics", timeout=30).status_code == 401
    until(lambda: value_of(scrape(), "vigil_intake_posts_total", kind="telemetry", outcome="taken", process="web-1"))
    found = scrape()
    assert value_of(found, "vigil_agent_up") == 1
    assert value_of(found, "vigil_redis_up") == 1
    assert (value_of(found, "vigil_http_requests_total", method="GET", status="4xx") or 0) >= 1
    assert (value_of(found, "vigil_http_requests_total", method="POST", status="2xx") or 0) >= 1
    assert until(lambda: value_of(scrape(), "vigil_follower_ticks_total"))
