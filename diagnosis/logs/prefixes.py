"""What stands before a line's own words: rank, node, time, level. It is evidence, so it is read and not thrown away.

A line may have several: a launcher's, a library's, a logger's. They are taken off from the left until none is known;
what is left begins where the program's own words do, with their indentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

AT_MOST = 8  # prefixes of one line
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

# What has a number and a colon, too, and is no node.
_NO_NODE = (
    r"(?!(?i:python|cpu|gpu|ata|nvidia|nvme|eth|en[opsx]|ib|mlx|sd|md|usb|pci|rank|step|epoch|iter|loss)|"
    r"[\w.-]*\.(?:py|sh|c|cc|cpp|cu):)"
)

# Each takes one prefix off, in time proportional to the line, whatever it holds: no two repetitions that follow each
# other match the same letters.
# Groups: rank, local (rank on its node), node, level, Y M D mon h m s f z, up (since boot).
_KINDS = [
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
        r"\[(?P<node>[A-Za-z][\w.-]*):\d+\] ",  # Open MPI's own words
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
# Where no logger says a level, words at the start do.
_SAID = re.compile(r"\S*(?: \w*)?(?P<warning>Warning): |(?P<warn>[Ww]arning|WARN(?:ING)?)\b[: ]")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was before a line's own words. `stamp`: Unix seconds, of a clock that may be off and mostly names no zone.

    `dated`: whether the stamp names its day; else it counts from midnight. `up`: seconds since that node's boot.
    """

    length: int = 0
    rank: int | None = None
    local_rank: int | None = None
    node: str = ""
    stamp: float | None = None
    is_dated: bool = False
    up: float | None = None
    level: str = ""

    @property
    def stream(self) -> tuple[int | None, int | None, str]:
        """Whose words these are, among all that are mixed in one file."""
        return self.rank, self.local_rank, self.node


def prefix_of(line: str, *, year: int = 0) -> Prefix:
    """The prefixes of one line. `year`: for stamps that name none."""
    at, rank, local, node, stamp, is_dated, up, level = 0, None, None, "", None, False, None, ""
    for _ in range(AT_MOST):
        for kind in _KINDS:
            if (found := kind.match(line, at)) is not None and found.end() > at:
                break
        else:
            break
        at, told = found.end(), found.groupdict()
        if (value := told.get("rank")) is not None and rank is None:
            rank = int(value)
        if (value := told.get("local")) is not None and local is None:
            local = int(value)
        node = node or told.get("node") or told.get("ip") or told.get("actor") or ""
        level = level or _level(told.get("level") or told.get("glog") or "")
        if told.get("up"):
            up = float(told["up"])
        if told.get("h") and (stamp is None or not is_dated):
            stamp, is_dated = _stamp(told, year)
    if level and (named := _LOGGER.match(line, at)):
        at = named.end()
    if not level and _SAID.match(line, at):
        level = "warning"
    return Prefix(at, rank, local, node, stamp, is_dated, up, level)


def _level(word: str) -> str:
    return _LEVELS.get(word, word.lower())


def _stamp(told: dict[str, str | None], year: int) -> tuple[float | None, bool]:
    fraction = float(f"0.{told['f']}") if told.get("f") else 0.0
    hour, minute, second = (int(told[key] or 0) for key in ("h", "m", "s"))
    month = _MONTHS.get(told.get("month") or "", 0) or int(told.get("mon") or told.get("M") or 0)
    day = int(told.get("D") or 0)
    if not month or not day:
        return hour * 3600 + minute * 60 + second + fraction, False
    zone = told.get("z") or ""
    offset = 0.0
    if zone and zone != "Z":
        offset = (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60) * (-1 if zone[0] == "-" else 1)
    try:
        moment = datetime(int(told.get("Y") or year or 1972), month, day, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError:
        return None, False
    return moment.timestamp() + fraction - offset, True
