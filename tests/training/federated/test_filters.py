"""Test what filters make of updates: each by its definition, whichever clients are computed together."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.config import choices
from training.federated.filter_chain import FilterChain, FilteredUpdates
from training.federation import config, config_checks
from training.federation.config import FOLDERS

NEAREST = {"int8": {"rounding": "nearest"}}
WITHOUT = {"topk": {"feedback": False}}
CHAINS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "topk": (["topk"], {}),
    "topk without feedback": (["topk"], WITHOUT),
    "int8": (["int8"], {"int8": {"block": 7}}),
    "int8 nearest": (["int8"], NEAREST),
    "fp16": (["fp16"], {}),
    "sketch": (["sketch"], {"sketch": {"columns": 16}}),
    "sketch mean": (["sketch"], {"sketch": {"columns": 16, "rows": 2, "estimate": "mean"}}),
    "delta": (["delta"], {}),
    "topk int8": (["topk", "int8"], {"topk": {"density": 0.3}}),
    "topk fp16": (["topk", "fp16"], {}),
    "sketch int8": (["sketch", "int8"], {"sketch": {"columns": 16}}),
    "delta topk int8": (["delta", "topk", "int8"], WITHOUT),
    "delta int8": (["delta", "int8"], {}),
    "none": ([], {}),
}


def chain(filters: list[str], numbers: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> FilterChain:
    return FilterChain(config.parse({"filters": filters, **options}), numbers, dtype)


def named(name: str, numbers: int) -> FilterChain:
    filters, options = CHAINS[name]
    return chain(filters, numbers, **options)


def through(
    made: FilterChain, rows: Tensor, round_: int = 1, state: dict[str, Tensor] | None = None, first: int = 0
) -> FilteredUpdates:
    """`first`: the number of the first client."""
    clients = np.arange(first, first + len(rows))
    return made.transform(rows, clients, round_, made.begin(len(rows)) if state is None else state)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CHAINS)
class TestEachChain:
    def test_gives_back_rows_made_of_what_is_sent_alone(self, name: str) -> None:
        created, rows = named(name, 50), drawn(3, 50)
        state = created.begin(3)
        for round_ in (1, 2, 3):
            passed = through(created, rows, round_, state)
            assert (passed.rows.shape, passed.rows.dtype) == (rows.shape, rows.dtype)
            received = created.receive(passed.wire, np.arange(3), round_, state)
            assert torch.equal(received, passed.rows)
            assert passed.state.keys() == state.keys() == created.state_names
            state = passed.state

    def test_the_result_for_a_client_does_not_depend_on_the_others(self, name: str) -> None:
        created, rows = named(name, 50), drawn(6, 50)
        together, state = through(created, rows), created.begin(1)
        for client in range(6):
            alone = through(created, rows[client : client + 1], state=state, first=client)
            for part, whole in ((alone.wire, together.wire), (alone.state, together.state)):
                assert all(torch.equal(part[which], whole[which][client : client + 1]) for which in whole)
            assert torch.equal(alone.rows[0], together.rows[client])

    def test_makes_the_same_of_many_numbers_part_after_part(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        created, rows = named(name, 50), drawn(7, 50)
        whole = through(created, rows)
        monkeypatch.setattr("training.federated.filter_chain.CHUNK_PARAMETERS", 120)
        parts = through(created, rows)
        assert torch.equal(parts.rows, whole.rows)
        assert all(torch.equal(parts.wire[which], whole.wire[which]) for which in whole.wire)

    def test_leaves_non_finite_numbers_visible(self, name: str) -> None:
        for strange in (math.nan, math.inf, -math.inf):
            rows = drawn(3, 50)
            rows[1, 20] = strange
            passed = through(named(name, 50), rows)
            assert torch.isfinite(passed.rows).all(dim=1).tolist() == [True, False, True]

    def test_makes_nothing_of_nothing(self, name: str) -> None:
        for tiny in (0.0, 1e-45):
            passed = through(named(name, 9), torch.full((2, 9), tiny))
            assert (passed.rows.abs() <= 9 * 1e-45).all()

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 40), st.integers(1, 4), st.integers(-30, 30), st.integers(0, 2**32))
    def test_takes_any_numbers(self, name: str, numbers: int, clients: int, power: int, seed: int) -> None:
        rows = drawn(clients, numbers, seed=seed) * 10.0**power
        passed = through(named(name, numbers), rows)
        assert torch.isfinite(passed.rows).all()
        assert passed.rows.shape == rows.shape


class TestTopk:
    def test_sent_and_residual_are_what_was_given_exactly(self) -> None:
        rows = drawn(4, 100)
        passed = through(chain(["topk"], 100), rows)
        assert torch.equal(passed.rows + passed.state["topk_residual"], rows)
        assert ((passed.rows == 0) | (passed.state["topk_residual"] == 0)).all()
        assert (passed.rows != 0).sum(dim=1).tolist() == [10] * 4
        least = passed.wire["delta"].abs().amin(dim=1)
        assert (passed.state["topk_residual"].abs().amax(dim=1) <= least).all()

    def test_over_rounds_nothing_is_lost(self) -> None:
        """The numbers are whole, so that their sums are exact."""
        created = chain(["topk"], 60, topk={"density": 0.05})
        state, given_, received = created.begin(3), torch.zeros(3, 60), torch.zeros(3, 60)
        for round_ in range(1, 41):
            rows = drawn(3, 60, seed=round_).mul(100).round()
            passed = through(created, rows, round_, state)
            state, given_, received = passed.state, given_ + rows, received + passed.rows
            assert torch.equal(received + state["topk_residual"], given_)

    @pytest.mark.parametrize("width", ["int8", "fp16"])
    def test_what_later_filters_lose_is_sent_later_too(self, width: str) -> None:
        """It is equal up to rounding: the residual is a difference of floats."""
        rows = drawn(3, 100, dtype=torch.float64)
        created = chain(["topk", width], 100, dtype=torch.float64)
        passed = through(created, rows)
        residual = passed.state["topk_residual"]
        torch.testing.assert_close(passed.rows + residual, rows, rtol=1e-15, atol=1e-15)
        assert residual.gather(1, passed.wire["delta.topk.places"].long()).abs().max() > 0

    def test_of_equal_numbers_the_first_are_sent(self) -> None:
        rows = torch.tensor([[1.0, -3.0, 1.0, 1.0, -1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
        places = through(chain(["topk"], 6, topk={"density": 0.5}), rows).wire["delta.topk.places"]
        assert places.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert places.dtype == torch.int32

    @pytest.mark.parametrize("places", [[0, 1, 1], [2, 1, 3], [-1, 0, 1], [4, 5, 6]])
    def test_places_that_no_client_of_ours_sends_are_refused(self, places: list[int]) -> None:
        created = chain(["topk"], 6, topk={"density": 0.5})
        wire = {"delta": torch.ones(1, 3), "delta.topk.places": torch.tensor([places], dtype=torch.int32)}
        with pytest.raises(ValueError, match="must ascend, from 0 to 5"):
            created.receive(wire, np.arange(1), 1, created.begin(1))


class TestInt8:
    def test_the_nearest_is_at_most_half_a_step_off(self) -> None:
        rows = drawn(5, 1000) * torch.logspace(-6, 6, 1000)
        passed = through(chain(["int8"], 1000, **NEAREST), rows)
        scale = passed.wire["delta.int8.scale"].repeat_interleave(256, dim=1)[:, :1000]
        assert ((passed.rows - rows).abs() <= scale / 2 * (1 + 1e-5)).all()
        assert passed.wire["delta"].dtype == torch.int8
        assert passed.wire["delta"].abs().amax() == 127
        assert passed.wire["delta.int8.scale"].shape == (5, 4)

    def test_by_chance_it_is_right_on_average(self) -> None:
        """A value is off by less than a step; the mean of 4,000 by a few of its deviations (½ step / √4,000)."""
        row = drawn(40)
        passed = through(chain(["int8"], 40), row.expand(4000, 40))
        scale = passed.wire["delta.int8.scale"]
        assert ((passed.rows - row).abs() < scale * (1 + 1e-5)).all()
        assert ((passed.rows.mean(dim=0) - row).abs() < 5 * scale[0] / 2 / math.sqrt(4000)).all()

    def test_chance_is_of_the_seed_the_round_and_the_client(self) -> None:
        row = drawn(1, 200)
        created = chain(["int8"], 200)
        first = through(created, row).rows
        assert torch.equal(through(created, row).rows, first)
        assert torch.equal(through(chain(["int8"], 200), row).rows, first)
        for other in (
            through(created, row, round_=2),
            through(created, row, first=1),
            through(chain(["int8"], 200, seed=1), row),
        ):
            assert not torch.equal(other.rows, first)


class TestFp16:
    def test_what_16_bits_hold_comes_back(self) -> None:
        rows = torch.arange(-2048.0, 2049.0).view(1, -1) / 1024
        assert torch.equal(through(chain(["fp16"], rows.shape[1]), rows).rows, rows)

    def test_what_is_larger_than_any_is_sent_as_the_largest(self) -> None:
        passed = through(chain(["fp16"], 3), torch.tensor([[1e9, -65504.0, -1e9]]))
        assert passed.rows.tolist() == [[65504.0, -65504.0, -65504.0]]


class TestSketch:
    def test_finds_what_is_large(self) -> None:
        """Ten of 10,000 numbers, among small ones: each within the norm of the others times 3/√columns."""
        rows = drawn(4, 10_000) * 0.01
        rest = rows.norm(dim=1, keepdim=True)
        where = torch.arange(10) * 997
        rows[:, where] += torch.linspace(-20, 19, 10)
        received = through(chain(["sketch"], 10_000, sketch={"columns": 1000}), rows).rows
        assert ((received - rows).abs()[:, where] <= 3 / math.sqrt(1000) * (rest + 1)).all()
        for row in received:
            assert set(row.abs().topk(10).indices.tolist()) == set(where.tolist())

    def test_the_mean_is_right_on_average(self) -> None:
        """Average over 3,000 rounds with different hashes; with 2 rows of 8 columns the variance is ‖row‖²/8/2."""
        row = drawn(1, 20)
        created = chain(["sketch"], 20, sketch={"rows": 2, "columns": 8, "estimate": "mean"})
        found = torch.cat([through(created, row, round_).rows for round_ in range(3000)])
        assert ((found.mean(dim=0) - row).abs() < 5 * row.norm() / 4 / math.sqrt(3000)).all()

    def test_sketches_can_be_added_up(self) -> None:
        rows = drawn(3, 30).mul(64).round()
        created = chain(["sketch"], 30)
        summed = through(created, rows.sum(dim=0, keepdim=True)).wire["delta"]
        assert torch.equal(through(created, rows).wire["delta"].sum(dim=0, keepdim=True), summed)


class TestDelta:
    def test_what_was_lost_is_in_the_next_difference(self) -> None:
        """The server's copy of an update that stays the same gets ever better; by int8 alone it never does."""
        rows, created = drawn(2, 300), chain(["delta", "int8"], 300, **NEAREST)
        state, off = created.begin(2), []
        for round_ in range(1, 4):
            passed = through(created, rows, round_, state)
            state = passed.state
            off.append(float((passed.rows - rows).abs().max()))
        assert torch.equal(state["delta_last"], passed.rows)
        assert off[1] < off[0] / 100
        assert off[2] < 1e-6


class TestRefused:
    @pytest.mark.parametrize(
        ("filters", "options", "field", "text"),
        [
            (["int8", "topk"], {}, "filters", 'Write filters = ["topk", "int8"].'),
            (["topk", "delta"], WITHOUT, "filters", 'Write filters = ["delta", "topk"].'),
            (["topk", "sketch"], {}, "filters", '"topk" and "sketch", which both choose what part of an update'),
            (["sketch", "int8", "topk"], {}, "filters", 'name "sketch" and "topk"'),
            (["fp16", "int8"], {}, "filters", "which both reduce the bits of a number. Keep one of them."),
            (["delta", "sketch"], {}, "filters", "growing without bound. Keep one of them."),
            (["delta", "topk"], {}, "topk.feedback", 'Write false, or leave out "delta".'),
            (["sketch"], {"sketch": {"rows": 4}}, "sketch.rows", 'Write 3 or 5, or estimate = "mean".'),
        ],
    )
    def test_what_does_not_go_together(
        self, filters: list[str], options: dict[str, Any], field: str, text: str
    ) -> None:
        (problem,) = config_checks.problems(config.parse({"filters": filters, **options}), 1)
        assert problem.field == field
        assert text in problem.message

    def test_an_algorithm_without_an_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _send_else(monkeypatch, {"gradient": "samples", "curvature": "samples"})
        problems = list(config_checks.problems(config.parse({"filters": ["topk"]}), 1))
        assert [problem.field for problem in problems] == ["filters"]
        assert "work on an update called delta, but fedavg sends curvature, gradient." in problems[0].message

    def test_what_an_algorithm_sends_with_its_update_stays_unfiltered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _send_else(monkeypatch, {"delta": "samples", "control": "clients"})
        assert not list(config_checks.problems(config.parse({"filters": ["topk"]}), 1))

    @pytest.mark.parametrize("name", CHAINS)
    def test_nothing_of_what_goes_together(self, name: str) -> None:
        filters, options = CHAINS[name]
        assert not list(config_checks.problems(config.parse({"filters": filters, **options}), 1))


def _send_else(monkeypatch: pytest.MonkeyPatch, sent: dict[str, str]) -> None:
    """The algorithm sends this."""
    choice = choices.get(FOLDERS["algorithm"], "fedavg")
    monkeypatch.setitem(choice.constants, "SENT", sent)


def test_a_site_without_torch_can_list_them() -> None:
    text = (
        "import sys; sys.modules['torch'] = None\n"
        "from training.federation import parts\n"
        "from training.config import choices\n"
        "for name in choices.names('federated.filters'): assert parts.filter_(name).STAGE\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
