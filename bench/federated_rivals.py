"""The same rounds by other hands: a plain torch loop, pfl-research (Apple, arXiv 2404.06430), Flower's simulation.

Each is a process of its own that takes turns with the others: it is told how many rounds to do, and says what they
took. This file runs in the rivals' environments, too, so it knows nothing but torch and numpy.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

MARK = "@"
"""Of the lines that are meant for the bench: a rival's own software may print, too."""


@dataclass(frozen=True)
class Work:
    """The work of all contenders: FedAvg with plain descent on a network with one hidden layer."""

    rows: Tensor
    targets: Tensor
    owned: Sequence[Tensor]
    """Of each client, its rows' numbers."""
    held_out: tuple[Tensor, Tensor]
    weights: dict[str, Tensor]
    """The model at the beginning."""
    batch: int
    learning_rate: float

    @classmethod
    def read(cls, path: str) -> Work:
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
        owners, weights = found["owners"], {name[7:]: part for name, part in found.items() if name[:7] == "weight:"}
        clients = int(owners.max()) + 1
        owned = [torch.nonzero(owners == client)[:, 0] for client in range(clients)]
        held_out = found["held_out_rows"], found["held_out_targets"]
        batch, rate = int(found["batch"]), float(found["learning_rate"])
        return cls(found["rows"], found["targets"], owned, held_out, weights, batch, rate)

    @staticmethod
    def write(path: Path, **arrays: NDArray[Any]) -> None:
        np.savez(path, **arrays)  # type: ignore[arg-type]

    def model(self) -> nn.Module:
        hidden, features = self.weights["hidden.weight"].shape
        outputs = len(self.weights["head.bias"])
        model = Network(features, hidden, outputs)
        model.load_state_dict(self.weights)
        return model

    def score(self, model: nn.Module) -> dict[str, float]:
        """Return the loss on held-out samples, to check that all contenders have done the same work."""
        rows, targets = self.held_out
        with torch.no_grad():
            answers = model(rows)
        right = (answers.argmax(dim=1) == targets).double().mean()
        return {"loss": float(functional.cross_entropy(answers, targets)), "accuracy": float(right)}


class Network(nn.Module):
    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(features, hidden), nn.Linear(hidden, outputs)

    def forward(self, rows: Tensor) -> Tensor:
        answers: Tensor = self.head(self.hidden(rows).relu())
        return answers

    # As pfl-research asks a model for them.

    def loss(self, rows: Tensor, targets: Tensor, **kwargs: object) -> Tensor:
        return functional.cross_entropy(self(rows), targets)

    def metrics(self, rows: Tensor, targets: Tensor, **kwargs: object) -> dict[str, Any]:
        return {}


class Over(Exception):
    """Raised when no more rounds are wanted."""


class Turns:
    """A contender's side of the turns: rounds are requested on stdin and reported on stdout."""

    def __init__(self, score: Callable[[], dict[str, Any]]) -> None:
        self._score = score
        self._left = 0
        self._taken: list[float] = []
        self._began = 0.0

    def begin(self) -> None:
        """Report that the contender is ready for its first round, and wait for the request."""
        print(MARK + json.dumps({"ready": True}), flush=True)
        self._wait()

    def done(self) -> None:
        """Report that a round is over and wait for the next request; raise Over if there is none."""
        self._taken.append(time.perf_counter() - self._began)
        self._left -= 1
        if not self._left:
            print(MARK + json.dumps({"seconds": self._taken, **self._score()}), flush=True)
            self._taken = []
            self._wait()
        self._began = time.perf_counter()

    def _wait(self) -> None:
        selected = sys.stdin.readline().strip()
        if not selected:
            raise Over
        self._left, self._began = int(selected), time.perf_counter()


def loop(path: str) -> None:
    """Run FedAvg by hand: one model for all clients, reset for each, with a running sum of their updates."""
    torch.set_num_threads(1)
    work = Work.read(path)
    model = work.model()
    weights: list[Tensor] = list(model.parameters())
    start = [weight.detach().clone() for weight in weights]
    descent = torch.optim.SGD(weights, lr=work.learning_rate)
    total = sum(map(len, work.owned))

    def train_round() -> None:
        sums = [torch.zeros_like(weight) for weight in start]
        for owned in work.owned:
            with torch.no_grad():
                torch._foreach_copy_(weights, start)
            order = owned[torch.randperm(len(owned))]
            for ids in torch.split(order, work.batch):
                descent.zero_grad()
                functional.cross_entropy(model(work.rows[ids]), work.targets[ids]).backward()  # type: ignore[no-untyped-call]
                descent.step()
            with torch.no_grad():
                torch._foreach_add_(sums, weights, alpha=len(owned) / total)
        torch._foreach_copy_(start, sums)

    def score() -> dict[str, float]:
        with torch.no_grad():
            torch._foreach_copy_(weights, start)
        return work.score(model)

    _repeat(train_round, score)


def _repeat(train_round: Callable[[], None], score: Callable[[], dict[str, float]]) -> None:
    turns = Turns(score)
    with suppress(Over):
        turns.begin()
        while True:
            train_round()
            turns.done()


def pfl(path: str) -> None:
    """Run pfl-research 0.6.0: its own backend, algorithm and data classes, in one process."""
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.pytorch import PyTorchTensorDataset  # type: ignore[import-not-found]
    from pfl.data.sampling import MinimizeReuseUserSampler  # type: ignore[import-not-found]
    from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    work = Work.read(path)
    module = work.model()
    turns = Turns(lambda: work.score(module))

    class Turn(TrainingProcessCallback):
        def after_central_iteration(self, *arguments: Any, **options: Any) -> tuple[bool, Any]:
            turns.done()
            return False, Metrics()

    users = [PyTorchTensorDataset((work.rows[ids], work.targets[ids]), user_id=str(n)) for n, ids in _named(work)]
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(range(len(users)))))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    given = NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.learning_rate)
    algorithm = NNAlgorithmParams(
        central_num_iterations=10**9,
        evaluation_frequency=10**9,
        train_cohort_size=len(users),
        val_cohort_size=None,
    )
    with suppress(Over):
        turns.begin()
        FederatedAveraging().run(
            algorithm_params=algorithm,
            backend=SimulatedBackend(data, data, postprocessors=[_by_samples()]),
            model=model,
            model_train_params=given,
            callbacks=[Turn()],
        )


def _named(work: Work) -> list[tuple[int, Tensor]]:
    return list(enumerate(work.owned))


def _by_samples() -> Any:
    """Weight updates by their samples, as the others do."""
    from pfl.aggregate.weighting import WeightByDatapoints  # type: ignore[import-not-found]

    return WeightByDatapoints()


def flower(path: str) -> None:
    """Run Flower 1.41's simulation: Ray with an actor per core, one thread each, and Flower's own FedAvg.

    Ray listens on every address of the machine, so it gets a network of its own with only the loopback (`unshare
    -n`).
    """
    _loopback_up()
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
    from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
    from flwr.serverapp import ServerApp  # type: ignore[import-not-found]
    from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
    from flwr.simulation import run_simulation  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    work = _read_once(path)
    model = work.model()
    lost: list[str] = []
    turns = Turns(lambda: {**work.score(model), "lost": lost})
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        data = _read_once(path)
        net, descent = _made_once(path)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        owned = data.owned[int(context.node_config["partition-id"])]
        for ids in torch.split(owned[torch.randperm(len(owned))], data.batch):
            descent.zero_grad()
            functional.cross_entropy(net(data.rows[ids]), data.targets[ids]).backward()  # type: ignore[no-untyped-call]
            descent.step()
        arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": len(owned)})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def evaluate(round_: int, arrays: Any) -> None:
        if round_ == 0:
            turns.begin()
            return
        model.load_state_dict(arrays.to_torch_state_dict())
        turns.done()

    class Counting(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            lost.extend(reply.error.reason or "no reason" for reply in replies if reply.has_error())
            lost.extend(["no answer"] * (len(work.owned) - len(replies)))
            return super().aggregate_train(server_round, replies)

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        while len(list(grid.get_node_ids())) < len(work.owned):  # else the first round is of those that are there
            time.sleep(0.1)
        strategy = Counting(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(work.owned))
        strategy.start(
            grid=grid, initial_arrays=ArrayRecord(work.weights), num_rounds=10**6, evaluate_fn=evaluate,
            train_config=ConfigRecord({}),
        )  # fmt: skip

    cores = os.cpu_count() or 1
    config = {
        "init_args": {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    with suppress(Over):
        run_simulation(server_app, client_app, num_supernodes=len(work.owned), backend_config=config)


def _loopback_up() -> None:
    """Enable the loopback; raises OSError if this is not a network of its own."""
    if Path("/proc/self/net/route").read_text().splitlines()[1:]:
        raise OSError("not where it could be reached: it has no network of its own")
    up, set_flags = 0x1, 0x8914  # IFF_UP, SIOCSIFFLAGS
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up))


@cache
def _read_once(path: str) -> Work:
    return Work.read(path)


@cache
def _made_once(path: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the process's own model, which it reuses from client to client."""
    torch.set_num_threads(1)
    work = _read_once(path)
    model = work.model()
    return model, torch.optim.SGD(model.parameters(), lr=work.learning_rate)
