"""Reports of a rank or the launcher: one stream per process, written to the attempt's spool (protocols.md §3).

The writer itself is `vigil_report.Stream`, so that the trainer and users' scripts write exactly the same files.
"""

from __future__ import annotations

from typing import Any

from vigil_report import Stream


class Reporter(Stream):
    """`log`, `event` and `flush` never wait for the disk; see Stream.

    A trainer that gathers tensors on the device and reports floats every N steps calls `flush()` right after, so that
    they are on disk at once; and `flush(wait=…)` before a checkpoint is committed.
    """


class NullReporter:
    """A reporter that does nothing, for runs outside an attempt, and tests of the loop."""

    def log(self, step: int, **values: float) -> None: ...

    def event(self, kind: str, **data: Any) -> None: ...

    def flush(self, wait: float = 0.0) -> bool:
        return True

    def close(self) -> None: ...


AnyReporter = Reporter | NullReporter
