"""Test the page of nodes: what everybody sees, and what only sysadmins may do."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import sync
from nodes.models import Agent, Gpu, Node, NodeOrder, Reading
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.jobs.pages.cluster.reading import node, queued
from tests.jobs.pages.reading import page_text
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


def test_nodes_by_partition(mira: User, scheduler: ScriptedScheduler) -> None:
    html = page_text(mira, "/nodes")
    assert "dgx-02 is drained: XID 79." in html
    assert "Free now: 2 of 16 GPUs, on one node." in html
    assert "2 <small>jobs</small>" in html
    assert html.index(">gpu</h2>") < html.index(">cpu</h2>"), "the default partition comes first"
    assert "GPU 3: wren, mira" in html
    assert "GPU 4: slurm-12, oskar9" in html, "other people's jobs have a name, but lead nowhere"
    assert html.count('data-s="mine"') == 4 + 1, "and one of the key"
    assert html.count('data-s="busy"') == 2 + 1
    assert html.count('data-s="out"') == 8 + 1
    assert "0 of 128 CPUs in use" in html
    assert "partition, drain" in html
    assert "1 <small>of 3 nodes</small>" in html, "as many as stand below it, those of CPUs with them"


def test_where_there_are_no_gpus_nothing_explains_them(mira: User) -> None:
    sync.read(
        ScriptedScheduler(machines=[node("cpu-01", "idle", gpus=0)], queued=[queued(11, state="running", gpus=0)])
    )
    html = page_text(mira, "/nodes")
    assert 'class="gpu"' not in html
    assert "1 <small>job</small>" in html


def test_a_broken_gpu_is_marked_and_leads_the_page(mira: User, scheduler: ScriptedScheduler) -> None:
    """The scheduler knows nothing of it: the node is in service, and as many GPUs are free."""
    agent = Agent.objects.create(node="dgx-01")
    Gpu.objects.create(uuid="GPU-a", agent=agent, index=3, fault="could not remap a row of its memory")
    Gpu.objects.create(uuid="GPU-b", agent=agent, index=5, fault="gone since", gone_at=timezone.now())
    html = page_text(mira, "/nodes")
    assert "dgx-02 is drained: XID 79. GPU 3 of dgx-01 is broken." in html
    assert "Free now: 2 of 16 GPUs, on one node." in html
    assert 'aria-label="GPU 3: broken, wren, mira">!' in html
    assert "GPU 3 broken · mixed" in html
    assert ">lost or broken</span>" in html
    Gpu.objects.create(uuid="GPU-c", agent=agent, index=4, lost_at=timezone.now())
    assert "2 GPUs of dgx-01 are lost or broken." in page_text(mira, "/nodes")
    scheduler.machines = [node("dgx-01", "idle")]
    sync.read(scheduler)
    assert '<p class="say">2 GPUs of dgx-01 are lost or broken. <span' in page_text(mira, "/nodes")


def test_nodes_are_filtered_by_the_address(mira: User, scheduler: ScriptedScheduler) -> None:
    for query, there in (("partition=cpu", "cpu-01"), ("state=out", "dgx-02"), ("q=nvlink", "dgx-01")):
        html = page_text(mira, f"/nodes?{query}")
        assert [name for name in ("dgx-01", "dgx-02", "cpu-01") if f'id="node-{name}"' in html] == [there]
    assert "No matching nodes" in page_text(mira, "/nodes?q=nowhere")


def test_only_what_changes_is_sent_again(mira: User, scheduler: ScriptedScheduler) -> None:
    for address in ("/nodes", "/nodes/dgx-01", "/queue"):
        assert "<nav" in page_text(mira, address)
        fragment = page_text(mira, address, **{"HX-Request": "true", "HX-Target": "live"})
        assert "<html" not in fragment
        assert "say" in fragment


def test_a_node(mira: User, scheduler: ScriptedScheduler) -> None:
    html = page_text(mira, "/nodes/dgx-01")
    assert "Schedulable: 2 of 8 GPUs free." in html
    assert "0, 1, 2, 3" in html
    assert "Drain…" not in html, "that is for sysadmins"
    drained = page_text(mira, "/nodes/dgx-02")
    assert "Not schedulable: drained by ops" in drained
    assert signed_in(mira).get("/nodes/nowhere").status_code == 404


def test_sysadmins_drain_on_the_page(scheduler: ScriptedScheduler) -> None:
    ops = sysadmin("ops")
    assert "Drain…" in page_text(ops, "/nodes/dgx-01")
    assert "Undrain" in page_text(ops, "/nodes/dgx-02")
    client = signed_in(ops)
    client.post("/nodes/dgx-01/drain", {"reason": " fan\n 3 "})
    client.post("/nodes/dgx-02/undrain", {"replaces": Node.objects.get(name="dgx-02").reason})
    assert {(o.node, o.action, o.reason) for o in NodeOrder.objects.all()} == {
        ("dgx-01", "drain", "fan 3"), ("dgx-02", "undrain", ""),
    }  # fmt: skip
    assert "by ops. Sent to the scheduler within seconds." in page_text(ops, "/nodes/dgx-01")
    client.post("/nodes/dgx-01/drain", {"reason": ""})
    assert NodeOrder.objects.count() == 2


def test_a_drain_by_hand_is_not_replaced_by_a_click(scheduler: ScriptedScheduler) -> None:
    """The page names who drained it, why, and what to do; a drained node has no button to drain it."""
    eva = sysadmin("eva")
    client = signed_in(eva)
    refused = client.post("/nodes/dgx-02/drain", {"reason": "reboot"}, follow=True).content.decode()
    output = " ".join(unescape(refused).replace("\N{NO-BREAK SPACE}", " ").split())
    assert "dgx-02 is drained by ops" in output
    assert "Nothing was changed. To replace its reason: vigil drain dgx-02 --reason R --replace" in output
    refused = client.post("/nodes/dgx-02/undrain", follow=True).content.decode()
    assert "Nothing was changed. Read the reason before you undrain the node." in refused
    assert not NodeOrder.objects.exists()


def test_others_may_not(mira: User, scheduler: ScriptedScheduler) -> None:
    assert signed_in(mira).post("/nodes/dgx-01/drain", {"reason": "fan"}).status_code == 403
    assert signed_in(mira).post("/nodes/dgx-02/undrain").status_code == 403
    Node.objects.create(name="made-up", is_made_up=True)
    assert signed_in(sysadmin()).post("/nodes/made-up/drain", {"reason": "fan"}).status_code == 403


def test_other_peoples_jobs_lead_nowhere(scheduler: ScriptedScheduler) -> None:
    stranger = person("stranger")
    html = page_text(stranger, "/nodes")
    assert "GPU 3: slurm-11, mira1" in html
    assert "/jobs/" not in html
    item = signed_in(stranger).get("/api/v1/queue?q=11").json()["items"][0]
    assert (item["job"], item["name"], item["user"], item["is_mine"]) == (None, "slurm-11", "mira1", False)


def test_silence_is_shown(mira: User, scheduler: ScriptedScheduler) -> None:
    scheduler.broken = SchedulerError("Slurm did not answer for 10 s.")
    sync.read(scheduler)
    since = timezone.now() - timedelta(minutes=4)
    Reading.objects.update(read_at=since)
    for address in ("/nodes", "/nodes/dgx-01", "/queue"):
        html = page_text(mira, address)
        assert "has not answered for 4 min; showing its answer from" in html
        assert "Slurm did not answer for 10 s." in html
    assert "dgx-01" in page_text(mira, "/nodes")
    reading = signed_in(mira).get("/api/v1/nodes").json()["reading"]
    assert reading["error"] == "Slurm did not answer for 10 s."
    Reading.objects.update(error="", failing_since=None)
    assert "was last polled 4 min ago" in page_text(mira, "/queue")


def test_a_slurm_that_hangs_is_shown_before_its_call_runs_out_of_time(
    mira: User, scheduler: ScriptedScheduler, settings: Any
) -> None:
    settings.VIGIL_SCHEDULER = "slurm"
    for seconds, is_shown in ((8, False), (11, True)):
        for address in ("/nodes", "/nodes/dgx-01", "/queue", "/cluster"):
            Reading.objects.update(read_at=timezone.now() - timedelta(seconds=seconds))
            found = re.search(r"Slurm has not answered for 1\d s; showing its answer from", page_text(mira, address))
            assert (found is not None) is is_shown
    Reading.objects.filter(part="queue").update(read_at=timezone.now())
    assert "has not answered" not in page_text(mira, "/nodes"), "it answers, if more slowly"


def test_what_could_not_be_read_is_counted_on_the_page_and_over_rest(mira: User, scheduler: ScriptedScheduler) -> None:
    scheduler.unreadable = {"nodes": 2, "queue": 1}
    scheduler.queued = [queued(85, component="85+0"), queued(86, component="85+1")]
    sync.read(scheduler)
    assert "2 nodes could not be read and are left out, or shown as last reported." in page_text(mira, "/nodes")
    html = page_text(mira, "/queue")
    assert "1 job could not be read and is left out." in html
    assert "86 (85+1, heterogeneous)" in html
    answer = signed_in(mira).get("/api/v1/queue?q=85%2B1").json()
    assert [(item["scheduler_id"], item["component"]) for item in answer["items"]] == [("86", "85+1")]
    assert (answer["reading"]["unreadable"], answer["reading"]["error"]) == (1, "")
    scheduler.unreadable = {}
    sync.read(scheduler)
    assert "could not be read" not in page_text(mira, "/nodes") + page_text(mira, "/queue")


def test_empty_pages_explain_what_comes(mira: User) -> None:
    assert "No nodes yet" in page_text(mira, "/nodes")
    assert "The queue has not been polled yet." in page_text(mira, "/queue")
    Reading.objects.create(part="nodes", error="Connection refused")
    assert "does not answer. Connection refused." in page_text(mira, "/nodes")


def test_a_thousand_nodes_come_page_by_page(mira: User) -> None:
    sync.read(ScriptedScheduler(machines=[node(f"n{number:04}") for number in range(1000)]))
    first = page_text(mira, "/nodes")
    assert first.count('class="node"') == 120
    assert "1–120 of 1,000 nodes" in first
    assert 'id="node-n0120"' in page_text(mira, "/nodes?from=120")
    assert page_text(mira, "/nodes?from=999999").count('class="node"') == 1
