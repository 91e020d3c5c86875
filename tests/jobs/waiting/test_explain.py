"""Test the explanation of why a job waits, and of what would start now, from given facts."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from jobs.spec import JobSpec
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import Limits, PartitionInfo, QosInfo, ReservationInfo
from tests.jobs.submissions import spec_of
from tests.jobs.waiting.queues import GPU, NOW, cluster, gpu_spec, node, now, plain, queued, texts, why


def test_names_nodes_by_state_and_what_is_scattered() -> None:
    where = cluster(*(node(f"h{i}", 4) for i in range(3)), node("d1", state="drained"), node("x", state="down*"))
    found = why(gpu_spec(), where)
    assert [block.kind for block in found.blocks] == ["nodes", "fragmentation"]
    assert texts(found)[0] == (
        "It needs 1 node with 8 free GPUs and 8 free CPUs; none has that: 3 have fewer than 8 free GPUs, "
        "1 is drained, 1 is down."
    )
    assert texts(found)[1] == "12 GPUs are free, but fragmented: 3 nodes have 4 free GPUs each, none has 8."
    assert found.meaning.startswith("Resources: ")
    assert not found.never


def test_offers_other_shapes_first_then_less() -> None:
    where = cluster(*(node(f"h{i}", 4) for i in range(3)))
    found = why(gpu_spec(), where)
    assert now(found)[0] == {"resources.nodes": 2, "resources.gpus_per_node": 4}
    assert plain(found.variants[0].text) == "2 nodes with 4 GPUs each instead of 1 node with 8 GPUs"
    assert {"resources.gpus_per_node": 4} in now(found)
    assert len(found.variants) <= 5
    assert [v.starts_now for v in found.variants] == sorted((v.starts_now for v in found.variants), reverse=True)


def test_every_variant_is_a_valid_spec_with_room() -> None:
    spec = gpu_spec(2, 8, global_batch=48)
    found = why(spec, cluster(node("a"), node("b", 5), node("c", 5)))
    assert now(found)
    for variant in found.variants:
        options = {**spec.model_dump(mode="json")["resources"]}
        options.update({path.removeprefix("resources."): value for path, value in variant.changes.items()})
        changed = JobSpec.parse({**spec.model_dump(mode="json"), "resources": options})
        assert changed.run is not None
        assert changed.run.global_batch % changed.world_size == 0


def test_never_proposes_what_does_not_divide() -> None:
    found = why(gpu_spec(1, 7, global_batch=35), cluster(node("a", 4)))
    assert now(found) == [{"resources.gpus_per_node": 1}]  # 5 of 35 have no room, 6, 4, 3 and 2 do not divide


@pytest.mark.parametrize("parallelism", ["fsdp", "auto"])
def test_proposes_the_largest_that_the_mesh_fits(parallelism: str) -> None:
    spec = gpu_spec(1, 6, global_batch=12, parallelism=parallelism, mesh={"tp": 2})
    assert {"resources.gpus_per_node": 2} in now(why(spec, cluster(node("a", 5)))), "3 have room, and 2 do not divide 3"


def test_counts_who_is_ahead_and_names_whom_the_reader_may_see() -> None:
    queue = (
        queued("70", 8, priority=9, starts_at=NOW + 3600, nodes=1),
        queued("71", 8, priority=8, tasks=3),
        queued("72", 8, priority=9, reason="JobHeldUser"),
        queued("73", 8, priority=1),
        queued("77", 4, priority=5, starts_at=NOW + 7200),
    )
    where = cluster(node("a", 4), queue=queue)
    found = why(gpu_spec(1, 4, "01:30:00"), where, "Priority", names={"70": "#12 wren"})
    assert (found.ahead.jobs, found.ahead.gpus, found.ahead.named) == (4, 32, ("#12 wren",))
    assert found.starts_at == NOW + 7200
    assert found.blocks[0].kind == "priority"
    assert "There is room for it, but 4 jobs wait with a higher priority" in texts(found)[0]


def test_shorter_slips_in_before_who_is_planned() -> None:
    queue = (queued("70", 8, priority=9, starts_at=NOW + 2 * 3600 + 600), queued("77", 4, priority=5))
    found = why(gpu_spec(1, 4, "12:00:00"), cluster(node("a", 4), queue=queue), "Priority")
    assert {"resources.time_limit": "02:00:00"} in now(found)
    variant = next(v for v in found.variants if v.changes == {"resources.time_limit": "02:00:00"})
    assert plain(variant.text) == "A time limit of 2 h instead of 12 h"


def test_what_those_ahead_take_is_not_offered() -> None:
    queue = (queued("70", 4, priority=9), queued("77", 8, priority=5))
    found = why(gpu_spec(1, 8), cluster(node("a", 4), queue=queue))
    assert now(found) == []
    assert all("ahead" in variant.why for variant in found.variants)


def test_a_reservation_ahead_blocks_and_a_shorter_limit_fits_before_it() -> None:
    soon = ReservationInfo(name="maintenance", nodes=("a",), starts_at=NOW + 4 * 3600 + 180, ends_at=NOW + 90_000)
    found = why(gpu_spec(), cluster(node("a"), reservations=(soon,)), "ReqNodeNotAvail, Reserved for maintenance")
    assert "reservation" in [block.kind for block in found.blocks]
    text = next(plain(block.text) for block in found.blocks if block.kind == "reservation")
    assert text.startswith("Reservation maintenance takes 1 node at ")
    assert text.endswith("this job requests 12 h.")
    assert now(found)[0] == {"resources.time_limit": "04:00:00"}


def test_what_never_starts_is_explained() -> None:
    found = why(gpu_spec(4, 8), cluster(node("a"), node("b", gpus=4)))
    assert found.never
    assert "It can never start as requested." in texts(found)[0]
    found = why(gpu_spec(2, 8), cluster(node("a"), node("b", state="drained")))
    assert not found.never
    assert "1 is drained" in texts(found)[0]


@pytest.mark.parametrize(
    ("partition", "word", "text", "final"),
    [
        ({"state": "down"}, "PartitionDown", "is down and starts no jobs", False),
        ({"max_time_s": 3600}, "PartitionTimeLimit", "limits jobs to 1 h; this job requests 12 h", True),
        ({"max_nodes": 1}, "PartitionNodeLimit", "at most 1 node; this job requests 2", True),
        ({"denied_accounts": ("vision",)}, "AccountNotAllowed", "does not accept account vision", True),
    ],
)
def test_partitions_refuse_by_name(partition: dict[str, Any], word: str, text: str, final: bool) -> None:
    where = cluster(node("a"), node("b"), partitions=(PartitionInfo(name="gpu", is_default=True, **partition),))
    found = why(gpu_spec(2, 8), where, word)
    assert found.blocks[0].is_reason
    assert text in texts(found)[0]
    assert found.never == final


def test_too_long_for_the_partition_is_offered_shorter() -> None:
    where = cluster(node("a"), partitions=(PartitionInfo(name="gpu", is_default=True, max_time_s=14_400),))
    assert now(why(gpu_spec(), where, "PartitionTimeLimit"))[0] == {"resources.time_limit": "04:00:00"}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Dependency", "dependency"), ("JobHeldUser", "held"), ("JobHeldAdmin", "held"), ("BeginTime", "time"),
        ("DependencyNeverSatisfied", "dependency"), ("Licenses", "limit"), ("QOSSomethingNew", "limit"),
    ],
)  # fmt: skip
def test_every_word_becomes_a_block(reason: str, kind: str) -> None:
    found = why(gpu_spec(1, 1), cluster(node("a")), reason)
    assert found.blocks[0].kind == kind
    assert found.blocks[0].is_reason
    if kind in {"dependency", "held"}:
        assert found.variants == ()


@pytest.mark.parametrize("reason", ["BeginTime", "Priority", "Resources", "None", ""])
def test_what_is_to_begin_later_names_when_and_offers_nothing_sooner(reason: str) -> None:
    begin = datetime.fromtimestamp(NOW + 7200, UTC)
    options = {"nodes": 1, "gpus_per_node": 8, "time_limit": "12:00:00", "begin": begin.isoformat()}
    found = why(spec_of(resources=options, run={"global_batch": 32}), cluster(node("a"), node("b", 4)), reason)
    assert found.blocks[0].kind == "time"
    assert texts(found)[0].startswith("Scheduled to start at ")
    assert texts(found)[0].endswith(", in 2 h.")
    assert found.variants == ()
    assert found.starts_on == ()
    assert not found.never


@pytest.mark.parametrize(("reason", "kind"), [("JobHeldUser", "held"), ("Dependency", "dependency")])
def test_a_hold_or_a_dependency_comes_before_a_later_begin(reason: str, kind: str) -> None:
    """Slurm reports the begin time as the start, whatever else the job waits for."""
    options = {"gpus_per_node": 8, "begin": datetime.fromtimestamp(NOW + 7200, UTC).isoformat()}
    queued_job = queued("77", 8, reason=reason, starts_at=NOW + 7200)
    found = why(spec_of(resources=options, run={"global_batch": 32}), cluster(node("a"), queue=(queued_job,)), reason)
    assert [block.kind for block in found.blocks] == [kind, "time"]
    assert texts(found)[1].endswith(", in 2 h.")
    assert found.variants == ()


@pytest.mark.parametrize(
    ("reason", "starts_at", "text"),
    [
        ("Resources", None, ""),  # scontrol update starttime=now
        ("Priority", NOW + 600, ""),
        ("BeginTime", NOW + 600, "in 10 min"),  # put forward
        ("BeginTime", NOW + 4 * 3600, "in 4 h"),  # put off
        ("Resources", NOW + 7200 - 1, "in 2 h"),
    ],
)
def test_the_schedulers_begin_counts_more_than_the_specifications(reason: str, starts_at: float, text: str) -> None:
    options = {"gpus_per_node": 8, "begin": datetime.fromtimestamp(NOW + 7200, UTC).isoformat()}
    queued_job = queued("77", 8, reason=reason, starts_at=starts_at)
    found = why(
        spec_of(resources=options, run={"global_batch": 32}), cluster(node("a", 4), queue=(queued_job,)), reason
    )
    assert ("Scheduled to start at" in " ".join(texts(found))) is bool(text)
    assert text in " ".join(texts(found))


def test_nothing_starts_now_in_a_reservation_that_has_not_begun() -> None:
    later = ReservationInfo(name="r", nodes=("a", "b"), starts_at=NOW + 7200, ends_at=NOW + 90_000)
    where = cluster(node("a", state="idle"), node("b"), reservations=(later,))
    options = {"nodes": 2, "gpus_per_node": 8, "time_limit": "12:00:00", "reservation": "r"}
    found = why(spec_of(resources=options, run={"global_batch": 32}), where, "Reservation")
    assert texts(found)[0].startswith("Reservation r begins at ")
    assert found.starts_on == ()
    assert [variant.text for variant in found.variants if variant.starts_now] == []


def test_once_its_time_has_come_it_waits_as_others_do() -> None:
    options = {"gpus_per_node": 8, "begin": datetime.fromtimestamp(NOW - 60, UTC).isoformat()}
    found = why(spec_of(resources=options, run={"global_batch": 32}), cluster(node("a", 4)))
    assert found.blocks[0].kind == "nodes"
    assert found.variants


def test_only_what_was_requeued_hears_of_requeues() -> None:
    for restarts, text in ((0, False), (1, True)):
        queued_job = queued("77", 1, restart_count=restarts)
        found = why(gpu_spec(1, 1), cluster(node("a"), queue=(queued_job,)), "BeginTime")
        assert ("requeue" in texts(found)[0]) is text
    assert "requeue" not in found.meaning
    queued_job = queued("77", 1, restart_count=1, starts_at=NOW + 120)
    found = why(gpu_spec(1, 1), cluster(node("a"), queue=(queued_job,)), "BeginTime")
    assert texts(found)[0].startswith("Slurm waits until ")


@pytest.mark.parametrize("word", ["JobHeldUser", "JobHeldAdmin"])
def test_a_hold_explains_what_lets_it_go(word: str) -> None:
    found = why(gpu_spec(1, 1), cluster(node("a")), word)
    assert "scontrol release 77" in texts(found)[0]


def test_what_vigil_holds_is_explained_in_its_words() -> None:
    found = why(gpu_spec(), cluster(), "Waits for #12 to complete.", waits_in_vigil=True, scheduler_id="")
    assert [(b.kind, b.text) for b in found.blocks] == [("dependency", "Waits for #12 to complete.")]
    assert found.sentence == "Waits for #12 to complete."
    assert found.variants == ()


def test_a_single_machine_shows_who_holds_what() -> None:
    box = NodeStatus(name="box", state="mixed", cpus=8, cpus_used=6, partitions=("local",), plays_many=True)
    queue = (
        queued("1", state="running", cpus=4, partition="local"),
        queued("2", state="running", cpus=2, partition="local"),
        queued("77", cpus=4, partition="local"),
    )
    where = cluster(box, partitions=(PartitionInfo(name="local", is_default=True),), queue=queue)
    spec = spec_of(resources={"ranks_per_node": 4}, run={"global_batch": 32})
    found = why(spec, where, "Waits for 4 CPUs; 2 of 8 are free.", names={"1": "#12 wren"})
    assert texts(found) == ["It needs 4 CPUs, 2 are free; #12 uses 4, others use 2."]
    assert {"resources.ranks_per_node": 2} in now(found)


@pytest.mark.parametrize(("reason", "waits"), [("BeginTime", False), ("", True), ("Priority", True)])
def test_a_single_machine_starts_in_order_what_is_to_begin_now(reason: str, waits: bool) -> None:
    box = NodeStatus(name="box", state="idle", cpus=8, partitions=("local",), plays_many=True)
    where = cluster(
        box,
        partitions=(PartitionInfo(name="local", is_default=True),),
        queue=(queued("5", cpus=8, partition="local", reason=reason),),
    )
    found = why(spec_of(resources={"ranks_per_node": 4}, run={"global_batch": 32}), where, "", scheduler_id="")
    assert (bool(found.blocks), found.ahead.jobs) == (waits, int(waits))


@pytest.mark.parametrize(
    ("state", "used", "text"),
    [
        (
            "draining",
            6,
            "box is draining: fan 3 (vigil: ops). Running jobs continue; nothing new starts until a sysadmin",
        ),
        ("drained", 0, "box is drained: fan 3 (vigil: ops). Nothing new starts until a sysadmin undrains it."),
    ],
)
def test_a_single_machine_that_is_drained_reports_it_first(state: str, used: int, text: str) -> None:
    box = NodeStatus(
        name="box", state=state, reason="fan 3 (vigil: ops)", cpus=8, cpus_used=used, partitions=("local",),
        plays_many=True,
    )  # fmt: skip
    where = cluster(
        box,
        partitions=(PartitionInfo(name="local", is_default=True),),
        queue=(queued("77", cpus=4, partition="local"),),
    )
    spec = spec_of(resources={"ranks_per_node": 4}, run={"global_batch": 32})
    found = why(spec, where, "This machine is drained: fan 3 (vigil: ops).")
    assert found.sentence.startswith(text)
    assert texts(found)[1:] == (["It needs 4 CPUs, 2 are free."] if used else [])
    assert (found.never, found.starts_on, found.variants) == (False, (), ()), "nothing of another shape starts, either"


def test_without_data_nothing_is_claimed() -> None:
    found = why(gpu_spec(), cluster(partitions=()), "")
    assert found.blocks == ()
    assert found.variants == ()


def test_a_large_cluster_is_explained_at_once() -> None:
    nodes = tuple(
        node(f"n{i}", i % 9, memory_used_mib=1000 * (i % 97), features=("a",) if i % 2 else ("b",)) for i in range(1000)
    )
    queue = tuple(
        queued(
            str(i), 1 + i % 8, priority=i % 1000, nodes=1 + i % 3, cpus=8 + i % 60, user=f"u{i % 50}", qos="q",
            state="running" if i % 4 == 0 else "pending", reason="Priority", starts_at=NOW + 60 * i,
        )
        for i in range(5000)
    ) + (queued("9999", 64, nodes=8, qos="q", priority=3),)  # fmt: skip
    where = cluster(
        *nodes, queue=queue, qos=(QosInfo(name="q", limits=Limits(user={GPU: 500}, group={GPU: 100_000})),),
        reservations=tuple(
            ReservationInfo(name=f"r{i}", nodes=tuple(f"n{j}" for j in range(i, 1000, 9)),  starts_at=NOW + 3600 * i)
            for i in range(1, 4)
        ),
    )  # fmt: skip
    best, spec = 9.0, gpu_spec(8, 8, global_batch=64)
    for _ in range(3):
        began = time.process_time()
        why(spec, where, "Priority", scheduler_id="9999")
        best = min(best, time.process_time() - began)
    assert best < 0.25  # 50 ms where nothing else runs; this machine may be busy
