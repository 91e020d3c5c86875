"""torch's PowerSGD on one bucket, its memory kept by parameter name.

Its hook chains all-reduces behind each other. With several buckets gloo saw them in another order on each rank, and
aborted (3 of 3 on torch 2.13); so there is one bucket, and no overlap with the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, _should_compress, powerSGD_hook
from torch.futures import Future

from training.comm._exchange import Hook, Peers, State
from training.units import MIB

SAVES = 2.0
"""A matrix is compressed if that makes it smaller by at least this factor."""
EPSILON = 1e-8
"""Added to lengths: the gradient of an embedding has columns of zeros, which can't be scaled to length 1."""
FIRST = 2
"""Steps that torch insists on sending all of, because its buckets change after the first: our pass that is thrown away
is that one already."""


@dataclass(frozen=True)
class _Memory:
    """The right factors, and what was not sent yet, by parameter."""

    factors: dict[str, Tensor]
    errors: dict[str, Tensor]


class LowRank(Hook):
    def __init__(self, peers: Peers, rank: int, plain_steps: int) -> None:
        super().__init__(peers)
        self._rank, self._plain_steps = rank, plain_steps
        self._matrices = [name for name, parameter in peers.parameters.items() if self._is_thin(parameter)]
        self.bucket_mib = sum(parameter.nbytes for parameter in peers.parameters.values()) / MIB + 1
        self._order: list[str] = []
        """The names of the parameters in the bucket, once it has been seen."""
        self._steps = torch.zeros((), dtype=torch.int64)
        self._ranks = torch.tensor(peers.count)
        """Ranks that exchange, or that did before the checkpoint that has been read."""
        self._read: _Memory | None = None
        """What a checkpoint is read into; torch takes it over at the first step that compresses."""
        self._before: Tensor | None = None
        """What was not sent yet when the step began; None: nothing that is compressed."""
        self._inner = self._new()

    def begin(self) -> None:
        super().begin()
        self._steps.zero_()
        self._inner = self._new()
        self._inner.iter = FIRST

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        if not bucket.is_last():
            raise RuntimeError("PowerSGD found more than one bucket of gradients: do all parameters have one type?")
        self._order = self.names(bucket)
        compresses = self._inner.iter >= self._inner.start_powerSGD_iter
        self._steps += 1
        self._count(compresses)
        if compresses and self._read is not None:
            self._install(self._read)
        self._before = self._inner.error_dict.get(0, bucket.buffer().new_zeros(())) if compresses else None
        found: Future[Tensor] = powerSGD_hook(self._inner, bucket)
        return found

    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        """The gradient of a skipped step must not come late, and what had not been sent before it still is to be."""
        if self._before is not None and skipped is not None:
            errors = self._inner.error_dict
            errors[0] = torch.where(skipped > 0, self._before, errors[0])
        self._before = None

    def state(self) -> State:
        """Right factors, alike on all ranks, and what this rank has not sent, by parameter; one replica has none."""
        if self.peers.count == 1:
            return {}
        memory = self._seen() if self._inner.q_memory_dict else self._blank()
        errors = {str(self.peers.index): dict(memory.errors)}
        return {"steps": self._steps, "ranks": self._ranks, "factors": dict(memory.factors), "errors": errors}

    def recall(self) -> None:
        """An error is a rank's gradient less the mean of all, step after step: the sum over all ranks is what was not
        sent yet, but what some of them have is far larger, so it is forgotten if others are gone."""
        self._inner.iter = FIRST + int(self._steps)
        if self._ranks > self.peers.count and self._read is not None:
            torch._foreach_zero_(list(self._read.errors.values()))
        self._ranks.fill_(self.peers.count)

    def _seen(self) -> _Memory:
        """What torch has, as parts of its own tensors."""
        inner, parameters = self._inner, self.peers.parameters
        sizes = [(self._width(parameters[name]), self._rank_of(parameters[name])) for name in self._ordered]
        factors = _split(inner.q_memory_dict[0], sizes)
        errors = _split(inner.error_dict[0], [tuple(parameters[name].shape) for name in self._order])
        return _Memory(
            dict(zip(self._ordered, factors, strict=True)),
            dict(zip(self._order, errors, strict=True)),
        )

    def _blank(self) -> _Memory:
        if self._read is None:
            parameters = self.peers.parameters
            thin = {name: parameters[name] for name in self._matrices}
            self._read = _Memory(
                {name: part.new_zeros(self._width(part), self._rank_of(part)) for name, part in thin.items()},
                {name: torch.zeros_like(part, requires_grad=False) for name, part in parameters.items()},
            )
        return self._read

    def _install(self, read: _Memory) -> None:
        """Torch's memory from what was read; nothing of it if the checkpoint had none."""
        self._read = None
        if not any(bool(factor.any()) for factor in read.factors.values()):
            return
        inner = self._inner
        thin = [self.peers.parameters[name] for name in self._ordered]
        inner.q_memory_dict[0] = torch.cat([read.factors[name].view(-1) for name in self._ordered])
        inner.p_memory_dict[0] = thin[0].new_empty(sum(len(part) * self._rank_of(part) for part in thin))
        inner.error_dict[0] = torch.cat([read.errors[name].view(-1) for name in self._order])

    @property
    def _ordered(self) -> list[str]:
        """Compressed matrices as torch's memory has them: in the bucket's order, but those of one size together."""
        by_size: dict[tuple[int, int], list[str]] = {}
        matrices = set(self._matrices)
        for name in self._order:
            if name in matrices:
                parameter = self.peers.parameters[name]
                by_size.setdefault((len(parameter), self._width(parameter)), []).append(name)
        return [name for names in by_size.values() for name in names]

    def _count(self, compresses: bool) -> None:
        sent = 0
        for name, parameter in self.peers.parameters.items():
            if compresses and name in self._matrices:
                sent += (len(parameter) + self._width(parameter)) * self._rank_of(parameter) * parameter.element_size()
            else:
                sent += parameter.nbytes
        self.count_all_reduce(sent)

    def _is_thin(self, parameter: Tensor) -> bool:
        sizes = (len(parameter), self._width(parameter), self._rank_of(parameter), SAVES)
        found: bool = _should_compress(*sizes)[0]  # type: ignore[no-untyped-call]
        return found

    def _width(self, parameter: Tensor) -> int:
        return parameter.numel() // len(parameter)

    def _rank_of(self, parameter: Tensor) -> int:
        return min(len(parameter), self._width(parameter), self._rank)

    def _new(self) -> PowerSGDState:
        return PowerSGDState(
            self.peers.group,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=FIRST + self._plain_steps,
            min_compression_rate=SAVES,
            orthogonalization_epsilon=EPSILON,
        )


def _split(flat: Tensor, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Consecutive parts of `flat`, of these shapes, in its memory."""
    parts = torch.split(flat, [prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
