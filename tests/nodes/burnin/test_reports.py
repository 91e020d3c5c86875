"""What a burn-in's program reports is bounded and checked: the node that writes it may be broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.reports import MAX_VALUES, BurnInMachine, BurnInResult, ItemSummary, parse_line

LINE: dict[str, Any] = {
    "at": 1.0, "test": "copy", "item": "host to GPU 2", "outcome": "passed", "value": 24.8, "unit": "GB/s",
    "digest": "", "basis": "H100, torch 2.13, CUDA 13.0", "detail": "",
}  # fmt: skip


def parse(**changes: Any) -> BurnInResult | BurnInMachine | None:
    return parse_line(json.dumps({**LINE, **changes}).encode())


def test_a_result() -> None:
    assert parse() == BurnInResult("copy", "host to GPU 2", "passed", 24.8, "GB/s", basis="H100, torch 2.13, CUDA 13.0")


@pytest.mark.parametrize(
    "changes",
    [
        {"test": "rm -rf"}, {"test": ["copy"]}, {"item": ""}, {"item": "x" * 1_000}, {"item": 7},
        {"outcome": "perfect"}, {"outcome": {}},
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any]) -> None:
    assert parse(**changes) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "24.8", 1e300])
def test_a_value_that_is_no_measurement_is_left_out(value: object) -> None:
    found = parse(value=value)
    assert isinstance(found, BurnInResult)
    assert found.value is None


def test_digests_are_hexadecimal_and_text_is_printable() -> None:
    found = parse(digest="<b>", detail="red\x1b[31m\u202e alert")
    assert isinstance(found, BurnInResult)
    assert (found.digest, found.detail) == ("", "red[31m alert")


def test_a_mount_names_its_type_and_source() -> None:
    for more, basis in (
        ({"fstype": "nfs4", "source": "filer:/data"}, "nfs4 filer:/data"), ({"fstype": "tmpfs", "source": 7}, "tmpfs"),
        ({"fstype": "nfs 4", "source": "x" * 1_000}, ""), ({}, ""),
    ):  # fmt: skip
        found = parse(test="mount", item="/data", **more)
        assert isinstance(found, BurnInResult)
        assert found.basis == basis


def test_facts() -> None:
    gpus = [{"index": number, "model": "H100"} for number in range(8)]
    found = parse(test="facts", item="this node", gpus=gpus, driver="570.1", torch="2.13", cuda="13.0", cpu="Xeon")
    assert found == BurnInMachine("H100", 8, "570.1", "2.13", "13.0", "Xeon")
    found = parse(test="facts", item="this node", gpus=[7, None] * 1_000, driver=9)
    assert found == BurnInMachine()


SCALARS = st.none() | st.booleans() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner))


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_may_come(data: bytes) -> None:
    assert parse_line(data) is None


def test_a_summary_is_bounded() -> None:
    summary = ItemSummary("copy", "host to GPU 2")
    for number in range(1_000):
        summary.add(BurnInResult("copy", "host to GPU 2", "passed", float(number), digest=f"{number:064x}"))
    assert (summary.count, len(summary.values), len(summary.digests)) == (1_000, MAX_VALUES, 4)
    assert summary.values[-1] == 999.0
