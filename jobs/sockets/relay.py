"""Turn a job's messages into what sockets receive from a web process: frames, bands, single ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from channels.db import database_sync_to_async
from numpy.typing import NDArray

from jobs import live
from jobs.intake.reports import SERIES, owner_of
from jobs.models import Attempt
from portal.hub import Item, PassThrough, Relay
from portal.series import store
from portal.series.bands import PATIENCE_S, Band, BandCollector

Key = tuple[int, str, int]  # attempt, series, incarnation
Run = tuple[str, int, int, NDArray[Any], NDArray[Any]]  # series, incarnation, rank, step, value

MAX_BANDS = SERIES  # series and incarnations with bands in the making
COLUMNS = 2**17  # of ranks in all of these: 600 MB
MAX_EARLY_MESSAGES = 64  # messages that may come while a relay opens


def relay_for(topic: str) -> Relay:
    """Return the relay of a topic, for the hub."""
    kind, _, number = topic.removeprefix("vigil:").partition(":")
    return JobRelay(int(number)) if kind == "job" else PassThrough()


def rank_audience(rank: int) -> str:
    return f"rank:{rank}"


class JobRelay:
    """The relay of a job's messages: rank 0's frame is passed on as it is; the other ranks' points become bands."""

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        self._about: dict[str, Any] = {}
        self._gathering: dict[Key, BandCollector] = {}  # what was reported longest ago comes first
        self._early: deque[bytes] | None = deque(maxlen=MAX_EARLY_MESSAGES)  # None: it is open

    async def open(self) -> None:
        """Begin with what the ranks reported last: their other halves are still to come."""
        # Gathered in a thread on private data: `feed` and `tick` continue meanwhile.
        about, gathering = await database_sync_to_async(self._catch_up)()
        self._about, self._gathering = about, gathering
        early, self._early = self._early or (), None
        for message in early:
            self._add(*live.split(message))
        self._make_room()

    def feed(self, message: bytes, audiences: set[str]) -> Iterator[Item]:
        frame, block = live.split(message)
        # Sent before the rest is even parsed: no reader waits for bands, or lacks the frame if they cannot be made.
        yield "", frame
        if self._early is not None:  # bands come once it is open: before that there are no readers
            self._early.append(message)
            return
        runs, touched = self._add(frame, block)
        yield from self._single_ranks(runs, audiences)
        complete = {key: self._gathering[key].complete(steps) for key, steps in touched.items()}
        self._make_room()
        yield from self._frames(complete)

    def tick(self) -> Iterator[Item]:
        now = time.monotonic()
        yield from self._frames({key: gathering.overdue(now) for key, gathering in self._gathering.items()})

    def _add(self, frame: bytes, block: bytes) -> tuple[list[Run], dict[Key, set[int]]]:
        """Gather a message's points. Return those of all ranks but 0, and which steps were touched."""
        self._about, columns = live.unpack(frame)
        now, attempt = time.monotonic(), self._about["attempt"]
        touched = _gather(self._gathering, attempt, _rank_0_runs(self._about, columns), now)
        runs = list(_runs(*live.unpack(block))) if block else []
        for key, steps in _gather(self._gathering, attempt, runs, now).items():
            touched.setdefault(key, set()).update(steps)
        return runs, touched

    def _make_room(self) -> None:
        """Drop the bands reported longest ago: nothing announces the end of a series or an incarnation."""
        columns = sum(gathering.columns for gathering in self._gathering.values())
        for key in list(self._gathering):
            if len(self._gathering) <= MAX_BANDS and columns <= COLUMNS:
                return
            columns -= self._gathering.pop(key).columns

    def _frames(self, bands: dict[Key, Band | None]) -> Iterator[Item]:
        """Yield one frame with the bands of each attempt; almost always there is only one."""
        for attempt in {key[0] for key, band in bands.items() if band}:
            bands_of_attempt = {key: band for key, band in bands.items() if band and key[0] == attempt}
            entries = [
                {"name": name, "kind": "band", "incarnation": incarnation, "n": len(band)}
                for (_, name, incarnation), band in bands_of_attempt.items()
            ]
            flat = []
            for band in bands_of_attempt.values():
                flat += [band.step.astype("<f8"), *map(live.narrow, (band.min, band.median, band.max, band.worst))]
            # The frame already had this version: without `extra` a page would drop the band as a repetition.
            about = {**self._about, "attempt": attempt, "extra": True, "events": [], "series": entries}
            yield "", live.pack(about, *flat)

    def _single_ranks(self, runs: list[Run], audiences: set[str]) -> Iterator[Item]:
        """Yield the points of single ranks for readers who requested one."""
        for audience in audiences - {""}:
            runs_of_rank = [run for run in runs if rank_audience(run[2]) == audience]
            if not runs_of_rank:
                continue
            entries = [
                {"name": name, "kind": "value", "rank": rank, "incarnation": incarnation, "n": len(step)}
                for name, incarnation, rank, step, _ in runs_of_rank
            ]
            flat = [column for *_, step, value in runs_of_rank for column in (step.astype("<f8"), value.astype("<f4"))]
            yield audience, live.pack({**self._about, "extra": True, "events": [], "series": entries}, *flat)

    def _catch_up(self) -> tuple[dict[str, Any], dict[Key, BandCollector]]:
        gathering: dict[Key, BandCollector] = {}
        attempt = Attempt.objects.filter(job_id=self.job_id).order_by("-number").first()
        if attempt is None:
            return {}, gathering
        recent = store.recent(owner_of(attempt.pk), seconds=PATIENCE_S)
        runs = [
            (name, incarnation, rank, points.step, points.value)
            for name, incarnation, rank, points in recent
            if rank >= 0
        ]
        _gather(gathering, attempt.pk, runs, time.monotonic())
        return live.header(attempt), gathering


def _gather(into: dict[Key, BandCollector], attempt: int, runs: Iterable[Run], now: float) -> dict[Key, set[int]]:
    """Add the points of these runs. Return the steps that each series and incarnation got."""
    touched: dict[Key, set[int]] = {}
    for name, incarnation, rank, step, value in runs:
        key = (attempt, name, incarnation)
        gathering = into.pop(key) if key in into else BandCollector()
        into[key] = gathering  # the last now: it was reported last
        gathering.add(rank, step, value, now)
        touched.setdefault(key, set()).update(step.tolist())
    return touched


def _rank_0_runs(about: dict[str, Any], data: memoryview) -> Iterator[Run]:
    """Yield rank 0's points in a frame."""
    for entry, columns in zip(about["series"], live.columns_of(about, data), strict=True):
        if entry["rank"] == 0:
            yield entry["name"], entry["incarnation"], 0, *_wide(columns)


def _runs(about: dict[str, Any], data: memoryview) -> Iterator[Run]:
    """Yield the points in a block of other ranks, run by run."""
    for entry, columns in zip(about["series"], live.columns_of(about, data), strict=True):
        step, value = _wide(columns)
        start = 0
        for rank, count in entry["runs"]:
            end = start + count
            yield entry["name"], entry["incarnation"], rank, step[start:end], value[start:end]
            start = end


def _wide(columns: dict[str, NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return columns["step"].astype(np.int64), columns["value"].astype(np.float64)
