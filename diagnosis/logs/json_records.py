"""Convert structured logs to text: a JSON record becomes the lines that a plain logger would have written.

Reads Docker's json-file, `journalctl -o json`, and records of structlog, loguru (serialize), python-json-logger, the
Elastic Common Schema and similar: time, level and message, then the traceback on lines of its own. Records may be
nested, as an application's in Docker's. Records without an error, such as metrics, stay as they are.

One line may become several; `LineExpansions` maps a line of the text back to the line of the log.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import re2

from diagnosis.regex import options

MAX_EXPANDED = 20_000  # lines of a log that become several; further ones stay JSON
MAX_RECORDS = 500_000  # of a log that are read: some 10 µs each
MAX_LINES = 400  # of one record
MAX_BYTES = 256 * 1024  # of a record that is read
MAX_DEPTH = 3  # records within records

_RECORD = re.compile(rb'(?m)^(?P<before>[^\n{]{0,120})(?P<json>\{[ \t]*"[^\n]*\})[ \t\r]*$')
# What makes a record worth reading: more than one line in it, a container's or a service's envelope, or a level.
_WORTH = re2.compile(
    rb'\\n|"MESSAGE"[ \t]*:|"log"[ \t]*:|"(?:exc_info|exception|stack_trace|exc_text|stack|error)"[ \t]*:|'
    rb'(?i:"(?:log\.)?(?:level|levelname|level_name|severity|lvl)"[ \t]*:[ \t]*"(?:err|crit|fatal|warn|alert|emerg))',
    options(never_capture=True),
)
_MESSAGES = ("message", "msg", "event", "text", "@message")
_LEVELS = ("level", "levelname", "severity", "log.level", "level_name", "lvl")
_TIMES = ("timestamp", "@timestamp", "time", "asctime", "ts", "datetime")
_TRACES = ("exc_info", "exception", "stack_trace", "error.stack_trace", "exc_text", "traceback", "stack", "exc")
_RANKS = ("rank", "global_rank")
_ERRNO_LEVEL = {"0": "FATAL", "1": "FATAL", "2": "CRITICAL", "3": "ERROR", "4": "WARNING"}  # syslog's priorities
_LEVEL_ALIASES = {
    "warn": "WARNING",
    "err": "ERROR",
    "crit": "CRITICAL",
    "alert": "CRITICAL",
    "emerg": "FATAL",
    "panic": "FATAL",
}
_LEVEL_NAMES = frozenset({"TRACE", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "FATAL"})
_LOGURU_FRAME = re.compile(r'(?m)^> (?=File ")')


@dataclass(slots=True)
class LineExpansions:
    """Maps lines of the converted text to lines of the log, where one line became several."""

    first: list[int] = field(default_factory=list)  # line of the text, from 1 on
    origin: list[int] = field(default_factory=list)  # line of the log
    count: list[int] = field(default_factory=list)  # lines of the text

    def note(self, first: int, origin: int, count: int) -> None:
        self.first.append(first)
        self.origin.append(origin)
        self.count.append(count)

    def line_of(self, line: int) -> int:
        """Return the line of the log that a line of the text comes from."""
        place = bisect.bisect_right(self.first, line) - 1
        if place < 0 or not line:
            return line
        beyond = line - (self.first[place] + self.count[place] - 1)
        return self.origin[place] + max(0, beyond)


def as_text(blocks: Iterable[bytes], expansions: LineExpansions) -> Iterator[bytes]:
    """Yield blocks of lines with JSON records turned into text; fills `expansions` as they are read."""
    passed, extra, read = 0, 0, 0  # lines before this block, those that the text has more, records
    for block in blocks:
        pieces, at, line = [], 0, passed + 1
        has_records = (b'{"' in block or b'{ "' in block) and _WORTH.search(block) is not None
        for record in _RECORD.finditer(block) if has_records else ():
            if len(expansions.first) >= MAX_EXPANDED or read >= MAX_RECORDS or _WORTH.search(record["json"]) is None:
                continue
            read += 1
            text = _text_of(record["json"])
            if text is None:
                continue
            before = record["before"]
            lines = [before + each.encode(errors="replace") for each in text.split("\n")[:MAX_LINES]]
            line += block.count(b"\n", at, record.start())
            pieces += [block[at : record.start()], b"\n".join(lines)]
            at = record.end()
            if len(lines) > 1:
                expansions.note(line + extra, line, len(lines))
                extra += len(lines) - 1
        passed += block.count(b"\n")
        yield b"".join([*pieces, block[at:]]) if pieces else block


def _text_of(data: bytes, depth: int = MAX_DEPTH) -> str | None:
    """Return the text of a record; None if its format is unknown."""
    if len(data) > MAX_BYTES:
        return None
    try:
        record = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("log"), str) and ("stream" in record or "time" in record):
        return _with_envelope(f"{_moment(record.get('time'))} {_stream(record)} F ", record["log"], depth)
    if "MESSAGE" in record:
        return _with_envelope(_journal_prefix(record), _journal_message(record["MESSAGE"]), depth)
    return _text_of_logger(record)


def _with_envelope(prefix: str, message: str, depth: int) -> str:
    """Return a message with its envelope's prefix on each line; a record inside it is converted as well."""
    message = message.rstrip("\r\n")
    if depth > 1 and message.startswith("{"):
        message = _text_of(message.encode(errors="replace"), depth - 1) or message
    return "\n".join(f"{prefix}{line}" for line in message.split("\n"))


# Envelopes.


def _stream(record: Mapping[str, Any]) -> str:
    return "stderr" if record.get("stream") == "stderr" else "stdout"


def _journal_message(value: object) -> str:
    """Return a message: journald writes an array of bytes if it is not UTF-8, and null if it is too long."""
    if isinstance(value, list):
        if value and isinstance(value[0], str | list):  # several fields of this name
            return "\n".join(_journal_message(item) for item in value)
        return bytes(byte for byte in value if isinstance(byte, int) and 0 <= byte < 256).decode(errors="replace")
    return value if isinstance(value, str) else ""


def _journal_prefix(record: Mapping[str, Any]) -> str:
    """Return the prefix that `journalctl -o short-iso` writes before a message."""
    stamp = str(record.get("__REALTIME_TIMESTAMP") or "")
    moment = _moment(int(stamp[:19]) / 1e6) if stamp.isdecimal() else "1970-01-01T00:00:00Z"
    host = re.sub(r"[^\w.-]", "", str(record.get("_HOSTNAME") or "host"))[:64] or "host"
    name = re.sub(r"[^\w./-]", "", str(record.get("SYSLOG_IDENTIFIER") or record.get("_COMM") or "unit"))[:64] or "unit"
    if name == "kernel" or record.get("_TRANSPORT") == "kernel":
        return f"{moment} {host} kernel: "
    pid = str(record.get("_PID") or record.get("SYSLOG_PID") or 0)
    return f"{moment} {host} {name}[{pid if pid.isdecimal() else 0}]: "


# Loggers.


def _text_of_logger(record: Mapping[str, Any]) -> str | None:
    """Return time, level and message on one line, then the traceback; None if it has no message."""
    inner = record.get("record")
    if isinstance(record.get("text"), str) and isinstance(inner, dict):
        return _text_of_loguru(record["text"], inner)
    message = _first_text(record, _MESSAGES)
    trace = _trace_of(record)
    if message is None and not trace:
        return None
    moment, level = _moment(_first(record, _TIMES)), _level_of(_first(record, _LEVELS))
    head = f"{f'{moment} ' if moment else ''}{f'[{level}] ' if level else ''}{message or ''}".rstrip()
    return _with_rank(record, f"{head}\n{trace}" if trace else head)


def _text_of_loguru(text: str, record: Mapping[str, Any]) -> str:
    """Return the text that loguru formatted, with the exception's type and value if they are not in it."""
    text = _LOGURU_FRAME.sub("  ", text.rstrip("\n"))
    found = record.get("exception")
    if isinstance(found, dict) and found.get("type") and str(found["type"]) not in text:
        text += f"\n{found['type']}: {found.get('value')}"
    extra = record.get("extra")
    return _with_rank(extra if isinstance(extra, dict) else {}, text)


def _trace_of(record: Mapping[str, Any]) -> str:
    """Return the traceback of a record as text; without one the exception's type and message."""
    error = record.get("error")
    for value in (_first(record, _TRACES), error.get("stack_trace") if isinstance(error, dict) else None):
        if trace := _as_trace(value):
            return trace
    parts = (
        error if isinstance(error, dict) else {"type": record.get("error.type"), "message": record.get("error.message")}
    )
    return f"{parts['type']}: {parts.get('message') or ''}" if isinstance(parts.get("type"), str) else ""


def _as_trace(value: object) -> str:
    if isinstance(value, str):
        return value.rstrip("\n") if "\n" in value or re.search(r"(?:Error|Exception)\b", value) else ""
    if isinstance(value, dict):  # an exception as an object: its own traceback, else its type and value
        trace = _as_trace(_first(value, _TRACES))
        kind = _first_text(value, ("type", "exc_type", "class", "name"))
        message = _first_text(value, ("value", "message"))
        return trace or (f"{kind}: {message or ''}" if kind else "")
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return "".join(item if item.endswith("\n") else f"{item}\n" for item in value).rstrip("\n")
        return "\n\n".join(filter(None, (_text_of_frames(item) for item in value if isinstance(item, dict))))
    return ""


def _text_of_frames(stack: Mapping[str, Any]) -> str:
    """Return structlog's `dict_tracebacks` in the format of a Python traceback."""
    kind = stack.get("exc_type")
    if not isinstance(kind, str):
        return ""
    frames = stack.get("frames")
    lines = [
        f'  File "{frame.get("filename", "?")}", line {frame.get("lineno", 0)}, in {frame.get("name", "?")}'
        for frame in (frames if isinstance(frames, list) else [])
        if isinstance(frame, dict)
    ]
    return "\n".join(["Traceback (most recent call last):", *lines, f"{kind}: {stack.get('exc_value') or ''}"])


def _with_rank(record: Mapping[str, Any], text: str) -> str:
    rank = _first(record, _RANKS)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < 1_000_000:
        return text
    return "\n".join(f"[rank{rank}]: {line}" for line in text.split("\n"))


def _first(record: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((record[name] for name in names if record.get(name) not in (None, "", False, [])), None)


def _first_text(record: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((record[name] for name in names if isinstance(record.get(name), str)), None)


def _level_of(value: object) -> str:
    """Return the standard name of a level; "" if it is unknown."""
    if isinstance(value, dict):
        value = value.get("name")
    text = str(value or "")
    level = _ERRNO_LEVEL.get(text) or _LEVEL_ALIASES.get(text.lower()) or text.upper()
    return level if level in _LEVEL_NAMES else ""


def _moment(value: object) -> str:
    """Return a time in ISO 8601; "" if it is not a time."""
    if isinstance(value, dict):
        value = value.get("repr")
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1000 if value > 1e11 else value
        try:
            return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        except (ValueError, OverflowError, OSError):
            return ""
    return value if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", value) else ""
