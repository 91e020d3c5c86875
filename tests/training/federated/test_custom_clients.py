"""Test custom clients: client.py, run like the built-in recipes."""

from __future__ import annotations

import json
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.federated.custom_files import ALGORITHM, LINEAR, MOMENTUM, RUN, ready, started
from tests.training.federated.in_process import RecordingReporter, digest
from training.config import choices
from training.config.base import ConfigError
from training.corpus.errors import DataError
from training.federated.client_failures import ClientsFailed
from training.federated.custom import part_loader
from training.federated.custom.client import RESERVED_SERIES
from training.federated.custom.user_code import UserCode
from training.federation import config_checks
from training.federation.config import parse


def test_a_model_and_data_are_enough(tmp_path: Path) -> None:
    loop = started(tmp_path, rounds=20, reporter=(reporter := RecordingReporter()))
    assert loop.run()
    (began,) = reporter.of("run.started")
    assert (began["recipe"], began["algorithm"], began["parameters"], began["alone"]) == ("client", "fedavg", 15, "")
    losses = reporter.series["validation_loss"]
    assert losses[20] < 0.8 * losses[1]
    assert reporter.series["accuracy"].keys() == losses.keys()


def test_each_client_has_the_samples_of_its_data_function(tmp_path: Path) -> None:
    loop = ready(tmp_path, LINEAR + "\n\ndef name(client):\n    return f'hospital {client}'\n")
    divided = loop.federation.divided
    assert divided.sizes.tolist() == [5, 10, 15]
    assert [len(ids) for ids in divided.validation] == [1, 2, 3]
    assert divided.labels.owner_names == ("hospital 0", "hospital 1", "hospital 2")
    x = torch.randn(18, 4, generator=torch.Generator().manual_seed(2))
    given, labels = loop.federation.model.task.batch("train", divided.train[2])
    assert torch.equal(given, x[torch.arange(18) % 6 != 5])
    assert torch.equal(labels, (given[:, 0] > 0).long() + (given[:, 1] > 0).long())
    assert loop.federation.divided.counts().sum(axis=1).tolist() == [5, 10, 15]


def test_validation_samples_of_the_data_function_are_used(tmp_path: Path) -> None:
    client = LINEAR.replace(
        "return x,", "return dict(train=(x, (x[:, 0] > 0).long()), validation=(x[:1], (x[:1, 0] > 0).long())) #"
    )
    divided = ready(tmp_path, client).federation.divided
    assert divided.sizes.tolist() == [6, 12, 18]
    assert [len(ids) for ids in divided.validation] == [1, 1, 1]


@pytest.mark.parametrize("training", ["", MOMENTUM])
def test_the_server_averages_models_of_a_custom_train_function(tmp_path: Path, training: str) -> None:
    source = "\n\ndef train(model, batches, learning_rate):\n    own = float(len(batches))\n"
    source += "    nn.init.constant_(model.weight, own)\n    nn.init.constant_(model.bias, -own)\n    return own\n"
    loop = ready(tmp_path, LINEAR + (training or source), batch=5)
    loop._round(1)
    if not training:  # 1, 2 and 3 batches of 5, 10 and 15 samples
        mean = (1 * 5 + 2 * 10 + 3 * 15) / 30
        weights = loop.server.weights.double()
        assert torch.allclose(weights, torch.tensor([mean] * 12 + [-mean] * 3, dtype=torch.float64))
    assert loop.work.unstacked_reason == "its clients train with train() of client.py"
    assert loop.server.losses.tolist() == [1.0, 2.0, 3.0] if not training else (loop.server.losses > 0).all()


def test_clients_are_evaluated_by_a_custom_function(tmp_path: Path) -> None:
    evaluate = "\n\ndef evaluate(model, x, y):\n    assert not model.training\n"
    evaluate += "    return {'accuracy': len(x), 'f1': torch.tensor([0.5])}\n"
    judged = (loop := ready(tmp_path, LINEAR + evaluate)).evaluator.evaluate(loop.server, should_continue=lambda: True)
    assert judged is not None
    assert judged.by_client["accuracy"].tolist() == [1, 2, 3]
    assert judged.means["accuracy"] == pytest.approx((1 * 1 + 2 * 2 + 3 * 3) / 6)
    assert judged.means["f1"] == 0.5
    assert judged.means["loss"] > 0


def test_a_custom_loss_is_minimised(tmp_path: Path) -> None:
    loss = "\n\ndef loss(model, x, y, *, towards=1.0):\n    return (model(x) - towards).square().sum(dim=1)\n"
    loop = ready(tmp_path, LINEAR + loss, learning_rate=0.05, epochs=50, client={"towards": 2.0})
    loop._round(1)
    loop._round(2)
    assert loop.work.unstacked_reason == ""
    assert torch.allclose(loop.server.weights[12:], torch.full((3,), 2.0), atol=0.1)


def test_it_resumes_bit_for_bit_and_requests_no_data_twice(tmp_path: Path) -> None:
    client = LINEAR.replace("data(client)", "data(client, *, asked)") + MOMENTUM
    client = client.replace("    draw =", "    open(f'{asked}/{client}', 'x').close()\n    draw =")
    for name, lengths in {"whole": [4], "parts": [2, 4]}.items():
        (marker := tmp_path / f"{name}-asked").mkdir()
        for rounds in lengths:
            assert started(tmp_path / name, client, rounds=rounds, client={"asked": str(marker)}).run()
        assert {path.name for path in marker.iterdir()} == {"0", "1", "2"}
    assert digest(tmp_path / "whole" / "run") == digest(tmp_path / "parts" / "run")


def test_a_checkpoint_goes_on_with_the_same_data_only(tmp_path: Path) -> None:
    assert started(tmp_path, rounds=2).run()
    with pytest.raises(DataError, match=r"client\.py returns different data from what the checkpoint was trained on"):
        started(tmp_path, LINEAR.replace("6 * client", "12 * client")).run()


SECRET = 1234.5625
LEAKY = LINEAR.replace("return x,", f"x[0] = {SECRET}\n    return x,")


@pytest.mark.parametrize(
    ("leak", "error"),
    [
        ("model.stolen = batches\n    model.register_buffer('more', batches[0][0])", None),
        ("model.register_parameter('more', nn.Parameter(batches[0][0]))", None),
        ("model.weight = nn.Parameter(batches[0][0])", r"ValueError: train\(\) left weight as .*5, 4\), but .*3, 4\)"),
        ("model.weight = None", r"ValueError: train\(\) took weight out of the model"),
        ("model.double()", r"ValueError: train\(\) left weight as torch\.float64"),
        ("return batches[0][0]", r"TypeError: train\(\) returns a Tensor of shape \(\d, 4\) as the mean loss"),
        ("return {'rows': batches}", r"TypeError: train\(\) returns a dict as the mean loss, not a number"),
    ],
)  # fmt: skip
def test_nothing_but_declared_tensors_leaves_a_client(tmp_path: Path, leak: str, error: str | None) -> None:
    """Whatever train() puts into the model or gives back: neither message, report nor checkpoint holds a sample."""
    client = f"{LEAKY}\n\ndef train(model, batches, learning_rate):\n    {leak}\n"
    reporter = RecordingReporter()
    if error is not None:
        with pytest.raises(ClientsFailed, match=error):
            started(tmp_path, client, reporter=reporter, batch=5).run()
        return
    loop = started(tmp_path, client, reporter=reporter, batch=5)
    assert loop.run()
    up = loop.work.messages_of(loop.work.training_task, loop.server).up
    assert {name: shape for name, (shape, _) in up.tensors.items()} == {"delta": (15,)}
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and "data" not in path.parts]
    assert written
    assert not any(struct.pack("<f", SECRET) * 4 in path.read_bytes() for path in written)
    assert str(SECRET) not in json.dumps([reporter.series, reporter.events])


def test_a_client_that_raises_drops_out_by_name(tmp_path: Path) -> None:
    client = LINEAR + MOMENTUM.replace("    optimizer =", "    assert len(batches) != 3, 'no three'\n    optimizer =")
    reporter = RecordingReporter()
    assert started(tmp_path, client, reporter=reporter, batch=5).run()
    (dropped,) = reporter.of("client.dropped")
    assert dropped["client"] == 2
    assert "client.py" in dropped["traceback"]
    assert "AssertionError: no three" in dropped["traceback"]
    assert reporter.series["dropped"][1] == 1


EXPANDED = LINEAR.replace(
    "    return nn.Linear(4, 3)",
    "    model = nn.BatchNorm1d(4)\n    model.running_mean = torch.zeros(1).expand(4)\n    return model",
)


def _with(data: str) -> str:
    return LINEAR.replace("    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()", data)


@pytest.mark.parametrize(
    ("client", "run", "message"),
    [
        ("def data(client): pass", {}, r"client\.entry: client\.py has no function model\(\), but data\(\)\."),
        ("x = 1", {}, r"client\.entry: client\.py has no function model\(\)"),
        (LINEAR, {"client": {"hiden": 1}}, r"run\.client\.hiden: client\.py has no such option"),
        (LINEAR + MOMENTUM, {"client": {"momntum": 0.1}}, r'has no such option\. Did you mean "momentum"'),
        (LINEAR + MOMENTUM, {"algorithm": "fedprox"}, r'run\.algorithm: is "fedprox", which .* steps'),
        (LINEAR + MOMENTUM, {"algorithm": "fednewton"}, r"run\.algorithm: "),
        (LINEAR, {"algorithm": "own"}, r"algorithm\.py defines neither aggregate\(\) nor run_round\(\)"),
        (_with("    return x"), {}, r"data\(0\) returns a Tensor, not a tuple of tensors"),
        (_with("    return x,"), {}, r"data\(\) returns inputs without labels"),
        (_with("    return x, 'label'"), {}, r"data\(0\) returns something that is not a tensor"),
        (_with("    return x, x[:3, 0].long()"), {}, r"data\(0\) returns parts of 6, 3 samples"),
        (_with("    return x[:client], x[:client, 0].long()"), {}, r"data\(0\) returns no sample to train on"),
        (_with("    return x[:, : client + 1], x[:, 0].long()"), {}, r"data\(1\) returns float32 of shape .*, 2\)"),
        (_with("    return {'train': (x, x), 'test': (x, x)}"), {}, r"returns a dict of 'train', 'test'"),
        (_with("    return torch.tensor(1.0), torch.tensor(1)"), {}, r"with the samples as their first dim"),
        (LINEAR.replace("nn.Linear(4, 3)", "3"), {}, r"model\(\) returns a int, not a torch\.nn\.Module"),
        (LINEAR.replace("nn.Linear(4, 3)", "nn.Linear(4, 3, dtype=torch.cfloat)"), {}, r"weight .* has complex"),
        (f"HEAD = 'fc'\n{LINEAR}", {}, r"HEAD is 'fc', but the model has no such module"),
        (LINEAR + "\n\ndef loss(model, x, y):\n    return model(x).sum()\n", {}, r"loss\(\) returns a tensor of"),
        (LINEAR.replace("nn.Linear(4, 3)", "nn.Flatten()"), {}, r"run\.recipe: client makes a model that has nothing"),
        (EXPANDED, {}, r"client\.py: the buffer running_mean of the model .* Write expand\(…\)\.clone\(\)"),
        (LINEAR.replace("model()", "model(*, hidden)"), {}, r"run\.client\.hidden: is missing, and model"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_what_to_do(
    tmp_path: Path, client: str, run: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as refused:
        ready(tmp_path, client, **({"recipe": "client"} | run))
    assert re.search(message, str(refused.value)), refused.value


def test_a_holdout_that_leaves_no_sample_is_refused_before_the_run() -> None:
    (problem,) = config_checks.problems(parse({"recipe": "client", "client": {"held_out": 1}}), 1)
    assert (problem.field, problem.message) == (
        "client.held_out", "is 1, which leaves no sample for training. Write 0, or at least 2."
    )  # fmt: skip


NORMALISED = (
    LINEAR.replace(
        "def model():",
        """class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x))


def model():""",
    ).replace("nn.Linear(4, 3)\n\n\ndef data", "Normalised()\n\n\ndef data")
    + "\nHEAD = 'head'\n"
)
TAKES_WHAT_TRAIN_GIVES = {
    *("fedadagrad", "fedadam", "fedasync", "fedavg", "fedavgm", "fedbn", "fedbuff", "fedper", "fedstein", "fedyogi"),
    *("own", "qfedavg"),
}


@pytest.mark.parametrize("algorithm", choices.names("federated.algorithms"))
def test_a_custom_train_is_refused_where_the_algorithm_would_not_be_applied(tmp_path: Path, algorithm: str) -> None:
    pace = {"pace": "asynchronous"} if algorithm in ("fedasync", "fedbuff") else {}
    files = NORMALISED + MOMENTUM, ALGORITHM
    if algorithm in TAKES_WHAT_TRAIN_GIVES:
        loop = ready(tmp_path, *files, recipe="client", algorithm=algorithm, **pace)
        before = loop.server.weights.clone()
        loop._round(1)
        assert not torch.equal(loop.server.weights, before)
    else:
        with pytest.raises(ConfigError, match=rf'run\.algorithm: .*"{algorithm}"'):
            ready(tmp_path, *files, recipe="client", algorithm=algorithm, **pace)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("client.kept['v'] = client.apart().descend(lambda w, g: g + w)", "takes or corrects the steps of clients"),
        ("delta = delta / client.steps", "counts the steps of clients"),
    ],
)
def test_so_is_a_custom_algorithm(tmp_path: Path, train: str, message: str) -> None:
    """Ditto and FedNova do the same."""
    algorithm = "SENT = {'delta': 'samples'}\n\n\ndef initial_client_state(model):\n    return {'v': model}\n\n\n"
    algorithm += (
        f"def train(client):\n"
        f"    delta = client.descend() - client.model\n    {train}\n    return {{'delta': delta}}\n\n\n{ALGORITHM}"
    )
    with pytest.raises(ConfigError, match=message):
        ready(tmp_path, LINEAR + MOMENTUM, algorithm, recipe="client", algorithm="own")


def test_errors_of_the_file_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        ready(tmp_path, "import no_such_package\n")
    with pytest.raises(ZeroDivisionError):
        ready(tmp_path / "data", _with("    return 1 / 0"))


def test_what_is_judged_wrongly_names_the_client(tmp_path: Path) -> None:
    evaluate = "\n\ndef evaluate(model, x, y):\n    return {'rows': x}\n"
    with pytest.raises(
        ClientsFailed,
        match=r"client \d can't be evaluated:[\s\S]*evaluate\(\) returns a Tensor of shape \(\d, 4\) as rows",
    ):
        started(tmp_path, LINEAR + evaluate).run()


def test_files_next_to_it_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_layers.py").write_text("from torch import nn\nOWN = nn.Linear(4, 3)\n")
    loop = ready(tmp_path, LINEAR.replace("nn.Linear(4, 3)", "__import__('own_layers').OWN"))
    assert loop.federation.model.weights.size == 15


SCALED = LINEAR.replace(
    "def model():\n    return nn.Linear(4, 3)",
    """class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("hidden_by", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, *, x):
        if self.training:
            self.seen += 1
        return self.scale * self.linear(x)


def model():
    return Scaled()


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x=x), y, reduction="none")""",
)


def test_numbers_without_dims_train_and_constants_stay_at_home(tmp_path: Path) -> None:
    """A scale without dims, a causal mask full of −∞, a count that goes on; and a model that is called by name."""
    reporter = RecordingReporter()
    loop = started(tmp_path, SCALED, reporter=reporter)
    assert loop.run()
    assert loop.federation.model.weights.size == 16
    assert list(loop.federation.model.statistics.shapes) == ["seen"]
    assert reporter.series["validation_loss"][4] < reporter.series["validation_loss"][1]


def test_what_is_drawn_by_chance_follows_from_the_seed(tmp_path: Path) -> None:
    drawing = "\n\ndef train(model, batches, learning_rate):\n    import random\n    import numpy as np\n"
    drawing += (
        "    nn.init.constant_(model.bias, random.random() + np.random.rand() + torch.rand(()).item())\n    return 0\n"
    )
    noise = (
        "import torch\n\n\ndef aggregate(server):\n    return server.model + server.mean['delta'] + torch.randn(15)\n"
    )
    found = [started(tmp_path / name, LINEAR + drawing, noise, recipe="client", algorithm="own") for name in "ab"]
    for place, loop in enumerate(found):
        torch.manual_seed(place)  # what was drawn before, on another rank say, counts for nothing
        assert loop.run()
    assert torch.equal(found[0].server.weights, found[1].server.weights)


def test_scores_have_names_that_nobody_else_has(tmp_path: Path) -> None:
    """A name that a federation reports by itself is refused, except the accuracy and the loss."""
    reporter = RecordingReporter()
    assert started(tmp_path, reporter=reporter, rounds=1).run()
    assert reporter.series.keys() - {"loss", "accuracy"} <= RESERVED_SERIES
    evaluate = "\n\ndef evaluate(model, x, y):\n    return {'dropped': 1}\n"
    with pytest.raises(ClientsFailed, match=r"a score called 'dropped', a name that Vigil uses"):
        started(tmp_path / "taken", LINEAR + evaluate).run()


def test_a_client_that_exits_drops_out(tmp_path: Path) -> None:
    client = LINEAR + MOMENTUM.replace("    optimizer =", "    len(batches) == 3 and exit(3)\n    optimizer =")
    reporter = RecordingReporter()
    assert started(tmp_path, client, reporter=reporter, batch=5).run()
    assert reporter.of("client.dropped")[0]["client"] == 2
    assert "exit code 3" in reporter.of("client.dropped")[0]["traceback"]


def test_odd_files_next_to_it_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "code" / "folder.py").mkdir(parents=True)
    (tmp_path / "code" / ".#client.py").symlink_to("me@here.1234")
    client = LINEAR.replace(
        "return x,", "x = torch.from_numpy(x.numpy()[:, ::-1].copy()).numpy()[:, ::-1]\n    return x,"
    )
    assert (
        ready(
            tmp_path, client.replace("(x[:, 0] > 0).long() + (x[:, 1] > 0).long()", "x[:, 0] > 0")
        ).work.unstacked_reason
        == ""
    )


def test_a_file_that_is_called_as_a_module_of_others_takes_nobodys_place(tmp_path: Path) -> None:
    loop = ready(tmp_path, LINEAR)
    (tmp_path / "code" / "random.py").write_text(LINEAR)
    (tmp_path / "code" / "torch.py").write_text(ALGORITHM)
    user_code = UserCode(tmp_path / "code", loop.workspace.job_dir, "random.py", "torch.py")
    config = parse({**RUN, "recipe": "client", "algorithm": "own"})
    part_loader.load_recipe(config, user_code)
    part_loader.load_algorithm(config, user_code)
    assert sys.modules["random"] is random
    assert sys.modules["torch"] is torch
