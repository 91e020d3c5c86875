"""The training loop of the parameter server, over torch.distributed.rpc. Experimental.

Steps run in intervals. Within one, workers and server only exchange models and gradients; at its end all ranks are
synchronised: they have finished the same step and have the same model, so validation, checkpoints and stops are the
trainer's own. Tensors are sent
through main memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from training.comm._exchange import broadcast as send_to_all
from training.comm._server import ParameterServer, SentModel, ServedExchange
from training.engine.optimizer_step import OptimizerStep
from training.guards.numerics import NumericsError
from training.loader.order import Share
from training.manifest import Manifest
from training.runtime.distributed import TIMEOUT, StepFlags, broadcast
from training.step import arithmetic
from training.step.norms import GradientNorm
from training.trainer import Trainer
from training.units import MIB

SYNC_INTERVAL = 64
"""Maximum number of steps between two synchronisations of all ranks."""
POLL_SECONDS = 1.0
"""How often the server checks for a stop request while no gradients arrive."""
_server: ParameterServer | None = None
"""The server of this process, for remote calls."""


class ParameterServerTrainer(Trainer):
    """Rank 0 is the server; the others train, each on its part of every global batch."""

    def _prepare(self, start: Manifest | None) -> None:
        super()._prepare(start)
        share = self.assembly.share
        own_share = Share(max(0, self.world.rank - 1), self.world.size - 1, share.global_batch, share.micro_batch)
        self._worker_step = OptimizerStep(self.config, replace(self.assembly, share=own_share), self.guards.gradient)
        self._parameters = list(self.assembly.optimizer.parameters)
        self._norm = GradientNorm(self._parameters, self.assembly.model.shape)
        exchange = self.assembly.model.exchange
        assert isinstance(exchange, ServedExchange)
        self._peers = exchange.peers
        if self.world.leads:
            global _server
            _server = ParameterServer(self.world.size - 1, exchange.staleness, model=self._model, apply=self._apply)
        _init_rpc(self.world.rank, self.world.size)

    def _run_step(self) -> StepFlags:
        """Run all steps until the next synchronisation."""
        end = self._next_sync_step()
        due = self.world.leads and any(self.cadence.is_due(step) for step in range(self.step + 1, end + 1))
        batch = self.config.global_batch
        first = self.step
        if self.world.leads:
            self._serve(end)
        else:
            self._train(end)
        self.step = broadcast(self.world, self.step)
        self.consumed += (self.step - first) * batch
        send_to_all([parameter.detach() for parameter in self._parameters], self._peers)
        send_to_all(
            self.assembly.model.buffers(), self._peers, source=1
        )  # running means: the server processes no batch
        self.agreement.begin(stop=self.stop.is_requested, saving=self.checkpoints.is_saving, due=due)
        return self.agreement.end()

    def _next_sync_step(self) -> int:
        """Return the step of the next synchronisation: all that is due at certain steps must be due at one."""
        intervals = [self.config.validate_every, self.config.checkpoint_every, self.config.keep_every, SYNC_INTERVAL]
        ends = [(self.step // steps + 1) * steps for steps in intervals if isinstance(steps, int) and steps]
        return min(*ends, self.config.steps)

    # The server.

    def _serve(self, end: int) -> None:
        assert _server is not None
        began, first = time.perf_counter(), self.step
        _server.open(self.step, end)
        ended = False
        while not ended:
            if self.stop.is_requested:
                _server.close()
            self.step, ended, losses = _server.progress(POLL_SECONDS)
            if losses:
                self.heartbeat.beat("step", self.step)
                seconds = (time.perf_counter() - began) / (self.step - first)
                self._report(losses, seconds)
        self._log(f"step {self.step}  {self.step - first} steps in {time.perf_counter() - began:.1f} s")

    def _report(self, losses: dict[int, float], seconds: float) -> None:
        """Report losses. `seconds`: mean step time in this interval so far."""
        assert _server is not None
        sent, _server.sent_bytes = _server.sent_bytes, 0
        for step, loss in losses.items():
            self.reporter.log(
                step + 1,
                loss=loss,
                learning_rate=arithmetic.learning_rate(self.config, step),
                staleness=_server.max_staleness,
                communicated_mib=sent / len(losses) / MIB,
                step_seconds=seconds,
                **{f"{self.assembly.task.unit}_per_second": self.assembly.units_per_step / max(seconds, 1e-9)},
            )

    def _model(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    def _apply(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Apply one worker's gradient as an optimizer step of its own, at the learning rate of its step."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.device)
        norm, largest = self._norm(), self.config.clip
        rate = arithmetic.learning_rate(self.config, step)
        self.assembly.optimizer.step(rate, (norm / largest).clamp(min=1.0) if largest else None)
        self.assembly.optimizer.zero_grad()

    # A worker.

    def _train(self, end: int) -> None:
        worker = self.world.rank - 1
        for step in range(self.step, end):
            self.heartbeat.beat("step", step)
            began = time.perf_counter()
            model: SentModel = rpc.rpc_sync(_name(0), _pull, args=(worker, step))
            if model is None:
                return
            with torch.no_grad():
                for parameter, received in zip(self._parameters, model, strict=True):
                    parameter.copy_(received)
            waited = time.perf_counter() - began
            consumed = self.consumed + (step - self.step) * self.config.global_batch
            loss = float(self._worker_step.differentiate(consumed, step, whole=True))
            norm = float(self._norm())
            if not math.isfinite(norm):
                what = f"step {step + 1:,}: loss {loss}, gradient norm {norm} on rank {self.world.rank}"
                raise NumericsError("nonfinite", what)
            gradients = [parameter.grad.cpu() for parameter in self._parameters if parameter.grad is not None]
            self.assembly.optimizer.zero_grad()
            rpc.rpc_sync(_name(0), _push, args=(worker, step, gradients, loss))
            self.reporter.log(
                step + 1,
                loss=loss,
                gradient_norm=norm,
                step_seconds=time.perf_counter() - began,
                wait_seconds=waited,
                communicated_mib=sum(part.nbytes for part in gradients) / MIB,
            )

    def _finish(self, stopping: bool) -> bool:
        rpc.shutdown()
        return super()._finish(stopping)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _pull(worker: int, step: int) -> Future[SentModel]:
    assert _server is not None
    return _server.pull(worker, step)


def _push(worker: int, step: int, gradients: list[Tensor], loss: float) -> None:
    assert _server is not None
    _server.push(worker, step, gradients, loss)


def _init_rpc(rank: int, size: int) -> None:
    """Connect to the other ranks for rpc through the store of the process group."""
    store: Any = dist.distributed_c10d._get_default_store()

    def rendezvous_at_store(_url: str, **_options: object) -> Iterator[tuple[Any, int, int]]:
        yield PrefixStore("rpc", store), rank, size

    register_rendezvous_handler("vigil", rendezvous_at_store)  # type: ignore[no-untyped-call]
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # as with gloo, see training.runtime.distributed
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="vigil://", rpc_timeout=TIMEOUT.total_seconds(), num_worker_threads=max(16, size)
    )
    rpc.init_rpc(_name(rank), rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def _name(rank: int) -> str:
    return f"rank{rank}"
