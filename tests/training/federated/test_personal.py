"""Test algorithms with personal parts for each client: FedBN, FedPer, Ditto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.training.federated.in_process import DIGITS_FP64, REGRESSION, Federation
from tests.training.federated.quadratic import quadratics
from training.federated.model import PERSONAL, STATISTICS

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedbn": ("norm", {"tabular": {"hidden": 16, "batch_norm": True}}),
    "fedper": ("head", {}),
}


@pytest.mark.parametrize("name", PARTS)
class TestAPart:
    def test_never_travels(self, name: str, tmp_path: Path) -> None:
        part, run = PARTS[name]
        federation = Federation(tmp_path, name, DIGITS_FP64, **run)
        layout = federation.loop.federation.model.weights
        everything = dict(federation.loop.federation.model.task.model.named_parameters())
        personal = {tensor for tensor in everything if tensor.startswith(f"{part}.")}
        assert set(layout.shared_shapes) == set(everything) - personal != set(everything)
        numbers = sum(shape.numel() for shape in layout.shared_shapes.values())
        assert federation.messages.up.tensors == {"delta": ((numbers,), torch.float64)}
        assert set(federation.messages.down.tensors) == set(layout.shared_shapes)

    def test_is_different_for_each_client(self, name: str, tmp_path: Path) -> None:
        part, run = PARTS[name]
        federation = Federation(tmp_path, name, DIGITS_FP64, **run)
        layout, before = federation.loop.federation.model.weights, federation.model
        after = federation.go(2)
        assert torch.equal(after[layout.shared :], before[layout.shared :])
        assert not torch.equal(after[: layout.shared], before[: layout.shared])
        for state in federation.server.client_state.values():
            assert len(state.unique(dim=0)) == 5  # type: ignore[no-untyped-call]
        expected = {PERSONAL, STATISTICS} if name == "fedbn" else {PERSONAL}
        assert federation.server.client_state.keys() == expected

    def test_with_a_single_client_it_equals_fedavg(self, name: str, tmp_path: Path) -> None:
        _, run = PARTS[name]
        personal, plain = (
            Federation(tmp_path, algorithm, DIGITS_FP64, clients=1, split="iid", **run)
            for algorithm in (name, "fedavg")
        )
        personal.go(2)
        plain.go(2)
        layouts = [algorithm.loop.federation.model.weights for algorithm in (personal, plain)]
        whole = torch.cat([personal.server.shared, personal.server.client_state[PERSONAL][0]])
        tensors, expected = layouts[0].tensors(whole), layouts[1].tensors(plain.server.weights)
        for tensor, value in expected.items():
            torch.testing.assert_close(tensors[tensor], value, rtol=0, atol=1e-12)
        if name == "fedbn":
            torch.testing.assert_close(
                personal.server.client_state[STATISTICS][0], plain.server.statistics, rtol=0, atol=1e-12
            )


def test_who_fails_keeps_what_it_had(tmp_path: Path) -> None:
    """A batch of one sample has no deviation to normalise by: who has one sample too many can't go on."""
    _, run = PARTS["fedbn"]
    federation = Federation(tmp_path, "fedbn", DIGITS_FP64, clients=4, split="iid", batch=374, **run)
    assert federation.divided.sizes.tolist() == [375, 374, 374, 374]
    before = {name: values.clone() for name, values in federation.server.client_state.items()}
    assert federation.round().failed.keys() == {0}
    for name, values in federation.server.client_state.items():
        assert torch.equal(values[0], before[name][0])
        assert not torch.equal(values[1], before[name][1])


class TestDitto:
    def test_the_global_model_is_fedavgs(self, tmp_path: Path) -> None:
        plain, ditto = (Federation(tmp_path, name, DIGITS_FP64, dtype="fp32") for name in ("fedavg", "ditto"))
        for _ in range(2):
            report, expected = ditto.round(), plain.round()
            assert torch.equal(ditto.model, plain.model)
            assert report.loss == expected.loss
        assert ditto.messages == plain.messages

    def test_a_personal_model_is_pulled_towards_the_global_model(self, tmp_path: Path) -> None:
        pull, rate = 1.5, 0.05
        federation = Federation(tmp_path, "ditto", REGRESSION, epochs=3, per_round=2, options={"pull": pull})
        parts, models = quadratics(federation), federation.model.expand(4, -1).clone()
        for _ in range(5):
            sent = federation.model
            for client in federation.round().clients:
                for _ in range(3):
                    direction = parts[client].gradient(models[client]) + pull * (models[client] - sent)
                    models[client] -= rate * direction
            torch.testing.assert_close(federation.server.client_state["personal_model"], models, rtol=0, atol=1e-12)
        assert len(models.unique(dim=0)) == 4  # type: ignore[no-untyped-call]

    def test_clients_are_evaluated_with_personal_models(self, tmp_path: Path) -> None:
        federation = Federation(tmp_path, "ditto", DIGITS_FP64)
        federation.go(2)
        judged = federation.loop.evaluator.evaluate(federation.server, should_continue=lambda: True)
        assert judged is not None
        model = federation.loop.federation.model
        for client, ids in enumerate(federation.divided.validation):
            rows, labels = model.task.batch("validation", ids)
            tensors = model.weights.tensors(federation.server.client_state["personal_model"][client])
            logits = torch.func.functional_call(model.task.model, tensors, (rows,))
            assert judged.by_client["loss"][client] == pytest.approx(float(cross_entropy(logits, labels)), abs=1e-12)
