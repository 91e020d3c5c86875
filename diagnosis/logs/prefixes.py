"""Parse what precedes a line's own words: rank, node, time and level. Prefixes are evidence, so they are kept.

A line may have several: a launcher's, a library's, a logger's. They are removed from the left until none is recognized;
what is left begins where the program's own words do, with their indentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

MAX_PREFIXES = 8  # prefixes of one line
_MONTHS = {
    name: index
    for index, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
_TIME = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,:](?P<f>\d{1,9}))?"
_DATE = r"(?P<Y>\d{4})[-/](?P<M>\d\d)[-/](?P<D>\d\d)"
_ZONE = r"(?P<z>Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE)"
_PLAIN_LEVEL = _LEVEL.replace("?P<level>", "?:")
_NODE = r"(?P<node>[A-Za-z][\w-]*(?:\.[\w-]+)*)"

# Names with a number and a colon that are not nodes.
_NO_NODE = (
    r"(?!(?i:python|cpu|gpu|ata|nvidia|nvme|eth|en[opsx]|ib|mlx|sd|md|usb|pci|rank|step|epoch|iter|loss)|"
    r"[\w.-]*\.(?:py|sh|c|cc|cpp|cu):)"
)

# Each takes one prefix off, in time proportional to the line, whatever it holds: no two repetitions that follow each
# other match the same letters.
# Groups: rank, local (rank on its node), node, level, Y M D mon h m s f z, up (since boot).
_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        r"\[rank(?P<rank>\d{1,6})\]: ?(?=\[?[EWIF]?\S|\s|$)",
        r"\[rank(?P<rank>\d{1,6})\](?=\[)",
        r"\[(?:default|\w*?[a-z]_?)(?P<local>\d{1,3})\]: ?",  # torchrun's --tee: role and local rank
        r" {0,5}(?P<rank>\d{1,5}): ",  # srun --label
        # Open MPI's --tag-output, Horovod's launcher; of what follows the indentation is the program's.
        r"\[(?:\d+,)?(?P<rank>\d{1,6})\]<std(?:err|out|diag)>:(?: (?=\S))?",
        r"\((?:host|process|proc|rank|worker) (?P<rank>\d{1,6})\):? ?(?=\S|\s|$)",  # EasyLM, levanter, own loggers
        r"\((?P<actor>\w[\w.]*) pid=\d+(?:, ip=(?P<ip>[\d.]+))?\) ",
        r"\[(?P<glog>[EWIF])(?P<mon>\d\d)(?P<D>\d\d) " + _TIME + r" [\w./]+:\d+\] ",  # c10d since 2.2
        r"\[(?P<glog>[EWIF])\d{0,4} (?:" + _TIME + r" )?[\w./]+:\d+\] ",
        r"(?P<glog>[EWIF])(?P<mon>\d\d)(?P<D>\d\d) " + _TIME + r" +\d+ [\w./-]+:\d+\] ",  # glog: JAX, TensorFlow
        _DATE + "[ T]" + _TIME + r": (?P<glog>[EWIF]) [\w./-]+:\d+\] ",
        r"\[(?:PG (?:ID )?\d+ (?:PG GUID )?[^\]]*?)?[Rr]ank (?P<rank>\d{1,6})\]:? ?",
        r"(?:<\d+>)?\[ *(?P<up>\d{1,9}\.\d{6})\] ?(?:\[ *[TC]\d+\] ?)?",
        r"\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<month>[A-Z][a-z]{2}) +(?P<D>\d{1,2}) " + _TIME + r" (?P<Y>\d{4})\] ",
        r"(?P<month>[A-Z][a-z]{2}) +(?P<D>\d{1,2}) " + _TIME + " " + _NODE + r" (?:kernel|[\w./-]+(?:\[\d+\])?): ",
        _DATE + "T" + _TIME + _ZONE + " " + _NODE + r" (?:kernel|[\w./-]+\[\d+\]): ",
        _DATE + "T" + _TIME + _ZONE + r" std(?:err|out) [FP] ",
        r"(?P<node>[\w.-]+):\d+:\d+ \[(?P<local>\d{1,3})\] (?=.*NCCL)",
        r"\[?" + _DATE + "[ T]" + _TIME + _ZONE + r"\]?(?: *[|:-] +| *(?=\[)|: | )",
        r"\[?(?P<M>\d\d)/(?P<D>\d\d)/(?P<Y>\d{4})[ ,]+" + _TIME + r"\]?(?: *[|:-] +| )",
        r"\[" + _TIME + r"\] *",
        _TIME + r"(?: *[|-] +| )",
        r"\[(?P<node>[A-Za-z][\w.-]*):\d+\] ",  # Open MPI's own messages
        r"[\w.]{1,60} - (?=" + _PLAIN_LEVEL + " - )",
        r"\[[\w.]{1,60}\](?=\[" + _PLAIN_LEVEL + r"\])",
        r"\[" + _LEVEL + r" *(?:[|:][\w. ]+)?\][: ]? *",
        _LEVEL + r" {0,20}(?:\| [\w.<>]+:[\w.<>]+:\d+ - |: ?(?:[\w.]+:)? ?|\| | {1,20}- +| {1,3}(?=[\[\w]))",
        r"\[[\w./-]+\.py:\d+(?::[\w<>]+)?\] ?",
        r"[\w.]+:[\w<>]+:\d+ - ",
        # pdsh, DeepSpeed's launcher
        _NO_NODE + r"(?P<node>[A-Za-z](?=[\w-]*\d)[\w-]*+(?:\.[\w-]+)*+): (?!.*\btask)",
        r"\[(?P<rank>\d{1,5})\]: ?",
        r"(?:\[)?[Rr](?:ank|ANK)[ =:]?(?P<rank>\d{1,6})\]?(?:: | - | \| )",
        r"<std(?:err|out)>: ?",
    )
]
_LEVELS = {"E": "error", "W": "warning", "I": "info", "F": "fatal", "WARN": "warning", "CRITICAL": "fatal"}
_LOGGER = re.compile(r"(?:[\w.]{1,60} )?- (?=\S)")  # after a level
# The level by the line's first words, where no logger names it.
_WARNING_WORDS = re.compile(r"\S*(?: \w*)?(?P<warning>Warning): |(?P<warn>[Ww]arning|WARN(?:ING)?)\b[: ]")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prefixes of a line.

    `length` in characters; `stamp` in Unix seconds, of a clock that may be off and mostly names no zone. Without
    `is_dated`, the stamp counts from midnight. `up` counts seconds since the node's boot.
    """

    length: int = 0
    rank: int | None = None
    local_rank: int | None = None
    node: str = ""
    stamp: float | None = None
    is_dated: bool = False
    uptime: float | None = None
    level: str = ""

    @property
    def stream(self) -> tuple[int | None, int | None, str]:
        """Return (rank, local rank, node): which of the streams mixed in one file the line belongs to."""
        return self.rank, self.local_rank, self.node


def parse_prefix(line: str, *, year: int = 0) -> Prefix:
    """Return the prefixes of one line. `year` completes time stamps that name none."""
    at, rank, local, node, stamp, is_dated, up, level = 0, None, None, "", None, False, None, ""
    for _ in range(MAX_PREFIXES):
        for pattern in _PATTERNS:
            if (match := pattern.match(line, at)) is not None and match.end() > at:
                break
        else:
            break
        at, groups = match.end(), match.groupdict()
        if (value := groups.get("rank")) is not None and rank is None:
            rank = int(value)
        if (value := groups.get("local")) is not None and local is None:
            local = int(value)
        node = node or groups.get("node") or groups.get("ip") or groups.get("actor") or ""
        level = level or _level(groups.get("level") or groups.get("glog") or "")
        if groups.get("up"):
            up = float(groups["up"])
        if groups.get("h") and (stamp is None or not is_dated):
            stamp, is_dated = _stamp(groups, year)
    if level and (named := _LOGGER.match(line, at)):
        at = named.end()
    if not level and _WARNING_WORDS.match(line, at):
        level = "warning"
    return Prefix(at, rank, local, node, stamp, is_dated, up, level)


def _level(word: str) -> str:
    return _LEVELS.get(word, word.lower())


def _stamp(groups: dict[str, str | None], year: int) -> tuple[float | None, bool]:
    fraction = float(f"0.{groups['f']}") if groups.get("f") else 0.0
    hour, minute, second = (int(groups[key] or 0) for key in ("h", "m", "s"))
    month = _MONTHS.get(groups.get("month") or "", 0) or int(groups.get("mon") or groups.get("M") or 0)
    day = int(groups.get("D") or 0)
    if not month or not day:
        return hour * 3600 + minute * 60 + second + fraction, False
    zone = groups.get("z") or ""
    offset = 0.0
    if zone and zone != "Z":
        offset = (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60) * (-1 if zone[0] == "-" else 1)
    try:
        moment = datetime(int(groups.get("Y") or year or 1972), month, day, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError:
        return None, False
    return moment.timestamp() + fraction - offset, True
