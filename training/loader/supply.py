"""A run's data at its start: rank 0 makes it if it has to be made, every rank opens it, and the run says what it is."""

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

SAY_SECONDS = 5.0
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
    """What the recipe's `prepare` gives, on every rank; its DataError with the option's whole path.

    Making can take hours. So that nobody takes the others for stuck meanwhile, rank 0 tells them every few seconds
    that it goes on, and all of them beat.
    """

    def make(tell: Callable[..., None]) -> Prepared:
        try:
            return recipe.prepared(cache, identity, config.recipe_options(), tell=tell)
        except DataError as error:
            raise error.within(f"run.{config.recipe}") from None

    return Telling(world, heartbeat, reporter).by_rank_0(make)


def build(recipe: Recipe, config: BaseRunConfig, prepared: Prepared, weights: Path | None = None) -> Task:
    """What the recipe's `build` makes of it; its DataError with the option's whole path.

    `weights`: what its parameters are read from; None: the seed or a checkpoint gives them.
    """
    try:
        task = recipe.built(prepared.path, config.recipe_options())
        if weights is not None:
            task = replace(task, weights=recipe.weights(weights, prepared.path))
    except DataError as error:
        raise error.within(f"run.{config.recipe}") from None
    return task


def tell_prepared(reporter: AnyReporter, prepared: Prepared, task: Task, share: Share) -> None:
    """One event: what the run trains on, and how evenly it lies on data-parallel coordinates and in shards."""
    batches = task.samples["train"] // share.global_batch
    shares = [Share(index, share.count, share.global_batch, share.micro_batch) for index in range(share.count)]
    imbalance = {"coordinates": _least_and_most([batches * one.size for one in shares])}
    if task.by_shard:
        imbalance["shards"] = _least_and_most(task.by_shard)
    reporter.event(
        "data.prepared",
        identity=prepared.identity,
        **prepared.facts,
        samples=task.samples["train"],
        validation_samples=task.samples["validation"],
        imbalance=imbalance,
    )


def _least_and_most(samples: list[int]) -> dict[str, int]:
    """Samples of an epoch."""
    return {"least": min(samples), "most": max(samples)}


def _told(error: Exception) -> Exception:
    """The error as the other ranks can hear of it: a library's own may hold what doesn't travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Tellable(Protocol):
    """How far data is that is being made: `str` says it in words."""

    def facts(self) -> dict[str, object]: ...


class Telling:
    """Rank 0 does something long and tells of it; the others listen, until what came of it is told."""

    def __init__(self, world: World, heartbeat: Heartbeat | NullHeartbeat, reporter: AnyReporter) -> None:
        self._world, self._heartbeat, self._reporter = world, heartbeat, reporter
        self._say_at = time.monotonic() + SAY_SECONDS
        self._event_at = time.monotonic() + EVENT_SECONDS

    def by_rank_0(self, make: Callable[[Callable[..., None]], T]) -> T:
        """What rank 0 makes, on every rank; where it fails, all raise. `make` is given what to call meanwhile."""
        if not self._world.leads:
            return cast(T, self._listen())
        made: T | Exception
        try:
            made = make(self._tell)
        except Exception as error:  # told to all, so that no rank waits for what never comes
            made = error
        if isinstance(made, Exception):
            broadcast(self._world, _told(made))
            raise made
        broadcast(self._world, made)
        return made

    def _tell(self, progress: Tellable | None = None) -> None:
        self._heartbeat.beat("data")
        now = time.monotonic()
        if now < self._say_at:
            return
        self._say_at = now + SAY_SECONDS
        broadcast(self._world, None)
        if progress is None:
            return
        print(progress, flush=True)
        if now >= self._event_at:
            self._event_at = now + EVENT_SECONDS
            self._reporter.event("data.progress", **progress.facts())

    def _listen(self) -> object:
        while True:
            told: object = broadcast(self._world, None)
            self._heartbeat.beat("data")
            if isinstance(told, Exception):
                raise told
            if told is not None:
                return told
