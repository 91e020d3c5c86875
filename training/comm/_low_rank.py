"""torch's PowerSGD on one bucket, with its state by parameter name.

Its hook chains all-reduces. With several buckets gloo saw them in a different order on each rank and aborted (3 of 3 on
torch 2.13); so there is one bucket, and no overlap with the backward pass.
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

from training.comm._exchange import HookExchange, Peers, State
from training.units import MIB

MIN_COMPRESSION = 2.0
"""A matrix is compressed if that makes it smaller by at least this factor."""
EPSILON = 1e-8
"""Added to lengths: an embedding's gradient has columns of zeros, which cannot be normalised."""
FIRST_STEPS = 2
"""Steps that torch insists on sending uncompressed, as its buckets change after the first: our discarded pass."""


@dataclass(frozen=True)
class _LowRankState:
    """The right factors, and what has not been sent yet, by parameter."""

    factors: dict[str, Tensor]
    errors: dict[str, Tensor]


class LowRank(HookExchange):
    def __init__(self, peers: Peers, rank: int, plain_steps: int) -> None:
        super().__init__(peers)
        self._rank, self._plain_steps = rank, plain_steps
        self._matrices = [name for name, parameter in peers.parameters.items() if self._is_compressible(parameter)]
        self.bucket_mib = sum(parameter.nbytes for parameter in peers.parameters.values()) / MIB + 1
        self._order: list[str] = []
        """The names of the parameters in the bucket, known after the first one."""
        self._steps = torch.zeros((), dtype=torch.int64)
        self._ranks = torch.tensor(peers.count)
        """Number of ranks that exchange, or that did before the checkpoint that has been read."""
        self._restored: _LowRankState | None = None
        """State that a checkpoint is read into; passed to torch at the first step that compresses."""
        self._errors_before: Tensor | None = None
        """What had not been sent when the step began; None: the step is not compressed."""
        self._powersgd = self._new_state()

    def begin(self) -> None:
        super().begin()
        self._steps.zero_()
        self._powersgd = self._new_state()
        self._powersgd.iter = FIRST_STEPS

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        if not bucket.is_last():
            raise RuntimeError("PowerSGD found more than one bucket of gradients: do all parameters have one type?")
        self._order = self.names(bucket)
        is_compressed = self._powersgd.iter >= self._powersgd.start_powerSGD_iter
        self._steps += 1
        self._count(is_compressed)
        if is_compressed and self._restored is not None:
            self._install(self._restored)
        self._errors_before = self._powersgd.error_dict.get(0, bucket.buffer().new_zeros(())) if is_compressed else None
        result: Future[Tensor] = powerSGD_hook(self._powersgd, bucket)
        return result

    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        """Undo a skipped step.

        Its gradient must not be sent late, and what had not been sent before it remains to be sent.
        """
        if self._errors_before is not None and skipped is not None:
            errors = self._powersgd.error_dict
            errors[0] = torch.where(skipped > 0, self._errors_before, errors[0])
        self._errors_before = None

    def state(self) -> State:
        """Return right factors, equal on all ranks, and what this rank has not sent, by parameter.

        {} for a single replica.
        """
        if self.peers.count == 1:
            return {}
        current = self._current_state() if self._powersgd.q_memory_dict else self._empty_state()
        errors = {str(self.peers.index): dict(current.errors)}
        return {"steps": self._steps, "ranks": self._ranks, "factors": dict(current.factors), "errors": errors}

    def on_restored(self) -> None:
        """Handle a restored checkpoint: forget unsent errors if there are fewer ranks.

        An error is a rank's gradient minus the mean of all, step after step. The sum over all ranks is what has not
        been sent yet, but individual errors are far larger, so without the other ranks' errors they must be dropped.
        """
        self._powersgd.iter = FIRST_STEPS + int(self._steps)
        if self._ranks > self.peers.count and self._restored is not None:
            torch._foreach_zero_(list(self._restored.errors.values()))
        self._ranks.fill_(self.peers.count)

    def _current_state(self) -> _LowRankState:
        """Return torch's state, as views of its own tensors."""
        inner, parameters = self._powersgd, self.peers.parameters
        sizes = [(self._width(parameters[name]), self._rank_of(parameters[name])) for name in self._ordered]
        factors = _split(inner.q_memory_dict[0], sizes)
        errors = _split(inner.error_dict[0], [tuple(parameters[name].shape) for name in self._order])
        return _LowRankState(
            dict(zip(self._ordered, factors, strict=True)),
            dict(zip(self._order, errors, strict=True)),
        )

    def _empty_state(self) -> _LowRankState:
        if self._restored is None:
            parameters = self.peers.parameters
            thin = {name: parameters[name] for name in self._matrices}
            self._restored = _LowRankState(
                {name: part.new_zeros(self._width(part), self._rank_of(part)) for name, part in thin.items()},
                {name: torch.zeros_like(part, requires_grad=False) for name, part in parameters.items()},
            )
        return self._restored

    def _install(self, restored: _LowRankState) -> None:
        """Set torch's state from what was read, unless the checkpoint had none."""
        self._restored = None
        if not any(bool(factor.any()) for factor in restored.factors.values()):
            return
        inner = self._powersgd
        thin = [self.peers.parameters[name] for name in self._ordered]
        inner.q_memory_dict[0] = torch.cat([restored.factors[name].view(-1) for name in self._ordered])
        inner.p_memory_dict[0] = thin[0].new_empty(sum(len(part) * self._rank_of(part) for part in thin))
        inner.error_dict[0] = torch.cat([restored.errors[name].view(-1) for name in self._order])

    @property
    def _ordered(self) -> list[str]:
        """Compressed matrices in the order of torch's state: in the bucket's order, but grouped by size."""
        by_size: dict[tuple[int, int], list[str]] = {}
        matrices = set(self._matrices)
        for name in self._order:
            if name in matrices:
                parameter = self.peers.parameters[name]
                by_size.setdefault((len(parameter), self._width(parameter)), []).append(name)
        return [name for names in by_size.values() for name in names]

    def _count(self, is_compressed: bool) -> None:
        sent = 0
        for name, parameter in self.peers.parameters.items():
            if is_compressed and name in self._matrices:
                sent += (len(parameter) + self._width(parameter)) * self._rank_of(parameter) * parameter.element_size()
            else:
                sent += parameter.nbytes
        self.count_all_reduce(sent)

    def _is_compressible(self, parameter: Tensor) -> bool:
        sizes = (len(parameter), self._width(parameter), self._rank_of(parameter), MIN_COMPRESSION)
        result: bool = _should_compress(*sizes)[0]  # type: ignore[no-untyped-call]
        return result

    def _width(self, parameter: Tensor) -> int:
        return parameter.numel() // len(parameter)

    def _rank_of(self, parameter: Tensor) -> int:
        return min(len(parameter), self._width(parameter), self._rank)

    def _new_state(self) -> PowerSGDState:
        return PowerSGDState(
            self.peers.group,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=FIRST_STEPS + self._plain_steps,
            min_compression_rate=MIN_COMPRESSION,
            orthogonalization_epsilon=EPSILON,
        )


def _split(flat: Tensor, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return consecutive parts of `flat` with these shapes, in its memory."""
    parts = torch.split(flat, [prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
