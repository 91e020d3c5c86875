"""Test two lying clients of eleven, for each tensor and number that leaves a client, under each robust aggregation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.federated.built_in import built_in
from tests.training.federated.in_process import accuracy, ready, train
from tests.training.federated.test_update_combiner import BAD, BEARS, did
from tests.training.federated.texts import rounds_of, table, write_texts, write_weights
from training.config import choices
from training.federated.client_tasks import ClientUpdates
from training.federated.model import STATISTICS
from training.federated.round_report import REJECTED
from training.federated.rounds import Rounds
from training.federation import config_checks
from training.federation.config import FOLDERS, parse
from training.federation.filter_order import UPDATE

ROBUST = [name for name in built_in("aggregation") if name != "mean"]
BATCH_NORM = {"hidden": 16, "batch_norm": True}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_norm": {"tabular": BATCH_NORM},
    "fedstein": {"algorithm": "fedstein", "tabular": BATCH_NORM},
    "int8": {"filters": ["int8"]},
    "topk": {"filters": ["topk"], "topk": {"density": 0.5}},
}
"""What a client's message holds differs between these: an update, running statistics, scales, places."""
TENSORS = {
    "plain": {"delta"},
    "batch_norm": {"delta", "statistics"},
    "fedstein": {"delta", "statistics"},
    "int8": {"delta", "delta.int8.scale"},
    "topk": {"delta", "delta.topk.places"},
}
FAR = -1e9


def rounds_with(folder: Path, aggregation: str, setup: str) -> Rounds:
    chosen = {"aggregation": aggregation, aggregation: BEARS[aggregation], **SETUPS[setup]}
    digits = {"recipe": "tabular", "clients": 11, "learning_rate": 0.3, "tabular": {"hidden": 16}}
    return ready(folder, {**digits, **chosen})


def attack(rounds: Rounds, tensor: str, *, bad: tuple[int, ...] = BAD) -> None:
    """These clients send this tensor as FAR; one of whole numbers as the largest or lowest that is a message."""
    chain = rounds.work._filters
    received = chain._received

    def changed(wire: Any, clients: Any, *arguments: Any) -> list[Tensor]:
        is_bad = torch.from_numpy(np.isin(clients, bad)).view(-1, 1)
        wire = {name: _replaced(tensor, value, is_bad) if name == tensor else value for name, value in wire.items()}
        return received(wire, clients, *arguments)

    run = rounds.work.run

    def sent(*arguments: Any, **options: Any) -> ClientUpdates:
        found = run(*arguments, **options)
        if tensor in found.values and not (tensor == UPDATE and rounds.config.filters):
            is_bad = torch.from_numpy(np.isin(found.clients, bad)).view(-1, 1)
            found.values[tensor] = _replaced(tensor, found.values[tensor], is_bad)
        return found

    chain._received = changed  # type: ignore[method-assign]
    rounds.work.run = sent  # type: ignore[method-assign]


def _replaced(tensor: str, value: Tensor, is_bad: Tensor) -> Tensor:
    if tensor.endswith("places"):  # others than the first ones in order are refused as no message of ours
        far = torch.arange(value.shape[1], dtype=value.dtype).expand_as(value)
    elif not value.is_floating_point():
        far = torch.full_like(value, torch.iinfo(value.dtype).max)
    else:
        far = torch.full_like(value, FAR)
    return torch.where(is_bad.view(-1, *[1] * (value.ndim - 1)), far, value)


def watch(rounds: Rounds) -> dict[str, dict[int, Tensor]]:
    """Return what each client sends, by name and client, filled as rounds go."""
    found: dict[str, dict[int, Tensor]] = {}
    run = rounds.work.run

    def record(*arguments: Any, **options: Any) -> ClientUpdates:
        sent = run(*arguments, **options)
        for name, rows in sent.values.items():
            found.setdefault(name, {}).update(zip(sent.clients.tolist(), rows.double().clone(), strict=True))
        return sent

    rounds.work.run = record  # type: ignore[method-assign]
    return found


SHORTEN = {"norm_clipping", "fltrust"}
"""Rules that bound how long an update is, and no more: what is left of an attack is as long as an honest update."""


def assert_bounded(moved: Tensor, sent: dict[int, Tensor], aggregation: str, *, bad: tuple[int, ...] = BAD) -> None:
    """No farther from the honest clients' mean than the farthest of them; than they have moved, where it is lengths
    that are bounded."""
    honest = torch.stack([row for client, row in sorted(sent.items()) if client not in bad])
    mean = honest.mean(dim=0)
    reach = honest if aggregation in SHORTEN else honest - mean
    assert torch.isfinite(moved).all()
    assert (moved - mean).norm() <= reach.norm(dim=1).max()


@pytest.mark.parametrize("aggregation", ROBUST)
@pytest.mark.parametrize(("setup", "tensor"), [(setup, name) for setup in TENSORS for name in sorted(TENSORS[setup])])
def test_no_tensor_of_a_client_leads_the_model_astray(
    aggregation: str, setup: str, tensor: str, tmp_path: Path
) -> None:
    rounds = rounds_with(tmp_path, aggregation, setup)
    messages = rounds.work.messages_of(rounds.work.training_task, rounds.server)
    assert set(messages.up.tensors) == TENSORS[setup], "a new tensor must be attacked here, too"
    before, running = rounds.server.weights.double(), rounds.server.statistics.double()
    attack(rounds, tensor)
    sent = watch(rounds)
    train(rounds)
    shared = rounds.federation.model.weights.shared
    assert_bounded((rounds.server.weights.double() - before)[:shared], sent[UPDATE], aggregation)
    if STATISTICS in sent:
        changes = {client: row - running for client, row in sent[STATISTICS].items()}
        assert_bounded(rounds.server.statistics.double() - running, changes, aggregation)


@pytest.mark.parametrize("aggregation", ["median", "trimmed_mean", "hierarchical"])
def test_a_client_is_reported_when_its_statistics_are_left_out(aggregation: str, tmp_path: Path) -> None:
    rounds = rounds_with(tmp_path, aggregation, "batch_norm")
    attack(rounds, STATISTICS, bad=(3,))
    reports = train(rounds, 10)
    assert {client for report in reports for client in did(report, REJECTED)} == {3}
    assert accuracy(rounds) > 0.9


@pytest.mark.parametrize("adapters", ["lora", "scl"])
@pytest.mark.parametrize("aggregation", ["median", "norm_clipping"])
def test_adapters_are_no_way_in(adapters: str, aggregation: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"from_weights": str(write_weights(tmp_path / "llama"))}
    options |= {"lora_rank": 2} if adapters == "lora" else {}
    texts = write_texts(tmp_path / "texts")
    run = table(texts, adapters=adapters, aggregation=aggregation, language=options, local_steps=1)
    rounds = rounds_of(tmp_path / "run", run)
    assert set(rounds.work.messages_of(rounds.work.training_task, rounds.server).up.tensors) == {UPDATE}
    before = rounds.server.weights.double()
    attack(rounds, UPDATE, bad=(3,))
    sent = watch(rounds)
    train(rounds)
    assert_bounded(rounds.server.weights.double() - before, sent[UPDATE], aggregation, bad=(3,))


@pytest.mark.parametrize("aggregation", ROBUST)
def test_a_client_s_count_of_samples_is_bounded(aggregation: str, tmp_path: Path) -> None:
    rounds = rounds_with(tmp_path, aggregation, "batch_norm")
    assert rounds.combiner is not None
    rounds.combiner._samples = np.where(np.isin(np.arange(11), BAD[:1]), 10**15, rounds.combiner._samples)
    before = rounds.server.weights.double()
    attack(rounds, UPDATE, bad=BAD[:1])
    sent = watch(rounds)
    train(rounds)
    assert_bounded(rounds.server.weights.double() - before, sent[UPDATE], aggregation, bad=BAD[:1])


@pytest.mark.parametrize("aggregation", ROBUST)
def test_a_client_s_loss_changes_no_model(aggregation: str, tmp_path: Path) -> None:
    honest, lied = (rounds_with(tmp_path / name, aggregation, "plain") for name in ("honest", "lied"))
    run = lied.work.run

    def claimed(*arguments: Any, **options: Any) -> ClientUpdates:
        sent = run(*arguments, **options)
        sent.losses[torch.from_numpy(np.isin(sent.clients, BAD))] = 1e30
        return sent

    lied.work.run = claimed  # type: ignore[method-assign]
    train(honest)
    train(lied)
    assert torch.equal(honest.server.weights, lied.server.weights)


@pytest.mark.parametrize("algorithm", choices.names(FOLDERS["algorithm"]))
def test_what_else_an_algorithm_sends_is_not_for_robust_aggregations(algorithm: str) -> None:
    """Control variates, Hessians, counts of steps: where one is sent, every robust aggregation is refused."""
    sent = choices.get(FOLDERS["algorithm"], algorithm).constants["SENT"]
    assert isinstance(sent, dict)
    if set(sent) != {UPDATE}:
        for aggregation in ROBUST:
            run = parse({"algorithm": algorithm, "aggregation": aggregation, "clients": 12})
            assert "aggregation" in {problem.field for problem in config_checks.problems(run, 1)}
