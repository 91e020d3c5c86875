"""Test prefixes of log lines: they are removed and parsed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.logs.prefixes import parse_prefix
from tests.examples import examples

SECOND = datetime(2026, 11, 21, 3, 1, 31, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "message", "fields"),
    [
        (
            "[rank3]:[E1121 03:01:31.123456789 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught",
            "Watchdog caught",
            {"rank": 3, "level": "error"},
        ),
        ('[rank0]:   File "x", line 1', '  File "x", line 1', {"rank": 0}),
        ("[E ProcessGroupNCCL.cpp:828] [Rank 3] x", "x", {"rank": 3, "level": "error"}),
        ("[PG ID 1 PG GUID 1(name) Rank 3] x", "x", {"rank": 3}),
        ("[default3]:x", "x", {"local_rank": 3}),
        ('3:   File "a"', '  File "a"', {"rank": 3}),
        ("2: Traceback (most recent call last):", "Traceback (most recent call last):", {"rank": 2}),
        ("[1,3]<stderr>:x", "x", {"rank": 3}),
        ("[3]<stderr>:    call()", "    call()", {"rank": 3}),
        ("dgx-03:123:456 [3] NCCL WARN NET/IB : x", "NCCL WARN NET/IB : x", {"node": "dgx-03", "local_rank": 3}),
        ("(train_fn pid=123, ip=10.0.0.2) x", "x", {"node": "10.0.0.2"}),
        ("E1121 03:01:31.123456 12345 file.cc:123] x", "x", {"level": "error"}),
        ("2026-11-21 03:01:31.000000: W external/xla/foo.cc:123] x", "x", {"level": "warning", "stamp": SECOND}),
        (
            "Nov 21 03:01:31 dgx-03 kernel: [449410.332316] NVRM: Xid",
            "NVRM: Xid",
            {"node": "dgx-03", "uptime": 449410.332316, "stamp": SECOND},
        ),
        ("[Sat Nov 21 03:01:31 2026] NVRM: x", "NVRM: x", {"stamp": SECOND}),
        ("[449410.332316] NVRM: x", "NVRM: x", {"uptime": 449410.332316}),
        ("2026-11-21T04:01:31+01:00 dgx-03 kernel: NVRM", "NVRM", {"node": "dgx-03", "stamp": SECOND}),
        (
            "[2026-11-21 03:01:31,000] [INFO] [loss_scaler.py:183:update_scale] x",
            "x",
            {"level": "info", "stamp": SECOND},
        ),
        ("2026-11-21 03:01:31.000 | INFO     | __main__:log_dist:54 - x", "x", {"level": "info", "stamp": SECOND}),
        ("2026-11-21 03:01:31,000 - root - ERROR - x", "x", {"level": "error", "stamp": SECOND}),
        ("11/21/2026 03:01:31 - ERROR - __main__ - x", "x", {"level": "error", "stamp": SECOND}),
        ("[2026-11-21 03:01:31][train][ERROR] - x", "x", {"level": "error", "stamp": SECOND}),
        ("0: [2026-11-21 03:01:31,000] ERROR x", "x", {"rank": 0, "level": "error", "stamp": SECOND}),
        ("INFO:root:x", "x", {"level": "info"}),
        ("worker-0: x", "x", {"node": "worker-0"}),
        ("[0]: x", "x", {"rank": 0}),
        ("Rank 3: x", "x", {"rank": 3}),
        ("[dgx-03:12345] *** Process received signal ***", "*** Process received signal ***", {"node": "dgx-03"}),
        ("/home/mira/x.py:12: UserWarning: foo", "/home/mira/x.py:12: UserWarning: foo", {"level": "warning"}),
        ("slurmstepd: error: x", "slurmstepd: error: x", {}),
        ("RuntimeError: x", "RuntimeError: x", {}),
        ("dgx-03: task 3: x", "dgx-03: task 3: x", {}),
    ],
)
def test_a_prefix_is_taken_off_and_read(line: str, message: str, fields: dict[str, Any]) -> None:
    prefix = parse_prefix(line, year=2026)
    assert line[prefix.length :] == message
    assert {name: getattr(prefix, name) for name in fields} == fields


@given(st.text(max_size=200))
@settings(max_examples=examples(300), deadline=None)
def test_any_line_has_a_prefix_within_it(line: str) -> None:
    assert 0 <= parse_prefix(line).length <= len(line)


@pytest.mark.parametrize("start", ["", "[INFO | ", "INFO ", "["])
@pytest.mark.parametrize("repeated", ["9", "a1", "a", " ", ".", "1:", "-", "/"])
def test_long_line_takes_time_in_proportion_to_its_length(start: str, repeated: str) -> None:
    """1,000 digits, as print(2**4000) writes them, took seconds, and 8,000 would have taken hours."""
    line = (start + repeated * 8_000)[:1_000]
    began = time.process_time()
    for _ in range(20):
        parse_prefix(line)
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("/x/torch/nn/modules/module.py:1511: UserWarning: Full backward hook is firing", "warning"),
        ("module.py:1511:FutureWarning: it goes", "warning"),
        ("UserWarning: x", "warning"),
        ("<string>:3: DeprecationWarning: y", "warning"),
        ("the run ended with a UserWarning: z", ""),
        ("9" * 500, ""),
    ],
)
def test_warnings_are_recognised_by_their_class(line: str, level: str) -> None:
    assert parse_prefix(line).level == level
