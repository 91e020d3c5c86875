"""Record some steps with torch.profiler: requested on the job's page, or by the configuration.

The portal writes `profile.json` into its own folder of the run directory, {"id", "directory", "rank", "steps"}; the
requested rank notices it at a step boundary, polling once a second. The trace (Chrome's JSON, gzipped; open it with
chrome://tracing or ui.perfetto.dev) goes to `profiles/` in the attempt's folder, and an event names the file. No other
rank takes part; the heartbeat's phase protects those that wait for the one that writes. A profile that fails is
reported, and training continues; one during which the process ended is reported by the next incarnation, which does not
record it again.
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
from training.metrics.step_trace import silence_kineto
from training.reporting.reporter import AnyReporter

REQUEST, FOLDER = "profile.json", "profiles"
POLL_SECONDS = 1.0
MAX_STEPS = 100
FROM_CONFIG = "config"
_ID = re.compile(r"[a-z0-9]{1,32}")


@dataclass(frozen=True)
class ProfileRequest:
    """Profile `steps` steps, beginning with the next."""

    id: str
    steps: int


@dataclass
class _Window:
    request: ProfileRequest
    first: int
    profiler: Any


class Profiling:
    """Profiles one rank. `at`: the first step to profile on rank 0 by configuration, 0 for none; `steps`: how many."""

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
        self._request_file = run_dir / "portal" / REQUEST
        self._attempt_dir, self._folder, self._rank = attempt_dir, attempt_dir / FOLDER, rank
        self._configured_step, self._steps = (at if rank == 0 else 0), steps
        self._reporter, self._heartbeat = reporter, heartbeat
        self._window: _Window | None = None
        self._handled: set[str] = set()
        self._next_poll = 0.0

    @property
    def is_recording(self) -> bool:
        return self._window is not None

    def between(self, step: int, *, continues: bool = True) -> None:
        """Begin or end a profile at the boundary after `step` steps, 0 too.

        `continues`: whether another step follows.
        """
        if self._window is not None:
            self._window.profiler.step()
            if step >= self._window.first + self._window.request.steps - 1:
                self._end(self._window, step)
        elif continues and (request := self._next_request(step)) is not None:
            self._begin(request, step)

    def close(self, step: int) -> None:
        """Write the open profile, incomplete, because the run ends."""
        if self._window is not None:
            self._end(self._window, step)

    def _next_request(self, step: int) -> ProfileRequest | None:
        if self._configured_step and step + 1 == self._configured_step:
            return ProfileRequest(FROM_CONFIG, self._steps)
        if (now := time.monotonic()) < self._next_poll:
            return None
        self._next_poll = now + POLL_SECONDS
        if not os.path.exists(self._request_file):
            return None
        table = read_json(self._request_file)
        return self._parse_request(table) if isinstance(table, dict) else None

    def _parse_request(self, table: dict[str, Any]) -> ProfileRequest | None:
        request_id, steps = table.get("id"), table.get("steps")
        if table.get("directory") != self._attempt_dir.name or table.get("rank", 0) != self._rank:
            return None
        if not isinstance(request_id, str) or not _ID.fullmatch(request_id) or request_id in self._handled:
            return None
        return ProfileRequest(request_id, min(max(steps, 1), MAX_STEPS) if isinstance(steps, int) else self._steps)

    def _begin(self, request: ProfileRequest, step: int) -> None:
        self._handled.add(request.id)
        self._heartbeat.beat("profile", step)
        mark = self._mark(request)
        try:
            self._folder.mkdir(exist_ok=True)
            if mark.exists():  # begun by an earlier incarnation
                self._report_unfinished(request, mark)
                return
            mark.touch(0o640)
            self._window = _Window(request, step + 1, _start())
        except (RuntimeError, OSError) as error:
            self._fail(request, error)

    def _end(self, window: _Window, step: int) -> None:
        """Write the trace and report how long that took, as training stands still meanwhile."""
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

    def _report_unfinished(self, request: ProfileRequest, mark: Path) -> None:
        """Report once a profile that was never finished: its requester would wait for as long as the attempt runs."""
        if not mark.stat().st_size and not any(self._folder.glob(f"step-*.rank{self._rank}.{request.id}.json.gz")):
            self._fail(request, "its process ended before it was written")

    def _fail(self, request: ProfileRequest, error: object) -> None:
        self._reporter.event("profile.failed", id=request.id, of_rank=self._rank, reason=str(error)[:500])
        with suppress(OSError):
            self._mark(request).write_text("failed\n")  # so that no later incarnation reports it again

    def _mark(self, request: ProfileRequest) -> Path:
        return self._folder / f".{request.id}.{self._rank}"


def _start() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    silence_kineto()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    profiler = profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler
