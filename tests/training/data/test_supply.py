"""Test preparing data on rank 0, while the other ranks receive progress and the result."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.config import run_config
from training.contracts import Recipe
from training.corpus.building import ShardProgress
from training.corpus.errors import DataError
from training.data import Prepared
from training.loader import supply
from training.runtime.distributed import World

CONFIG = run_config.parse({"recipe": "language", "language": {"source": "/data"}})


class Recorder:
    """A heartbeat and a reporter."""

    def __init__(self) -> None:
        self.phase = ""
        self.beats = 0
        self.events: list[tuple[str, dict[str, Any]]] = []

    def beat(self, phase: str, step: int = 0) -> None:
        assert phase == "data"
        self.beats += 1

    def event(self, kind: str, **data: Any) -> None:
        self.events.append((kind, data))


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[bytes]:
    """Return what rank 0 has broadcast to another rank."""
    sent: queue.Queue[bytes] = queue.Queue()

    def broadcast(world: World, value: object) -> object:
        if world.leads:
            sent.put(pickle.dumps(value))
            return value
        return pickle.loads(sent.get(timeout=10))

    monkeypatch.setattr(supply, "broadcast", broadcast)
    monkeypatch.setattr(supply, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(supply, "EVENT_SECONDS", 0.0)
    return sent


def _prepare(rank: int, prepare: Callable[..., Prepared]) -> tuple[Recorder, Prepared]:
    recorder = Recorder()
    world = World(rank, 2, torch.device("cpu"))
    recipe = Recipe(prepare=prepare, build=prepare)
    created = supply.prepare(
        recipe,
        CONFIG,
        world,
        cache=Path("/cache"),
        identity="x",
        heartbeat=recorder,  # type: ignore[arg-type]
        reporter=recorder,  # type: ignore[arg-type]
    )
    return recorder, created


def _makes(cache: Path, identity: str | None, report_progress: Callable[..., None], *, source: str = "") -> Prepared:
    assert (cache, identity, source) == (Path("/cache"), "x", "/data")
    report_progress(None)
    report_progress(ShardProgress("mine", 2_000_000, time.monotonic(), bytes=1_000_000, documents=7))
    return Prepared(Path("/made"), "mine")


@pytest.mark.usefixtures("broadcasts")
def test_both_beat_and_get_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[tuple[Recorder, Prepared]] = []
    other = threading.Thread(target=lambda: answers.append(_prepare(1, _makes)))
    other.start()
    leading, created = _prepare(0, _makes)
    other.join(10)
    ((listening, got),) = answers
    assert created == got == Prepared(Path("/made"), "mine")
    assert (leading.beats, listening.beats) == (2, 3)
    assert capsys.readouterr().out.startswith("tokens of mine: 7 documents, 1 of 2 MB (50 %), ")
    ((kind, facts),) = leading.events
    assert kind == "data.progress"
    assert facts == {"source": "mine", "documents": 7, "bytes": 1_000_000, "total_bytes": 2_000_000, "percent": 50.0}


class Unportable(Exception):
    """An error that cannot be pickled, as some libraries have them."""

    def __init__(self, what: str, *, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.usefixtures("broadcasts")
@pytest.mark.parametrize("what", [Unportable("no answer", why="busy"), OSError(threading.Lock())])
def test_both_hear_of_what_cannot_travel(what: Exception) -> None:
    def fails(cache: Path, identity: str | None = None) -> Prepared:
        raise what

    with pytest.raises(type(what)) as caught:
        _prepare(0, fails)
    assert caught.value is what
    with pytest.raises(RuntimeError, match=f"^{type(what).__name__}: "):
        _prepare(1, fails)


@pytest.mark.parametrize("error", [DataError("is bad.", "source"), OSError(5, "Input/output error")])
def test_both_hear_of_what_goes_wrong(broadcasts: queue.Queue[bytes], error: Exception) -> None:
    def fails(cache: Path, identity: str | None = None) -> Prepared:
        raise error

    for rank in (0, 1):
        with pytest.raises(type(error)) as caught:
            _prepare(rank, fails)
        wanted = "run.language.source: is bad." if isinstance(error, DataError) else "[Errno 5] Input/output error"
        assert str(caught.value) == wanted
    assert broadcasts.empty()
