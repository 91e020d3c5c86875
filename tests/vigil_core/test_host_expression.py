"""Host expressions expand as Slurm's do, and never beyond the limit."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vigil_core.host_expression import MAX_NODES, BadHostExpression, expand, expand_all, expand_reported


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("dgx01", ["dgx01"]),
        ("dgx[01-03,7],login", ["dgx01", "dgx02", "dgx03", "dgx7", "login"]),
        ("dgx[08-10]", ["dgx08", "dgx09", "dgx10"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a, b c,a", ["a", "b", "c"]),
        ("dgx[01-02]\r\nlogin\r\n", ["dgx01", "dgx02", "login"]),
        ("gpu-1.lab", ["gpu-1.lab"]),
    ],
)
def test_expands(expression: str, names: list[str]) -> None:
    assert expand(expression) == names


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "Name at least one node"),
        ("n[1-999999999]", "more than 1,000 nodes"),
        ("n[1-99]m[1-99]", "more than 1,000 nodes"),
        ("n[1-900],m[1-900]", "more than 1,000 nodes"),
        ("n[9999999999]", "not a number or range"),
        ("n[3-1]", "counts down"),
        ("n[", "do not match"),
        ("n]1[", "do not match"),
        ("n[[1]]", "do not match"),
        ("n[a-b]", "not a number or range"),
        ("n[]", "not a number or range"),
        ("../etc", "not the name of a node"),
        ("a;reboot", "not the name of a node"),
        ("x" * 3000, "more than 2,000 characters"),
        (" ,, ", "names no node"),
        ("-x", "not the name of a node"),
        ("n" + "[1,1,1]" * 8, "more than 1,000 nodes"),
        ("n" + "[1]" * 600, "more than 8 pairs of brackets"),
    ],
)
def test_refuses_what_names_no_nodes_or_too_many(expression: str, message: str) -> None:
    with pytest.raises(BadHostExpression, match=message):
        expand(expression)


@given(st.text(alphabet="n0123456789[]-, ", max_size=60))
def test_is_bounded_whatever_is_written(expression: str) -> None:
    began = time.process_time()
    with suppress(BadHostExpression):
        assert 1 <= len(expand(expression)) <= MAX_NODES
    assert time.process_time() - began < 5


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True))
def test_a_list_of_numbers_is_those_nodes(numbers: list[int]) -> None:
    assert expand(f"n[{','.join(map(str, numbers))}]") == [f"n{number}" for number in numbers]


def test_several_expressions_share_their_limits() -> None:
    assert expand_all(["dgx[1-2]", "dgx2 login"]) == ["dgx1", "dgx2", "login"]
    assert expand_all([]) == []
    for expressions, message in (
        (["n[1-900]", "m[1-900]"], "more than 1,000 nodes"),
        (["n[1-900]"] * 3, "more than 1,000 nodes"),  # the same ones, but 2,700 in all
        (["n1"] * 1001, "more than 2,000 characters"),
        (["n1", ""], "names no node"),
        (["n[1", "2]"], "do not match"),
    ):
        with pytest.raises(BadHostExpression, match=message):
            expand_all(expressions)


def test_what_a_scheduler_reports_may_have_any_characters_and_ends() -> None:
    assert expand_reported(["r[1-2]n[08-09],_login"], 100) == ("r1n08", "r1n09", "r2n08", "r2n09", "_login")
    assert expand_reported(["", "a,,b", "a"], 100) == ("a", "b")
    for malformed in ("n[1-3", "n[1-101]", "n[a-b]", "n" + "[0-9]" * 2000, f"n[0-{'9' * 5000}]"):
        assert expand_reported([malformed], 100) == ()


@given(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=20, unique=True))
def test_plain_names_expand_to_themselves(names: list[str]) -> None:
    assert expand(",".join(names)) == expand_all(names) == list(expand_reported(names, 20)) == names
