"""Test what recorded operations show of a step: with hand-made ones, and with a step that was really recorded."""

from __future__ import annotations

import pytest
import torch

from tests.training import ranks
from training.metrics.step_trace import Sampler, TracedOperation, analyze
from training.step.timing import OPTIMIZER, StepTimer

WINDOWS = [("forward", (0.0, 4.0)), ("backward", (4.0, 10.0))]


def op(name: str, begin: float, end: float, **more: object) -> TracedOperation:
    return TracedOperation(name=name, begin=begin, end=end, **more)  # type: ignore[arg-type]


def test_on_a_cpu_the_innermost_operation_counts() -> None:
    operations = [
        op("aten::linear", 0.0, 3.0),
        op("aten::addmm", 0.5, 2.5),
        op("autograd::engine::evaluate_function: AddmmBackward0", 4.0, 9.0),
        op("aten::mm", 5.0, 7.0),
        op("gloo:all_reduce", 6.0, 9.5, thread=7, is_async=True),
    ]
    sample = analyze(3, operations, WINDOWS, on_gpu=False)
    assert sample is not None
    # linear's own second, addmm's two, mm's two; what only surrounds them is nothing.
    assert sample.busy == pytest.approx(0.5)
    assert sample.matmul == pytest.approx(1.0)
    assert sample.exposed == pytest.approx(0.25)  # 7.0 to 9.5
    assert sample.exposed_by_part == pytest.approx({"forward": 0.0, "backward": 2.5 / 6})


def test_on_a_gpu_kernels_count_and_nccl_is_communication() -> None:
    operations = [
        op("sm90_xmma_gemm_bf16", 0.0, 3.0, is_async=True),
        op("vectorized_elementwise_kernel", 3.0, 4.0, is_async=True),
        op("ncclDevKernel_AllReduce_Sum", 3.0, 6.0, is_async=True),
        op("nvjet_tst_128x256", 5.0, 9.0, is_async=True),
    ]
    sample = analyze(3, operations, WINDOWS, on_gpu=True)
    assert sample is not None
    assert sample.busy == pytest.approx(0.8)
    assert sample.matmul == pytest.approx(7 / 8)
    assert sample.exposed == pytest.approx(0.1)  # 4.0 to 5.0
    assert sample.exposed_by_part == pytest.approx({"forward": 0.0, "backward": 1 / 6})


def test_no_operations_give_no_analysis() -> None:
    assert analyze(1, [], WINDOWS, on_gpu=False) is None
    assert analyze(1, [op("aten::mm", 0.0, 1.0)], [], on_gpu=False) is None


def record() -> None:
    """Record a step in a process of its own, as a rank has: next to what other tests leave behind, torch's recorder
    has waited for ever."""
    clock = iter(range(1_000))
    sampler = Sampler(torch.device("cpu"), every=1.0, clock=lambda: float(next(clock)))
    due = [sampler.is_due() for _ in range(12)]
    assert due.index(True) == 10  # the first ones allocate, and compile
    watch = StepTimer(torch.device("cpu"))
    model, inputs = torch.nn.Linear(256, 256), torch.randn(512, 256)
    sampler.begin()
    watch.begin()
    loss = model(inputs).square().mean()
    watch.mark("forward")
    loss.backward()
    watch.mark("backward")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    watch.mark(OPTIMIZER)
    marks = watch.end()
    sample = sampler.end(11, marks)
    assert sample is not None
    assert sample.step == 11
    assert 0.0 < sample.matmul <= 1.0
    assert 0.0 < sample.busy <= 1.0
    assert sample.exposed == 0.0
    assert set(sample.exposed_by_part) == {"forward", "backward", "optimizer"}
    assert not sampler.is_due()  # the next one waits until this one's cost is little


@pytest.mark.slow
def test_records_a_real_step_in_its_parts() -> None:
    process = ranks.fork(record)
    process.join(ranks.SECONDS)
    assert process.exitcode == 0
