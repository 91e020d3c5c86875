"""Test splits: each sample has exactly one owner, for any split, and the same one for the same seed."""

from __future__ import annotations

import base64
import json
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.training.federated.built_in import built_in
from tests.training.federated.in_process import ready, run, train
from training.config.base import ConfigError
from training.data import Labels
from training.federated.split import dirichlet
from training.federated.split.shift import drawn, view
from training.federation import config, config_checks, data_division, parts, random_streams, tables
from training.federation.apportionment import apportioned_owners
from training.federation.config import FederationConfig
from training.runtime.seeds import derive_seed

NAMES = built_in("split")
FILLS = ("iid", "quantity", "shards", "shift", "dirichlet", "dirichlet_equal")
"""Those that leave no client without a sample while there are enough."""
DIGITS: dict[str, Any] = {"clients": 10, "learning_rate": 0.3, "tabular": {"hidden": 16}}
Ids = NDArray[np.int64]


def labels_of(samples: int, classes: int, *, owners: int = 7, seed: int = 0, validation: int = 0) -> Labels:
    draw = np.random.RandomState(seed)
    of = {"train": draw.randint(classes, size=samples), "validation": draw.randint(classes, size=validation)}
    owners_by_split = {"train": draw.randint(owners, size=samples), "validation": draw.randint(owners, size=validation)}
    return Labels(of, tuple(map(str, range(classes))), owners_by_split, tuple(map(str, range(owners))))  # type: ignore[arg-type]


def without_owners(labels: Labels) -> Labels:
    return Labels(labels.by_split, labels.names)


def config_of(split: str, clients: int, *, seed: int = 0, **options: Any) -> FederationConfig:
    return config.parse({"split": split, "clients": clients, "seed": seed, split: options})


def divide(split: str, labels: Labels, clients: int, *, seed: int = 0, **options: Any) -> data_division.DataDivision:
    labels = labels if split == "column" else without_owners(labels)
    return data_division.divide(config_of(split, clients, seed=seed, **options), labels)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 60),
    st.integers(0, 300),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
@example("dirichlet", 60, 60, 1, 0)
@example("shards", 40, 40, 10, 0)
@settings(max_examples=150, deadline=None)
def test_every_sample_has_exactly_one_owner_and_none_is_invented_or_lost(
    name: str, clients: int, more: int, classes: int, seed: int
) -> None:
    labels = labels_of(clients + more, classes, seed=seed, validation=more // 3)
    divided = divide(name, labels, clients, seed=seed)
    owners = divided.owners["train"]
    assert owners.shape == (clients + more,)
    assert ((owners >= 0) & (owners < clients)).all()
    assert np.array_equal(np.sort(np.concatenate(divided.train)), np.arange(clients + more))
    assert divided.sizes.tolist() == [len(ids) for ids in divided.train]
    assert divided.counts().sum() == clients + more
    assert (divided.counts().sum(axis=0) == np.bincount(labels.by_split["train"], minlength=classes)).all()
    judged = divided.owners["validation"]
    assert ((judged >= -1) & (judged < clients)).all()
    assert sum(map(len, divided.validation)) == (judged >= 0).sum()
    again = divide(name, labels, clients, seed=seed)
    assert all(np.array_equal(divided.owners[split], again.owners[split]) for split in ("train", "validation"))
    if name in FILLS:
        assert divided.sizes.min() >= 1


@pytest.mark.parametrize("name", NAMES)
def test_data_that_leave_nothing_to_train_on_are_refused_as_such(name: str) -> None:
    divided = divide(name, labels_of(0, 3, validation=9), 4)
    (misfit,) = data_division.check(config_of(name, 4), divided)
    assert misfit.field == "recipe"
    assert "nothing to train on" in str(misfit)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "column"])
def test_another_seed_another_split(name: str) -> None:
    labels = labels_of(1000, 10)
    first, other = (divide(name, labels, 10, seed=seed).owners["train"] for seed in (0, 1))
    assert not np.array_equal(first, other)


@given(st.integers(1, 200), st.integers(0, 1000), st.sampled_from(["iid", "shift"]))
@settings(max_examples=50, deadline=None)
def test_iid_sizes_differ_by_at_most_one(clients: int, more: int, name: str) -> None:
    sizes = divide(name, labels_of(clients + more, 3), clients).sizes
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(1, 100), st.integers(0, 2000), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
@settings(max_examples=50, deadline=None)
def test_quantities_follow_the_power_law(clients: int, more: int, exponent: float) -> None:
    samples = clients + more
    sizes = divide("quantity", labels_of(samples, 3), clients, exponent=exponent).sizes
    parts = np.arange(1, clients + 1) ** -exponent
    assert np.abs(sizes - (1 + more * parts / parts.sum())).max() <= 1
    assert (np.diff(sizes) <= 0).all()


def test_shards_are_of_few_classes_and_about_alike() -> None:
    divided = divide("shards", labels_of(2000, 10), 20, shards_each=2)
    assert ((divided.counts() > 0).sum(axis=1) <= 4).all()
    assert divided.sizes.max() - divided.sizes.min() <= 2


def test_with_no_more_samples_than_clients_everybody_has_a_shard() -> None:
    assert (divide("shards", labels_of(50, 10), 50, shards_each=8).sizes == 1).all()


def test_a_small_alpha_leaves_few_classes_and_a_large_alpha_all() -> None:
    labels = labels_of(10_000, 10)
    few, all_ = ((divide("dirichlet", labels, 10, alpha=alpha).counts() > 20).sum(axis=1) for alpha in (0.01, 1000.0))
    assert few.mean() < 2.5
    assert (all_ == 10).all()


def test_an_alpha_too_small_for_floats_gives_each_class_to_a_single_client() -> None:
    draw = np.random.RandomState(0)
    assert any(np.isnan(np.random.RandomState(seed).dirichlet([0.001] * 2)).any() for seed in range(10))
    for _ in range(50):
        parts = dirichlet._parts(2, 0.001, draw)
        assert parts.sum() == pytest.approx(1)
        assert np.isfinite(parts).all()


def as_before(labels: Labels, clients: int, seed: int, alpha: float) -> Ids:
    """Return what the split was before it was drawn again: one draw, and whoever has nothing has nothing."""
    draw, of = np.random.RandomState(derive_seed(seed, random_streams.SPLIT) % 2**32), labels.by_split["train"]
    owners = np.empty(len(of), dtype=np.int64)
    for label in np.unique(of):
        rows = draw.permutation(np.flatnonzero(of == label))
        owners[rows] = apportioned_owners(len(rows), dirichlet._parts(clients, alpha, draw))
    return owners


@pytest.mark.parametrize("seed", range(12))
def test_a_draw_that_was_good_is_the_same_as_before(seed: int) -> None:
    labels = labels_of(1500, 10)
    before = as_before(labels, 20, seed, 0.1)
    least = int(np.bincount(before, minlength=20).min())
    found = {many: divide("dirichlet", labels, 20, seed=seed, alpha=0.1, min_samples=many) for many in (1, 10)}
    for many, divided in found.items():
        assert np.array_equal(divided.owners["train"], before) == (least >= many)
        assert divided.sizes.min() >= many


def test_it_is_drawn_again_and_not_only_filled_up() -> None:
    """One draw in nine gives each of 20 clients ten samples at alpha = 0.1; then nobody has just ten, as if filled."""
    sizes = [divide("dirichlet", labels_of(1500, 10), 20, seed=seed, alpha=0.1).sizes for seed in range(20)]
    assert min(size.min() for size in sizes) >= 10
    assert sum(int((size == 10).sum()) for size in sizes) < 10


@pytest.mark.parametrize(("clients", "alpha", "least"), [(100, 0.05, 7), (20, 0.001, 10), (700, 0.1, 1)])
def test_where_no_draw_reaches_everybody_whoever_has_most_gives(clients: int, alpha: float, least: int) -> None:
    divided = divide("dirichlet", labels_of(1500, 10), clients, alpha=alpha)
    assert divided.sizes.min() == least
    assert (divided.counts() > 0).sum(axis=1).mean() < 3, "still of few classes"


@pytest.mark.parametrize(("clients", "alpha"), [(20, 0.1), (100, 0.05)])
def test_common_set_ups_of_digits_are_taken_whatever_the_seed(clients: int, alpha: float) -> None:
    for seed in range(30):
        parsed = config.parse({"clients": clients, "split": "dirichlet", "dirichlet": {"alpha": alpha}, "seed": seed})
        assert list(config_checks.problems(parsed, 1)) == []


def test_hsu_s_clients_have_as_many_and_few_classes_where_alpha_is_small() -> None:
    labels = labels_of(10_003, 10)
    few, many = (divide("dirichlet_equal", labels, 20, alpha=alpha) for alpha in (0.1, 1000.0))
    for divided in (few, many):
        assert divided.sizes.max() - divided.sizes.min() <= 1
    assert np.median((few.counts() > 5).sum(axis=1)) <= 3
    shares = many.counts() / many.sizes[:, None]
    assert np.median(np.abs(shares - 0.1)) < 0.02


class TestClassImbalance:
    def config_of(self, split: str, imbalance: float, **more: Any) -> FederationConfig:
        return config.parse({"split": split, "clients": 10, "class_imbalance": imbalance, **more})

    @pytest.mark.parametrize("split", [name for name in NAMES if name != "column"])
    def test_classes_fall_off_geometrically_over_all_clients(self, split: str) -> None:
        labels = without_owners(labels_of(20_000, 10, validation=500))
        divided = data_division.divide(self.config_of(split, 50.0), labels)
        counts = divided.counts().sum(axis=0)
        assert counts[0] / counts[-1] == pytest.approx(50, rel=0.05)
        assert (np.diff(counts) < 0).all()
        assert counts[:-1] / counts[1:] == pytest.approx(np.full(9, 50 ** (1 / 9)), rel=0.1)
        assert counts.sum() == divided.sizes.sum() == sum(map(len, divided.train)) < 20_000
        assert (divided.owners["train"] == -1).sum() == 20_000 - counts.sum()
        assert (divided.owners["validation"] >= 0).all(), "and is judged by all classes alike"
        again = data_division.divide(self.config_of(split, 50.0), labels)
        assert np.array_equal(divided.owners["train"], again.owners["train"])

    def test_owners_keep_what_is_left(self) -> None:
        labels = labels_of(5000, 10, owners=7, validation=100)
        divided = data_division.divide(self.config_of("column", 20.0, clients=7), labels)
        assert labels.owners is not None
        used = divided.owners["train"] >= 0
        assert np.array_equal(divided.owners["train"][used], labels.owners["train"][used])
        assert divided.names == tuple("0123456")

    def test_it_trains_on_them_alone(self, tmp_path: Path) -> None:
        rounds = ready(tmp_path, {**DIGITS, "class_imbalance": 20.0})
        (report,) = train(rounds)
        assert report.samples == rounds.federation.divided.sizes.sum() < 1000

    def test_it_takes_classes(self) -> None:
        labels = without_owners(labels_of(500, 1))
        config = self.config_of("iid", 10.0)
        (misfit,) = data_division.check(config, data_division.divide(config, labels))
        assert misfit.field == "class_imbalance"


class TestASplitThatIsOlderThanAnOption:
    """A checkpoint of a run that knew no `min_samples`: its clients keep the samples that they had."""

    TABLE: dict[str, Any] = {**DIGITS, "clients": 20, "split": "dirichlet", "checkpoint_every": 1, "rounds": 1}
    TABLE |= {"dirichlet": {"alpha": 0.1, "min_samples": 1}, "seed": 1}

    def aged(self, folder: Path) -> None:
        """Run one round, and take the options from the checkpoint as if it were older than they are."""
        run(folder, self.TABLE)
        (path,) = (folder / "job" / "checkpoints").glob("*/COMMITTED")
        text = json.loads(path.read_text())
        del text["config"]["dirichlet"]["min_samples"]
        del text["config"]["class_imbalance"]
        path.write_text(json.dumps(text))

    def test_is_the_same_when_it_is_resumed(self, tmp_path: Path) -> None:
        labels = config_checks.shipped_labels(config.parse(self.TABLE))
        assert labels is not None
        before = as_before(labels, 20, 1, 0.1)
        assert 1 <= np.bincount(before, minlength=20).min() < 10
        self.aged(tmp_path)
        for rounds in (2, 3):  # the second from a checkpoint that knows the option
            table = {**self.TABLE, "dirichlet": {"alpha": 0.1}, "rounds": rounds}
            resumed = run(tmp_path, table)
            assert resumed.step == rounds
            assert np.array_equal(resumed.federation.divided.owners["train"], before)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"dirichlet": {"alpha": 0.1, "min_samples": 5}}, "min_samples"),
            ({"class_imbalance": 2.0}, "class_imbalance"),
        ],
    )
    def test_is_refused_with_another(self, change: dict[str, Any], field: str, tmp_path: Path) -> None:
        self.aged(tmp_path)
        with pytest.raises(ConfigError, match=field):
            run(tmp_path, {**self.TABLE, "rounds": 2, **change})


def test_a_long_tail_falls_geometrically_from_another_head_for_each() -> None:
    counts = divide("longtail", labels_of(100_000, 10), 10, imbalance=81.0).counts()
    assert sorted(counts.argmax(axis=1).tolist()) == list(range(10))
    assert counts.max(axis=1) / counts.min(axis=1) == pytest.approx(np.full(10, 81), rel=0.3)


def test_columns_keep_owners_together_and_join_the_smallest() -> None:
    owners = np.repeat(np.arange(5), [50, 40, 5, 4, 1])
    zeros = np.zeros(100, dtype=np.int64)
    labels = Labels(
        {"train": zeros, "validation": zeros[:5]}, ("",), {"train": owners, "validation": np.arange(5)}, tuple("abcde")
    )
    divided = divide("column", labels, 3)
    assert divided.sizes.tolist() == [50, 40, 10]
    assert divided.owners["validation"].tolist() == [0, 1, 2, 2, 2]
    assert divided.names == ("a", "b", "c and 2 more"), "by whose their samples are"
    assert divide("iid", labels, 3).names == ()


def test_names_are_packed_in_as_many_events_as_they_take() -> None:
    names = ["ada", "", "hôpital nº 9", "two\nlines \u202eback\udc80", "x" * 200, *(f"owner {n}" for n in range(5000))]
    parts = [tables.ClientNames.unpack(part.pack()) for part in tables.name_events(names)]
    assert len(parts) > 1
    assert max(len(str(part.pack())) for part in parts) < 32_768
    assert [part.first for part in parts] == [0, len(parts[0].names), len(parts[0].names) + len(parts[1].names)]
    found = [name for part in parts for name in part.names]
    assert found == [*names[:3], "twolines back", "x" * tables.NAME_CHARACTERS, *names[5:]]
    assert tables.name_events([]) == []


@pytest.mark.parametrize("names", ["no table", 7, base64.b85encode(zlib.compress(b"a\x1b[2J")).decode()])
def test_names_that_we_never_pack_are_refused(names: object) -> None:
    for event in ({"first": 0, "names": names}, tables.name_events(["ada"])[0].pack() | {"first": True}):
        with pytest.raises(tables.TableError):
            tables.ClientNames.unpack(event)


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_clients_and_a_hundred_thousand_samples_take_no_second(name: str) -> None:
    labels = labels_of(100_000, 10, owners=20_000, validation=20_000)
    began = time.process_time()
    divided = divide(name, labels, 10_000)
    assert len(divided.train) == 10_000
    assert time.process_time() - began < 1.0


class TestShift:
    def test_features_are_scaled_and_moved_by_client_alone(self) -> None:
        rows = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        owners = np.array([2, 0, 2, -1, 0, 5])
        viewed, labels = view((rows, torch.arange(6)), owners, 7, strength=0.5)
        scale, move = drawn(owners, 4, 7, 0.5)
        assert torch.equal(viewed, rows * torch.from_numpy(scale) + torch.from_numpy(move))
        assert labels.tolist() == list(range(6))
        assert torch.equal(viewed[3], rows[3])
        assert np.array_equal(scale[0], scale[2])
        assert not np.array_equal(scale[0], scale[1])
        alone, _ = view((rows[4:5], torch.arange(1)), owners[4:5], 7, strength=0.5)
        assert torch.equal(alone[0], viewed[4])
        other, _ = view((rows, torch.arange(6)), owners, 8, strength=0.5)
        assert not torch.equal(other, viewed)

    @given(st.integers(0, 2**32 - 1), st.floats(0, 10), st.integers(1, 50))
    @settings(max_examples=30, deadline=None)
    def test_no_further_than_its_strength(self, seed: int, strength: float, features: int) -> None:
        scale, move = drawn(np.arange(20), features, seed, strength)
        assert (np.abs(np.log(scale)) <= np.log1p(strength) + 1e-12).all()
        assert (np.abs(move) <= strength).all()

    def test_images_are_changed_by_channel(self) -> None:
        images = torch.ones(2, 3, 4, 4)
        viewed, _ = view((images, torch.zeros(2)), np.array([0, 1]), 0, strength=1.0)
        assert viewed.shape == images.shape
        assert (viewed == viewed[:, :, :1, :1]).all()
        assert not (viewed[0] == viewed[1]).any()

    def test_what_has_no_features_is_refused(self) -> None:
        with pytest.raises(ValueError, match='Write split = "iid"'):
            view((torch.zeros(2, 5, dtype=torch.int64),), np.array([0, 0]), 0)

    def test_clients_train_and_are_judged_by_what_they_see(self, tmp_path: Path) -> None:
        rounds = ready(tmp_path, {**DIGITS, "split": "shift"})
        plain = ready(tmp_path / "plain", DIGITS)
        owners = rounds.federation.divided.owners
        for split in ("train", "validation"):
            ids = np.arange(0, 200, 3)
            viewed, _ = rounds.federation.model.task.batch(split, ids)
            as_is = plain.federation.model.task.batch(split, ids)
            assert torch.equal(viewed, view(as_is, owners[split][ids], 0, strength=0.5)[0])
        train(rounds, 2)
        assert torch.isfinite(rounds.server.weights).all()

    def test_without_strength_nothing_changes(self, tmp_path: Path) -> None:
        tables: list[dict[str, Any]] = [{"split": "shift", "shift": {"strength": 0.0}}, {"split": "iid"}]
        weights = []
        for number, table in enumerate(tables):
            rounds = ready(tmp_path / str(number), {**DIGITS, **table})
            train(rounds)
            weights.append(rounds.server.weights)
        assert torch.equal(*weights)


def test_only_shift_changes_samples() -> None:
    assert [name for name in NAMES if parts.split(name).view is not None] == ["shift"]
