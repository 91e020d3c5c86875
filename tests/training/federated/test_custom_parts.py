"""Test a custom rule, selection and split at run time: aggregation.py, selection.py and split.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training import ranks
from tests.training.federated.custom_files import LINEAR, ready, started
from tests.training.federated.in_process import RecordingReporter, accuracy, digest, start, train
from training import run_file
from training.config.base import ConfigError
from training.federated.controller import QuorumLost
from training.federated.round_report import REJECTED
from training.federation import config_checks
from training.federation.config import parse
from training.runtime.distributed import World

EXAMPLE = Path(__file__).parents[3] / "examples" / "parts"
DIGITS: dict[str, Any] = {"recipe": "tabular", "clients": 10, "learning_rate": 0.3, "tabular": {"hidden": 16}}
RULE = "import torch\n\n\ndef combine(rows, weights):\n    "
SELECT = "import numpy as np\n\n\ndef select(round):\n    "
DIVIDE = "import numpy as np\n\n\ndef divide(labels, clients, rng):\n    "
EVERYBODY = f"{SELECT}return round.eligible\n"
BY_TURNS = f"{DIVIDE}return np.arange(len(labels.by_split['train'])) % clients\n"
MEAN = f"{RULE}return (weights @ rows.double()) / weights.sum(), []\n"


def with_rule(folder: Path, text: str, *, options_of_rule: dict[str, Any] | None = None, **run: Any) -> Any:
    options = {"own_aggregation": options_of_rule} if options_of_rule else {}
    return ready(
        folder, files={"aggregation.py": text}, **{**DIGITS, "aggregation": "own_aggregation", **options, **run}
    )


def with_selection(folder: Path, text: str, **run: Any) -> Any:
    return ready(folder, files={"selection.py": text}, **{**DIGITS, "selection": "own_selection", **run})


def with_split(folder: Path, text: str, **run: Any) -> Any:
    return ready(folder, files={"split.py": text}, **{**DIGITS, "split": "own_split", **run})


class TestRule:
    TRIMMED = "import torch\n\n\ndef combine(rows, weights, *, trim=1):\n"
    TRIMMED += (
        "    ordered = rows.double().sort(dim=0).values\n    return ordered[trim : len(rows) - trim].mean(dim=0), []\n"
    )

    @pytest.mark.parametrize("more", [{}, {"tabular": {"hidden": 16, "batch_norm": True}}], ids=["plain", "batch_norm"])
    def test_is_like_vigils(self, tmp_path: Path, more: dict[str, Any]) -> None:
        """The trimmed mean as somebody else would write it; running statistics pass through it, too."""
        attacked = {**DIGITS, "attack": "scaling", "attackers": [3], **more}
        custom = with_rule(tmp_path / "own", self.TRIMMED, options_of_rule={"trim": 2}, **attacked)
        theirs = start(tmp_path / "theirs", {**attacked, "aggregation": "trimmed_mean", "trimmed_mean": {"trim": 2}})
        theirs._prepare(None)
        train(custom, 3)
        train(theirs, 3)
        assert torch.allclose(custom.server.weights, theirs.server.weights, atol=1e-6)
        assert torch.allclose(custom.server.statistics, theirs.server.statistics, atol=1e-6)

    def test_sees_each_update_with_its_weight(self, tmp_path: Path) -> None:
        rule = (
            f"{RULE}seen.append((rows.clone(), weights.clone()))\n    return rows.double()[0], [2, 1]\n\n\nseen = []\n"
        )
        loop = ready(
            tmp_path, LINEAR, files={"aggregation.py": rule}, recipe="client", aggregation="own_aggregation", clients=3
        )
        before = loop.server.weights.clone()
        (report,) = train(loop)
        ((rows, weights),) = sys.modules["aggregation"].seen
        assert (tuple(rows.shape), rows.dtype, weights.dtype) == ((3, 15), torch.float32, torch.float64)
        assert weights.tolist() == [5, 10, 15]
        assert torch.allclose(loop.server.weights, before + rows[0])
        assert sorted(report.clients[report.states == REJECTED].tolist()) == [1, 2]

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ("rows.mean(dim=0)", r"returns a tensor of shape \(1210,\)\. Return a row and the places left out: row"),
            ("None", r"returns a NoneType\. Return a row"),
            ("rows, []", r"returns a tensor of shape \(10, \d+\) as the row\. Return a tensor of shape \(\d+,\)"),
            ("rows[0].tolist(), []", r"returns a list as the row"),
            ("rows[0].long(), []", r"returns a row of torch\.int64\. Return a floating-point tensor"),
            ("rows[0] / 0, []", r"returns a row with [\d,]+ NaN or Inf"),
            ("rows[0], [10]", r"leaves out place 10 of 10 rows\. Return integers from 0 to 9"),
            ("rows[0], [-1]", r"leaves out place -1 of 10 rows"),
            ("rows.double()[0] + 1e39, []", r"returns a row with 1,210 NaN or Inf in torch\.float32"),
            ("rows[0].to_sparse(), []", r"returns a row that is torch\.sparse_coo\. Return a dense tensor"),
            ("rows[0].to('meta'), []", r"returns a row that is on meta"),
            ("rows[0], range(10**9)", r"leaves out place 10 of 10 rows"),
            ("rows[0], [1, 1]", r"names a place twice"),
            ("rows[0], weights > 0", r"as the places left out\. Return integers"),
            ("rows[0], [0.5]", r"returns a list as the places left out"),
            ("rows[0], None", r"returns a NoneType as the places left out"),
            ("rows[0], range(10)", r"leaves out all 10 rows\. Keep one, or raise .+\.TooFewUpdates"),
        ],
    )  # fmt: skip
    def test_answer_is_checked(self, tmp_path: Path, answer: str, message: str) -> None:
        loop = with_rule(tmp_path, f"{RULE}return {answer}\n")
        with pytest.raises((TypeError, ValueError), match=rf"^combine\(\) of aggregation\.py .*{message}"):
            train(loop)

    @pytest.mark.parametrize("places", ["[1, 3]", "(3, 1)", "torch.tensor([1, 3])", "torch.tensor([1, 3]).numpy()"])
    def test_places_may_be_any_list_of_numbers(self, tmp_path: Path, places: str) -> None:
        (report,) = train(with_rule(tmp_path, f"{RULE}return rows[0], {places}\n"))
        assert sorted(report.clients[report.states == REJECTED].tolist()) == [1, 3]

    def test_what_it_writes_into_its_arguments_changes_nothing(self, tmp_path: Path) -> None:
        """The server's copies decide how clients are weighted and how distant their statistics are."""
        table = {"tabular": {"hidden": 16, "batch_norm": True}}
        clean = with_rule(tmp_path / "clean", MEAN, **table)
        writing = MEAN.replace("return", "answer =") + "    rows.zero_(), weights.zero_()\n    return answer\n"
        dirty = with_rule(tmp_path / "dirty", writing, **table)
        assert [report.samples for report in train(clean, 2)] == [report.samples for report in train(dirty, 2)]
        assert torch.equal(clean.server.weights, dirty.server.weights)
        assert torch.equal(clean.server.statistics, dirty.server.statistics)

    def test_too_few_updates_lose_the_round(self, tmp_path: Path) -> None:
        few = f"from training.federation.parts import TooFewUpdates\n{RULE}raise TooFewUpdates('11 wanted')\n"
        with pytest.raises(QuorumLost, match="round 1 was lost 3 times: 11 wanted"):
            train(with_rule(tmp_path, few))

    @pytest.mark.parametrize(
        ("table", "field"),
        [
            ({"algorithm": "scaffold"}, "aggregation"),
            ({"algorithm": "feddyn"}, "aggregation"),
            ({"pace": "asynchronous"}, "aggregation"),
            ({"algorithm": "gossip"}, "aggregation"),
            ({"filters": ["topk", "int8"], "pace": "deadline", "attack": "sign_flip"}, None),
        ],
    )
    def test_goes_with_what_a_robust_rule_goes_with(self, table: dict[str, Any], field: str | None) -> None:
        found = [
            problem.field for problem in config_checks.problems(parse({**DIGITS, **table, "aggregation": "median"}), 1)
        ]
        assert (found[0] if found else None) == field
        custom = parse({**DIGITS, **table, "aggregation": "own_aggregation"})
        assert [problem.field for problem in config_checks.problems(custom, 1)] == found

    def test_goes_with_filters_and_late_updates(self, tmp_path: Path) -> None:
        table = {"filters": ["topk", "int8"], "pace": "deadline", "deadline": {"quantile": 0.5}, "split": "quantity"}
        assert len(train(with_rule(tmp_path, MEAN, **table), 3)) == 3


class TestSelection:
    def test_the_selected_clients_take_part(self, tmp_path: Path) -> None:
        rule = f"{SELECT}return np.array([round.round, 9])\n"
        loop = with_selection(tmp_path, rule, per_round=2)
        assert [sorted(report.clients.tolist()) for report in train(loop, 3)] == [[1, 9], [2, 9], [3, 9]]
        assert loop.server.last_rounds.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 3]

    def test_the_selection_gets_all_facts(self, tmp_path: Path) -> None:
        observed = f"{SELECT}seen.append(round)\n    return round.eligible[: round.count]\n\n\nseen = []\n"
        loop = with_selection(tmp_path, observed, per_round=4)
        train(loop, 2)
        first, second = sys.modules["selection"].seen
        assert (first.wanted, first.round, first.attempt, len(first.eligible)) == (4, 1, 1, 10)
        assert first.samples.tolist() == loop.federation.divided.sizes.tolist()
        assert np.isnan(first.losses).all()
        assert second.last_rounds.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
        assert (~np.isnan(second.losses)).tolist() == [True] * 4 + [False] * 6

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ("None", r"returns a NoneType\. Return client ids from round\.eligible"),
            ("[]", r"returns no client in round 1\. Return at least one of round\.eligible"),
            ("round.eligible > 3", r"returns true and false\. Return client ids: round\.eligible\[mask\]"),
            ("[0.0, 1.0]", r"returns an array of float64 of shape \(2,\)"),
            ("[[0], [1]]", r"returns an array of int64 of shape \(2, 1\)"),
            ("[[0], [1, 2]]", r"returns a list"),
            ("[0, 10]", r"returns client 10, which is not in round\.eligible"),
            ("[-1, 3]", r"returns client -1, which is not in round\.eligible"),
            ("[3, 1]", r"not ascending, or one twice\. Return np\.unique"),
            ("[1, 1]", r"not ascending, or one twice"),
        ],
    )
    def test_answer_is_checked(self, tmp_path: Path, answer: str, message: str) -> None:
        loop = with_selection(tmp_path, f"{SELECT}return {answer}\n")
        with pytest.raises((TypeError, ValueError), match=rf"^select\(\) of selection\.py .*{message}"):
            train(loop)

    def test_what_it_writes_into_its_argument_changes_nothing(self, tmp_path: Path) -> None:
        writing = (
            f"{SELECT}round.losses[:] = 7\n    round.samples[:] = 1\n    round.last_rounds[:] = 9\n    return [0]\n"
        )
        loop = with_selection(tmp_path, writing, per_round=1)
        train(loop, 1)
        assert np.isnan(loop.server.losses[1:]).all()
        assert loop.server.last_rounds.tolist() == [1] + [0] * 9
        assert loop.federation.divided.sizes.min() > 1

    @pytest.mark.parametrize("pace", ["deadline", "asynchronous"])
    def test_goes_with_every_pace(self, tmp_path: Path, pace: str) -> None:
        loop = with_selection(tmp_path, f"{SELECT}return round.eligible[: round.count]\n", per_round=4, pace=pace)
        assert len(train(loop, 3)) == 3


class TestSplit:
    def test_clients_have_the_samples_of_the_split(self, tmp_path: Path) -> None:
        by_label = f"{DIVIDE}return labels.by_split['train']\n"
        loop = with_split(tmp_path, by_label)
        counts = loop.federation.divided.counts()
        assert (counts.diagonal() == counts.sum(axis=1)).all()
        labels, owners = loop.federation.divided.labels.by_split, loop.federation.divided.owners
        assert (owners["validation"] == labels["validation"]).all(), "judged by what they train on"
        assert len(train(loop, 1)) == 1

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ("None", r"returns a NoneType\. Return 1,\d+ integers from 0 to 9: the client of each sample"),
            ("np.arange(10)", r"returns an array of int64 of shape \(10,\)"),
            ("(np.arange(len(labels.by_split['train'])) % clients) / 1", r"returns an array of float64"),
            ("labels.by_split['train'] + 1", r"assigns a sample to client 10\. Return"),
            ("labels.by_split['train'] - 1", r"assigns a sample to client -1\. Return"),
            (
                "labels.by_split['train'] // 2",
                r"assigns no sample to 5 of 10 clients \(5, 6, 7, …\)\. Assign at least one",
            ),
        ],
    )
    def test_answer_is_checked(self, tmp_path: Path, answer: str, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=rf"^divide\(\) of split\.py .*{message}"):
            with_split(tmp_path, f"{DIVIDE}return {answer}\n")

    def test_samples_are_transformed_by_its_view(self, tmp_path: Path) -> None:
        view = "\n\ndef view(batch, owners, seed, *, times=1.0):\n"
        view += "    features, labels = batch\n"
        view += "    return features * times * torch.from_numpy(1.0 + owners)[:, None], labels\n"
        files = {"split.py": f"import torch\n{BY_TURNS}{view}"}
        plain = with_split(tmp_path / "plain", BY_TURNS)
        table = {**DIGITS, "split": "own_split", "own_split": {"times": 2.0}, "dtype": "fp64"}
        observed = ready(tmp_path / "seen", files=files, **table)
        ids = plain.federation.divided.train[3][:5]
        was, is_ = (loop.federation.model.task.batch("train", ids)[0].double() for loop in (plain, observed))
        assert torch.allclose(is_, was * 8)
        train(observed, 1)
        assert accuracy(observed) > 0

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ("batch[0]", r"returns a Tensor\. Return a tuple of 2 tensors"),
            ("(batch[0][:1], batch[1])", r"returns parts of 1, \d+ samples\. Return a tuple of 2 tensors"),
        ],
    )
    def test_view_is_checked(self, tmp_path: Path, answer: str, message: str) -> None:
        bad = f"{BY_TURNS}\n\ndef view(batch, owners, seed):\n    return {answer}\n"
        with pytest.raises(Exception, match=rf"view\(\) of split\.py {message}"):
            train(with_split(tmp_path, bad))

    def test_a_checkpoint_goes_on_with_the_same_division_only(self, tmp_path: Path) -> None:
        run = {**DIGITS, "split": "own_split", "rounds": 2}
        assert started(tmp_path, files={"split.py": BY_TURNS}, **run).run()
        turned = BY_TURNS.replace("return np", "return 9 - np")
        with pytest.raises(ConfigError, match=r"client\.split: split\.py divides the samples differently"):
            started(tmp_path, files={"split.py": turned}, **{**run, "rounds": 4}).run()
        assert started(tmp_path, files={"split.py": f"{BY_TURNS}# the same\n"}, **{**run, "rounds": 4}).run()

    @pytest.mark.parametrize(
        ("table", "field"),
        [
            ({"clients": 1500}, "clients"),
            ({"aggregation": "fltrust", "fltrust": {"root_samples": 300}}, "fltrust.root_samples"),
            ({"own_split": {"labels_each": 2}}, None),
        ],
    )
    def test_what_is_wrong_with_any_split_is_found_before(self, table: dict[str, Any], field: str | None) -> None:
        found = list(config_checks.problems(parse({**DIGITS, "split": "own_split", **table}), 1))
        assert [problem.field for problem in found] == ([field] if field else [])

    def test_custom_clients_refuse_a_split(self) -> None:
        (problem,) = config_checks.problems(parse({"recipe": "client", "split": "own_split"}), 1)
        assert problem.field == "split"
        assert "data(client) of client.py already says what each client has" in problem.message


DRAWING = {
    "aggregation.py": f"import random\nimport numpy as np\n{RULE}noise = torch.randn(rows.shape[1]) * random.random()\n"
    "    row = rows.double().mean(dim=0) + 1e-3 * noise * np.random.rand()\n"
    "    return row, [int(torch.randint(len(rows), ()))]\n",
    "selection.py": f"import torch\n{SELECT}np.random.shuffle(round.eligible)\n"
    "    return np.sort(round.rng.permutation(round.eligible)[: int(torch.randint(2, 6, ()))])\n",
    "split.py": f"{DIVIDE}many = len(labels.by_split['train'])\n    rng.rand(7)\n"
    "    return np.random.permutation(np.arange(many) % clients)\n",
}
"""Each draws from everything that there is."""
ALL_CUSTOM = {"aggregation": "own_aggregation", "selection": "own_selection", "split": "own_split", "per_round": 6}


def test_what_they_draw_follows_from_the_seed_over_a_resume(tmp_path: Path) -> None:
    run = {**DIGITS, **ALL_CUSTOM}
    for name, lengths in {"whole": [4], "parts": [2, 4]}.items():
        for rounds in lengths:
            assert started(tmp_path / name, files=DRAWING, **{**run, "rounds": rounds}).run()
    assert started(tmp_path / "other", files=DRAWING, **{**run, "rounds": 4, "seed": 1}).run()
    found = [digest(tmp_path / name / "run") for name in ("whole", "parts", "other")]
    assert found[0] == found[1] != found[2]


def _run_rank(rank: int, size: int, folder: Path, files: dict[str, str], table: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    world = World(rank, size, torch.device("cpu"))
    try:
        loop = ready(folder / f"{size}" / f"rank-{rank}", files=files, world=world, **table)
        reports = train(loop, 3)
        state = loop.server.weights.numpy().tobytes().hex(), [report.clients.tolist() for report in reports]
        (folder / f"{size}-{rank}").write_text(repr(state))
    except Exception as error:
        (folder / f"{size}-{rank}").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def on_ranks(size: int, folder: Path, files: dict[str, str], table: dict[str, Any]) -> list[str]:
    processes = [ranks.fork(_run_rank, rank, size, folder, files, table) for rank in range(size)]
    for process in processes:
        process.join(ranks.SECONDS)
    assert [process.exitcode for process in processes] == [0] * size
    return [(folder / f"{size}-{rank}").read_text() for rank in range(size)]


@pytest.mark.slow
def test_the_same_bits_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, tmp_path, DRAWING, {**DIGITS, **ALL_CUSTOM})
    assert alone.startswith("('"), alone  # a state, not an error that would be the same on two ranks
    assert on_ranks(2, tmp_path, DRAWING, {**DIGITS, **ALL_CUSTOM}) == [alone, alone]


@pytest.mark.slow
def test_a_file_that_fails_on_rank_0_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 alone has the traceback; nobody waits for it for ever."""
    for number, (name, text) in enumerate(
        {
            "aggregation.py": f"{RULE}raise KeyError('combine')\n",
            "selection.py": f"{SELECT}raise KeyError('select')\n",
            "split.py": f"{DIVIDE}raise KeyError('divide')\n",
        }.items()
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        key = name.removesuffix(".py")
        found = on_ranks(2, folder, {name: text}, {**DIGITS, key: f"own_{key}"})
        assert found[0].partition(":")[0] == "KeyError"
        assert "losed by peer" in found[1] or "reset by peer" in found[1], found[1]


def test_the_example_runs(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "code")
    file = run_file.load(tmp_path / "code" / "job.toml")
    assert file.client is not None
    for name in ("aggregation", "selection", "split"):
        sys.modules.pop(name, None)
    reporter, table = RecordingReporter(), {**file.config.model_dump(), "rounds": 30}
    loop = start(tmp_path / "run", table, code=file.client.directory, reporter=reporter)
    assert loop.run()
    labels = (loop.federation.divided.counts() > 0).sum(axis=1)
    assert set(labels.tolist()) == {2}
    assert np.ptp(loop.federation.divided.sizes) < 100
    assert loop.server.last_rounds.min() >= 27, "everybody takes part again soon"
    assert reporter.series["accuracy"][30] > 0.6
