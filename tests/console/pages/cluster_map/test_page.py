"""Test the map of the cluster: cells, racks and the sentence, and what a person sees of others' jobs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import LazySettings
from django.utils import timezone
from msgspec import structs

from bench import simulated_fleet
from console.pages.cluster_map import layout
from console.pages.cluster_map.packed import packed
from console.pages.cluster_map.rows import MapGpu, MapHolder, MapNode
from console.pages.cluster_map.words import PendingDemand, facts, headline
from jobs.listing import visibility
from jobs.listing.visibility import NodeAllocation
from nodes.models import Agent, Gpu, Holding, Node, Partition, QueuedJob, RackPlace, Reading
from nodes.telemetry.mounts import SlowFileSystem
from portal.models import User
from tests.jobs.pages.reading import page_text
from tests.lab import a_job, a_project, person, signed_in, sysadmin
from tests.nodes.telemetry.reporting import UUIDS
from tests.nodes.telemetry.reporting import Machine as Reporting

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
NBSP = "\N{NO-BREAK SPACE}"


def machine(name: str = "dgx-01", *devices: MapGpu, **fields: Any) -> MapNode:
    counted = {"gpus": len(devices), "gpus_used": sum(device.is_allocated for device in devices)}
    return MapNode(name, **{"state": "mixed", "partitions": ["h100"], "devices": list(devices), **counted, **fields})


def busy(index: int, percent: int = 90, celsius: int = 60, **fields: Any) -> MapGpu:
    holder = MapHolder("mira", "wren")
    payload = {"percent": percent, "temperature_c": celsius, "watts": 500, "holder": holder, **fields}
    return MapGpu(index, pk=index + 1, is_allocated=True, **payload)


def drawn(*machines: MapNode) -> layout.RackMap:
    return layout.draw(machines, ["h100", "cpu"])


def cells(of: MapNode) -> list[layout.MapCell]:
    return [layout.cell_of(device, of) for device in of.devices]


# Cells.
@pytest.mark.parametrize(
    ("device", "state", "mark"),
    [
        (busy(0), "busy", ""),
        (busy(0, 0, is_wasted=True), "wasted", "z"),
        (busy(0, celsius=84, slowdown_c=87), "hot", "▲"),
        (busy(0, celsius=83, slowdown_c=87), "busy", ""),
        (busy(0, celsius=86), "hot", "▲"),
        (busy(0, throttle=0x40), "hot", "▲"),
        (busy(0, throttle=0x04), "busy", ""),  # a power cap is no heat
        (busy(0, is_lost=True), "lost", "×"),
        (MapGpu(0), "idle", ""),
        (MapGpu(0, percent=0), "idle", ""),
        (MapGpu(0, percent=50), "stray", "?"),
        (MapGpu(0, is_allocated=True, is_hidden=True), "busy", ""),
    ],
)
def test_a_cell_by_the_reported_values(device: MapGpu, state: str, mark: str) -> None:
    cell = layout.cell_of(device, machine())
    assert (cell.state, cell.mark) == (state, mark)


def test_a_cell_carries_all_four_answers() -> None:
    (cell,) = cells(machine("dgx-01", busy(3, 97, 61)))
    assert (cell.use, cell.heat, cell.owner) == (8, 4, "mi")
    assert cell.colour in range(1, 9)
    assert cell.label == f"GPU 3: in use by mira, wren, 97{NBSP}%, 61{NBSP}°C"
    (cell,) = cells(machine("dgx-01", MapGpu(0)))
    assert (cell.use, cell.heat, cell.owner, cell.colour, cell.label) == ("", "", "", "", "GPU 0: free")
    (cell,) = cells(machine("dgx-01", MapGpu(0, is_allocated=True, is_hidden=True)))
    assert (cell.owner, cell.label) == ("··", "GPU 0: in use")
    (cell,) = cells(machine("dgx-01", MapGpu(0), takes_jobs=False))
    assert (cell.state, cell.mark) == ("drained", "–")


def test_buckets_and_letters_at_their_ends() -> None:
    assert [layout.heat_bucket(c) for c in (-5, 30, 58, 86, 200)] == [0, 0, 4, 8, 8]
    uses = [layout.cell_of(MapGpu(0, percent=p), machine()).use for p in (0, 11, 12, 99, 100)]
    assert uses == [0, 0, 1, 8, 8]
    assert [layout.initials(name) for name in ("mira", "ada.lindqvist", "a", "", "x-y_z", "...")] == [
        "mi", "al", "a", "", "xy", "..",
    ]  # fmt: skip


# Rows: each is described in one line.
def test_a_row_shows_what_matters_most() -> None:
    def why(of: MapNode) -> str:
        return layout.MapRow(of).why.replace(NBSP, " ")

    allocations = [NodeAllocation("7", name, "mira", None, False, (), None, 0) for name in ("wren", "plover", "heron")]
    assert why(machine("n", busy(0), MapGpu(1), jobs=allocations[:1])) == "wren, 1 free"
    assert why(machine("n", busy(0), jobs=allocations)) == "wren, plover, 1 more"
    assert why(machine("n", MapGpu(0), MapGpu(1))) == "free"
    assert why(machine("n", MapGpu(0, is_allocated=True, is_hidden=True), MapGpu(1))) == "in use, 1 free"
    assert why(machine("n", busy(2, celsius=90), busy(3, is_lost=True))) == "GPU 3 lost"
    assert why(machine("n", busy(2, celsius=90), busy(4, celsius=91))) == "GPUs 2, 4 hot"
    out = {"state": "drained", "is_in_service": False, "takes_jobs": False}
    assert why(machine("n", busy(3, is_lost=True), reason="XID 79", **out)) == "drained, XID 79"
    assert why(machine("n", MapGpu(0), silent_since=NOON)).startswith("agent silent since ")
    assert why(machine("n", cpus=8, state="idle")) == "idle"
    families = [
        layout.MapRow(of).family
        for of in (machine("n", busy(0)), machine("n", busy(0, is_lost=True)), machine("n", **out))
    ]
    assert families == ["running", "warn", "cancelled"]


# Racks and those that stand in none.
def rack(name: str, celsius: int, *, order: int = 0, slot: int = 0, node: str = "") -> MapNode:
    return machine(node or f"n-{name}-{slot}", busy(0, celsius=celsius), rack=name, rack_order=order, slot=slot)


def test_racks_stand_in_physical_order() -> None:
    there = drawn(rack("R10", 60), rack("R2", 60, slot=2), rack("R2", 60, slot=1), rack("Z", 60, order=-1))
    assert [column.name for column in there.columns] == ["Z", "R2", "R10"]
    assert [row.name for row in there.columns[1].rows] == ["n-R2-1", "n-R2-2"]
    assert there.has_racks


def test_a_rack_is_compared_with_its_neighbours() -> None:
    there = drawn(rack("1", 60), rack("2", 66), rack("3", 62), rack("4", 61))
    assert [round(column.off_c or 0, 1) for column in there.columns] == [-6.0, 5.0, -1.5, -1.0]
    assert [column.is_warm for column in there.columns] == [False, True, False, False]
    idle = machine("idle", MapGpu(0, percent=0, temperature_c=31), rack="2")
    assert [column.off_c for column in drawn(rack("1", 60), idle).columns] == [None, None], (
        "idle GPUs are cooler anyway"
    )
    assert drawn(rack("1", 60)).columns[0].off_c is None


def test_the_sums_of_a_rack() -> None:
    (column,) = drawn(machine("n", busy(0, 80, 60), busy(1, 0, 40, is_wasted=True), MapGpu(2), rack="R")).columns
    assert (column.gpus, column.used, column.wasted, column.kilowatts) == (3, 2, 1, 1.0)
    assert (column.percent, column.mean_c) == (40, 50)


def test_nodes_without_a_rack_stand_by_partition() -> None:
    many = [machine(f"dgx-{i}", MapGpu(0)) for i in range(1, 31)]
    there = drawn(*many, machine("x", MapGpu(0), partitions=[]), machine("c", partitions=["cpu", "h100"], cpus=4))
    assert [(column.name, column.part, len(column.rows)) for column in there.columns] == [
        ("h100", "1 of 3", 11), ("h100", "2 of 3", 11), ("h100", "3 of 3", 9), ("No partition", "", 1),
    ]  # fmt: skip
    assert [row.name for row in there.columns[0].rows[:4]] == ["c", "dgx-1", "dgx-2", "dgx-3"]
    assert not there.has_racks


@pytest.mark.parametrize(("nodes", "size"), [(64, "full"), (65, "folded"), (256, "folded"), (257, "canvas")])
def test_more_nodes_are_drawn_smaller(nodes: int, size: str) -> None:
    there = drawn(*(machine(f"n{i}", MapGpu(0), rack=f"R{i % 9}") for i in range(nodes)))
    assert there.size == size
    assert layout.draw_rack(there, "R3").size == "full"
    assert layout.draw_rack(there, "nowhere").columns == []


def test_a_packed_map_shows_the_same() -> None:
    of = machine("n", busy(0, 93, 61), MapGpu(3), busy(5, is_lost=True, temperature_c=None), rack="R")
    hidden = machine("m", MapGpu(0, is_allocated=True, is_hidden=True), rack="R", slot=1)
    report = packed(drawn(of, hidden, machine("c", cpus=8, cpus_used=3, partitions=["cpu"])))
    assert report["owners"] == [["mi", "mira", layout.colour("mira")]]
    first, cpus = report["columns"]
    assert first["nodes"][0] == ["n", 86, "bil", "5d--5a", "3d----", "00--00", "GPU 5 lost", [0, 3, 5]]
    assert first["nodes"][1] == ["m", 86, "b", "--", "--", "--", "", None]
    assert cpus["nodes"] == [["c", 86, "", "", "", "", "", None, 3, 8]]


# The sentence, and the numbers.
def summary(*machines: MapNode, slow: tuple[SlowFileSystem, ...] = (), waiting: PendingDemand | None = None) -> str:
    return " ".join(headline(drawn(*machines), slow, waiting or PendingDemand(), NOON)).replace(NBSP, " ")


def test_the_sentence_starts_with_what_is_broken() -> None:
    out = {"state": "drained", "is_in_service": False, "takes_jobs": False, "reason": "XID 79."}
    assert summary() == "No nodes yet. The scheduler is polled within seconds of Vigil’s start."
    assert summary(machine("n", MapGpu(0))) == "The node is in service. No pending jobs."
    assert summary(machine("a"), machine("b"), waiting=PendingDemand(2, 36)) == (
        "All 2 nodes are in service. 2 pending jobs need 36 GPUs."
    )
    assert summary(machine("a", **out), machine("b", busy(5, is_lost=True)), waiting=PendingDemand(1, 0)) == (
        "a is drained (XID 79) and GPU 5 of b is lost. 1 pending job."
    )
    three = [machine(name, **out) for name in "abc"]
    assert summary(*three).startswith("3 nodes are out of service (a, b and c).")
    assert summary(*three, machine("d", **out)).startswith("4 nodes are out of service.")
    lost = [busy(i, is_lost=True) for i in range(2)]
    assert summary(machine("a", *lost)).startswith("2 GPUs are lost on a.")
    assert summary(machine("a", lost[0]), machine("b", lost[1])).startswith("2 GPUs are lost on 2 nodes.")
    silent = machine("a", silent_since=NOON)
    assert re.match(r"The agent of a has been silent since .*\d\d:\d\d\. ", summary(silent))
    assert summary(silent, replace(silent, name="b")).startswith("2 agents are silent.")


def test_the_sentence_names_idle_allocations_and_what_hangs() -> None:
    wasted = [busy(i, 0, is_wasted=True) for i in range(3)]
    assert "3 GPUs are allocated but idle: mira’s." in summary(machine("a", *wasted))
    noor = structs.replace(wasted[2], holder=MapHolder("noor", "x"))
    assert "3 GPUs are allocated but idle, 2 of them mira’s." in summary(machine("a", *wasted[:2], noor))
    ongoing = SlowFileSystem("nfs01:/x", ["/x"], ["a", "b"], NOON - timedelta(minutes=11), NOON, None)
    assert summary(machine("a"), slow=(ongoing,)).startswith("nfs01 has been slow for 11 min on 2 nodes.")
    over = replace(ongoing, until=NOON)
    assert summary(machine("a"), slow=(over,)).startswith("The node is in service.")
    warm = summary(rack("1", 60), rack("2", 66), rack("3", 60))
    assert warm.endswith("Rack 2 is 6.0 °C warmer than its neighbours.")


def test_the_numbers_that_matter() -> None:
    there = drawn(
        machine("a", busy(0, 80, cap_watts=700), MapGpu(1, cap_watts=700)), machine("b", *map(MapGpu, range(3)))
    )
    report = {title: (value, of.replace(NBSP, " ")) for title, value, of, _ in facts(there, PendingDemand(3, 24))}
    assert report == {
        "In use": ("1", "of 5 GPUs"), "Working": ("0.8", "by utilisation"), "Free": ("4", "at most 3 on one node"),
        "Not schedulable": ("0", "of 2 nodes"), "Pending": ("24", "GPUs for 3 jobs"), "Power": ("0.5", "of 0.7 kW"),
    }  # fmt: skip
    cpus = facts(drawn(machine("c", cpus=8, cpus_used=3)), PendingDemand(1, 0))
    assert [(title, value, of.replace(NBSP, " ")) for title, value, of, _ in cpus] == [
        ("In use", "3", "of 8 CPUs"), ("Not schedulable", "0", "of 1 node"), ("Pending", "1", "job"),
    ]  # fmt: skip
    assert facts(drawn(), PendingDemand()) == facts(drawn(), PendingDemand(0, 0))


# The page.
@pytest.fixture
def mira(db: None) -> User:
    return person("mira", a_project(), slurm_user="mira1")


def a_dgx(now: datetime) -> Reporting:
    """Return a reporting node with two GPUs: one is allocated to mira's job in Vigil, the other to a job of oskar."""
    Node.objects.create(name="dgx-01", state="allocated", partitions=["h100"], gpus=2, gpus_used=2, cpus=8)
    Partition.objects.create(name="h100", is_default=True)
    Reading.objects.update_or_create(part="nodes", defaults={"read_at": now, "asked_at": now})
    a_job(User.objects.get(username="mira"), a_project(), name="wren", state="running", attempt={"scheduler_id": "11"})
    reporting = Reporting()
    reporting.post(reporting.facts(now.timestamp()))
    batch = reporting.batch(int(now.timestamp()) - 10, gpu_percent=[[93] * 10, [7] * 10], temperature_c=61, watts=400)
    batch["processes"] = [
        {"gpu": UUIDS[0], "pid": 41, "user": "mira1", "name": "train <b>", "memory_mib": 5, "job": "11"},
        {"gpu": UUIDS[1], "pid": 42, "user": "oskar9", "name": "secret.py", "memory_mib": 5, "job": "12"},
    ]
    reporting.post(batch)
    for number, user, uuid in (("11", "mira1", UUIDS[0]), ("12", "oskar9", UUIDS[1])):
        gpu = Gpu.objects.get(uuid=uuid)
        QueuedJob.objects.create(
            scheduler_id=number, name=f"slurm-{number}", user=user, state="running", nodes=["dgx-01"], gpus=1,
            gpu_indices={"dgx-01": [gpu.index]},
        )  # fmt: skip
        Holding.objects.create(
            gpu=gpu, agent=gpu.agent, scheduler_id=number, user=user, name=f"slurm-{number}", source="scheduler",
            since=now - timedelta(hours=1),
        )  # fmt: skip
    return reporting


def test_the_page_with_all_four_answers(mira: User) -> None:
    a_dgx(timezone.now())
    RackPlace.objects.create(node="dgx-01", rack="A & 1")
    html = page_text(mira, "/cluster?by=heat")
    assert "The node is in service. No pending jobs." in re.sub(r"<[^>]+>", "", html).replace("  ", " ")
    assert 'id="by-heat" checked' in html.replace('value="heat" ', "")
    assert "<b>A & 1</b></a> · 61 °C" in html
    assert "2 of 2 in use · 0.8 kW" in html
    first = Gpu.objects.get(uuid=UUIDS[0]).pk
    cell = re.search(rf'<a class="gpu s\d" href="/nodes/dgx-01#gpu-{first}" [^>]+>', html)
    assert cell
    for attribute in (
        'data-s="busy"', 'data-u="8"', 'data-use="93"', 'data-t="4"', 'data-temp="61"', 'data-owner="mi"', "data-mine",
        'aria-label="GPU 0: in use by mira, wren, 93 %, 61 °C"',
    ):  # fmt: skip
        assert attribute in cell[0]
    assert 'aria-label="GPU 1: in use by oskar9, slurm-12, 7 %, 61 °C"' in html
    assert 'id="by-state" checked' in page_text(mira, "/cluster?by=nonsense").replace('value="state" ', "")


def test_who_holds_what_where_more_runs_than_a_statement_names(mira: User, monkeypatch: pytest.MonkeyPatch) -> None:
    a_dgx(timezone.now())
    few, stranger = page_text(mira, "/cluster"), person("stranger")
    monkeypatch.setattr(visibility, "MAX_LISTED", 0)
    labels = re.findall(r'aria-label="(GPU [^"]+)"', page_text(mira, "/cluster"))
    assert labels == ["GPU 0: in use by mira, wren, 93 %, 61 °C", "GPU 1: in use by oskar9, slurm-12, 7 %, 61 °C"]
    assert labels == re.findall(r'aria-label="(GPU [^"]+)"', few)
    assert "in use by mira1, slurm-11" in page_text(stranger, "/cluster"), (
        "Vigil's name is for those who may see the job"
    )


def test_the_card_of_a_gpu(mira: User) -> None:
    a_dgx(timezone.now())
    card = page_text(mira, "/cluster/dgx-01/0")
    assert ">wren</a>" in card
    assert "93 %" in card
    assert "train <b>" in card
    assert "train <b>" not in signed_in(mira).get("/cluster/dgx-01/0").text, "a process names itself: it is escaped"
    assert "secret.py" in page_text(mira, "/cluster/dgx-01/1")
    assert 'data-url="/cluster/NODE/0"' in page_text(mira, "/cluster"), "its script puts node and index there"
    for address in ("/cluster/dgx-01/2", "/cluster/nowhere/0", "/cluster/dgx-01/x"):
        assert signed_in(mira).get(address).status_code == 404
    Agent.objects.update(heard_at=timezone.now() - timedelta(minutes=5))
    silent = page_text(mira, "/cluster/dgx-01/0")
    assert "Its agent has been silent since" in silent
    assert "93 %" not in silent


def test_allocations_of_others_are_hidden_where_the_site_requires_it(mira: User, settings: LazySettings) -> None:
    a_dgx(timezone.now())
    settings.VIGIL_QUEUE_VISIBLE = "own"
    html = page_text(mira, "/cluster") + page_text(
        mira, "/cluster?by=owner", **{"HX-Request": "true", "HX-Target": "live"}
    )
    assert "oskar" not in html
    assert "slurm-12" not in html
    assert 'aria-label="GPU 1: in use"' in html
    assert 'data-use="7"' not in html
    assert "0.4 kW" in html, "and its watts are in no sum"
    assert 'data-use="93"' in html
    card = page_text(mira, "/cluster/dgx-01/1")
    assert "secret.py" not in card
    assert "oskar" not in card
    assert "7 %" not in card
    assert "It is allocated to somebody else’s job." in card
    stranger = page_text(person("stranger"), "/cluster")
    assert "wren" not in stranger
    assert 'data-use="93"' not in stranger
    assert "oskar9" in page_text(sysadmin(), "/cluster"), "sysadmins see all"


def test_a_node_that_only_the_scheduler_knows(mira: User) -> None:
    Node.objects.create(name="dgx-02", state="mixed", gpus=4, gpus_used=2, partitions=["h100"])
    Node.objects.create(name="cpu-01", state="mixed", cpus=8, cpus_used=3, partitions=["cpu"])
    html = page_text(mira, "/cluster")
    assert html.count('data-s="busy"') == 2 + 2, "two of the key"
    assert "3 of 8 CPUs" in html
    assert '<progress value="3" max="8"' in html
    assert "No agent reports on it." in page_text(mira, "/cluster/dgx-02/0")


def test_an_empty_cluster(mira: User) -> None:
    html = page_text(mira, "/cluster")
    assert "No nodes yet" in html
    assert "No nodes in R" in page_text(mira, "/cluster?rack=R")
    assert signed_in(mira).post("/cluster").status_code == 405


def test_only_what_changes_is_sent_again(mira: User) -> None:
    a_dgx(timezone.now())
    fragment = page_text(mira, "/cluster", **{"HX-Request": "true", "HX-Target": "live"})
    assert "<html" not in fragment
    assert 'id="lead" hx-swap-oob="true"' in fragment
    assert 'type="radio"' not in fragment, "what somebody chose stays chosen"


def test_a_thousand_nodes_are_a_small_page_of_few_queries(mira: User, django_assert_max_num_queries: Any) -> None:
    simulated_fleet.make(300, nodes_per_rack=20)
    client = signed_in(mira)
    with django_assert_max_num_queries(25):
        html = client.get("/cluster").text
    assert html.count("<") < 3_000, "no element a GPU"
    found = re.search(r'<script id="map-data" type="application/json">(.+?)</script>', html)
    assert found
    payload = json.loads(found[1])
    assert sum(len(column["nodes"]) for column in payload["columns"]) == 300
    assert {len(node[2]) for column in payload["columns"] for node in column["nodes"]} == {8}
    assert 'href="/cluster?rack=R03"' in html, "by rack, for those without a script"
    item = client.get("/cluster?rack=R03").text
    assert item.count('class="node"') == 20
    assert 'aria-label="GPU 7' in item
