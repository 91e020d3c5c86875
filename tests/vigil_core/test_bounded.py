"""Test TOML and JSON from outside: the cost of reading is bounded before parsing."""

from __future__ import annotations

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from tomlkit.exceptions import TOMLKitError

from jobs.spec import MAX_BYTES, JobSpec, SweepSpec, has_sweep, write_toml
from tests.examples import examples
from vigil_core.bounded import REQUEST, SPECIFICATION, Bounds, TooComplex, check_json, check_toml, json_object, toml

ROOT = Path(__file__).parents[2]
SMALL = Bounds(depth=3, items=12, dots=6)

TOO_COMPLEX = {
    "a dotted key": ".".join(["a"] * 32_700) + " = 1",
    "a quoted dotted key": ".".join(['""'] * 20_000) + " = 1",
    "a dotted key with spaces": " . ".join(["a"] * 15_000) + " = 1",
    "a header": "[" + ".".join(["a"] * 32_000) + "]",
    "a header of a list": "[[" + ".".join(["a"] * 32_000) + "]]",
    "a dotted key in braces": "x = {" + ".".join(["a"] * 32_000) + " = 1}",
    "lists in lists": "x = " + "[" * 30_000,
    "braces in braces": "x = " + "{a = " * 12_000,
    "dotted keys below a header": "[t]\n" + "".join(f"a.k{i} = 1\n" for i in range(5_000)),
    "keys": "".join(f"k{i}=1\n" for i in range(7_000)),
    "headers": "".join(f"[t{i}]\n" for i in range(7_000)),
    "lists of tables": "[[x]]\n" * 10_000,
    "values of a list": "x = [" + "1," * 30_000 + "]",
    "digits": "x = 0x" + "f" * 60_000,
}


@pytest.mark.parametrize("text", TOO_COMPLEX.values(), ids=TOO_COMPLEX)
def test_toml_that_would_cost_too_much_is_refused_by_its_line(text: str) -> None:
    began = time.process_time()
    with pytest.raises(TooComplex, match=r"^Line \d+: .*\.$"):
        toml(text)
    assert time.process_time() - began < 1


def test_brackets_in_strings_and_comments_do_not_count() -> None:
    text = """
    '[[[[[[[[[[' = "]]]]{{{{{{{{{{{{" # [[[[[[[[[[ a.b.c.d.e.f.g.h.i.j
    url = 'https://a.b.c.d.e.f.g.h.i.j.k.l'
    many = \"\"\"[[[[[[[[[[[ "a" ""b"" \\\"\"\" a.b.c.d.e.f.g.h.i.j.k.l = {{{{{{{{{{\"\"\"\"\"
    plain = '''[[[[[[[[[[[[ \\'''
    """
    assert len(toml(text)) == 4


def documented() -> list[str]:
    """Return every specification that the repository shows."""
    blocks = [
        block
        for page in (ROOT / "docs").rglob("*.md")
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)
    ]
    return [path.read_text() for path in (ROOT / "examples").rglob("*.toml")] + blocks


def test_examples_and_docs_are_read() -> None:
    found = documented()
    assert len(found) > 20
    for text in found:
        check_toml(text)


def test_the_largest_specification_is_read() -> None:
    spec = {
        "name": "x",
        "kind": "script",
        "tags": [f"t{i}" for i in range(50)],
        "environment": {"env": {f"A{i}": "1" for i in range(200)}},
        "resources": {
            "nodes": 200,
            "require_nodes": [f"a{i}" for i in range(200)],
            "exclude_nodes": [f"b{i}" for i in range(200)],
        },
        "script": {"directory": ".", "args": ["-x"] * 1_000, "env": {f"B{i}": "1" for i in range(200)}},
    }
    text = write_toml(JobSpec.parse(spec))
    check_toml(text)
    check_toml(text + "\n[sweep.over]\n" + f"'run.seed' = {list(range(1_000))}\n")


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8), st.text(max_size=60) | st.integers() | st.floats(allow_nan=False), max_size=20
    ),
    st.text(max_size=400),
)
def test_what_tomlkit_writes_is_read_back(options: dict[str, Any], notes: str) -> None:
    """The form and `vigil submit --set` write strings of any letters, quoted keys and tables in tables."""
    table = {re.sub("[\ud800-\udfff]", "", name): value for name, value in options.items()}
    text = tomlkit.dumps({"notes": notes.replace("\0", ""), "run": {"client": table}})
    try:
        wanted = tomllib.loads(text)
    except ValueError:
        return  # tomlkit wrote what no parser takes, such as a lone carriage return
    assert toml(text) == wanted


TOKENS = ["a", "b", "1", ".", "=", " ", "\n", ",", "[", "]", "[[", "]]", "{", "}", '"', "'", '"""', "'''", "\\", "#",
          "\r\n", "a=1\n", "[a]\n", "[[a]]\n", "a.b=1\n", "[a.b]\n", "1.5", "0xf", "é"]  # fmt: skip


@settings(max_examples=examples(2_000), deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=40).map("".join))
def test_the_scanner_sees_all_that_a_parser_reads(text: str) -> None:
    """TOML that passes small bounds has no more items and no deeper tables than they allow."""
    try:
        data = toml(text, SMALL)
    except (ValueError, RecursionError):
        return
    size, depth = measured(data)
    assert size <= SMALL.items + SMALL.dots
    assert depth <= SMALL.depth + SMALL.dots + 1


def measured(value: object) -> tuple[int, int]:
    """Return how many keys and values there are, and how deep."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    found = [measured(item) for item in inner]
    return sum(size + 1 for size, _ in found), 1 + max((depth for _, depth in found), default=-1 if not inner else 0)


@pytest.mark.lengthy
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.sampled_from([*TOKENS, "k{i}", "k{i}=1\n", "a.k{i}=1\n", "[a.k{i}]\n"]), min_size=1, max_size=6).map(
        "".join
    )
)
def test_any_text_of_the_largest_size_costs_seconds_at_most(unit: str) -> None:
    """A piece repeated up to 64 KB, through the scanner and both parsers."""
    text = "".join(unit.replace("{i}", str(i)) for i in range(MAX_BYTES // len(unit)))[:MAX_BYTES]
    began = time.process_time()
    try:
        toml("[t]\n" + text)
        tomlkit.parse("[t]\n" + text)
    except (ValueError, RecursionError, TOMLKitError):
        pass
    assert time.process_time() - began < 4, unit


TOO_COMPLEX_JSON = {
    "lists in lists": "[" * 50_000,
    "a list of empty lists": "[" + "[]," * 100_000 + "[]]",
    "values": "[" + "1," * 100_000 + "1]",
    "keys": "{" + ",".join(f'"k{i}":""' for i in range(100_000)) + "}",
    "strings": '["",' * 2 + '"",' * 100_000 + "1]",
}


@pytest.mark.parametrize("text", TOO_COMPLEX_JSON.values(), ids=TOO_COMPLEX_JSON)
def test_json_that_would_cost_too_much_is_refused(text: str) -> None:
    with pytest.raises(TooComplex):
        check_json(text.encode())


def test_json_of_much_text_is_read() -> None:
    notes = '[[[{{{,"' * 50_000 + "\\"
    assert json_object(json.dumps({"notes": notes})) == {"notes": notes}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[]{},:é'), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(st.sampled_from('a"\\[{,'), max_size=3), inner, max_size=6)
    ),
    max_leaves=40,
)  # fmt: skip


@settings(max_examples=examples(1_000), deadline=None)
@given(JSON, st.integers(1, 8), st.integers(1, 60))
def test_json_is_refused_just_where_it_is_out_of_bounds(value: object, depth: int, items: int) -> None:
    body = json.dumps(value).encode()
    size, deep = counted(value)
    try:
        check_json(body, Bounds(depth=depth, items=items))
    except TooComplex:
        assert size > items or deep > depth
    else:
        assert size <= items
        assert deep <= depth


def counted(value: object) -> tuple[int, int]:
    """Return how many commas and brackets JSON has outside of strings, and how deep the brackets lie."""
    if not isinstance(value, list | dict):
        return 0, 0
    found = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + max(0, len(found) - 1) + sum(size for size, _ in found), 1 + max((deep for _, deep in found), default=0)


def test_limits_of_requests_leave_room_for_what_is_sent() -> None:
    racks = {"items": [{"node": f"n{i}", "rack": "r", "slot": i, "order": 1} for i in range(10_000)]}
    check_json(json.dumps(racks).encode(), REQUEST)
    assert SPECIFICATION.depth >= 6


def test_a_sweep_of_many_long_jobs_is_refused() -> None:
    """1,000 jobs of 60 KB each were 30 s of one request."""
    from jobs.errors import SpecError

    text = "#\n" * 30_000 + 'name = "x"\n[sweep.over]\n"run.seed" = ' + str(list(range(1_000)))
    assert has_sweep(toml(text))
    began = time.process_time()
    with pytest.raises(SpecError, match="Use fewer jobs"):
        SweepSpec.parse_toml(text)
    assert time.process_time() - began < 10
