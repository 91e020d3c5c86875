"""The update that the server computes itself, for rules that compare the clients' updates with it (FLTrust).

The server trains as a client would, on some of the validation samples (training.federation.data_division), which are
not used for evaluation any more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from training.federated import schedule
from training.federated.assembly import Federation
from training.federated.client_tasks import ClientTask
from training.federated.client_work import ClientWork
from training.federated.filter_chain import FilterChain
from training.federated.schedule import ClientChunk
from training.federated.server import Server
from training.federation import random_streams
from training.federation.data_division import DataDivision
from training.federation.parts import TooFewUpdates
from training.federation.round_plan import steps_of
from training.runtime.seeds import derive_seed


class TrustedUpdate:
    """Computes the server's update as one client, with random numbers of its own and without a state."""

    def __init__(self, federation: Federation) -> None:
        config, divided = federation.config, federation.divided
        owners = np.full(len(divided.owners["validation"]), -1, dtype=np.int64)
        owners[divided.root] = 0
        server_data = DataDivision(divided.labels, {"train": owners}, clients=1)
        server_config = config.model_copy(
            update={"seed": derive_seed(config.seed, random_streams.ROOT) % 2**32, "filters": [], "attack": "none"}
        )
        no_filters = FilterChain(server_config, federation.model.weights.shared, federation.model.dtype)
        self._work = ClientWork(
            server_config,
            federation.model,
            server_data,
            no_filters,
            unstacked_reason=federation.work.unstacked_reason,
            split="validation",
        )
        steps = steps_of(server_data.sizes, config.batch, epochs=config.epochs, local_steps=config.local_steps)
        widths = schedule.widths_of(server_data.sizes, config.batch)
        self._chunk = ClientChunk(np.zeros(1, dtype=np.int64), int(steps[0]), int(widths[0]))

    def compute(self, server: Server, task: ClientTask, round_: int) -> dict[str, Tensor]:
        """Return the server's result of the clients' task, (size,) by name; TooFewUpdates if it is not finite."""
        server_task, state = (
            replace(self._work.training_task, model=task.model),
            server.client_state.home_rows(self._chunk.clients),
        )
        updates = self._work.run(self._chunk, round_, server_task, server, state=state)
        if updates.failed:
            raise RuntimeError(f"the server's own update failed:\n{updates.failed[0]}")
        found = {name: value[0] for name, value in self._work.training_task.summands(updates.values).items()}
        if not all(bool(torch.isfinite(value).all()) for value in found.values()):
            raise TooFewUpdates("the server's own update is not finite")
        return found
