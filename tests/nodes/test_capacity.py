"""Test what could start now, against an oracle that tries every choice of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo, QueuedJobInfo, ReservationInfo
from nodes.scheduling import features
from nodes.scheduling.backfill import after, limited_by_plans
from nodes.scheduling.capacity import (
    ClusterCapacity,
    Fit,
    FreeCapacity,
    Request,
    assess,
    starts,
    survey,
)
from nodes.scheduling.node_states import closed_reason, is_in_service
from tests.examples import examples

NOW = 1_000_000.0
GOOD = ("idle", "mixed", "allocated", "planned", "idle~")
BAD = ("down*", "drained", "draining", "idle+drain", "mixed@", "completing", "fail", "maint")


def fits_now(request: Request, where: ClusterCapacity) -> Fit:
    return assess(request, survey(request, where), where)


def node(name: str, **facts: Any) -> NodeStatus:
    given = {"state": "idle", "cpus": 64, "gpus": 8, "memory_mib": 512_000, "gpu_type": "h100", "partitions": ("gpu",)}
    return NodeStatus(name=name, **{**given, **facts})


def cluster(*nodes: NodeStatus, **facts: Any) -> ClusterCapacity:
    given = {"partitions": (PartitionInfo(name="gpu", is_default=True),), "now": NOW}
    return ClusterCapacity(nodes=nodes, **{**given, **facts})


@st.composite
def clusters(draw: st.DrawFn) -> ClusterCapacity:
    nodes = [
        node(
            f"n{i}",
            state=draw(st.sampled_from(GOOD * 6 + BAD)),
            cpus_used=draw(st.sampled_from((0, 0, 0, 0, 30, 64))),
            gpus_used=draw(st.sampled_from((0, 0, 0, 0, 4, 7))),
            memory_used_mib=draw(st.sampled_from((0, 256_000, 500_000))),
            memory_mib=draw(st.sampled_from((0, 512_000))),
            gpu_type=draw(st.sampled_from(("h100", "h100", "a100"))),
            partitions=draw(st.sampled_from((("gpu",), ("gpu", "all"), ("gpu", "all"), ("all",)))),
            features=tuple(draw(st.sampled_from(("abc", "ab", "ac", "a", "b", "bc", "c", "")))),
        )
        for i in range(draw(st.integers(2, 6)))
    ]
    names = st.sets(st.sampled_from([n.name for n in nodes]))
    reservations = [
        ReservationInfo(
            name=f"r{i}",
            nodes=tuple(draw(names)),
            starts_at=NOW + draw(st.sampled_from((-3600, 1800, 90_000))),
            ends_at=NOW + draw(st.sampled_from((-60, 100_000))),
        )
        for i in range(draw(st.sampled_from((0, 0, 1, 2))))
    ]
    return cluster(*nodes, reservations=tuple(reservations))


EXPRESSIONS = ("", "a", "a&b", "a|b", "[a|b]", "a*2", "[a*1&b*2]", "(a&b)|c", "a|b&c", "a*1&b*1", "[a*1&b*1&c*1]")


@st.composite
def requests(draw: st.DrawFn) -> Request:
    low = draw(st.sampled_from((1, 2, 2, 3, 4)))
    some = st.sets(st.sampled_from(["n0", "n1", "n2"]), max_size=2)
    return Request(
        min_nodes=low,
        max_nodes=low + draw(st.integers(0, 2)),
        cpus=draw(st.sampled_from((1, 16, 64))),
        gpus=draw(st.sampled_from((0, 0, 1, 4, 8))),
        gpu_type=draw(st.sampled_from(("", "", "H100", "a100"))),
        memory_mib=draw(st.sampled_from((0, 0, 20_000, 400_000))),
        time_limit_s=draw(st.sampled_from((600, 1800, 86_400))),
        exclusive=draw(st.integers(0, 3)) == 0,
        partition=draw(st.sampled_from(("", "gpu", "gpu,all", "gpu,all", "all"))),
        constraint=draw(st.sampled_from(EXPRESSIONS)),
        reservation=draw(st.sampled_from(("", "", "", "", "r0"))),
        required_nodes=tuple(draw(some)) if draw(st.integers(0, 5)) == 5 else (),
        excluded_nodes=tuple(draw(some)) if draw(st.integers(0, 5)) == 5 else (),
    )


# The oracle: expressions spelt out by hand, every set of nodes tried.
def meets(expression: str, chosen: Sequence[NodeStatus]) -> bool:
    has = [set(n.features) for n in chosen]
    spread = {
        "a*2": (("a", 2),),
        "[a*1&b*2]": (("a", 1), ("b", 2)),
        "a*1&b*1": (("a", 1), ("b", 1)),
        "[a*1&b*1&c*1]": (("a", 1), ("b", 1), ("c", 1)),
    }
    each = {
        "a": lambda f: "a" in f,
        "a&b": lambda f: {"a", "b"} <= f,
        "a|b": lambda f: bool({"a", "b"} & f),
        "(a&b)|c": lambda f: {"a", "b"} <= f or "c" in f,
        "a|b&c": lambda f: bool({"a", "b"} & f) and "c" in f,  # from left to right
        "[a*1&b*2]": lambda f: bool({"a", "b"} & f),  # in brackets nothing else
        "[a*1&b*1&c*1]": lambda f: bool({"a", "b", "c"} & f),
    }
    if expression == "[a|b]":
        return all("a" in f for f in has) or all("b" in f for f in has)
    if expression in each and not all(each[expression](f) for f in has):
        return False
    places = [name for name, count in spread.get(expression, ()) for _ in range(count)]
    return any(all(p in has[i] for p, i in zip(places, order, strict=True)) for order in _orders(len(has), len(places)))


def _orders(many: int, places: int) -> list[tuple[int, ...]]:
    return list(permutations(range(many), places))


def may_start(request: Request, where: ClusterCapacity, n: NodeStatus) -> bool:
    end = NOW + request.time_limit_s
    names = request.partition.split(",") if request.partition else ["gpu"]
    if not set(names) & set(n.partitions) or n.name in request.excluded_nodes:
        return False
    if request.gpus and request.gpu_type and request.gpu_type.lower() != n.gpu_type:
        return False
    reserved = [r for r in where.reservations if r.name == request.reservation]
    if request.reservation and not any(n.name in r.nodes for r in reserved):
        return False
    if n.state in BAD and not (n.state == "maint" and reserved):
        return False
    for r in where.reservations:
        if r not in reserved and n.name in r.nodes and r.ends_at > NOW and r.starts_at < end:
            return False
    if request.exclusive and (n.cpus_used or n.gpus_used):
        return False
    enough_memory = not n.memory_mib or request.memory_mib <= n.memory_mib - n.memory_used_mib
    return request.cpus <= n.cpus - n.cpus_used and request.gpus <= n.gpus - n.gpus_used and enough_memory


def oracle(request: Request, where: ClusterCapacity) -> bool:
    free = [n for n in where.nodes if may_start(request, where, n)]
    for many in range(request.min_nodes, request.max_nodes + 1):
        for chosen in combinations(free, many):
            if set(request.required_nodes) <= {n.name for n in chosen} and meets(request.constraint, chosen):
                return True
    return False


@settings(max_examples=examples(600))
@given(clusters(), requests())
@pytest.mark.lengthy
def test_starts_exactly_where_some_choice_of_nodes_would_do(where: ClusterCapacity, request: Request) -> None:
    fit = fits_now(request, where)
    assert fit.starts == oracle(request, where) == starts(request, survey(request, where), where)
    assert fit.starts <= fit.fits_if_empty <= fit.can_ever_fit
    assert sum(count for _, count in fit.obstacles) + len(fit.nodes) <= len(where.nodes)


@settings(max_examples=examples(150))
@given(clusters(), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 8), st.integers(1, 32)), max_size=6))
@pytest.mark.lengthy
def test_jobs_ahead_never_take_more_than_there_is(where: ClusterCapacity, requests: list[tuple[int, int, int]]) -> None:
    ahead = [
        QueuedJobInfo(
            scheduler_id=str(i), name="j", user="u", state="pending", partition="all", node_count=n, gpus=n * g,
            cpus=n * c, starts_at=NOW + 60 * i,
        )
        for i, (n, g, c) in enumerate(requests)
    ]  # fmt: skip
    left = after(ahead, where)
    assert all(min(room.cpus, room.gpus, room.memory_mib) >= 0 for room in left.left.values())
    before = {n.name: (n.cpus - n.cpus_used, n.gpus - n.gpus_used) for n in where.nodes}
    started = [job for job in ahead if job not in left.waiting]
    given_away = sum(before[name][1] - room.gpus for name, room in left.left.items())
    assert given_away == sum(job.gpus for job in started)
    if left.waiting:
        assert left.until["all"] == min((NOW + 60 * int(j.scheduler_id), j.scheduler_id) for j in left.waiting)


@pytest.mark.parametrize(
    ("expression", "ways"),
    [
        ("", 1),
        ("a", 1),
        ("a|b|c", 1),
        ("[a|b|c]", 3),
        ("[a|b]&c", 2),
        ("(x&y)*2", 1),
        ("a*1&b*2", 1),
        ("[(x&y)*2&z*1]", 1),
    ],
)
def test_reads_what_slurm_writes(expression: str, ways: int) -> None:
    found = features.read(expression)
    assert found is not None
    assert len(found) == ways


@pytest.mark.parametrize(
    "expression", ["a&", "|a", "(a", "a)", "[a|b&c]", "a*0", "a*b", "a*2|b", "a,b", "[a|b", "a&b*2", "[a*1&b*2]&c"]
)
def test_promises_nothing_of_what_it_cannot_read(expression: str) -> None:
    assert features.read(expression) is None
    fit = fits_now(Request(constraint=expression), cluster(node("n0", features=("a", "b"))))
    assert not fit.starts
    assert not fit.is_sure
    assert fit.fits_if_empty


@given(st.text(alphabet="ab&|*()[]12 ,", max_size=12))
def test_reads_any_text_without_falling_over(expression: str) -> None:
    features.read(expression)


def test_groups_why_not_the_others() -> None:
    nodes = [node(f"d{i}", state="drained") for i in range(2)] + [node("x", state="down*")]
    nodes += [node(f"h{i}", gpus_used=4, cpus_used=32) for i in range(3)] + [node("old", gpus=4)]
    fit = fits_now(Request(gpus=8), cluster(*nodes))
    assert dict(fit.obstacles) == {"drained": 2, "down": 1, "room:gpus": 3, "small:gpus": 1}
    assert not fit.starts
    assert fit.fits_if_empty
    assert fit.suitable_nodes == 3
    assert dict(fit.free_gpus) == {4: 3}
    assert not fits_now(Request(gpus=8, min_nodes=4, max_nodes=4), cluster(*nodes)).fits_if_empty
    assert fits_now(Request(gpus=8, min_nodes=4, max_nodes=4), cluster(*nodes)).can_ever_fit
    assert not fits_now(Request(gpus=16), cluster(*nodes)).can_ever_fit


def test_a_reservation_that_begins_too_early_is_in_the_way() -> None:
    soon = ReservationInfo(name="maintenance", nodes=("n0",), starts_at=NOW + 7200, ends_at=NOW + 9000)
    where = cluster(node("n0"), reservations=(soon,))
    assert fits_now(Request(time_limit_s=7200), where).starts
    late = fits_now(Request(time_limit_s=7201), where)
    assert not late.starts
    assert late.until == NOW + 7200
    assert late.obstacles == (("window", 1),)


def test_who_is_planned_next_leaves_a_window() -> None:
    where = cluster(node("n0", gpus_used=4), node("n1", gpus_used=8))
    big = QueuedJobInfo(
        scheduler_id="7", name="big", user="anna", state="pending", partition="gpu", node_count=2, gpus=16,
        starts_at=NOW + 3600,
    )  # fmt: skip
    small = QueuedJobInfo(scheduler_id="8", name="s", user="bo", state="pending", partition="gpu", gpus=2, cpus=2)
    ahead = after([big, small], where)
    assert ahead.left["n0"] == FreeCapacity(62, 2, 512_000, {"h100": 2})
    assert [job.scheduler_id for job in ahead.waiting] == ["7"]

    def goes(gpus: int, seconds: int) -> bool:
        request = Request(gpus=gpus, time_limit_s=seconds)
        return assess(request, limited_by_plans(survey(request, where, left=ahead.left), ahead), where).starts

    assert goes(2, 3600)
    assert not goes(2, 3601)
    assert not goes(3, 600)


@pytest.mark.parametrize(
    ("nodes", "cpus", "starts"), [(1, 4, True), (2, 4, True), (2, 5, False), (4, 2, True), (9, 1, False)]
)
def test_a_machine_plays_several_nodes(nodes: int, cpus: int, starts: bool) -> None:
    here = cluster(node("box", cpus=12, cpus_used=4, gpus=0, plays_many=True))
    fit = fits_now(Request(min_nodes=nodes, max_nodes=nodes, cpus=cpus), here)
    assert fit.starts == starts
    assert fit.fits_if_empty == (nodes * cpus <= 12)


@pytest.mark.parametrize(
    ("state", "why", "in_service"),
    [
        ("idle", "", True), ("mixed", "", True), ("allocated-", "", True), ("idle~", "", True),
        ("drained", "drained", False), ("idle+drain", "drained", False), ("draining*", "draining", False),
        ("down*", "down", False), ("idle*", "not responding", False), ("completing", "being cleaned up", True),
        ("idle$", "reserved", True), ("mixed+reserved", "reserved", True), ("unknown", "unknown to Slurm", False),
    ],
)  # fmt: skip
def test_reads_states_as_slurm_writes_them(state: str, why: str, in_service: bool) -> None:
    assert closed_reason(state) == why
    assert is_in_service(state) == in_service


def test_more_room_never_stops_a_start() -> None:
    """Freeing a node, or asking for less, keeps what could start startable."""
    for used, gpus, cpus in product((0, 4, 8), (0, 2, 4, 8), (1, 32)):
        goes = fits_now(Request(gpus=gpus, cpus=cpus), cluster(node("n", gpus_used=used))).starts
        assert goes <= fits_now(Request(gpus=gpus, cpus=cpus), cluster(node("n"))).starts
        assert goes <= fits_now(Request(gpus=gpus // 2, cpus=cpus), cluster(node("n", gpus_used=used))).starts


@pytest.mark.parametrize(
    ("nodes", "constraint", "starts"),
    [
        (2, "a|b&c", True), (3, "a|b&c", False), (3, "b&c|a", True), (3, "a|(b&c)", True), (4, "a|(b&c)", False),
        (2, "c*2", True), (3, "c*3", False), (4, "c*1", True), (2, "[a|b]", True), (3, "[a|b]", False),
        (4, "[a*2&b*2]", True), (3, "[c*2&b*2]", False), (4, "[c*2&b*2]", False), (3, "[c*2&b*1]", True),
        (2, "[a*1&c*2]", False), (4, "[c*1&b*1]", False), (3, "[c*1&b*1]", True), (4, "c*1&b*1", True),
        (2, "[a|b]&c", False),
    ],
)  # fmt: skip
def test_agrees_with_what_slurm_did(nodes: int, constraint: str, starts: bool) -> None:
    """Recorded of Slurm 22.05 on four idle nodes with these features: what ran, and what was refused."""
    where = cluster(*(node(f"d{i}", features=tuple(has)) for i, has in enumerate(("a", "bc", "ac", "b"))))
    fit = fits_now(Request(min_nodes=nodes, max_nodes=nodes, constraint=constraint), where)
    assert fit.is_sure
    assert fit.starts == starts
