"""Report the kernel log's Xids, each once: after a restart the log is read again, but not reported again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpus.reports import DriverEvent
from nodes.agent import proc
from nodes.agent.kernel_log.aggregation import XidAggregator
from nodes.agent.kernel_log.reader import KernelLog, KernelRecord
from nodes.agent.kernel_log.xids import DriverLogParser, may_contain_xid
from nodes.agent.log import StatusLog

REMEDY = "Only NVML reports Xids now. Run the agent as root or with CAP_SYSLOG, with access to /dev/kmsg."
Event = dict[str, Any]


@dataclass
class KernelWatch:
    """Follows the kernel log for Xids."""

    log: KernelLog
    xids: XidAggregator
    status: StatusLog
    proc: Path
    _driver: DriverLogParser = field(default_factory=DriverLogParser)
    _overruns: list[Event] = field(default_factory=list)

    @property
    def seq(self) -> int:
        """Return the last record that is reported, or needs no report."""
        return max(self.log.last_seq, self.log.reported_seq)

    @property
    def is_read(self) -> bool:
        return not self.log.problem

    def open(self) -> None:
        """Open the kernel log if it is not open; call it repeatedly."""
        if not self.is_read:
            self.log.open()
            self.status.update("kernel log", f"{self.log.problem}. {REMEDY}" if self.log.problem else "")

    def read(self) -> None:
        """Read new records."""
        records = self.log.read()
        if not records and not self.log.overruns:
            return
        now, wall, uptime = time.monotonic(), time.time(), proc.uptime(self.proc)
        for record in records:
            if may_contain_xid(record.raw):
                self._add_record(record, now, wall, uptime)
        for first, last in self.log.overruns:
            self._overruns.append({"kind": "kmsg.overrun", "at": round(wall, 3), "from_seq": first, "to_seq": last})
        self.log.overruns.clear()

    def add_nvml_event(self, event: DriverEvent) -> None:
        self.xids.add_nvml_event(event.gpu.bus, event.value, at=event.time, now=time.monotonic())

    def has_urgent(self) -> bool:
        return bool(self._overruns) or self.xids.has_urgent(time.monotonic(), is_kernel_log_read=self.is_read)

    def take(self) -> list[Event]:
        """Return the events up to `seq`."""
        overruns, self._overruns = self._overruns, []
        return [*overruns, *self.xids.take(time.monotonic(), is_kernel_log_read=self.is_read)]

    def _add_record(self, record: KernelRecord, now: float, wall: float, uptime: float) -> None:
        """Add a record, dated by its age: the log's clock drifts, and the wall clock may have been set since."""
        xid = self._driver.read(record.text, record.at)
        if xid is not None and record.seq > self.log.reported_seq:
            self.xids.add_kernel_record(xid, seq=record.seq, at=min(wall, wall - (uptime - record.at)), now=now)
