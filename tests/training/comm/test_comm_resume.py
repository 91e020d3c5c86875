"""Test that a resumed run equals, float for float, an uninterrupted one, whatever state ranks keep for exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import TINY, Run, Sabotage
from training.attempt.lineage import newest_on_lineage

pytestmark = pytest.mark.slow
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp16": (2, {}),
    "bf16": (2, {}),
    "topk": (4, {"density": 0.05}),
    "powersgd": (4, {"rank": 2, "plain_steps": 3}),
    "local_sgd": (3, {"every": 5}),
    "diloco": (4, {"every": 5}),
}
"""Name → ranks, options. Every run is saved at steps 4 and 8: in the middle of what exchanges at 5 and 10."""


def _settings(name: str) -> dict[str, Any]:
    options = WAYS[name][1]
    settings = {**TINY, "communication": name, **({name: options} if options else {})}
    if name == "powersgd":  # of several buckets' size, which gloo would abort on
        settings |= {"ddp": {"bucket_mib": 0.1}, "language": {**TINY["language"], "head_width": 32}}
    return settings


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sampled(2)
def test_hex_equal_after_a_resume(name: str, tmp_path: Path) -> None:
    world = WAYS[name][0]
    run = Run(tmp_path / "run", _settings(name))
    run.finish(world)
    whole = _curves(run, world)
    run.finish(world, resume="step-8")
    assert run.events("run.started")[0]["start_step"] == 8
    assert _curves(run, world) == whole, "the second attempt's values count from step 9 on"
    loss = run.series()
    assert len(loss) == 12
    assert loss[12] < loss[1]
    if name in ("topk", "powersgd"):  # those that are left have what they kept, and the common factors
        run.finish(2, resume="step-8")
        assert run.series()[12] == pytest.approx(loss[12], rel=0.1)
        assert run.series()[12] != loss[12]


def test_hex_equal_after_a_kill_in_the_middle_of_an_exchange(tmp_path: Path) -> None:
    """Kill the exchange of step 10 when one replica has already left what all had agreed on."""
    whole, run = (Run(tmp_path / name, _settings("diloco")) for name in ("whole", "run"))
    whole.finish(2)
    committed = run.job_dir / "checkpoints" / "step-8" / "COMMITTED"
    dying = Sabotage("training.comm._replicas:Replicas._outer_step", call=2, rank=1, until=str(committed))
    codes = run.start(2, sabotage=dying).wait()
    assert codes[1] == -9
    assert codes[0] != 0
    run.finish(2, resume=newest_on_lineage(run.job_dir))
    assert run.events("run.started")[0]["resumed_from"] == "step-8"
    assert _curves(run, 2) == _curves(whole, 2)


def test_bytes_are_sent_when_something_is_exchanged(tmp_path: Path) -> None:
    """And a run goes on with another number of replicas, and with another way to exchange."""
    still = {**_settings("diloco"), "language": {**TINY["language"], "dropout": 0.0}}
    run = Run(tmp_path / "run", still)
    run.finish(4)
    sent = run.series("communicated_mib")
    assert [step for step, mib in sent.items() if mib > 0] == [5, 10, 12]
    parameters = run.events("run.started")[0]["parameters"]
    assert sent[5] == pytest.approx(2 * 3 / 4 * 4 * parameters / 2**20)

    run.write(steps=14)
    losses = {}
    for ranks, name in ((4, "diloco"), (2, "diloco"), (1, "diloco"), (2, "topk"), (4, "plain")):
        run.write(communication=name)
        run.config.pop("diloco", None)
        run.write(**({"diloco": WAYS["diloco"][1]} if name == "diloco" else {}))
        run.finish(ranks, resume="step-12")
        losses[ranks, name] = sum(run.series(rank=rank)[13] for rank in range(ranks)) / ranks
    for loss in losses.values():
        assert loss == pytest.approx(losses[4, "diloco"], rel=1e-6), "all begin with what the replicas agreed on"


def test_a_weight_with_two_names_is_sent_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**_settings("local_sgd"), "language": {**TINY["language"], "tied": True}})
    run.finish(3)
    parameters = run.events("run.started")[0]["parameters"]
    assert run.series("communicated_mib")[5] == pytest.approx(2 * 2 / 3 * 4 * parameters / 2**20)


def test_replicas_that_a_checkpoint_has_not_begin_where_all_agreed(tmp_path: Path) -> None:
    """Step 8 of two lies between exchanges: the third and fourth begin with the parameters of step 5."""
    run = Run(tmp_path / "run", _settings("diloco"))
    run.finish(2)
    before = run.series()[8]
    run.finish(4, resume="step-8")
    assert run.series()[9] < before * 1.1
    assert [step for step, mib in run.series("communicated_mib").items() if mib > 0] == [5, 10, 12]


def _curves(run: Run, world: int) -> list[dict[int, float]]:
    names = ("loss", "gradient_norm", "communicated_mib")
    return [run.series(name, rank) for name in names for rank in range(world)]
