"""The update that the server makes itself, for rules that trust no other: from rows of its own, as a client would.

The rows are some of those kept for validation (training.federation.data_division), which nobody is judged by any more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from training.federated import schedule
from training.federated.assembly import Federation
from training.federated.client_tasks import Question
from training.federated.client_work import Work
from training.federated.filter_chain import Chain
from training.federated.schedule import Chunk
from training.federated.server import Server
from training.federation import random_streams
from training.federation.data_division import Divided
from training.federation.parts import TooFew
from training.federation.round_plan import steps_of
from training.runtime.seeds import derive_seed


class Root:
    """A client of no number: no other's order of samples or dropout is its, and it keeps nothing."""

    def __init__(self, federation: Federation) -> None:
        config, divided = federation.config, federation.divided
        owners = np.full(len(divided.owners["validation"]), -1, dtype=np.int64)
        owners[divided.root] = 0
        own = Divided(divided.labels, {"train": owners}, clients=1)
        apart = config.model_copy(
            update={"seed": derive_seed(config.seed, random_streams.ROOT) % 2**32, "filters": [], "attack": "none"}
        )
        nothing = Chain(apart, federation.model.weights.shared, federation.model.dtype)
        self._work = Work(apart, federation.model, own, nothing, alone=federation.work.alone, split="validation")
        steps = steps_of(own.sizes, config.batch, epochs=config.epochs, local_steps=config.local_steps)
        widths = schedule.widths_of(own.sizes, config.batch)
        self._chunk = Chunk(np.zeros(1, dtype=np.int64), int(steps[0]), int(widths[0]))

    def update(self, server: Server, question: Question, round_: int) -> dict[str, Tensor]:
        """Return its answer to the clients' question, (numbers,) by name; raise TooFew if it is not finite."""
        asked, own = replace(self._work.training, model=question.model), server.kept.home_rows(self._chunk.clients)
        sent = self._work.run(self._chunk, round_, asked, server, own=own)
        if sent.failed:
            raise RuntimeError(f"the server's own update failed:\n{sent.failed[0]}")
        found = {name: value[0] for name, value in self._work.training.folded(sent.values).items()}
        if not all(bool(torch.isfinite(value).all()) for value in found.values()):
            raise TooFew("the server's own update is no numbers")
        return found
