"""Test Slurm's notations against simple oracles, and that no JSON breaks the readers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodes.schedulers.base import ALIVE, ENDED, UNKNOWN
from nodes.schedulers.slurm import job_cache, limits, shapes
from nodes.schedulers.slurm.states import ended_before, job_state, node_state, wait_reason
from nodes.schedulers.slurm.values import gpu_indices, gpus, hosts, integer, moment, number, text, tres, words
from tests.examples import examples
from tests.nodes.slurm.simulated_rest import VERSIONS, SimulatedRest, body

NEWEST = VERSIONS[-1]
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z]", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["dgx[01-03", "dgx[1-2][3-4]", "gpu:h100:8(IDX:0-9999999999)", "gres/gpu=1e999", "mem=1e400G",
                       "0-99999999999", "[1-9", "\ud800", "\0", "(null)", "9" * 5000, f"n[0-{'9' * 5000}]"])
    | st.sampled_from([0xFFFFFFFE, 0xFFFFFFFFFFFFFFFE, -1, 1e308, 10**400, 0, 2**63]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["set", "infinite", "number", "signal", "id", "name", "status", "return_code",
                                       "time", "nodes", "tres", "per", "jobs", "count", "type"]), inner, max_size=5),
    max_leaves=8,
)  # fmt: skip
JOB_WORDS = sorted(
    {"PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
     "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
)  # fmt: skip
JOB_FLAGS = sorted(
    {"COMPLETING", "CONFIGURING", "LAUNCH_FAILED", "UPDATE_DB", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING",
     "SIGNALING", "STAGE_OUT", "STOPPED", "REVOKED", "REQUEUE_FED", "RECONFIG_FAIL", "POWER_UP_NODE", "EXPEDITING"}
)  # fmt: skip
NODE_WORDS = [
    "DOWN", "IDLE", "ALLOCATED", "ERROR", "MIXED", "FUTURE", "UNKNOWN", "DRAIN", "COMPLETING", "NOT_RESPONDING", "FAIL",
    "MAINTENANCE", "RESERVED", "PLANNED", "POWERED_DOWN", "REBOOT_REQUESTED", "INVALID_REG", "CLOUD", "DYNAMIC_NORM",
]  # fmt: skip


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list as Slurm writes it, and the names that it stands for, put together by hand."""
    parts, names = [], []
    for _ in range(draw(st.integers(1, 4))):
        pieces, columns = [], []
        for _ in range(draw(st.integers(1, 2))):
            pieces.append(draw(NAMES))
            columns.append([pieces[-1]])
            if draw(st.booleans()):
                width, ranges, numbers = draw(st.integers(1, 4)), [], []
                for _ in range(draw(st.integers(1, 3))):
                    first = draw(st.integers(0, 10**width - 1))
                    last = min(first + draw(st.integers(0, 5)), 10**width - 1)
                    ranges.append(f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else ""))
                    numbers += [f"{value:0{width}}" for value in range(first, last + 1)]
                pieces.append(f"[{','.join(ranges)}]")
                columns.append(numbers)
        parts.append("".join(pieces))
        names += ["".join(column) for column in itertools.product(*columns)]
    return ",".join(parts), list(dict.fromkeys(names))  # a node that is named twice is one node


@given(host_lists())
@example(("dgx[01-03,07],login", ["dgx01", "dgx02", "dgx03", "dgx07", "login"]))
@example(("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]))
def test_host_lists(case: tuple[str, list[str]]) -> None:
    line, names = case
    assert list(hosts(line)) == names
    assert list(hosts(names)) == names
    assert list(hosts(line.split(",") if "[" not in line else [line])) == names


@pytest.mark.parametrize("line", ["n[0-99999999]", f"n[0-{'9' * 5000}]", "n" + "[0-9]" * 2000])
def test_host_lists_end(line: str) -> None:
    assert len(hosts(line)) <= 100_000


@given(st.lists(st.tuples(st.sampled_from(["", "h100", "a100-sxm", "b200"]), st.integers(0, 16)), max_size=4))
def test_gpus_by_type(kinds: list[tuple[str, int]]) -> None:
    expected: dict[str, int] = {}
    for kind, count in kinds:
        expected[kind] = expected.get(kind, 0) + count
    typed = [f":{kind}" if kind else "" for kind, _ in kinds]
    counts = [count for _, count in kinds]
    for form in (
        "gpu{}:{}(S:0-1)",
        "gpu{}:{}",
        "gres:gpu{}:{}",
        "gres/gpu{}:{}",
        "gres/gpu{}={}",
        "gpu{}:{}(IDX:0,2-3)",
    ):
        line = ",".join([form.format(*pair) for pair in zip(typed, counts, strict=True)] + ["license:matlab:3"])
        assert gpus(line) == expected, line


@given(st.sets(st.integers(0, 15)))
def test_indices_of_gpus(indices: set[int]) -> None:
    line = f"gpu:h100:{len(indices)}(IDX:{','.join(map(str, sorted(indices))) or 'N/A'})"
    assert gpu_indices(line) == tuple(sorted(indices))


@given(st.dictionaries(st.sampled_from(["cpu", "node", "billing", "gres/gpu", "gres/gpu:h100"]), st.integers(0, 10**9)))
def test_tres_in_both_forms(counted: dict[str, int]) -> None:
    assert tres(",".join(f"{name}={count}" for name, count in counted.items())) == counted
    rows = []
    for name, count in counted.items():
        kind, _, rest = name.partition("/")
        rows.append({"type": kind, "name": rest or None, "id": 1, "count": count})
    assert tres(rows) == counted


@pytest.mark.parametrize(
    ("line", "mib"),
    [
        ("mem=2000M", 2000),
        ("mem=2G", 2048),
        ("mem=1.5T", 1572864),
        ("mem=1024K", 1),
        ("mem=7", 7),
        ("mem=125G", 128000),
    ],
)
def test_memory_is_in_mib(line: str, mib: int) -> None:
    assert tres(line) == {"mem": mib}


@given(st.integers(0, 2**31))
def test_numbers_in_all_shapes(value: int) -> None:
    reports: list[Any] = [value, float(value), str(value), {"set": True, "infinite": False, "number": value}]
    assert [integer(item) for item in reports] == [value] * 4
    unset = [{"set": False, "infinite": False, "number": value}, {"set": True, "infinite": True, "number": value}]
    assert [number(item) for item in unset] == [None, None]


@pytest.mark.parametrize(
    "value", [None, "", "x", True, [], {}, -1, 0xFFFFFFFE, 0xFFFFFFFFFFFFFFFE, float("nan"), float("inf"), "nan", "inf"]
)
def test_numbers_that_are_none(value: object) -> None:
    assert number(value) is None
    assert integer(value, default=7) == 7
    assert moment(value) is None


@given(JSON)
def test_words_and_texts_can_be_stored(value: Any) -> None:
    for line in (text(value), *words(value), *hosts(value)):
        assert "\0" not in line.encode().decode()


def fields(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), JSON, max_size=12)


FEW_JOBS = [
    job for job in body(NEWEST, "busy/slurm-jobs")["jobs"] if job["name"] in ("gpus", "array", "held", "failed")
]
JOB_FIELDS = sorted({name for raw in body(NEWEST, "busy/slurm-jobs")["jobs"][:1] for name in raw})
READ = [
    "job_id", "job_state", "array_job_id", "array_task_id", "array_task_string", "exit_code", "state_reason",
    "nodes", "start_time", "end_time", "restart_cnt", "name", "comment", "tres_alloc_str", "tres_req_str",
    "gres_detail", "time_limit", "priority", "flags", "partition", "user_name", "node_count", "cpus",
]  # fmt: skip
ACCOUNT_FIELDS = [
    "job_id",
    "state",
    "array",
    "time",
    "exit_code",
    "nodes",
    "restart_cnt",
    "name",
    "comment",
    "steps",
    "user",
]
NODE_FIELDS = sorted(body(NEWEST, "busy/slurm-nodes")["nodes"][0]) + ["state_flags"]


@settings(max_examples=examples(60))
@given(fields(READ), fields(JOB_FIELDS))
def test_no_job_upsets_the_readers(first: dict[str, Any], second: dict[str, Any]) -> None:
    raw = {**second, **first, "job_id": 17}
    found = shapes.record(raw)
    queued = shapes.queued(raw, found)
    assert found.job_id == "17"
    assert found.status.state in ALIVE | ENDED | {UNKNOWN}
    assert queued.state == found.status.state


@settings(max_examples=examples(40))
@given(
    fields(NODE_FIELDS), fields(ACCOUNT_FIELDS), fields(sorted(body(NEWEST, "busy/slurm-partitions")["partitions"][0]))
)
def test_nothing_else_upsets_them(node: dict[str, Any], row: dict[str, Any], partition: dict[str, Any]) -> None:
    named = {"name": "it", "account": "lab"}
    shapes.node({**node, **named})
    limits.partition({**partition, **named})
    limits.reservation({**node, **named})
    shapes.accounted({**row, "job_id": 1})
    shapes.steps(row)
    limits.qos({"limits": row, **partition, **named})
    limits.association({"max": row, **node, **named})
    limits.share({**row, **named})


@settings(max_examples=examples(20))
@given(st.lists(JSON | fields(READ), min_size=1, max_size=3), st.integers(0, 2**31))
@pytest.mark.lengthy
def test_an_odd_entry_hides_no_other(odd: list[Any], place: int) -> None:
    """Neither from those who follow nor from the queue, and none gets another's place in it."""
    jobs = FEW_JOBS
    odd = [{**item, "job_id": 0} if isinstance(item, dict) else item for item in odd]
    place %= len(jobs)
    report = json.dumps({"jobs": [*jobs[:place], *odd, *jobs[place:]]}).encode()
    played = SimulatedRest(NEWEST)
    played.answers["/jobs"] = httpx.Response(200, content=report)
    plain = SimulatedRest(NEWEST)
    ids = [str(job["job_id"]) for job in jobs]
    states = [{"job_id": str(job["job_id"]), "state": job["job_state"]} for job in jobs]
    for item in (plain, played):
        item.answers["/jobs/state"] = httpx.Response(200, json={"jobs": states})
        item.answers.setdefault("/jobs", httpx.Response(200, json={"jobs": jobs}))
    assert played.slurm.queue() == plain.slurm.queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_cache, "MAX_SINGLE_REQUESTS", 0)
        assert played.slurm.status(ids) == plain.slurm.status(ids)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_job_states_of_every_combination(size: int) -> None:
    for base, flags in itertools.product(["", *JOB_WORDS], itertools.combinations(JOB_FLAGS, size)):
        report = [base, *flags] if base else list(flags)
        for order in (report, report[::-1]):
            state = job_state(order)
            assert state in ALIVE | ENDED | {UNKNOWN}
            if not base and not flags:
                assert state == UNKNOWN
            if base in {"PENDING", "RUNNING", "SUSPENDED"} and "REVOKED" not in flags:
                assert state in ALIVE, report
            if state in ENDED and base:
                assert base.lower() == state or flags == ("REVOKED",) or "REVOKED" in flags
            if "COMPLETING" in flags:
                assert state == "completing"
            assert ended_before(order) in ENDED | {""}
            wait_reason(order)


@given(st.lists(st.sampled_from(NODE_WORDS), unique=True))
def test_node_states(flags: list[str]) -> None:
    state = node_state(flags)
    assert state == node_state([word.lower() for word in reversed(flags)])
    if "DOWN" in flags:
        assert state in {"down", "down+reboot_issued"}
    elif "DRAIN" in flags and not {"ERROR", "FUTURE"} & set(flags):
        assert state.partition("+")[0] in {"draining", "drained"}


def without(raw: Any, name: str) -> Any:
    return {key: value for key, value in raw.items() if key != name}


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_come_and_go(version: str) -> None:
    """A job is still read without any one of its fields, with null in it, or with new fields besides."""
    job = next(job for job in body(version, "busy/slurm-jobs")["jobs"] if job["name"] == "gpus")
    plain = shapes.record(job)
    assert shapes.record({**job, "brand_new": {"set": True, "number": 1}, "jobs": [1]}) == plain
    for name in job:
        if name == "job_id":
            continue
        for raw in (without(job, name), {**job, name: None}, {**job, name: []}, {**job, name: {}}):
            assert shapes.record(raw).job_id == plain.job_id, name
            shapes.queued(raw, shapes.record(raw))
    node = body(version, "busy/slurm-nodes")["nodes"][0]
    for name in node.keys() - {"name"}:
        for raw in (without(node, name), {**node, name: None}, {**node, name: []}, {**node, name: {}}):
            shapes.node(raw)


def test_old_shapes_in_a_new_version_and_the_other_way_round() -> None:
    job = next(job for job in body(NEWEST, "busy/slurm-jobs")["jobs"] if job["name"] == "gpus")
    flat = {
        name: value["number"] if isinstance(value, dict) and "number" in value and value["set"] else value
        for name, value in job.items()
        if not (isinstance(value, dict) and not value.get("set", True))
    }
    flat["job_state"] = "RUNNING"
    assert shapes.record(flat) == shapes.record(job)
    assert shapes.queued(flat, shapes.record(flat)) == shapes.queued(job, shapes.record(job))
