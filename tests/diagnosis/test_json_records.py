"""Test logs of JSON records: tracebacks and messages are read as if a plain logger had written them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.logs.json_records import LineExpansions, as_text
from diagnosis.offline import diagnose_text
from diagnosis.verdict import Verdict

TRACE = """Traceback (most recent call last):
  File "/app/train.py", line 91, in main
    fit(config)
  File "/app/train.py", line 60, in fit
    labels = batch["labels"]
KeyError: 'labels'"""
FULL = 'Traceback (most recent call last):\n  File "/app/save.py", line 4, in save\n    write()\n'
FULL += "OSError: [Errno 28] No space left on device"
AT = "2026-09-01T04:12:51.773Z"
FRAMES = [
    {
        "exc_type": "KeyError",
        "exc_value": "'labels'",
        "frames": [{"filename": "/app/train.py", "lineno": 60, "name": "fit"}],
    }
]
LOGURU = f"2026-07-07 01:10:09.310 | ERROR    | __main__:<module>:20 - training stopped\n{TRACE}\n".replace(
    '  File "/app/train.py", line 91', '> File "/app/train.py", line 91'
)
RECORDS: dict[str, dict[str, Any]] = {
    "structlog": {"event": "training failed", "level": "error", "timestamp": AT, "exception": TRACE},
    "structlog's dict_tracebacks": {"event": "training failed", "level": "error", "exception": FRAMES},
    "python-json-logger": {"asctime": AT, "levelname": "ERROR", "message": "failed", "exc_info": TRACE},
    "exc_info as a list": {"time": 1780000051.2, "level": "ERROR", "msg": "failed", "exc_info": TRACE.splitlines()},
    "loguru": {"text": LOGURU, "record": {"exception": {"type": "KeyError", "value": "'labels'"}, "message": "x"}},
    "ECS": {"@timestamp": AT, "log.level": "ERROR", "message": "failed", "error": {"stack_trace": TRACE}},
    "flat ECS": {"@timestamp": AT, "log.level": "ERROR", "message": "failed", "error.stack_trace": TRACE},
    "Google Cloud": {"severity": "ERROR", "message": f"failed\n{TRACE}", "timestamp": AT},
}


def after_steps(*records: object) -> str:
    """Return two steps on two lines, followed by these records."""
    steps = [{"step": step, "loss": 2.0} for step in (1, 2)]
    return "".join(f"{json.dumps(item) if isinstance(item, dict) else item}\n" for item in (*steps, *records))


def assert_key_error(verdict: Verdict, line: int = 3) -> None:
    root = verdict.evidence[0]
    assert (verdict.cause, verdict.exception, verdict.frame) == ("program.exception", "KeyError", "/app/train.py:fit")
    assert (root.line, root.text.splitlines()[0]) == (line, "KeyError: 'labels'")


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_traceback_within_a_record_is_read(record: dict[str, Any]) -> None:
    assert_key_error(diagnose_text(after_steps(record)))


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_within_a_containers_is_read(record: dict[str, Any]) -> None:
    outer = {"log": f"{json.dumps(record)}\n", "stream": "stderr", "time": "2026-08-14T12:00:03.410001Z"}
    assert_key_error(diagnose_text(after_steps(outer)))


def test_lines_of_a_container_make_a_single_traceback() -> None:
    at = "2026-08-14T12:00:03.410001123Z"
    lines = [{"log": f"{line}\n", "stream": "stderr", "time": at} for line in TRACE.splitlines()]
    verdict = diagnose_text(after_steps(*lines))
    assert_key_error(verdict, line=8)
    assert verdict.evidence[0].at is not None


def journal(message: object, name: str = "python") -> dict[str, object]:
    return {
        "__REALTIME_TIMESTAMP": "1780000051220110",
        "_HOSTNAME": "dgx-14",
        "SYSLOG_IDENTIFIER": name,
        "_PID": "41",
        "MESSAGE": message,
    }


@pytest.mark.parametrize("message", [FULL, list(FULL.encode()), [FULL, "again"]], ids=["text", "bytes", "twice"])
def test_a_journals_message_is_read(message: object) -> None:
    verdict = diagnose_text(after_steps(journal(message), journal(None)))
    assert (verdict.cause, verdict.evidence[0].line) == ("storage.full", 3)


def test_a_kernels_journal_is_the_kernels_word() -> None:
    xid = "NVRM: Xid (PCI:0000:b7:00): 79, pid=41833, name=python, GPU has fallen off the bus."
    lines = "".join(f"{json.dumps(journal(item, 'kernel'))}\n" for item in ("usb 1-1: new device", xid))
    verdict = diagnose_text(lines)
    assert (verdict.cause, verdict.node, verdict.evidence[0].line) == ("gpu.off_bus", "dgx-14", 2)
    assert "a kernel log" not in " ".join(verdict.unavailable)


def test_the_rank_of_a_record_is_the_rank_of_the_verdict() -> None:
    assert diagnose_text(after_steps({**RECORDS["structlog"], "rank": 7})).rank == 7


def test_lines_after_records_of_several_lines_keep_their_numbers() -> None:
    warned = {"event": "slow", "level": "warning", "exception": TRACE}
    steps = [{"step": step, "loss": 1.0} for step in range(3, 9)]
    verdict = diagnose_text(after_steps(warned, *steps, "OSError: [Errno 28] No space left on device"))
    assert (verdict.cause, verdict.evidence[0].line) == ("storage.full", 10)


def test_what_was_logged_as_a_warning_and_outlived_is_no_failure() -> None:
    warned = {"event": "upload failed, trying again", "level": "warning", "exception": TRACE}
    steps = [{"step": step, "loss": 1.0} for step in range(3, 9)]
    assert diagnose_text(after_steps(warned, *steps, {"event": "training finished", "level": "info"})).cause == "none"


def test_metrics_and_what_is_no_record_stay_as_they_are() -> None:
    text = b'{"step": 1, "loss": 2.0}\n{"level": "error", cut\n{"a": {}}\nplain {"level": "error"}\n'
    assert b"".join(as_text([text], LineExpansions())) == text


@given(st.lists(st.binary(max_size=60), max_size=12))
@settings(deadline=None, max_examples=60)
def test_any_bytes_pass(blocks: list[bytes]) -> None:
    b"".join(as_text([b'{"log": "' + block + b'"}\n' for block in blocks], LineExpansions()))


def test_ten_megabytes_of_a_containers_log_take_seconds() -> None:
    line = json.dumps({"log": "step 1 loss 2.0 and some more words of it\n", "stream": "stdout", "time": AT}) + "\n"
    deep = '{"log": ' * 20_000 + "\n"
    block = (line * 1_000 + deep).encode()
    began = time.monotonic()
    size = sum(map(len, as_text([block] * 40, LineExpansions())))
    assert size > 1 << 20
    assert time.monotonic() - began < 10
