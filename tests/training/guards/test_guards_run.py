"""Guards of whole runs: a spike, a NaN, a flipped bit, a rank put to sleep, each planted, each found and named."""

from __future__ import annotations

import itertools
import json
import math
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.ranks import TINY, Run
from training.distributed import Agreed, Agreement
from training.loader.order import Order
from training.seeds import derive_seed
from training.step.norms import GradientNorm
from training.step.optimizer import local
from training.trainer import Trainer

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 4000, 16

PLANTED = '''
"""A small network on made-up numbers; samples, ranks and weights go wrong as told."""

import os
import time
from typing import Annotated

import torch
from training.data import Prepared, Task

RANK = int(os.environ["RANK"])


def prepare(cache, identity=None):
    return Prepared(cache, "planted")


def build(
    data,
    *,
    huge: Annotated[int, "Sample with numbers far too large."] = -1,
    nan: Annotated[int, "Sample that holds a NaN."] = -1,
    burst: Annotated[int, "From this step on every third one's loss is far too large."] = 0,
    worse: Annotated[int, "From this loss on it is larger for good."] = 0,
    sleeper: Annotated[int, "Rank that takes longer than the others."] = -1,
    flaky: Annotated[int, "Rank that computes something else each time, from its twentieth loss on."] = -1,
    spot: Annotated[int, "At which of its losses the second rank comes to weights that give no number."] = 0,
    flip_rank: Annotated[int, "Rank in whose weights a bit is flipped."] = -1,
    flip_call: Annotated[int, "At which of its losses, those of checks included."] = 0,
):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    calls = 0
    bad = None

    def batch(split, ids):
        numbers = torch.from_numpy(ids).float()
        inputs = torch.sin(numbers[:, None] * torch.arange(1, 9))
        inputs[torch.from_numpy(ids == huge)] *= 1e4
        inputs[torch.from_numpy(ids == nan), 3] = float("nan")
        return inputs, torch.cos(7 * numbers)

    def loss(model_, batch):
        nonlocal calls, bad
        calls += 1
        if calls == flip_call and flip_rank == RANK:
            model[0].weight.data.view(torch.int32)[3, 3] ^= 1 << 5
        if sleeper == RANK:
            time.sleep(0.03)
        found = (model_(batch[0])[:, 0] - batch[1]).square().mean()
        if calls == spot and RANK == 1:
            bad = model[2].weight.detach().clone()
        if bad is not None and torch.equal(model[2].weight, bad):
            found = found * float("nan")
        if worse and calls > worse:
            found = found + 10
        if flaky == RANK and calls > 20:
            found = found * (1 + calls * 1e-6)
        return found * 1e6 if burst and calls > burst and calls % 3 == 0 else found

    return Task(
        model=model,
        samples={"train": 4000, "validation": 64},
        batch=batch,
        loss=loss,
        score=lambda model, batch: {"loss": loss(model, batch)},
        show=lambda batch: [f"begins with {float(first):.3f}" for first in batch[0][:, 0]],
    )
'''


def _run(folder: Path, planted: dict[str, Any], **settings: Any) -> Run:
    recipes = folder / "added" / "recipes"
    recipes.mkdir(parents=True)
    (folder / "added" / "parallel").mkdir()
    (recipes / "planted.py").write_text(textwrap.dedent(PLANTED))
    run = Run(folder / "run", added=folder / "added")
    run.config = {
        "recipe": "planted",
        "global_batch": BATCH,
        "learning_rate": 3e-3,
        "warmup_steps": 5,
        "validate_every": 0,
        "checkpoint_every": 0,
        "flush_steps": 7,
        **settings,
        "planted": planted,
    }
    run.write()
    return run


def _sample(step: int, place: int) -> int:
    """The sample at this place of this step's batch."""
    order = Order(SAMPLES, derive_seed(0, 1))
    return int(order.ids(np.array([(step - 1) * BATCH + place]))[0])


def test_spike_flipped_bit_and_sleeper_are_named(tmp_path: Path) -> None:
    huge = _sample(60, 5)
    planted = {"huge": huge, "sleeper": 3, "flip_rank": 2, "flip_call": 94}  # in step 79: each check takes two
    run = _run(tmp_path, planted, steps=200, check_weights_every=10)
    incarnation = run.start(4)
    assert incarnation.wait() == [1, 1, 1, 1], incarnation.output()

    (skipped,) = run.events("guard.skipped")
    assert skipped["step"] == 60
    assert skipped["norm"] > skipped["limit"] == pytest.approx(20 * skipped["mean"])
    assert skipped["samples"]["first_place"] == 59 * BATCH
    assert skipped["samples"]["count"] == len(skipped["samples"]["ids"]) == BATCH
    assert skipped["samples"]["ids"][5] == huge

    (straggler,) = run.events("straggler", rank=3)
    assert (straggler["rank"], straggler["part"]) == (3, "compute")
    assert straggler["factor"] > 1.5
    assert not any(run.events("straggler", rank=rank) for rank in range(3))

    (corruption,) = run.events("guard.corruption")
    about = {name: corruption[name] for name in ("check", "ranks", "step", "clean_step", "what")}
    assert about == {"check": "replica", "ranks": [2], "step": 80, "clean_step": 70, "what": about["what"]}
    assert "model.0.weight" in about["what"]
    assert "NumericsError: numerics.corruption: at step 80 the replica check finds rank 2 wrong" in incarnation.output()
    assert run.events("run.failed")[0]["exception"] == "NumericsError"


def test_what_is_sent_late_is_nothing_of_a_skipped_step(tmp_path: Path) -> None:
    run = _run(tmp_path, {"huge": _sample(60, 5)}, steps=70, communication="topk", topk={"density": 0.05})
    run.finish(2)
    assert [event["step"] for event in run.events("guard.skipped")] == [60]


def test_an_exchange_that_overflows_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path, {"huge": _sample(20, 5)}, steps=70, communication="fp16")
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert event["what"].endswith("gradient norm inf, but finite on every rank before fp16 exchanged it")


def err_once() -> None:
    """What no gradient explains: it is fine when it is computed again."""
    norm, calls = GradientNorm.__call__, itertools.count(1)

    def once(self: GradientNorm) -> Tensor:
        return norm(self) * (float("nan") if next(calls) == 20 else 1)

    GradientNorm.__call__ = once  # type: ignore[method-assign]


def test_replicas_that_exchange_no_gradients_are_not_blamed(tmp_path: Path) -> None:
    run = _run(tmp_path, {}, steps=40, communication="local_sgd")
    run.spy = f"{__name__}:err_once"
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert event["step"] == 20
    assert event["what"].endswith("gradient norm nan")


def test_a_step_is_done_again_with_the_weights_that_a_replica_had(tmp_path: Path) -> None:
    """Though all became one model after it, at the end of that very step."""
    run = _run(tmp_path, {"spot": 31}, steps=60, communication="diloco", diloco={"every": 3})  # one pass is thrown away
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert (event["step"], event["rank"], event["where"]) == (30, 1, "the gradient of 2's output")


def wait_for_flags() -> None:
    """The second rank comes to the flags early and waits, as on a GPU: there no exchange holds the host up before."""
    end = Agreement.end

    def waiting(agreement: Agreement) -> Agreed:
        time.sleep(0.03 if os.environ["RANK"] == "1" else 0.0)
        return end(agreement)

    Agreement.end = waiting  # type: ignore[method-assign]


def test_who_waits_for_others_is_not_slow(tmp_path: Path) -> None:
    run = _run(tmp_path, {}, steps=70)
    run.spy = f"{__name__}:wait_for_flags"
    run.finish(2)
    assert not run.events("straggler", rank=0) + run.events("straggler", rank=1)


def test_a_nan_stops_all_ranks_and_tells_where_it_came_from(tmp_path: Path) -> None:
    nan = _sample(30, 11)  # the second of two ranks has it
    run = _run(tmp_path, {"nan": nan}, steps=200, checkpoint_every=5)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert (event["step"], event["rank"], event["where"]) == (30, 1, "the output of 0")
    assert event["samples"]["ids"][11] == nan
    assert "numerics.nonfinite: step 30" in incarnation.output()
    assert run.checkpoints[-1].step == 25
    assert list(run.series(rank=0)) == list(run.series(rank=1))
    assert max(run.series()) <= 30

    told = json.loads((incarnation.attempt_dir / "numerics" / "step-30.json").read_text())
    (seen,) = told["ranks"]
    assert (seen["rank"], seen["output"], seen["loss"]) == (1, "0", "nan")
    assert told["losses"]["0"] == pytest.approx(run.series(rank=0)[30])
    assert len(seen["samples"]) == BATCH // 2
    assert nan in seen["samples"]
    assert len(seen["texts"]) == 4
    assert seen["parameters"][0] == {"name": "0.weight", "gradient_norm": "nan"}


def spoil_a_weight() -> None:
    """Of the second rank alone: what it sends, the first gets, too."""

    def spoil(modules: dict[str, nn.Module]) -> None:
        part: Any = modules["blocks.1.mlp.up"].weight
        with torch.no_grad():
            local(part).view(-1)[0] = float("nan")

    _before_the_third_step(spoil)


def spoil_a_gradient() -> None:
    """Of a block that the second rank has."""

    def spoil(modules: dict[str, nn.Module]) -> None:
        modules["blocks.3.mlp.up"].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * math.nan,))

    _before_the_third_step(spoil)


def _before_the_third_step(spoil: Callable[[dict[str, nn.Module]], None]) -> None:
    one_step = Trainer._one_step

    def spoilt(trainer: Trainer) -> Agreed:
        if trainer.step == 2 and os.environ["RANK"] == "1":
            spoil({name: module for part in trainer.assembly.model.parts for name, module in part.named_modules()})
        return one_step(trainer)

    Trainer._one_step = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spy", "settings", "where"),
    [
        ("spoil_a_weight", {"mesh": {"tp": 2}}, "the output of blocks.1.mlp.up"),
        ("spoil_a_weight", {"mesh": {"cp": 2}}, "the output of blocks.1.mlp.up"),
        ("spoil_a_weight", {"mesh": {"pp": 2}, "pipeline": {"schedule": "DualPipeV"}}, "the output of blocks.1.mlp.up"),
        ("spoil_a_gradient", {"mesh": {"pp": 2}}, "the gradient of blocks.3.mlp.up's output"),
    ],
    ids=["tp", "cp", "pp, there and back", "pp, backward"],
)
def test_who_was_sent_a_nan_is_not_the_one_it_came_from(
    spy: str, settings: dict[str, Any], where: str, tmp_path: Path
) -> None:
    language = {**TINY["language"], "layers": 4}
    run = Run(tmp_path / "run", {**TINY, "checkpoint_every": 0, "language": language, **settings})
    run.spy = f"{__name__}:{spy}"
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert (event["step"], event["rank"], event["where"], event["ranks"]) == (3, 1, where, [0, 1])


def test_a_worker_of_a_parameter_server_says_what_is_not_finite(tmp_path: Path) -> None:
    run = _run(tmp_path, {"nan": _sample(30, 11)}, steps=40, communication="parameter_server")
    incarnation = run.start(2)
    incarnation.processes[1].join(60)
    incarnation.kill()  # the launcher's part: the server waits for a worker that is gone
    assert incarnation.processes[1].exitcode == 1
    (failed,) = run.events("run.failed", rank=1)
    assert failed["exception"] == "NumericsError"
    assert failed["error"] == "numerics.nonfinite: step 30: loss nan, gradient norm nan on rank 1"


def test_a_rank_that_differs_from_itself_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path, {"flaky": 1}, steps=60, check_weights_every=5)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.corruption")
    assert (event["check"], event["ranks"], event["what"]) == ("repeat", [1], "loss")
    assert event["clean_step"] == event["step"] - 5


def test_checks_change_no_number(tmp_path: Path) -> None:
    plain = _run(tmp_path / "plain", {}, steps=12)
    checked = _run(tmp_path / "checked", {}, steps=12, check_weights_every=1)
    for run in (plain, checked):
        run.finish(2)
    assert _hex(plain.series()) == _hex(checked.series())


@pytest.mark.parametrize("parallelism", ["zero1", "fsdp"])
def test_every_optimizer_skips_alike(parallelism: str, tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / name, {"huge": _sample(56, 3)}, steps=62, parallelism=name) for name in ("ddp", parallelism)
    ]
    for run in runs:
        run.finish(2)
        assert [event["step"] for event in run.events("guard.skipped")] == [56]
    assert list(runs[0].series().values()) == pytest.approx(list(runs[1].series().values()), rel=1e-4)


def test_too_many_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    run = _run(tmp_path, {"burst": 60}, steps=200)
    incarnation = run.start(1)
    assert incarnation.wait() == [1]
    assert len(run.events("guard.skipped")) >= 10
    (event,) = run.events("guard.divergence")
    assert event["what"].startswith("10 of 28 steps had a gradient norm above 20 times the usual")
    assert "NumericsError: numerics.divergence" in incarnation.output()


def test_a_loss_that_leaves_for_good_stops_all_ranks(tmp_path: Path) -> None:
    run = _run(tmp_path, {"worse": 200}, steps=600, checkpoint_every=50)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.divergence")
    assert 250 < event["step"] < 330
    assert "NumericsError: numerics.divergence: at step" in incarnation.output()
    assert list(run.series(rank=0)) == list(run.series(rank=1))


def test_goes_on_with_the_very_same_clipping_and_skips(tmp_path: Path) -> None:
    """Armed guards decide the numbers, so a resume has to go on from what they knew."""
    run = _run(tmp_path, {"huge": _sample(70, 3)}, steps=80, checkpoint_every=40, clip=0.001, flush_steps=7)
    run.finish(1)
    whole = {name: _hex(run.series(name)) for name in ("loss", "gradient_norm")}
    assert [event["step"] for event in run.events("guard.skipped")] == [70]
    run.finish(1, resume="step-40")
    assert {name: _hex(run.series(name)) for name in ("loss", "gradient_norm")} == whole
    assert [event["step"] for event in run.events("guard.skipped")] == [70]


def _hex(values: dict[int, float]) -> dict[int, str]:
    return {step: value.hex() for step, value in values.items()}
