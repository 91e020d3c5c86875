"""The parameter server: which worker may begin which step, and what happens to the gradients it receives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.futures import Future

from training.comm._exchange import Exchange, Peers, State

SentModel = list[Tensor] | None
"""The model's parameters on the CPU; None: the worker must stop."""


class ServedExchange(Exchange):
    """Between two stretches of steps all ranks have the server's model; only the server has the optimizer's state."""

    has_independent_replicas = True

    def __init__(self, peers: Peers, staleness: int) -> None:
        self.peers = peers
        self.staleness = staleness

    def saved(self, model: State, optimizer: State) -> State:
        return {"model": model, "optimizer": {} if self.peers.index else optimizer}


class ParameterServer:
    """Lets workers proceed within bounds. Each worker calls its methods from a thread of its own.

    A worker that requests step c (the run has finished c steps) gets the model once every worker has finished c −
    staleness steps.
    """

    def __init__(
        self,
        workers: int,
        staleness: int,
        *,
        model: Callable[[], list[Tensor]],
        apply: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        """`model` returns a copy to send; `apply` updates it with a step's gradients.

        Only one of them runs at a time.
        """
        self._staleness, self._model, self._apply = staleness, model, apply
        self._changed = threading.Condition()
        self._finished = [0] * workers
        self._begun = [0] * workers
        self._losses: dict[int, list[float]] = {}
        self._waiting: list[tuple[int, int, Future[SentModel]]] = []
        self._end = 0
        self._is_closed = False
        self.max_staleness = 0
        """The most steps that a worker was ahead of the slowest when it got the model."""
        self.sent_bytes = 0
        """Bytes sent."""

    def open(self, start: int, end: int) -> None:
        """Let all workers proceed from step `start` to `end`."""
        with self._changed:
            self._finished, self._begun, self._end = [start] * len(self._finished), [start] * len(self._begun), end
            self._release()  # a worker may have made its request before the server was ready

    def close(self) -> None:
        """Let no worker begin a step that none has begun: all finish the same one."""
        with self._changed:
            self._end, self._is_closed = min(self._end, max(self._begun)), True
            self._release()
            self._changed.notify_all()

    def pull(self, worker: int, step: int) -> Future[SentModel]:
        """Return a future of the model for this step, which is done when the worker may begin."""
        future: Future[SentModel] = Future()
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
        """Wait for progress, up to the time limit.

        Return steps finished by all, whether that is the end, and new mean losses.
        """
        with self._changed:
            self._changed.wait(seconds)
            slowest = min(self._finished)
            new = {step: self._losses.pop(step) for step in sorted(self._losses) if step < slowest}
            return slowest, slowest >= self._end, {step: sum(values) / len(values) for step, values in new.items()}

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
            self.max_staleness = max(self.max_staleness, step - slowest)
            sent = self._model()
            self.sent_bytes += sum(part.nbytes for part in sent)
            future.set_result(sent)
