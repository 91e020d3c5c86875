"""Repeat a step whose loss or gradient was not finite, to find where that began, and write it down.

No parameter has changed since (training.step.clipping), and a step's random numbers follow from its number, so the
repetition is identical: hooks find the first module whose output is not finite, and the first whose output's gradient
is not. Every rank's diagnosis goes into attempt-<k>/numerics/step-<n>.json.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from training.engine.assembling import Assembly
from training.engine.optimizer_step import OptimizerStep
from training.loader.order import Loader
from training.step.optimizer import local

TOP = 10
TEXT_LENGTH = 200
TEXTS = 4


@dataclass
class RankDiagnosis:
    """What one rank observed when the step was repeated. The fields are those of the JSON file."""

    rank: int
    loss: float | str = 0.0
    output: str = ""
    """The first module with a non-finite output, in the order of the forward pass."""
    gradient: str = ""
    """The first module with a non-finite gradient of its output, in the order of the backward pass."""
    parameters: list[dict[str, Any]] = field(default_factory=list)
    """Gradient norms of this rank's parameters: those that are not finite, then the largest."""
    samples: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def where(self) -> str:
        if self.output:
            return f"the output of {self.output}"
        return f"the gradient of {self.gradient}'s output" if self.gradient else ""

    @property
    def is_clean(self) -> bool:
        """Whether this rank's own loss and gradient were finite."""
        numbers = [self.loss, *(parameter["gradient_norm"] for parameter in self.parameters)]
        return not (self.where or self.error) and not any(isinstance(number, str) for number in numbers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(assembly: Assembly, update: OptimizerStep, *, rank: int, consumed: int, finished: int) -> RankDiagnosis:
    """Repeat, on all ranks at once, the step that follows `finished` steps; its gradient is thrown away."""
    diagnosis = RankDiagnosis(rank)
    diagnosis.samples, diagnosis.texts = _rank_samples(assembly, consumed)
    try:
        with _hooks(assembly, diagnosis):
            diagnosis.loss = json_number(update.differentiate_keeping_buffers(consumed, finished, whole=True).item())
        diagnosis.parameters = _largest_gradients(assembly)
    except (RuntimeError, ValueError) as error:  # an error in the report must not hide the original problem
        diagnosis.error = str(error)[:500]
    assembly.optimizer.zero_grad()
    return diagnosis


def repeat_unobserved(assembly: Assembly, update: OptimizerStep, *, consumed: int, finished: int) -> float | str:
    """Repeat the step as it ran, without hooks. Return its loss, or "nan" or "inf" if its gradient is not finite."""
    loss = update.differentiate_keeping_buffers(consumed, finished, whole=True).item()
    norms = [entry["gradient_norm"] for entry in _largest_gradients(assembly)]
    assembly.optimizer.zero_grad()
    return next((norm for norm in norms if isinstance(norm, str)), json_number(loss))


def origin(diagnoses: Iterable[RankDiagnosis], model: nn.Module) -> RankDiagnosis:
    """Return the diagnosis closest to the origin: ranks that share a model pass non-finite values on to each other.

    A non-finite output is closer than a gradient. Among outputs the first module in the order of the whole model is
    closest, among gradients the last.
    """
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}

    def distance(diagnosis: RankDiagnosis) -> tuple[bool, int, bool, int, int]:
        forward, backward = order.get(diagnosis.output, 0), -order.get(diagnosis.gradient, 0)
        return not diagnosis.output, forward, not diagnosis.gradient, backward, diagnosis.rank

    return min(diagnoses, key=distance)


def json_number(value: float) -> float | str:
    """Return a number as JSON can store it: non-finite ones as text."""
    return value if math.isfinite(value) else str(value)


def samples(assembly: Assembly, consumed: int) -> dict[str, Any]:
    """Describe the samples of a step over all ranks: positions in the data's order, and the ids of the first 64."""
    import numpy as np

    count = assembly.share.global_batch
    first = np.arange(consumed, consumed + min(count, 64), dtype=np.int64)
    return {
        "first_place": consumed,
        "count": count,
        "epoch": consumed // assembly.task.samples["train"],
        "ids": [int(number) for number in assembly.order.ids(first)],
        "coordinates": assembly.share.count,
    }


def _rank_samples(assembly: Assembly, consumed: int) -> tuple[list[int], list[str]]:
    ids = Loader(assembly.order, assembly.share).ids(consumed)
    texts: list[str] = []
    if assembly.task.show is not None and ids:
        shown = assembly.task.show(assembly.task.batch("train", ids[0][:TEXTS]))
        texts = [text[:TEXT_LENGTH] for text in shown]
    return [int(number) for part in ids for number in part], texts


@contextmanager
def _hooks(assembly: Assembly, diagnosis: RankDiagnosis) -> Iterator[None]:
    """Hook all modules without children. Compiled code would bypass the hooks, so nothing runs compiled."""
    handles = []
    for part in assembly.model.parts:
        for name, module in part.named_modules():
            if not any(module.children()):
                handles.append(module.register_forward_hook(_hook(name or type(module).__name__, diagnosis)))
    try:
        with _uncompiled():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _uncompiled() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and torch.compiler would import it
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _hook(name: str, diagnosis: RankDiagnosis) -> Callable[[nn.Module, Any, Any], None]:
    def note_gradient(gradient: Tensor) -> None:
        if not diagnosis.gradient and not _is_finite(gradient):
            diagnosis.gradient = name

    def note_output(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if not diagnosis.output and not _is_finite(tensor):
                diagnosis.output = name
            if tensor.requires_grad:
                tensor.register_hook(note_gradient)  # type: ignore[no-untyped-call]

    return note_output


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor.detach())).all())


def _largest_gradients(assembly: Assembly) -> list[dict[str, Any]]:
    norms = [
        (name, torch.linalg.vector_norm(local(parameter.grad).float()).item())
        for name, parameter in assembly.model.named_parameters()
        if parameter.grad is not None
    ]
    norms.sort(key=lambda entry: (math.isfinite(entry[1]), -entry[1] if math.isfinite(entry[1]) else 0.0))
    return [{"name": name, "gradient_norm": json_number(norm)} for name, norm in norms[:TOP]]
