"""Provide a run's data at its start: rank 0 makes it if necessary, every rank opens it, and an event describes it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar, cast

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.config.base import BaseRunConfig
from training.contracts import Recipe
from training.corpus.errors import DataError
from training.data import Prepared, Task
from training.loader.order import Share
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, broadcast

PROGRESS_SECONDS = 5.0
EVENT_SECONDS = 30.0

T = TypeVar("T")


def prepare(
    recipe: Recipe,
    config: BaseRunConfig,
    world: World,
    *,
    cache: Path,
    identity: str | None,
    heartbeat: Heartbeat | NullHeartbeat,
    reporter: AnyReporter,
) -> Prepared:
    """Return the result of the recipe's `prepare` on every rank. Raises DataError with the option's full path.

    Making data can take hours. So that no rank considers the others stuck, rank 0 informs them every few seconds, and
    all of them write their heartbeat.
    """

    def make(on_progress: Callable[..., None]) -> Prepared:
        try:
            return recipe.call_prepare(cache, identity, config.recipe_options(), report_progress=on_progress)
        except DataError as error:
            raise error.within(f"run.{config.recipe}") from None

    return LeaderWork(world, heartbeat, reporter).run(make)


def build(recipe: Recipe, config: BaseRunConfig, prepared: Prepared, weights: Path | None = None) -> Task:
    """Return the result of the recipe's `build`. Raises DataError with the option's full path.

    `weights`: where its parameters are read from; None: they come from the seed or a checkpoint.
    """
    try:
        task = recipe.call_build(prepared.path, config.recipe_options())
        if weights is not None:
            task = replace(task, weights=recipe.weights(weights, prepared.path))
    except DataError as error:
        raise error.within(f"run.{config.recipe}") from None
    return task


def report_prepared(reporter: AnyReporter, prepared: Prepared, task: Task, share: Share) -> None:
    """Report what the run trains on, and how evenly it is spread over data-parallel coordinates and shards."""
    batches = task.samples["train"] // share.global_batch
    shares = [Share(index, share.count, share.global_batch, share.micro_batch) for index in range(share.count)]
    imbalance = {"coordinates": _imbalance([batches * part.size for part in shares])}
    if task.by_shard:
        imbalance["shards"] = _imbalance(task.by_shard)
    reporter.event(
        "data.prepared",
        identity=prepared.identity,
        **prepared.facts,
        samples=task.samples["train"],
        validation_samples=task.samples["validation"],
        imbalance=imbalance,
    )


def _imbalance(samples: list[int]) -> dict[str, int]:
    """Return the smallest and largest number of samples per epoch."""
    return {"least": min(samples), "most": max(samples)}


def _picklable(error: Exception) -> Exception:
    """Return an error that other ranks can unpickle: a library's own may contain objects that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class HasProgress(Protocol):
    """Progress of data being made: `str` describes it."""

    def facts(self) -> dict[str, object]: ...


class LeaderWork:
    """Runs long work on rank 0, which informs the other ranks of progress until they get the result."""

    def __init__(self, world: World, heartbeat: Heartbeat | NullHeartbeat, reporter: AnyReporter) -> None:
        self._world, self._heartbeat, self._reporter = world, heartbeat, reporter
        self._next_progress = time.monotonic() + PROGRESS_SECONDS
        self._next_event = time.monotonic() + EVENT_SECONDS

    def run(self, make: Callable[[Callable[..., None]], T]) -> T:
        """Return what rank 0 makes, on every rank; if it fails, all raise.

        `make` gets a callback to call in the meantime.
        """
        if not self._world.leads:
            return cast(T, self._wait_for_result())
        result: T | Exception
        try:
            result = make(self._on_progress)
        except Exception as error:  # sent to all, so that no rank waits forever
            result = error
        if isinstance(result, Exception):
            broadcast(self._world, _picklable(result))
            raise result
        broadcast(self._world, result)
        return result

    def _on_progress(self, progress: HasProgress | None = None) -> None:
        self._heartbeat.beat("data")
        now = time.monotonic()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_SECONDS
        broadcast(self._world, None)
        if progress is None:
            return
        print(progress, flush=True)
        if now >= self._next_event:
            self._next_event = now + EVENT_SECONDS
            self._reporter.event("data.progress", **progress.facts())

    def _wait_for_result(self) -> object:
        while True:
            message: object = broadcast(self._world, None)
            self._heartbeat.beat("data")
            if isinstance(message, Exception):
                raise message
            if message is not None:
                return message
