"""The loop of the parameter server, over torch.distributed.rpc. Experimental.

Steps run in stretches. Within one, workers and server know nothing of each other but what they ask; at its end all have
finished the same step and hold the same model, so validation, checkpoints and stops are the trainer's own. Tensors
travel by main memory.
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
from training.comm._served import Sent, Served, Server
from training.engine.optimizer_step import OptimizerStep
from training.guards.numerics import NumericsError
from training.loader.order import Share
from training.manifest import Manifest
from training.runtime.distributed import TIMEOUT, Agreed, broadcast
from training.step import arithmetic
from training.step.norms import GradientNorm
from training.trainer import Trainer
from training.units import MIB

STRETCH = 64
"""Most steps between two boundaries at which all ranks meet."""
LOOK_SECONDS = 1.0
"""How often the server looks whether it was asked to stop, while no gradients come."""
_server: Server | None = None
"""This process's, which remote calls find here."""


class ServedTrainer(Trainer):
    """Rank 0 serves; the others train, each on its part of every global batch."""

    def _prepare(self, start: Manifest | None) -> None:
        super()._prepare(start)
        share = self.assembly.share
        mine = Share(max(0, self.world.rank - 1), self.world.size - 1, share.global_batch, share.micro_batch)
        self._work = OptimizerStep(self.config, replace(self.assembly, share=mine), self.guards.gradient)
        self._parameters = list(self.assembly.optimizer.parameters)
        self._norm = GradientNorm(self._parameters, self.assembly.model.shape)
        exchange = self.assembly.model.exchange
        assert isinstance(exchange, Served)
        self._everybody = exchange.peers
        if self.world.leads:
            global _server
            _server = Server(self.world.size - 1, exchange.staleness, model=self._model, apply=self._apply)
        _meet(self.world.rank, self.world.size)

    def _one_step(self) -> Agreed:
        """A whole stretch."""
        end = self._end_of_stretch()
        due = self.world.leads and any(self.cadence.is_due(step) for step in range(self.step + 1, end + 1))
        batch = self.config.global_batch
        first = self.step
        if self.world.leads:
            self._serve(end)
        else:
            self._train(end)
        self.step = broadcast(self.world, self.step)
        self.consumed += (self.step - first) * batch
        send_to_all([parameter.detach() for parameter in self._parameters], self._everybody)
        send_to_all(self.assembly.model.buffers(), self._everybody, of=1)  # running means: the server sees no batch
        self.agreement.begin(stop=self.stop.is_requested, saving=self.checkpoints.is_saving, due=due)
        return self.agreement.end()

    def _end_of_stretch(self) -> int:
        """Whatever is due at certain steps is due at a stretch's end."""
        every = [self.config.validate_every, self.config.checkpoint_every, self.config.keep_every, STRETCH]
        ends = [(self.step // steps + 1) * steps for steps in every if isinstance(steps, int) and steps]
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
            self.step, ended, losses = _server.progress(LOOK_SECONDS)
            if losses:
                self.heartbeat.beat("step", self.step)
                seconds = (time.perf_counter() - began) / (self.step - first)
                self._tell(losses, seconds)
        self._say(f"step {self.step}  {self.step - first} steps in {time.perf_counter() - began:.1f} s")

    def _tell(self, losses: dict[int, float], seconds: float) -> None:
        """`seconds`: of a step, in the mean over this stretch so far."""
        assert _server is not None
        sent, _server.sent = _server.sent, 0
        for step, loss in losses.items():
            self.reporter.log(
                step + 1,
                loss=loss,
                learning_rate=arithmetic.learning_rate(self.config, step),
                staleness=_server.stalest,
                communicated_mib=sent / len(losses) / MIB,
                step_seconds=seconds,
                **{f"{self.assembly.task.unit}_per_second": self.assembly.units_per_step / max(seconds, 1e-9)},
            )

    def _model(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    def _apply(self, step: int, gradients: Sequence[Tensor]) -> None:
        """One worker's gradient is an optimizer step of its own, at the learning rate of the step it is of."""
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
            model: Sent = rpc.rpc_sync(_name(0), _pull, args=(worker, step))
            if model is None:
                return
            with torch.no_grad():
                for parameter, received in zip(self._parameters, model, strict=True):
                    parameter.copy_(received)
            waited = time.perf_counter() - began
            consumed = self.consumed + (step - self.step) * self.config.global_batch
            loss = float(self._work.differentiate(consumed, step, whole=True))
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
def _pull(worker: int, step: int) -> Future[Sent]:
    assert _server is not None
    return _server.pull(worker, step)


def _push(worker: int, step: int, gradients: list[Tensor], loss: float) -> None:
    assert _server is not None
    _server.push(worker, step, gradients, loss)


def _meet(rank: int, size: int) -> None:
    """Meets the others for rpc at the store at which the ranks have met already."""
    store: Any = dist.distributed_c10d._get_default_store()

    def at_the_store(_url: str, **_options: object) -> Iterator[tuple[Any, int, int]]:
        yield PrefixStore("rpc", store), rank, size

    register_rendezvous_handler("vigil", at_the_store)  # type: ignore[no-untyped-call]
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # as with gloo, see training.runtime.distributed
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="vigil://", rpc_timeout=TIMEOUT.total_seconds(), num_worker_threads=max(16, size)
    )
    rpc.init_rpc(_name(rank), rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def _name(rank: int) -> str:
    return f"rank{rank}"
