"""Test runs on a user's texts, and runs with prefetched batches, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import TINY, Run, Sabotage
from training.attempt.lineage import newest_on_lineage
from training.loader.order import Share

pytestmark = pytest.mark.slow

SLOW = '''
"""Numbers whose look-up takes a while, and is written down."""
import json, os, time
import torch
from training.data import Prepared, Task

def prepare(cache, identity=None):
    return Prepared(cache, "numbers")

def build(data, *, samples: int = 50, damaged: int = -1):
    torch.manual_seed(0)
    def batch(split, ids):
        with open(f"{os.environ['VIGIL_ATTEMPT_DIR']}/ids.{os.environ['RANK']}", "a") as file:
            print(json.dumps(ids.tolist()), file=file)
        time.sleep(0.002)
        if damaged in ids:
            raise OSError(5, "Input/output error")
        return (torch.as_tensor(ids, dtype=torch.float32)[:, None] / samples,)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    loss = lambda model, batch: (model(batch[0]) - batch[0] ** 2).square().mean()
    return Task(model=model, samples={"train": samples, "validation": 10}, batch=batch, loss=loss,
                score=lambda model, batch: {"loss": loss(model, batch)})
'''
NUMBERS = {key: value for key, value in TINY.items() if key != "language"} | {"recipe": "slow", "global_batch": 4}


@pytest.fixture
def added(tmp_path: Path) -> Path:
    for kind in ("recipes", "parallel"):
        (tmp_path / "added" / kind).mkdir(parents=True)
    (tmp_path / "added" / "recipes" / "slow.py").write_text(SLOW)
    return tmp_path / "added"


def _read_ids(attempt_dir: Path, rank: int, world: int) -> list[list[int]]:
    """Return, by step, the ids that a rank read, without the discarded first pass."""
    lines = [json.loads(line) for line in (attempt_dir / f"ids.{rank}").read_text().splitlines()[1:]]
    assert {len(line) for line in lines} == {Share(rank, world, 4, 4).size}
    return lines


def test_prefetched_batches_are_not_consumed(added: Path, tmp_path: Path) -> None:
    """A rank dies with batches ready that nobody trained on; they come again, after a shrink as well."""
    whole = Run(tmp_path / "whole", dict(NUMBERS), added=added)
    first = whole.finish(2)
    expected = [_read_ids(first.attempt_dir, 0, 2), _read_ids(first.attempt_dir, 1, 2)]
    assert [len(found) for found in expected] == [12, 12], "nothing is read beyond the last step"

    run = Run(tmp_path / "run", dict(NUMBERS), added=added)
    committed = run.job_dir / "checkpoints" / "step-4" / "COMMITTED"
    ahead = run.job_dir / "attempt-1" / "ids.1"
    dying = Sabotage("training.engine.optimizer_step:OptimizerStep.__call__", call=6, rank=1, until=str(committed))
    killed = run.start(2, sabotage=dying)
    assert killed.wait()[1] == -9
    prefetched = [json.loads(line) for line in ahead.read_text().splitlines()[1:]]
    assert len(prefetched) > 6, "the thread was ahead of the step in which the rank died"
    assert prefetched == expected[1][: len(prefetched)]
    start = newest_on_lineage(run.job_dir)
    assert start == "step-4"
    (manifest,) = [found for found in run.checkpoints if found.name == start]
    assert manifest.consumed_samples == 16
    again = run.finish(2, resume=start)
    for rank in range(2):
        assert _read_ids(again.attempt_dir, rank, 2) == expected[rank][4:]
        assert run.series(rank=rank) == whole.series(rank=rank)
    smaller = run.finish(1, resume=start)
    both = [item + two for item, two in zip(*expected, strict=True)]
    lines = [json.loads(line) for line in (smaller.attempt_dir / "ids.0").read_text().splitlines()[1:]]
    assert [item + two for item, two in zip(lines[::2], lines[1::2], strict=True)] == both[4:]
    assert all(seconds > 0 for seconds in run.series("data_seconds").values())


def test_it_runs_ahead_to_the_last_step_of_smaller_batches(added: Path, tmp_path: Path) -> None:
    """The samples consumed before were in batches of another size: they do not show where the run ends."""
    run = Run(tmp_path / "run", {**NUMBERS, "steps": 4, "global_batch": 16}, added=added)
    run.finish(1)
    run.write(steps=16, global_batch=4)
    committed = run.job_dir / "checkpoints" / "step-8" / "COMMITTED"
    dying = Sabotage("training.engine.optimizer_step:OptimizerStep.__call__", call=8, until=str(committed))
    assert run.start(1, resume="step-4", sabotage=dying).wait() == [-9]
    prefetched = (run.job_dir / "attempt-2" / "ids.0").read_text().splitlines()[1:]
    assert len(prefetched) > 8, "the thread was ahead of the step in which the rank died"


def test_a_failing_prefetch_ends_the_run(added: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**NUMBERS, "slow": {"damaged": 7}}, added=added)
    failed = run.start(1)
    assert failed.wait() == [1]
    assert "OSError: [Errno 5] Input/output error" in failed.output()
    (event,) = run.events("run.failed")
    assert event["exception"] == "OSError"


def test_texts_of_the_user(tmp_path: Path) -> None:
    """JSON lines on two ranks; what is wrong with them is a single sentence, printed by both."""
    lines = [json.dumps({"body": f"Document {number}. The siskin sings at dawn."}) for number in range(400)]
    (tmp_path / "mine.jsonl").write_text("\n".join([*lines, lines[0]]))
    language = {**TINY["language"], "source": str(tmp_path / "mine.jsonl"), "text_field": "body"}
    run = Run(tmp_path / "run", {**TINY, "steps": 4, "language": language})
    run.finish(2)
    (event,) = run.events("data.prepared")
    tokens = sum(len(json.loads(line)["body"]) + 1 for line in lines)
    assert event["identity"].startswith("mine+bytes+")
    facts: dict[str, Any] = {"tokenizer": "bytes", "documents": 400, "duplicates": 1, "tokens": tokens, "shards": 2}
    assert facts.items() <= event.items()
    least_and_most = event["samples"] // 12 * 6
    assert event["imbalance"]["coordinates"] == {"least": least_and_most, "most": least_and_most}
    assert event["imbalance"]["shards"] == {"least": event["samples"], "most": event["samples"]}

    (tmp_path / "mine.jsonl").write_text("no JSON")
    run.write(language={**language, "validation_percent": 6.0})
    failed = run.start(2)
    assert failed.wait() == [1, 1]
    for rank in range(2):
        (text,) = [line for line in (failed.attempt_dir / f"logs/0.{rank}.log").read_text().splitlines() if line]
        assert text.startswith(f"DataError: run.language.source: {tmp_path}/mine.jsonl:1 is not JSON (")
