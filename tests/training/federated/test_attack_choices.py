"""Test built-in attacks: each against its definition, under the mean and under robust rules computed by numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.training.federated.custom_files import ALGORITHM, LINEAR
from tests.training.federated.custom_files import ready as ready_own
from tests.training.federated.in_process import DIGITS, REGRESSION, accuracy, ready, train
from training.config import choices
from training.config.base import ConfigError
from training.federated.attack.alie import largest_z
from training.federated.rounds import Rounds
from training.federation import config, config_checks
from training.federation.attackers import attackers
from training.federation.config import FOLDERS

Rows = NDArray[np.float64]
BAD = [2, 7]
GOOD = [client for client in range(12) if client not in BAD]
RUN = {**DIGITS, "dtype": "fp64", "attackers": BAD}
FORGED: dict[str, tuple[dict[str, Any], Callable[[Rows], Rows]]] = {
    "sign_flip": ({"scale": 3.0}, lambda rows: -3 * rows[BAD]),
    "scaling": ({"factor": 20.0}, lambda rows: 20 * rows[BAD]),
    "alie": ({"z": 1.5}, lambda rows: np.tile(rows[GOOD].mean(axis=0) - 1.5 * rows[GOOD].std(axis=0), (2, 1))),
    "ipm": ({"epsilon": 4.0}, lambda rows: np.tile(-4 * rows[GOOD].mean(axis=0), (2, 1))),
}


def krum(rows: Rows, sizes: Rows) -> Rows:
    apart = np.square(rows[:, None] - rows[None]).sum(axis=2)
    scores = np.sort(apart, axis=1)[:, 1 : len(rows) - 2 - 1].sum(axis=1)  # f = 2: n − f − 2 neighbours, not itself
    found: Rows = rows[scores.argmin()]
    return found


def clipped(rows: Rows, sizes: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1)
    weights = np.minimum(sizes, 3 * np.median(sizes))
    factors = weights * np.minimum(1, np.median(lengths) / lengths)
    found: Rows = factors @ rows / weights.sum()
    return found


RULES: dict[str, tuple[dict[str, Any], Callable[[Rows, Rows], Rows]]] = {
    "mean": ({}, lambda rows, sizes: np.average(rows, axis=0, weights=sizes)),
    "median": ({"f": 2}, lambda rows, sizes: np.median(rows, axis=0)),
    "trimmed_mean": ({"trim": 2}, lambda rows, sizes: np.sort(rows, axis=0)[2:-2].mean(axis=0)),
    "krum": ({"f": 2}, krum),
    "norm_clipping": ({}, clipped),
}


def rounds_of(folder: Path, **table: Any) -> Rounds:
    run = {**RUN, **table}
    return ready(folder, {name: value for name, value in run.items() if value != {}})


def learnt(folder: Path) -> tuple[Rows, Rows]:
    """Return what each client sends in the first round where nobody attacks, (clients, numbers), and its samples."""
    rounds = rounds_of(folder, attackers=[])
    found: dict[int, Rows] = {}
    run = rounds.work.run

    def watched(*arguments: Any, **options: Any) -> Any:
        sent = run(*arguments, **options)
        found.update(zip(sent.clients.tolist(), sent.values["delta"].numpy().copy(), strict=True))
        return sent

    rounds.work.run = watched  # type: ignore[method-assign]
    train(rounds)
    return np.stack([found[client] for client in range(12)]), rounds.federation.divided.sizes.astype(float)


def test_each_has_a_test() -> None:
    assert {*FORGED, "none", "label_flip", "gaussian"} == {*choices.names(FOLDERS["attack"])}


@pytest.mark.parametrize("attack", FORGED)
def test_what_is_forged_enters_each_rule_as_its_formula_has_it(attack: str, tmp_path: Path) -> None:
    rows, sizes = learnt(tmp_path / "honest")
    options, forge = FORGED[attack]
    rows[BAD] = forge(rows)
    for rule, (given, combined) in RULES.items():
        chosen = {"attack": attack, attack: options, "aggregation": rule} | ({rule: given} if given else {})
        rounds = rounds_of(tmp_path / rule, **chosen)
        before = rounds.server.weights.clone()
        train(rounds)
        moved = (rounds.server.weights - before).numpy()
        np.testing.assert_allclose(moved, combined(rows, sizes), atol=1e-12, err_msg=rule)


def test_gaussian_numbers_differ_by_round_and_client(tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, attack="gaussian", gaussian={"deviation": 50.0})
    sent: dict[tuple[int, int], Rows] = {}
    run = rounds.work.run

    def watched(chunk: Any, round_: int, *arguments: Any, **options: Any) -> Any:
        found = run(chunk, round_, *arguments, **options)
        for client, row in zip(found.clients.tolist(), found.values["delta"].numpy(), strict=True):
            sent[round_, client] = row.copy()
        return found

    rounds.work.run = watched  # type: ignore[method-assign]
    train(rounds, 2)
    forged = np.stack([sent[round_, client] for round_ in (1, 2) for client in BAD])
    assert forged.std() == pytest.approx(50, rel=0.1)
    assert abs(np.corrcoef(forged) - np.eye(4)).max() < 0.2
    assert max(np.abs(sent[1, client]).max() for client in GOOD) < 5


class TestLabelFlip:
    def test_attackers_train_on_reversed_labels_and_nobody_is_judged_by_them(self, tmp_path: Path) -> None:
        honest, flipped = (rounds_of(tmp_path / name, attack=name) for name in ("none", "label_flip"))
        for client in range(12):
            ids = honest.federation.divided.train[client]
            (_, truth), (_, labels) = (item.federation.model.task.batch("train", ids) for item in (honest, flipped))
            assert torch.equal(labels, 9 - truth if client in BAD else truth)
        ids = np.arange(50)
        assert torch.equal(*(item.federation.model.task.batch("validation", ids)[1] for item in (honest, flipped)))

    def test_a_single_label_can_be_flipped_to_another(self, tmp_path: Path) -> None:
        rounds = rounds_of(tmp_path, attack="label_flip", label_flip={"source": 7, "target": 1})
        labels = rounds.federation.model.task.batch("train", rounds.federation.divided.train[BAD[0]])[1]
        assert 7 not in labels
        assert len(labels.unique()) > 2

    def test_custom_labels_are_reversed_by_their_order(self, tmp_path: Path) -> None:
        client = LINEAR.replace("(x[:, 1] > 0).long()\n", "4 * (x[:, 1] > 0).long()\n").replace(
            "Linear(4, 3)", "Linear(4, 6)"
        )
        loop = ready_own(tmp_path, client, attack="label_flip", attackers=[2])
        assert set(loop.federation.model.task.batch("train", np.arange(30))[1].tolist()) == {0, 1, 4, 5}

    def test_samples_without_classes_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r'run\.attack: is "label_flip", but the samples of tabular have no class'
        ):
            ready(tmp_path, {**REGRESSION, "attack": "label_flip"})

    def test_a_source_without_a_target_is_refused(self) -> None:
        assert problems(attack="label_flip", label_flip={"source": 1}) == ["label_flip.target"]


@pytest.mark.parametrize(
    ("clients", "bad", "share"),
    [(50, 24, 24 / 26), (12, 2, 5 / 10), (10, 8, 1 / 2)],  # the first is the paper's example
)
def test_alie_s_largest_z_is_the_paper_s(clients: int, bad: int, share: float) -> None:
    assert largest_z(clients, bad) == pytest.approx(NormalDist().inv_cdf(share))


def test_alie_by_the_paper_uses_the_updates_of_the_attackers(tmp_path: Path) -> None:
    rows, sizes = learnt(tmp_path / "honest")
    rows[BAD] = rows[BAD].mean(axis=0) - 2 * rows[BAD].std(axis=0)
    rounds = rounds_of(tmp_path / "attacked", attack="alie", alie={"z": 2.0, "source": "attackers"})
    before = rounds.server.weights.clone()
    train(rounds)
    moved = (rounds.server.weights - before).numpy()
    np.testing.assert_allclose(moved, np.average(rows, axis=0, weights=sizes), atol=1e-12)


@pytest.mark.parametrize("attack", ["sign_flip", "gaussian"])
def test_the_mean_is_ruined_and_a_robust_rule_is_not(attack: str, tmp_path: Path) -> None:
    options = {"sign_flip": {"scale": 20.0}, "gaussian": {"deviation": 10.0}}[attack]
    found = {}
    for rule in ("mean", "median"):
        chosen = {"split": "iid", "dirichlet": {}, "attack": attack, attack: options, "aggregation": rule}
        rounds = rounds_of(tmp_path / rule, **chosen, epochs=3)
        train(rounds, 6)
        found[rule] = accuracy(rounds)
    assert found["median"] > 0.6
    assert not found["mean"] > 0.4


def test_who_attacks_is_named_or_drawn_by_the_seed() -> None:
    def of(**table: Any) -> list[int]:
        return attackers(config.parse({"clients": 50, "attack": "ipm", **table})).tolist()

    assert of(attackers=[9, 3, 9]) == [3, 9]
    drawn = of(attacker_share=0.3)
    assert len(set(drawn)) == 15
    assert drawn == of(attacker_share=0.3) != of(attacker_share=0.3, seed=1)
    assert len(of(attacker_share=0.001)) == 1
    assert of(attack="none") == []


def problems(**table: Any) -> list[str]:
    return [problem.field for problem in config_checks.problems(config.parse({"clients": 12, **table}), 1)]


class TestRefusals:
    @pytest.mark.parametrize("attack", [*FORGED, "gaussian"])
    @pytest.mark.parametrize("algorithm", ["scaffold", "qfedavg", "gossip"])
    def test_what_else_an_algorithm_sends_would_stay_honest(self, attack: str, algorithm: str) -> None:
        assert problems(attack=attack, algorithm=algorithm) == ["attack"]
        assert problems(attack="label_flip", algorithm=algorithm) == []

    @pytest.mark.parametrize("attack", ["alie", "ipm"])
    def test_filters_hide_what_others_send(self, attack: str) -> None:
        assert problems(attack=attack, filters=["int8"]) == ["attack"]
        assert problems(attack="sign_flip", filters=["int8"]) == []

    def test_attackers_are_clients_and_have_an_attack(self) -> None:
        assert problems(attack="ipm", attackers=[3, 12]) == ["attackers"]
        assert problems(attackers=[3]) == ["attackers"]
        assert problems(attack="ipm", attackers=[3, 3]) == ["attackers"]

    def test_a_custom_algorithm_sends_an_update_and_nothing_else(self, tmp_path: Path) -> None:
        file = "SENT = {'delta': 'samples', 'more': 'clients'}\n\n\n" + ALGORITHM
        with pytest.raises(ConfigError, match=r"run\.attack: .* own sends delta, more"):
            ready_own(tmp_path, LINEAR, file, recipe="client", algorithm="own", attack="ipm")


def test_what_is_forged_passes_through_the_filters(tmp_path: Path) -> None:
    rows, sizes = learnt(tmp_path / "honest")
    rows[BAD] *= -1
    rounds = rounds_of(tmp_path / "attacked", attack="sign_flip", filters=["fp16"])
    before = rounds.server.weights.clone()
    train(rounds)
    rounded = np.average(rows.astype(np.float16).astype(float), axis=0, weights=sizes)
    np.testing.assert_allclose((rounds.server.weights - before).numpy(), rounded, atol=1e-12)


@pytest.mark.parametrize("attack", ["ipm", "gaussian"])
def test_who_sends_no_numbers_neither_attacks_nor_counts_as_honest(attack: str, tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, attack=attack)
    run = rounds.work.run

    def spoilt(*arguments: Any, **options: Any) -> Any:
        sent = run(*arguments, **options)
        for client in (BAD[0], GOOD[0]):
            sent.values["delta"][torch.from_numpy(sent.clients == client)] = torch.nan
        return sent

    rounds.work.run = spoilt  # type: ignore[method-assign]
    (report,) = train(rounds)
    assert sorted(report.clients[~report.is_counted].tolist()) == sorted([BAD[0], GOOD[0]])
    assert torch.isfinite(rounds.server.weights).all()
