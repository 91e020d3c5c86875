"""The parameter server's side: who may begin which step, and what is done with the gradients that come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.futures import Future

from training.comm._exchange import Exchange, Peers, State

Sent = list[Tensor] | None
"""The model's parameters, on the CPU; None: go no further."""


class Served(Exchange):
    """Between two stretches of steps all ranks hold the server's model; its optimizer is the server's alone."""

    is_apart = True

    def __init__(self, peers: Peers, staleness: int) -> None:
        self.peers = peers
        self.staleness = staleness

    def saved(self, model: State, optimizer: State) -> State:
        return {"model": model, "optimizer": {} if self.peers.index else optimizer}


class Server:
    """Lets workers go on within bounds. Its methods are called by as many threads as there are workers.

    A worker that asks for step c (c steps of the run are behind it) is sent the model once every worker has finished
    c − staleness steps.
    """

    def __init__(
        self,
        workers: int,
        staleness: int,
        *,
        model: Callable[[], list[Tensor]],
        apply: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        """`model`: a copy to send. `apply`: updates it with a step's gradients. Only one of them runs at a time."""
        self._staleness, self._model, self._apply = staleness, model, apply
        self._changed = threading.Condition()
        self._finished = [0] * workers
        self._begun = [0] * workers
        self._losses: dict[int, list[float]] = {}
        self._waiting: list[tuple[int, int, Future[Sent]]] = []
        self._end = 0
        self._is_closed = False
        self.stalest = 0
        """Most steps that some worker was ahead of the slowest when it was sent the model."""
        self.sent = 0
        """Bytes."""

    def open(self, at: int, end: int) -> None:
        """Lets all go on from step `at` to `end`."""
        with self._changed:
            self._finished, self._begun, self._end = [at] * len(self._finished), [at] * len(self._begun), end
            self._release()  # a worker may have asked before the server came this far

    def close(self) -> None:
        """Nobody begins a step that nobody has begun: all finish the same one."""
        with self._changed:
            self._end, self._is_closed = min(self._end, max(self._begun)), True
            self._release()
            self._changed.notify_all()

    def pull(self, worker: int, step: int) -> Future[Sent]:
        """The model to begin this step with, when the worker may."""
        future: Future[Sent] = Future()
        with self._changed:
            self._waiting.append((worker, step, future))
            self._release()
        return future

    def push(self, worker: int, step: int, gradients: Sequence[Tensor], loss: float) -> None:
        with self._changed:
            self._apply(step, gradients)
            self._finished[worker] = step + 1
            self._losses.setdefault(step, []).append(loss)
            self._release()
            self._changed.notify_all()

    def progress(self, seconds: float) -> tuple[int, bool, dict[int, float]]:
        """Waits for some, so long at most: steps that all have finished, whether that is the end, and the mean losses
        of those that are new."""
        with self._changed:
            self._changed.wait(seconds)
            slowest = min(self._finished)
            new = {step: self._losses.pop(step) for step in sorted(self._losses) if step < slowest}
            return slowest, slowest >= self._end, {step: sum(all_) / len(all_) for step, all_ in new.items()}

    def _release(self) -> None:
        slowest = min(self._finished)
        for worker, step, future in self._waiting.copy():
            is_over = step >= self._end
            if (is_over and not self._is_closed) or (not is_over and step - slowest > self._staleness):
                continue
            self._waiting.remove((worker, step, future))
            if is_over:
                future.set_result(None)
                continue
            self._begun[worker] = step + 1
            self.stalest = max(self.stalest, step - slowest)
            sent = self._model()
            self.sent += sum(part.nbytes for part in sent)
            future.set_result(sent)
