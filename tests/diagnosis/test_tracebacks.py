"""Test tracebacks parsed into structure, from what Python itself prints."""

from __future__ import annotations

import traceback as python
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.logs.tracebacks import StackFrame, Traceback, TracebackReader
from diagnosis.signatures.operations import operations_of
from tests.examples import examples


def printed(code: str) -> str:
    """Return what Python prints for the exception that this code raises."""
    try:
        exec(compile(code, "/home/mira/train.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        return python.format_exc()
    raise AssertionError("it raised nothing")


def read(text: str) -> list[Traceback]:
    return read_lines(text.splitlines())


def read_lines(lines: Iterable[str]) -> list[Traceback]:
    reader = TracebackReader()
    for number, line in enumerate(lines, 1):
        reader.feed(number, line)
    return reader.finish()


def chained(text: str) -> list[list[tuple[str, str]]]:
    return [[(link.type, link.message) for link in item.chain] for item in read(text)]


@pytest.mark.parametrize(
    ("code", "chain"),
    [
        ("raise ValueError('bad')", [("ValueError", "bad")]),
        ("raise KeyboardInterrupt", [("KeyboardInterrupt", "")]),
        ("raise ValueError('a\\n  b: c\\nd')", [("ValueError", "a\n  b: c\nd")]),
        ("class Boom(Exception): pass\nraise Boom('x')", [("Boom", "x")]),
        (
            "try:\n  {}['a']\nexcept KeyError as e:\n  raise RuntimeError('x') from e",
            [("KeyError", "'a'"), ("RuntimeError", "x")],
        ),
        (
            "try:\n  {}['a']\nexcept KeyError:\n  [][1]",
            [("KeyError", "'a'"), ("IndexError", "list index out of range")],
        ),
        ("exec('a b')", [("SyntaxError", "invalid syntax")]),
    ],
)
def test_a_traceback_as_python_prints_it(code: str, chain: list[tuple[str, str]]) -> None:
    text = printed(code)
    (item,) = read(text)
    assert [(link.type, link.message) for link in item.chain] == chain
    assert item.is_whole
    assert item.frames[0].path.endswith("test_tracebacks.py")
    assert text.splitlines()[item.line - 1].startswith(chain[-1][0])


def test_of_a_group_the_first_is_what_began_it() -> None:
    found = chained(printed("raise ExceptionGroup('many', [ValueError('a'), TypeError('b')])"))
    assert found[0] == [("ValueError", "a"), ("ExceptionGroup", "many (2 sub-exceptions)")]


def test_a_recursion_keeps_its_frames_in_bounds() -> None:
    (item,) = read(printed("def f(): f()\nf()"))
    assert item.type == "RecursionError"
    assert len(item.frames) < 10


WORKER = """Traceback (most recent call last):
  File "train.py", line 10, in <module>
    for batch in loader:
  File "/env/site-packages/torch/utils/data/dataloader.py", line 700, in __next__
    data = self._next_data()
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/env/site-packages/torch/utils/data/_utils/worker.py", line 300, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/mira/data.py", line 3, in __getitem__
    raise ValueError("bad sample")
ValueError: bad sample

Epoch 2
"""


def test_the_traceback_of_a_worker_comes_first() -> None:
    (item,) = read(WORKER)
    inner, outer = item.chain
    assert (inner.type, inner.message) == ("ValueError", "bad sample")
    assert outer.message.startswith("Caught ValueError")
    assert inner.user_frame == StackFrame("/home/mira/data.py", "__getitem__", 'raise ValueError("bad sample")')
    assert operations_of(inner.frames)[0] == "data"


def test_where_the_log_begins_in_the_middle_of_a_traceback() -> None:
    (item,) = read(
        '  File "x/enums.py", line 9, in Kind\n    int4 = torch.int4\n           ^^^^\nAttributeError: no int4\n'
    )
    assert (item.type, item.is_whole, len(item.frames)) == ("AttributeError", False, 1)
    assert item.frames[0].code == "int4 = torch.int4"


def test_where_the_log_ends_in_the_middle_of_a_traceback() -> None:
    (item,) = read('Traceback (most recent call last):\n  File "train.py", line 9, in main\n    step()\n')
    assert (item.type, item.is_whole, item.line) == ("", False, 0)


def test_a_dump_of_where_threads_are_is_no_exception() -> None:
    text = """Fatal Python error: Segmentation fault

Current thread 0x00007f12 (most recent call first):
  File "/home/mira/t.py", line 4 in forward
  File "/home/mira/t.py", line 9 in <module>

Extension modules: numpy.core (total: 1)
"""
    (item,) = read(text)
    assert item.is_stack
    assert [frame.function for frame in item.frames] == ["forward", "<module>"]


def test_what_stands_below_a_rule_is_somebody_elses() -> None:
    (item,) = read(
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nIndexError: x\n' + "-" * 40 + "\nMPI_ABORT\n"
    )
    assert (item.type, item.message) == ("IndexError", "x")


def test_rich_draws_boxes() -> None:
    text = """╭───── Traceback (most recent call last) ─────╮
│ /home/mira/train.py:34 in main                     │
│                                                    │
│   31 def main():                                   │
│ ❱ 34     raise ValueError("x")                     │
╰────────────────────────────────────────────────────╯
ValueError: x
"""
    (item,) = read(text)
    assert (item.type, item.message) == ("ValueError", "x")
    assert item.frames[0].function == "main"


LINES = st.sampled_from(
    """Traceback (most recent call last):
  File "a.py", line 1, in f
    code()
    ^^^^
ValueError: x

During handling of the above exception, another exception occurred:
words
  | ValueError: y
    +-+--- 1 ---
The above exception was the direct cause of the following exception:
Original Traceback (most recent call last):
RuntimeError: Caught ValueError in DataLoader worker process 0.
Current thread 0x1 (most recent call first):""".splitlines()
)


@given(st.lists(LINES | st.text(max_size=40), max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_whatever_the_lines_are_each_chain_has_an_end(lines: list[str]) -> None:
    found = read_lines(lines)
    links: list[Any] = [id(link) for item in found for link in item.chain]
    assert len(found) <= len(lines)
    assert all(item.line <= len(lines) for item in found)
    assert len(links) <= 4 * len(lines) + 1
