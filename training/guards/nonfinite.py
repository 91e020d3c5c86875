"""A step whose loss or gradient was not finite, done once more to see where that began, and written down.

No parameter has changed since (training.step.clipping), and a step's random numbers follow from its number, so the
second time is the first one over again: hooks name the first module whose output is not finite, and the first whose
output's gradient is not. What every rank has seen goes into attempt-<k>/numerics/step-<n>.json.
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
TEXT_LETTERS = 200
TEXTS = 4


@dataclass
class Seen:
    """What one rank saw in the same step, done once more."""

    rank: int
    loss: float | str = 0.0
    output: str = ""
    """The first module with an output that was not finite, in the order of the forward pass."""
    gradient: str = ""
    """The first module whose output's gradient was not, in the order of the backward pass."""
    parameters: list[dict[str, Any]] = field(default_factory=list)
    """Gradients of this rank's parameters: those that are not finite, then the largest."""
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
        """Whether it found nothing in its own loss and gradient."""
        numbers = [self.loss, *(parameter["gradient_norm"] for parameter in self.parameters)]
        return not (self.where or self.error) and not any(isinstance(number, str) for number in numbers)

    def told(self) -> dict[str, Any]:
        return asdict(self)


def examine(assembly: Assembly, update: OptimizerStep, *, rank: int, consumed: int, finished: int) -> Seen:
    """The step after so many finished ones again, on all ranks at once; its gradient is thrown away."""
    seen = Seen(rank)
    seen.samples, seen.texts = _samples(assembly, consumed)
    try:
        with _watched(assembly, seen):
            seen.loss = plain(update.rehearse(consumed, finished, whole=True).item())
        seen.parameters = _largest(assembly)
    except (RuntimeError, ValueError) as error:  # a report of what went wrong must not hide that it did
        seen.error = str(error)[:500]
    assembly.optimizer.zero_grad()
    return seen


def once_more(assembly: Assembly, update: OptimizerStep, *, consumed: int, finished: int) -> float | str:
    """The step once more as it ran, unwatched: its loss, or the word for what its gradient was if not finite."""
    loss = update.rehearse(consumed, finished, whole=True).item()
    norms = [known["gradient_norm"] for known in _largest(assembly)]
    assembly.optimizer.zero_grad()
    return next((norm for norm in norms if isinstance(norm, str)), plain(loss))


def origin(everybody: Iterable[Seen], model: nn.Module) -> Seen:
    """Who saw it first: ranks that share a model hand on to each other what is not finite.

    Where it was in the forward pass is nearer to its origin than where a gradient brought it; and of modules, in the
    order of the whole model, the first is the nearest, or the last that had such a gradient.
    """
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}

    def distance(found: Seen) -> tuple[bool, int, bool, int, int]:
        forward, backward = order.get(found.output, 0), -order.get(found.gradient, 0)
        return not found.output, forward, not found.gradient, backward, found.rank

    return min(everybody, key=distance)


def plain(value: float) -> float | str:
    """A number as JSON has it, which has no word for what is not finite."""
    return value if math.isfinite(value) else str(value)


def samples(assembly: Assembly, consumed: int) -> dict[str, Any]:
    """Which samples a step takes, on all ranks: places in the data's order, and the ids of the first."""
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


def _samples(assembly: Assembly, consumed: int) -> tuple[list[int], list[str]]:
    ids = Loader(assembly.order, assembly.share).ids(consumed)
    texts: list[str] = []
    if assembly.task.show is not None and ids:
        shown = assembly.task.show(assembly.task.batch("train", ids[0][:TEXTS]))
        texts = [text[:TEXT_LETTERS] for text in shown]
    return [int(number) for part in ids for number in part], texts


@contextmanager
def _watched(assembly: Assembly, seen: Seen) -> Iterator[None]:
    """Hooks on all modules that have none inside. Compiled code would pass them by, so nothing runs compiled."""
    handles = []
    for part in assembly.model.parts:
        for name, module in part.named_modules():
            if not any(module.children()):
                handles.append(module.register_forward_hook(_hook(name or type(module).__name__, seen)))
    try:
        with _uncompiled():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _uncompiled() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and asking would import it
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _hook(name: str, seen: Seen) -> Callable[[nn.Module, Any, Any], None]:
    def note_gradient(gradient: Tensor) -> None:
        if not seen.gradient and not _finite(gradient):
            seen.gradient = name

    def note_output(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if not seen.output and not _finite(tensor):
                seen.output = name
            if tensor.requires_grad:
                tensor.register_hook(note_gradient)  # type: ignore[no-untyped-call]

    return note_output


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor.detach())).all())


def _largest(assembly: Assembly) -> list[dict[str, Any]]:
    norms = [
        (name, torch.linalg.vector_norm(local(parameter.grad).float()).item())
        for name, parameter in assembly.model.named_parameters()
        if parameter.grad is not None
    ]
    norms.sort(key=lambda known: (math.isfinite(known[1]), -known[1] if math.isfinite(known[1]) else 0.0))
    return [{"name": name, "gradient_norm": plain(norm)} for name, norm in norms[:TOP]]
