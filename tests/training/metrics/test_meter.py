"""Test step reports that are made when the device has finished, which on a GPU is long after the host moved on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.config.mesh import shape_of
from training.config.run_config import parse
from training.engine.optimizer_step import StepRecord, StepResult
from training.metrics.measuring import refused
from training.metrics.meter import Meter, MeterOptions, StepTimes
from training.reporting.reporter import NullReporter
from training.step.clipping import GuardDecision


class Device:
    """Replaces a GPU's events: every step took it a second, by which time the host was far ahead."""

    def read(self, step: int, times: StepTimes) -> dict[str, float]:
        return {"step_seconds": max(times.step, 1.0)}

    def on_flush(self) -> None:
        pass


def test_steps_are_as_long_as_the_device_took_not_the_host() -> None:
    records: list[StepRecord] = []
    waited: list[float] = []

    def note(steps: list[StepRecord], seconds: float) -> None:
        records.extend(steps)
        waited.append(seconds)

    meter = Meter(
        NullReporter(),
        MeterOptions(unit="tokens", units_per_step=8, flush_steps=4, flush_seconds=1000.0),
        leads=False,
        log=print,
        on_steps=note,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        measuring=Device(),
    )
    for step in range(1, 6):
        zero = torch.zeros(())
        updated = StepResult(
            torch.tensor(float(step)), torch.tensor(2.0), 1e-3, GuardDecision(*[zero] * len(GuardDecision._fields))
        )
        meter.record(step, updated, StepTimes(0.001 if step < 5 else 1.5, 0.0, saving=step in (3, 5)))
    assert [item.step for item in records] == [1, 2, 3, 4, 5], "the first at once, then four together"
    assert [item.seconds for item in records] == [1.0, 1.0, 1.0, 1.0, 1.5]
    assert [item.saving for item in records] == [False, False, True, False, True]
    assert [(item.loss, item.norm) for item in records] == [(float(step), 2.0) for step in range(1, 6)]
    assert len(waited) == 2
    assert all(seconds >= 0 for seconds in waited)


@pytest.mark.parametrize(
    ("table", "world", "expected"),
    [
        ({"global_batch": 5}, 3, set()),  # a rank was lost: the rest still get remedies
        ({"parallelism": "fsdp"}, 2, set()),
        ({"parallelism": "fsdp", "fsdp": {"reshard": "never"}}, 2, {"reshard"}),
        ({"parallelism": "fsdp", "mesh": {"tp": 2}}, 4, {"compile", "fp8"}),
        (
            {"parallelism": "fsdp", "mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}},
            4,
            {"compile", "reshard"},
        ),
        ({"language": {"from_weights": "/data/llama", "lora_rank": 4}}, 2, {"fp8"}),
    ],
)
def test_the_verdict_excludes_what_a_layout_refuses(table: dict[str, Any], world: int, expected: set[str]) -> None:
    config = parse(table)
    assert refused(config, shape_of(config, world)) == expected
