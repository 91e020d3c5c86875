"""Test robust aggregations in the engine: bad clients are excluded and reported, on whichever rank they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training import ranks
from tests.training.federated.built_in import built_in
from tests.training.federated.in_process import accuracy, ready, train
from training.config import choices
from training.federated.client_tasks import ClientUpdates
from training.federated.controller import QuorumLost
from training.federated.pending_updates import ArrivingUpdates
from training.federated.round_report import BROKEN, DROPPED, LATE, REJECTED, TRAINED, RoundReport
from training.federated.rounds import Rounds
from training.federation import config, data_division
from training.federation.config import FOLDERS
from training.runtime.distributed import World

DIGITS: dict[str, Any] = {
    "recipe": "tabular",
    "clients": 10,
    "learning_rate": 0.3,
    "tabular": {"hidden": 16},
}
BAD = (3, 7)
FAR = -1e6
OPTIONS: dict[str, dict[str, Any]] = {"fltrust": {"root_samples": 60}, "hierarchical": {"groups": 5}}
"""Options of rules whose defaults do not fit eleven clients, two of them bad."""
BEARS: dict[str, dict[str, Any]] = {
    name: OPTIONS.get(name, {option.name: 2 for option in choice.options if option.name in ("f", "trim")})
    for name, choice in choices.describe(FOLDERS["aggregation"]).items()
    if name in built_in("aggregation") and name != "mean"
}
"""Each robust rule, with options that tolerate two bad clients of eleven."""


def rounds_of(folder: Path, **table: Any) -> Rounds:
    """Return a rank that is ready for its first round."""
    return ready(folder, {**DIGITS, **table})


def scale_updates(rounds: Rounds, *, factor: float, of: tuple[int, ...] = BAD, name: str = "delta") -> None:
    """Let these clients send their update multiplied by a factor."""
    run = rounds.work.run

    def spoilt(chunk: Any, *arguments: Any, **options: Any) -> ClientUpdates:
        sent = run(chunk, *arguments, **options)
        is_bad = torch.from_numpy(np.isin(sent.clients, of))[:, None]
        sent.values[name] = torch.where(is_bad, sent.values[name] * factor, sent.values[name])
        return sent

    rounds.work.run = spoilt  # type: ignore[method-assign]


def watch(rounds: Rounds) -> dict[int, torch.Tensor]:
    """Client → the update that it sends, or has learnt if it is spoilt only after this."""
    found: dict[int, torch.Tensor] = {}
    run = rounds.work.run

    def record(chunk: Any, *arguments: Any, **options: Any) -> ClientUpdates:
        sent = run(chunk, *arguments, **options)
        found.update(zip(sent.clients.tolist(), sent.values["delta"].clone(), strict=True))
        return sent

    rounds.work.run = record  # type: ignore[method-assign]
    return found


def did(report: RoundReport, state: int) -> list[int]:
    return sorted(report.clients[report.states == state].tolist())


class TestAnAttack:
    def test_ruins_the_mean(self, tmp_path: Path) -> None:
        rounds = rounds_of(tmp_path)
        scale_updates(rounds, factor=FAR)
        assert did(train(rounds, 1)[-1], TRAINED) == list(range(10))
        assert not accuracy(rounds) > 0.4

    @pytest.mark.parametrize(
        ("aggregation", "options"),
        [
            ("median", {"f": 2}),
            ("trimmed_mean", {"trim": 2}),
            ("multi_krum", {"f": 2}),
            ("fltrust", {"root_samples": 60}),
        ],
    )
    def test_is_tolerated_and_reported(self, aggregation: str, options: Any, tmp_path: Path) -> None:
        rounds = rounds_of(tmp_path, aggregation=aggregation, **{aggregation: options})
        scale_updates(rounds, factor=FAR)
        reports = train(rounds, 10)
        assert accuracy(rounds) > 0.6
        assert all(set(BAD) <= set(did(report, REJECTED)) for report in reports)
        assert did(reports[-1], REJECTED) == list(BAD)
        good = [client for client in range(10) if client not in BAD]
        assert reports[-1].samples == rounds.federation.divided.sizes[good].sum()
        up = rounds.work.messages_of(rounds.work.training_task, rounds.server).up
        samples = rounds.federation.divided.sizes[reports[-1].clients]
        assert reports[-1].traffic.bytes_up == up.sizes(10, reports[-1].clients.tolist(), samples.tolist()).sum()

    def test_of_numbers_that_are_none_never_gets_in(self, tmp_path: Path) -> None:
        rounds = rounds_of(tmp_path, aggregation="krum", krum={"f": 2})
        scale_updates(rounds, factor=float("nan"))
        (report,) = train(rounds)
        assert did(report, BROKEN) == list(BAD)
        assert len(did(report, TRAINED)) == 1
        assert len(did(report, REJECTED)) == 7
        assert torch.isfinite(rounds.server.weights).all()


class TestTenTimesTooLarge:
    """Two of eleven send ten times what they have learnt: finite numbers in the right direction."""

    def moved(self, folder: Path, **table: Any) -> tuple[torch.Tensor, torch.Tensor, RoundReport]:
        """Return where a round leads, and what each client has learnt, (clients, numbers)."""
        rounds = rounds_of(folder, clients=11, dtype="fp64", **table)
        before, learnt = rounds.server.weights.clone(), watch(rounds)
        scale_updates(rounds, factor=10)
        (report,) = train(rounds, 1)
        return rounds.server.weights - before, torch.stack([learnt[client] for client in range(11)]), report

    def test_leads_the_mean_astray(self, tmp_path: Path) -> None:
        moved, learnt, _ = self.moved(tmp_path)
        assert moved.norm() > 2 * learnt.mean(dim=0).norm()
        assert moved.norm() > learnt.norm(dim=1).max()

    @pytest.mark.parametrize("aggregation", BEARS)
    def test_is_borne(self, aggregation: str, tmp_path: Path) -> None:
        """The round leads to about where it would lead without: nearer to it than some of the clients themselves."""
        moved, learnt, report = self.moved(tmp_path, aggregation=aggregation, **{aggregation: BEARS[aggregation]})
        mean = learnt.mean(dim=0)
        assert (moved - mean).norm() <= (learnt - mean).norm(dim=1).max()
        out = set(did(report, REJECTED))
        if aggregation in ("krum", "multi_krum", "bulyan"):
            assert set(BAD) <= out
        if aggregation in ("norm_clipping", "fltrust"):
            assert not out, "it is shortened, not left out"

    def test_counts_no_more_than_its_norm_allows(self, tmp_path: Path) -> None:
        moved, learnt, _ = self.moved(tmp_path, aggregation="norm_clipping", norm_clipping={"norm": 0.25})
        assert learnt.norm(dim=1).min() > 0.25
        torch.testing.assert_close(
            moved, (learnt / learnt.norm(dim=1, keepdim=True) * 0.25).mean(dim=0), atol=0.01, rtol=0
        )


def test_the_only_update_that_counts_gives_the_next_model(tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, aggregation="krum", krum={"f": 1}, dtype="fp64")
    before, found = rounds.server.weights.clone(), watch(rounds)
    (report,) = train(rounds)
    (chosen,) = did(report, TRAINED)
    assert torch.equal(rounds.server.weights, before + found[chosen])
    assert report.loss == report.losses[report.clients == chosen]


def test_statistics_pass_through_the_rule_by_themselves(tmp_path: Path) -> None:
    """They pass as differences to the server's; a client left out of them alone still has its update counted."""
    table: dict[str, Any] = {"aggregation": "multi_krum", "multi_krum": {"f": 1}, "split": "quantity", "dtype": "fp64"}
    rounds = rounds_of(tmp_path, **table)
    assert rounds.combiner is not None
    rounds.combiner._like = {name: torch.empty(2, dtype=torch.float64) for name in ("delta", "statistics")}
    rounds.server.statistics = torch.tensor([1.0, 1.0], dtype=torch.float64)
    rounds.combiner._variances = torch.tensor([False, True])
    clients = np.array([5, 0, 1, 2, 3, 4])
    rows = torch.tensor([[1e6, 1e6], [1.0, 2.0], [1.0, 3.0], [1.0, 4.0], [1.0, 5.0], [-7.0, 7.0]], dtype=torch.float64)
    about = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 2.0], [2.0, 2.0], [-1e9, -1e9], [0.0, 0.0]], dtype=rows.dtype)
    combined = rounds.combiner.combine(
        rounds.work.training_task,
        [{"delta": rows, "statistics": about}],
        [6],
        clients=clients,
        counts=clients != 4,
        late=ArrivingUpdates.empty(),
        round_=1,
    )
    assert combined.mean["delta"].tolist() == [1.0, 3.5]
    assert combined.mean["statistics"].tolist() == [7 / 4, 2.0]
    assert combined.left_out.tolist() == [3, 5], "one for its update, one for statistics far from all others"


def test_late_updates_are_among_those_that_are_combined(tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, aggregation="median", dtype="fp64")
    assert rounds.combiner is not None
    rounds.combiner._like = {"delta": torch.empty(1, dtype=torch.float64)}
    late = ArrivingUpdates(
        clients=np.array([2, 9]),
        rows=torch.tensor([[3.0], [-1e6]], dtype=torch.float64),
        samples=np.array([1.0, 1.0]),
        factors=np.array([0.5, 0.5]),
        losses=np.zeros(2),
    )
    sent = {"delta": torch.tensor([[1.0], [9.0], [4.0]], dtype=torch.float64)}
    combined = rounds.combiner.combine(
        rounds.work.training_task,
        [sent],
        [3],
        clients=np.array([4, 0, 1]),
        counts=np.ones(3, bool),
        late=late,
        round_=1,
    )
    assert combined.mean["delta"].tolist() == [3.0]
    assert combined.left_out.tolist() == [0, 1, 4, 9]


def test_a_robust_round_waits_until_a_deadline_and_reports_late_clients(tmp_path: Path) -> None:
    table: dict[str, Any] = {"aggregation": "multi_krum", "multi_krum": {"f": 2}, "clients": 20}
    rounds = rounds_of(tmp_path, **table, pace="deadline", deadline={"quantile": 0.6})
    scale_updates(rounds, factor=FAR)
    reports = train(rounds, 4)
    assert sum(len(did(report, LATE)) for report in reports)
    bad = [client for report in reports for client in did(report, REJECTED)]
    assert set(BAD) & set(bad)
    assert not any(set(BAD) & set(did(report, TRAINED) + did(report, LATE)) for report in reports)
    assert torch.isfinite(rounds.server.weights).all()


def test_a_round_with_too_few_updates_is_tried_again_and_then_given_up(tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, aggregation="bulyan", per_round=7)
    scale_updates(rounds, factor=float("nan"), of=(0, 1, 2, 3))
    before = rounds.server.weights.clone()
    with pytest.raises(QuorumLost, match="round 1 was lost 3 times: . updates are left, at least 7 are needed"):
        train(rounds)
    assert torch.equal(rounds.server.weights, before)


def test_a_client_that_fails_is_not_counted_as_rejected(tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, aggregation="median", learning_rate=0.1)
    rounds.work.unstacked_reason = "for the test"
    compute_each = rounds.work._compute_each

    def failing(chunk_arguments: Any, chunk: Any, *arguments: Any) -> ClientUpdates:
        sent = compute_each(chunk_arguments, chunk, *arguments)
        if 4 in chunk.clients:
            sent.failed[4] = "Traceback"
        return sent

    rounds.work._compute_each = failing  # type: ignore[method-assign, assignment]
    (report,) = train(rounds)
    assert did(report, DROPPED) == [4]


class TestWhatTheServerTrainsOn:
    def test_nobody_is_judged_by(self, tmp_path: Path) -> None:
        rounds = rounds_of(tmp_path, aggregation="fltrust", fltrust={"root_samples": 100})
        divided = rounds.federation.divided
        assert len(divided.root) == 100
        assert (divided.owners["validation"][divided.root] == -1).all()
        read_ids: list[int] = []
        batch = rounds.federation.model.task.batch

        def record(split: Any, ids: Any) -> Any:
            read_ids.extend(ids.tolist() if split == "validation" else ())
            return batch(split, ids)

        object.__setattr__(rounds.federation.model.task, "batch", record)
        accuracy(rounds)
        assert sorted([*read_ids, *divided.root.tolist()]) == list(range(len(divided.owners["validation"])))
        read_ids.clear()
        train(rounds, 1)
        assert set(read_ids) == set(divided.root.tolist())

    @pytest.mark.parametrize(
        ("table", "field"),
        [
            ({"fltrust": {"root_samples": 300}}, "fltrust.root_samples"),
            ({"tabular": {"held_out": 0}}, "aggregation"),
        ],
    )
    def test_must_leave_some(self, table: dict[str, Any], field: str) -> None:
        from training.federation import config_checks

        parsed = config.parse({**DIGITS, "aggregation": "fltrust", **table})
        (problem,) = config_checks.problems(parsed, 1)
        assert problem.field == field

    def test_root_samples_are_taken_only_where_requested(self, tmp_path: Path) -> None:
        rounds = rounds_of(tmp_path)
        assert len(rounds.federation.divided.root) == 0
        assert data_division.root_samples(rounds.config) == 0


def _run_rank(rank: int, size: int, folder: Path, table: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    world = World(rank, size, torch.device("cpu"))
    rounds = ready(folder / f"{size}" / f"rank-{rank}", {**DIGITS, **table}, world=world)
    scale_updates(rounds, factor=FAR)
    reports = train(rounds, 3)
    state = [rounds.server.weights, rounds.server.statistics, *rounds.server.memory.values()]
    found = {
        "state": [tensor.numpy().tobytes().hex() for tensor in state],
        "rejected": [did(report, REJECTED) for report in reports],
        "late": [did(report, LATE) for report in reports],
    }
    (folder / f"{size}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        {"aggregation": "multi_krum", "multi_krum": {"f": 2}, "split": "quantity"},
        {
            **{"aggregation": "fltrust", "fltrust": {"root_samples": 40}, "per_round": 7},
            "tabular": {"hidden": 16, "batch_norm": True},
        },
        {"aggregation": "mean", "algorithm": "scaffold", "pace": "deadline", "deadline": {"quantile": 0.5}},
        {
            **{"aggregation": "trimmed_mean", "trimmed_mean": {"trim": 2}, "attack": "alie", "attackers": [0, 5]},
            **{"client_momentum": 0.9, "client_lr_schedule": "cosine", "alie": {"z": 30.0}},
        },
        {"aggregation": "mean", "attack": "gaussian", "pace": "deadline", "deadline": {"quantile": 0.5}},
    ],
    ids=lambda table: table.get("attack", table.get("algorithm", table["aggregation"])),
)
def test_the_same_bits_on_any_number_of_ranks(table: dict[str, Any], tmp_path: Path) -> None:
    for size in (1, 2, 3):
        processes = [ranks.fork(_run_rank, rank, size, tmp_path, table) for rank in range(size)]
        for process in processes:
            process.join(ranks.SECONDS)
        assert [process.exitcode for process in processes] == [0] * size
    found = [json.loads((tmp_path / f"{size}-{rank}.json").read_text()) for size in (1, 2, 3) for rank in range(size)]
    assert all(found_by_rank == found[0] for found_by_rank in found)
    assert any(found[0]["rejected"] if table["aggregation"] != "mean" else found[0]["late"])
