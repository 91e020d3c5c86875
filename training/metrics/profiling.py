"""Some steps written down whole by torch.profiler: asked for on the job's page, or by the configuration.

The portal writes `profile.json` into its own folder of the run directory, {"id", "directory", "rank", "steps"}, and the
rank that is asked sees it at a step boundary, looking once a second. The trace (Chrome's JSON, gzipped; chrome://tracing
and ui.perfetto.dev open it) goes to `profiles/` in the attempt's folder, and an event says where it is. No other rank
takes part; those that wait for the one that writes are spared by its heartbeat's phase. A profile that fails is told,
and training goes on; one during which its process ended is told by the next incarnation, and not begun again.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.attempt.files import read_json
from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.metrics.step_trace import hush
from training.reporting.reporter import AnyReporter

REQUEST, FOLDER = "profile.json", "profiles"
LOOK_SECONDS = 1.0
MOST_STEPS = 100
FROM_CONFIG = "config"
_ID = re.compile(r"[a-z0-9]{1,32}")


@dataclass(frozen=True)
class Request:
    """Profile so many steps, beginning with the next."""

    id: str
    steps: int


@dataclass
class _Window:
    request: Request
    first: int
    profiler: Any


class Profiling:
    """Profiles one rank. `at`: the configuration's first step to profile on rank 0, 0 for none; `steps`: how many."""

    def __init__(
        self,
        run_dir: Path,
        attempt_dir: Path,
        rank: int,
        *,
        at: int,
        steps: int,
        reporter: AnyReporter,
        heartbeat: Heartbeat | NullHeartbeat,
    ) -> None:
        self._request = run_dir / "portal" / REQUEST
        self._attempt_dir, self._folder, self._rank = attempt_dir, attempt_dir / FOLDER, rank
        self._at, self._steps = (at if rank == 0 else 0), steps
        self._reporter, self._heartbeat = reporter, heartbeat
        self._window: _Window | None = None
        self._seen: set[str] = set()
        self._next_look = 0.0

    @property
    def is_on(self) -> bool:
        return self._window is not None

    def between(self, step: int, *, goes_on: bool = True) -> None:
        """Begins or ends one at the boundary after `step` steps, 0 too. Not `goes_on`: no step follows to record."""
        if self._window is not None:
            self._window.profiler.step()
            if step >= self._window.first + self._window.request.steps - 1:
                self._end(self._window, step)
        elif goes_on and (request := self._wanted(step)) is not None:
            self._begin(request, step)

    def close(self, step: int) -> None:
        """The run ends: what is open is written as far as it goes."""
        if self._window is not None:
            self._end(self._window, step)

    def _wanted(self, step: int) -> Request | None:
        if self._at and step + 1 == self._at:
            return Request(FROM_CONFIG, self._steps)
        if (now := time.monotonic()) < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        if not os.path.exists(self._request):
            return None
        found = read_json(self._request)
        return self._request_of(found) if isinstance(found, dict) else None

    def _request_of(self, found: dict[str, Any]) -> Request | None:
        number, steps = found.get("id"), found.get("steps")
        if found.get("directory") != self._attempt_dir.name or found.get("rank", 0) != self._rank:
            return None
        if not isinstance(number, str) or not _ID.fullmatch(number) or number in self._seen:
            return None
        return Request(number, min(max(steps, 1), MOST_STEPS) if isinstance(steps, int) else self._steps)

    def _begin(self, request: Request, step: int) -> None:
        self._seen.add(request.id)
        self._heartbeat.beat("profile", step)
        mark = self._mark(request)
        try:
            self._folder.mkdir(exist_ok=True)
            if mark.exists():  # begun by an incarnation before this one
                self._tell_unended(request, mark)
                return
            mark.touch(0o640)
            self._window = _Window(request, step + 1, _start())
        except (RuntimeError, OSError) as error:
            self._fail(request, error)

    def _end(self, window: _Window, step: int) -> None:
        """Training stands still while the trace is written; how long that took is told."""
        self._window = None
        self._heartbeat.beat("profile", step)
        began = time.monotonic()
        request, rank = window.request, self._rank
        name = f"step-{window.first}-{step}.rank{rank}.{request.id}.json.gz"
        try:
            window.profiler.stop()
            size = self._write(window.profiler, self._folder / name)
        except (RuntimeError, OSError) as error:
            self._fail(request, error)
            return
        self._reporter.event(
            "profile.saved",
            id=request.id,
            name=name,
            of_rank=rank,
            first_step=window.first,
            last_step=step,
            bytes=size,
            seconds=round(time.monotonic() - began, 3),
        )

    def _write(self, profiler: Any, target: Path) -> int:
        plain, packed = target.with_name(f".{target.name}.json"), target.with_name(f".{target.name}.part")
        try:
            profiler.export_chrome_trace(str(plain))
            with open(plain, "rb") as read, gzip.open(packed, "wb", compresslevel=3) as written:
                shutil.copyfileobj(read, written, 1 << 20)
            os.chmod(packed, 0o640)
            os.replace(packed, target)
        finally:
            for path in (plain, packed):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        return target.stat().st_size

    def _tell_unended(self, request: Request, mark: Path) -> None:
        """Tells once of one that was never ended: who waits for it would do so for as long as the attempt runs."""
        if not mark.stat().st_size and not any(self._folder.glob(f"step-*.rank{self._rank}.{request.id}.json.gz")):
            self._fail(request, "its process ended before it was written")

    def _fail(self, request: Request, error: object) -> None:
        self._reporter.event("profile.failed", id=request.id, of_rank=self._rank, reason=str(error)[:500])
        with suppress(OSError):
            self._mark(request).write_text("failed\n")  # so that no later incarnation tells it again

    def _mark(self, request: Request) -> Path:
        return self._folder / f".{request.id}.{self._rank}"


def _start() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    hush()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    profiler = profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler
