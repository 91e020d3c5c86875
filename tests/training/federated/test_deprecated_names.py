"""Names of earlier releases that an algorithm.py or aggregation.py may still use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.training.federated.custom_files import LINEAR, ready
from tests.training.federated.in_process import accuracy, train
from training.data import Labels
from training.federated.custom import part_loader
from training.federation import parts

OLD_DITTO = """
from training.federation.parts import TooFew

SENT = {"delta": "samples"}
WHOLE = True
HEAD = MOMENTUM = WEIGHT_DECAY = PARTIAL = True


def begin(model):
    return {"personal_model": model}


def memory(model):
    return {"rounds": model.new_zeros(1)}


def train(client):
    def pulled(v, gradient):
        return gradient + 0.1 * (v - client.model)

    delta = client.descend(beside=None) - client.model
    client.kept["personal_model"] = client.apart().descend(pulled, begin=client.kept["personal_model"])
    return {"delta": delta}


def play(controller):
    answer = controller.train()
    start = controller.server.shared.double()
    found = controller.ask("loss", lambda client: {"loss": client.loss(client.model)}, {"loss": "samples"}, vectors={})
    assert found.mean["loss"] > 0
    assert set(controller.server.kept) == {"personal_model"}
    assert set(controller.server.memory) == {"rounds"}
    served = controller.server.round(controller.round, answer)
    assert served.selected == served.counted == 3
    assert controller.draw().rand() == controller.rng().rand()
    return start + answer.mean["delta"]


def aggregate(server):
    raise TooFew("play() replaces it")


def own(model, kept):
    return kept["personal_model"]
"""


def test_old_names_mean_what_they_meant(tmp_path: Path) -> None:
    assert parts.TooFew is parts.TooFewUpdates
    assert set(part_loader.DEPRECATED.values()) <= set(parts.Algorithm.__dataclass_fields__)
    table = {"recipe": "tabular", "tabular": {"hidden": 8}, "split": "dirichlet"}
    old = ready(tmp_path / "old", LINEAR, OLD_DITTO, **table, algorithm="own")
    new = ready(tmp_path / "new", **table, algorithm="ditto")
    for loop in (old, new):
        train(loop, 2)
    assert torch.equal(old.server.weights, new.server.weights)
    assert torch.equal(old.server.client_state["personal_model"], new.server.client_state["personal_model"])
    assert accuracy(old) == accuracy(new)


def test_the_generator_of_a_selection_has_its_former_name(tmp_path: Path) -> None:
    selected = []
    for name in ("draw", "rng"):
        selection = f"def select(round):\n    return round.{name}.permutation(round.eligible)[:1]\n"
        run = {"recipe": "tabular", "selection": "custom_selection", "per_round": 1, "clients": 50}
        loop = ready(tmp_path / name, files={"selection.py": selection}, **run)
        selected.append([report.selected.tolist() for report in train(loop, 3)])
    assert selected[0] == selected[1]


def test_labels_of_a_split_file_have_their_former_name() -> None:
    labels = Labels({"train": np.zeros(2, dtype=np.int64)}, ("a",))
    assert labels.of is labels.by_split
