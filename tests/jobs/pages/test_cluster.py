"""The pages of nodes and of the queue: what anybody signed in sees, and what stays their own."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Sweep
from jobs.spec import JobSpec
from nodes.cluster import sync
from nodes.models import Node, NodeOrder, Reading
from nodes.schedulers.base import NodeStatus, SchedulerError
from nodes.schedulers.cluster import Accounts, Association, License, Limits, Partition, Qos, QueuedJob
from portal.models import User
from tests.jobs.schedulers import Told
from tests.lab import a_job, a_project, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db
HOUR_S = 3600


def node(name: str, state: str = "mixed", **facts: Any) -> NodeStatus:
    own: dict[str, Any] = {"name": name, "state": state, "partitions": ("gpu",), "gpus": 8, "cpus": 128}
    return NodeStatus(**own | facts)


def queued(number: int, **facts: Any) -> QueuedJob:
    own: dict[str, Any] = {"scheduler_id": str(number), "name": f"slurm-{number}", "user": "other", "state": "pending"}
    return QueuedJob(**own | {"partition": "gpu", "gpus": 8} | facts)


@pytest.fixture
def mira() -> User:
    return person("mira", a_project(), slurm_user="mira1")


@pytest.fixture
def told(mira: User) -> Told:
    """A cluster on which mira runs a job of Vigil's (#11), and somebody else another (#12)."""
    a_job(mira, a_project(), name="wren", state="running", attempt={"scheduler_id": "11"})
    scheduler = Told(
        machines=[
            node("dgx-01", gpus_used=6, gpus_allocated=(0, 1, 2, 3, 4, 5), features=("nvlink",)),
            node("dgx-02", "drained", reason="XID 79", reason_by="ops"),
            node("cpu-01", "idle", gpus=0, partitions=("cpu",)),
        ],
        queued=[
            queued(11, state="running", user="mira1", nodes=("dgx-01",), gpu_indices={"dgx-01": (0, 1, 2, 3)}),
            queued(12, state="running", user="oskar9", nodes=("dgx-01",), gpu_indices={"dgx-01": (4, 5)}),
            queued(13, priority=50, reason="Resources", starts_at=timezone.now().timestamp() + HOUR_S),
            queued(14, priority=90, reason="QOSMaxGRESPerUser", partition="cpu,gpu"),
            queued(15, priority=70, reason="Priority", user="mira1"),
            queued(16, reason="JobHeldAdmin"),
        ],
        divided=[Partition(name="gpu", is_default=True, max_time_s=24 * HOUR_S), Partition(name="cpu", state="drain")],
    )
    sync.read(scheduler)
    return scheduler


def text(user: User, address: str, **headers: str) -> str:
    answer = signed_in(user).get(address, headers=headers)
    assert answer.status_code == 200
    return " ".join(unescape(answer.content.decode()).replace("\N{NO-BREAK SPACE}", " ").split())


def test_nodes_by_partition(mira: User, told: Told) -> None:
    html = text(mira, "/nodes")
    assert "dgx-02 is drained: XID 79." in html
    assert "Free now: 2 of 16 GPUs." in html
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
    sync.read(Told(machines=[node("cpu-01", "idle", gpus=0)], queued=[queued(11, state="running", gpus=0)]))
    html = text(mira, "/nodes")
    assert 'class="gpu"' not in html
    assert "1 <small>job</small>" in html


def test_nodes_are_filtered_by_the_address(mira: User, told: Told) -> None:
    for query, there in (("partition=cpu", "cpu-01"), ("state=out", "dgx-02"), ("q=nvlink", "dgx-01")):
        html = text(mira, f"/nodes?{query}")
        assert [name for name in ("dgx-01", "dgx-02", "cpu-01") if f'id="node-{name}"' in html] == [there]
    assert "No node matches" in text(mira, "/nodes?q=nowhere")


def test_only_what_changes_is_sent_again(mira: User, told: Told) -> None:
    for address in ("/nodes", "/nodes/dgx-01", "/queue"):
        assert "<nav" in text(mira, address)
        fragment = text(mira, address, **{"HX-Request": "true", "HX-Target": "live"})
        assert "<html" not in fragment
        assert "say" in fragment


def test_one_node(mira: User, told: Told) -> None:
    html = text(mira, "/nodes/dgx-01")
    assert "Takes jobs: 2 of 8 GPUs free." in html
    assert "0, 1, 2, 3" in html
    assert "Drain…" not in html, "that is for sysadmins"
    drained = text(mira, "/nodes/dgx-02")
    assert "Takes no jobs: it is drained." in drained
    assert "XID 79, says ops" in drained
    assert signed_in(mira).get("/nodes/nowhere").status_code == 404


def test_sysadmins_drain_on_the_page(told: Told) -> None:
    ops = sysadmin("ops")
    assert "Drain…" in text(ops, "/nodes/dgx-01")
    assert "Undrain" in text(ops, "/nodes/dgx-02")
    client = signed_in(ops)
    client.post("/nodes/dgx-01/drain", {"reason": " fan\n 3 "})
    client.post("/nodes/dgx-02/undrain", {"replaces": Node.objects.get(name="dgx-02").reason})
    assert {(o.node, o.action, o.reason) for o in NodeOrder.objects.all()} == {
        ("dgx-01", "drain", "fan 3"), ("dgx-02", "undrain", ""),
    }  # fmt: skip
    assert "by ops. The scheduler is asked within seconds." in text(ops, "/nodes/dgx-01")
    client.post("/nodes/dgx-01/drain", {"reason": ""})
    assert NodeOrder.objects.count() == 2


def test_others_may_not(mira: User, told: Told) -> None:
    assert signed_in(mira).post("/nodes/dgx-01/drain", {"reason": "fan"}).status_code == 403
    assert signed_in(mira).post("/nodes/dgx-02/undrain").status_code == 403
    Node.objects.create(name="made-up", is_made_up=True)
    assert signed_in(sysadmin()).post("/nodes/made-up/drain", {"reason": "fan"}).status_code == 403


def test_the_queue_in_plain_words(mira: User, told: Told) -> None:
    html = text(mira, "/queue")
    assert "Your slurm-15 waits, 1 of 2 in gpu." in html
    assert "Resources: what it asks for is not free yet." in html
    assert "with it, its owner would run more than the QOS allows one person." in html
    order = [
        html.index(name) for name in (">wren<", ">slurm-15<", ">slurm-14<", ">slurm-13<", ">slurm-16<", ">slurm-12<")
    ]
    assert order == sorted(order), "own first, then by priority, then what runs"
    assert ">held<" in html


@pytest.mark.parametrize(
    ("query", "there"),
    [
        ("state=pending", {"13", "14", "15", "16"}),
        ("mine=1", {"11", "15"}),
        ("user=oskar9", {"12"}),
        ("partition=cpu", {"14"}),
        ("q=slurm-13", {"13"}),
        ("q=%2316", {"16"}),
        ("q=oskar&state=pending", set()),
    ],
)
def test_the_queue_is_filtered_alike_on_page_and_api(mira: User, told: Told, query: str, there: set[str]) -> None:
    items = signed_in(mira).get(f"/api/v1/queue?{query}").json()["items"]
    assert {item["scheduler_id"] for item in items} == there
    html = text(mira, f"/queue?{query}")
    assert {number for number in map(str, range(11, 17)) if f'"under">{number} ·' in html} == there


def test_the_queue_over_rest(mira: User, told: Told) -> None:
    client = signed_in(mira)
    first = client.get("/api/v1/queue?limit=4").json()
    rest = client.get(f"/api/v1/queue?limit=4&cursor={first['next']}").json()
    assert [item["scheduler_id"] for item in first["items"] + rest["items"]] == ["11", "15", "14", "13", "16", "12"]
    assert rest["next"] is None
    assert first["counts"] == {"pending": 4, "running": 2}
    own, waiting = first["items"][0], first["items"][3]
    assert (own["name"], own["user"], own["is_mine"]) == ("wren", "mira", True)
    assert own["job"] is not None
    assert own["gpu_indices"] == {"dgx-01": [0, 1, 2, 3]}
    assert (waiting["position"], waiting["waiting"], waiting["reason"]) == (2, 2, "Resources")
    assert waiting["why"] == "Resources: what it asks for is not free yet."
    assert client.get("/api/v1/queue?state=sleeping").status_code == 422
    assert client.get("/api/v1/queue?cursor=x").status_code == 422


def test_jobs_of_vigil_go_by_the_names_that_people_gave(mira: User, told: Told) -> None:
    sweep = Sweep.objects.create(name="rates", key="120f9dbab06497d9", owner=mira, project=a_project())
    theirs = a_job(person("finn"), a_project("siskin"), name="finch", state="running")
    assert theirs.latest is not None
    past = "model.0123456789abcdef"
    told.queued += [
        queued(19, name=past, user="oskar9"),
        queued(17, name=f"rates.{sweep.key}", user="mira1", tasks=18, priority=99),
        queued(18, name=f"finch.{theirs.latest.key}", state="running", user="oskar9", nodes=("dgx-01",)),
    ]
    sync.read(told)
    html = text(mira, "/queue")
    assert f'href="/sweeps/{sweep.pk}">rates</a>' in html
    assert "18 jobs of your rates wait" in html
    assert ">finch<" in html
    assert f">{past}<" in html, "what came past Vigil is called as it is"
    assert "finch, oskar9" in html or "finch" in text(mira, "/nodes/dgx-01")
    items = {item["scheduler_id"]: item for item in signed_in(mira).get("/api/v1/queue").json()["items"]}
    assert (items["17"]["sweep"], items["17"]["name"], items["17"]["user"]) == (sweep.pk, "rates", "mira")
    item = signed_in(person("stranger")).get("/api/v1/queue?q=rates").json()["items"][0]
    assert (item["sweep"], item["name"], item["user"]) == (None, "rates", "mira1")


def test_an_array_counts_as_the_jobs_that_it_stands_for(mira: User, told: Told) -> None:
    """Alike on the pages, over REST and at home, which counts jobs of Vigil's."""
    sweep = Sweep.objects.create(name="rates", key="120f9dbab06497d9", owner=mira, project=a_project())
    for index in range(12):
        facts = {"scheduler_id": f"17_{index}", "reason": "Resources"}
        a_job(mira, sweep.project, name=f"rates-{index}", state="pending", sweep=sweep, attempt=facts)
    told.queued = [queued(17, name=f"rates.{sweep.key}", user="mira1", tasks=12, priority=99), queued(18, priority=1)]
    sync.read(told)
    html = text(mira, "/queue")
    assert (
        '12 jobs of your rates wait, from place 1 of 13 in gpu. <span class="muted">13 jobs wait in all, 0 run.' in html
    )
    assert 'Waiting <span class="count">13</span>' in html
    assert "stands for 12 jobs" in html
    assert "8 GPUs each" in html
    assert "13 of 13" in html, "one who comes after twelve"
    assert ">2 of 2 rows</span>" in html
    assert "13 <small>jobs</small>" in text(mira, "/nodes")
    answer = signed_in(mira).get("/api/v1/queue").json()
    assert answer["counts"] == {"pending": 13}
    assert [(item["position"], item["waiting"]) for item in answer["items"]] == [(1, 13), (13, 13)]
    assert "1 job runs, 12 wait." in text(mira, "/")


def test_a_job_that_never_starts_says_so_first(mira: User, told: Told) -> None:
    spec = JobSpec.parse({"name": "heron", "resources": {"time_limit": "2-00:00:00", "partition": "gpu"}})
    facts = {"scheduler_id": "19", "reason": "PartitionTimeLimit"}
    job = a_job(mira, a_project(), name="heron", state="pending", spec=spec.model_dump(mode="json"), attempt=facts)
    told.queued.append(queued(19, user="mira1", reason="PartitionTimeLimit", time_limit_s=48 * HOUR_S))
    sync.read(told)
    for address in (f"/jobs/{job.pk}", f"/jobs/{job.pk}/life"):
        html = text(mira, address)
        assert '<p class="say">It never starts as it is.' in html
        assert "lets a job run for" in html[html.index("never starts") : html.index("Your move:")]


def test_where_everybody_sees_their_own_alone(mira: User, told: Told, settings: Any) -> None:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    items = signed_in(mira).get("/api/v1/queue").json()["items"]
    assert [item["scheduler_id"] for item in items] == ["11", "15"]
    html = text(mira, "/nodes")
    assert "GPU 4: in use" in html
    assert "oskar9" not in html
    assert "slurm-12" not in html
    assert "oskar9" not in text(mira, "/nodes/dgx-01")
    assert len(signed_in(sysadmin()).get("/api/v1/queue").json()["items"]) == 6
    anna = person("anna", a_project())
    assert [item["name"] for item in signed_in(anna).get("/api/v1/queue").json()["items"]] == ["wren"], (
        "a colleague of the project sees Vigil's jobs of it"
    )
    assert signed_in(person("stranger")).get("/api/v1/queue").json()["items"] == []


def test_a_colleague_sees_the_row_of_an_array_where_each_sees_their_own(mira: User, told: Told, settings: Any) -> None:
    """The attempts go by "17_0" and "17_1"; what still waits of them is the row 17."""
    settings.VIGIL_QUEUE_VISIBLE = "own"
    sweep = Sweep.objects.create(name="rates", key="120f9dbab06497d9", owner=mira, project=a_project())
    for task in (0, 1):
        facts = {"scheduler_id": f"17_{task}", "submitted_at": timezone.now()}
        a_job(mira, sweep.project, state="pending", name=f"rates-{task}", sweep=sweep, attempt=facts)
    told.queued += [queued(17, name=f"rates.{sweep.key}", user="portal", tasks=2), queued(1, user="oskar9")]
    sync.read(told)
    anna = person("anna", sweep.project)
    items = {item["scheduler_id"]: item for item in signed_in(anna).get("/api/v1/queue").json()["items"]}
    assert set(items) == {"11", "17"}
    assert (items["17"]["name"], items["17"]["sweep"], items["17"]["is_mine"]) == ("rates", sweep.pk, False)
    own = {item["scheduler_id"]: item for item in signed_in(mira).get("/api/v1/queue?mine=1").json()["items"]}
    assert own["17"]["is_mine"], "whoever's name Slurm has for it"
    assert signed_in(person("stranger")).get("/api/v1/queue").json()["items"] == []


def test_other_peoples_jobs_lead_nowhere(told: Told) -> None:
    stranger = person("stranger")
    html = text(stranger, "/nodes")
    assert "GPU 3: slurm-11, mira1" in html
    assert "/jobs/" not in html
    item = signed_in(stranger).get("/api/v1/queue?q=11").json()["items"][0]
    assert (item["job"], item["name"], item["user"], item["is_mine"]) == (None, "slurm-11", "mira1", False)


def test_silence_is_said(mira: User, told: Told) -> None:
    told.broken = SchedulerError("Slurm did not answer for 10 s.")
    sync.read(told)
    since = timezone.now() - timedelta(minutes=4)
    Reading.objects.update(read_at=since)
    for address in ("/nodes", "/nodes/dgx-01", "/queue"):
        html = text(mira, address)
        assert "has not answered for 4 min; this is what it said at" in html
        assert "Slurm did not answer for 10 s." in html
    assert "dgx-01" in text(mira, "/nodes")
    reading = signed_in(mira).get("/api/v1/nodes").json()["reading"]
    assert reading["error"] == "Slurm did not answer for 10 s."
    Reading.objects.update(error="", failing_since=None)
    assert "was last asked 4 min ago" in text(mira, "/queue")


def test_a_slurm_that_hangs_is_said_before_its_call_runs_out_of_time(mira: User, told: Told, settings: Any) -> None:
    settings.VIGIL_SCHEDULER = "slurm"
    for seconds, is_said in ((8, False), (11, True)):
        Reading.objects.update(read_at=timezone.now() - timedelta(seconds=seconds))
        for address in ("/nodes", "/nodes/dgx-01", "/queue", "/cluster"):
            assert ("Slurm has not answered for 11 s; this is what it said at" in text(mira, address)) is is_said
    Reading.objects.filter(part="queue").update(read_at=timezone.now())
    assert "has not answered" not in text(mira, "/nodes"), "it answers, if more slowly"


def test_what_could_not_be_read_is_counted_on_the_page_and_over_rest(mira: User, told: Told) -> None:
    told.unreadable = {"nodes": 2, "queue": 1}
    told.queued = [queued(85, component="85+0"), queued(86, component="85+1")]
    sync.read(told)
    assert "2 nodes could not be read and are left out." in text(mira, "/nodes")
    html = text(mira, "/queue")
    assert "1 job could not be read and is left out." in html
    assert "86 (85+1, heterogeneous)" in html
    answer = signed_in(mira).get("/api/v1/queue?q=85%2B1").json()
    assert [(item["scheduler_id"], item["component"]) for item in answer["items"]] == [("86", "85+1")]
    assert (answer["reading"]["unreadable"], answer["reading"]["error"]) == (1, "")
    told.unreadable = {}
    sync.read(told)
    assert "could not be read" not in text(mira, "/nodes") + text(mira, "/queue")


def test_empty_pages_say_what_comes(mira: User) -> None:
    assert "No nodes yet" in text(mira, "/nodes")
    assert "The queue has not been read yet." in text(mira, "/queue")
    Reading.objects.create(part="nodes", error="Connection refused")
    assert "does not answer. Connection refused." in text(mira, "/nodes")


def test_what_was_submitted_since_the_queue_was_read_is_told(mira: User) -> None:
    sync.read(Told(machines=[node("dgx-01")]))
    assert "Nothing waits and nothing runs." in text(mira, "/queue")
    a_job(mira, a_project(), state="pending", name="siskin")
    one = "1 job of yours has not been handed to the scheduler yet."
    stranger = person("stranger")
    for address in ("/queue", "/nodes"):
        assert one in text(mira, address)
        assert one not in text(stranger, address)
    html = text(mira, "/queue")
    assert "The queue was empty when it was read." in html
    assert "starts at once" not in html
    now = timezone.now()
    for task in (0, 1):
        facts = {"scheduler_id": f"17_{task}", "submitted_at": now}
        a_job(mira, a_project(), state="pending", name=f"rates-{task}", attempt=facts)
    handed = "2 jobs of yours were handed over since the queue was read."
    assert f"{one} {handed}" in text(mira, "/queue")
    client = signed_in(mira)
    assert client.get("/api/v1/queue").json()["unseen"] == {"kept": 1, "newer": 2, "text": f"{one} {handed}"}
    sync.read(Told(queued=[queued(17, user="mira1", tasks=2), queued(18, user="mira1", state="running")]))
    assert client.get("/api/v1/queue").json()["unseen"]["newer"] == 0
    assert f"2 jobs wait in all, 1 runs. {one}" in text(mira, "/queue")
    fragment = text(mira, "/queue", **{"HX-Request": "true", "HX-Target": "live"})
    assert 'hx-swap-oob="true">everything that waits or runs on the cluster, read' in fragment


def test_a_thousand_nodes_come_page_by_page(mira: User) -> None:
    sync.read(Told(machines=[node(f"n{number:04}") for number in range(1000)]))
    first = text(mira, "/nodes")
    assert first.count('class="node"') == 120
    assert "1–120 of 1,000 nodes" in first
    assert 'id="node-n0120"' in text(mira, "/nodes?from=120")
    assert text(mira, "/nodes?from=999999").count('class="node"') == 1


def test_lists_of_the_cluster(mira: User, told: Told) -> None:
    client = signed_in(mira)
    found = client.get("/api/v1/partitions").json()["items"]
    assert [(p["name"], p["is_default"], p["state"]) for p in found] == [("gpu", True, "up"), ("cpu", False, "drain")]
    assert client.get("/api/v1/nodes?partition=cpu").json()["items"][0]["name"] == "cpu-01"
    assert [n["name"] for n in client.get("/api/v1/nodes?state=drained").json()["items"]] == ["dgx-02"]
    told.machines = [replace(told.machines[0], state="mixed+drain")]
    sync.read(told)
    assert client.get("/api/v1/nodes/dgx-01").json()["takes_jobs"] is False


def test_licences_are_on_the_queue_page_where_there_are_any(mira: User, told: Told) -> None:
    assert "Licences" not in text(mira, "/queue")
    told.licensed = [License(name="abaqus", total=1500, used=3), License(name="matlab", total=2, used=1, reserved=1)]
    told.unreadable["licenses"] = 1
    sync.read(told)
    html = text(mira, "/queue")
    assert "Licences in use: abaqus 3 of 1,500 · matlab 1 of 2, 1 reserved" in html
    assert "1 licence could not be read and is left out." in html
    found = signed_in(mira).get("/api/v1/licenses").json()
    assert found["items"][1] == {
        "name": "matlab", "total": 2, "used": 1, "reserved": 1, "free": 1, "is_made_up": False,
    }  # fmt: skip
    assert found["reading"]["unreadable"] == 1


def test_accounts_are_everybodys_own(mira: User, told: Told) -> None:
    told.accounted = Accounts(
        qos=(Qos(name="small", limits=Limits(user={"gres/gpu": 2})),),
        associations=(
            Association(account="lab"),
            Association(account="lab", user="mira1", fair_share=0.25),
            Association(account="lab", user="oskar9"),
        ),
    )
    sync.read(told)
    found = signed_in(mira).get("/api/v1/accounts").json()["items"]
    assert [(a["account"], a["user"], a["fair_share"]) for a in found] == [("lab", "mira1", 0.25)]
    assert len(signed_in(sysadmin()).get("/api/v1/accounts").json()["items"]) == 3
    assert signed_in(person("stranger")).get("/api/v1/accounts").json()["items"] == []
    assert signed_in(mira).get("/api/v1/qos").json()["items"][0]["limits"]["user"] == {"gres/gpu": 2}
    assert signed_in(mira).get("/api/v1/reservations").json()["items"] == []
