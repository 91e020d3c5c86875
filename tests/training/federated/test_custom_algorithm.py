"""Test custom algorithms: algorithm.py, run like the built-in ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.training.federated.custom_files import ALGORITHM, LINEAR, ready, started
from training.config.base import ConfigError


def test_a_custom_algorithm_equals_the_built_in_algorithm(tmp_path: Path) -> None:
    """FedAvgM as somebody else would write it, on Vigil's data."""
    momentum = """
import torch


def initial_server_state(model):
    return {"velocity": torch.zeros_like(model)}


def aggregate(server, *, momentum=0.9):
    server.memory["velocity"] = momentum * server.memory["velocity"] + server.mean["delta"]
    return server.model + server.memory["velocity"]
"""
    table = {"recipe": "tabular", "tabular": {"hidden": 8}}
    custom = started(tmp_path / "own", LINEAR, momentum, **table, algorithm="own", own={"momentum": 0.5})
    theirs = started(tmp_path / "theirs", **table, algorithm="fedavgm", fedavgm={"momentum": 0.5})
    assert custom.run()
    assert theirs.run()
    assert torch.equal(custom.server.weights, theirs.server.weights)


def test_an_algorithm_declares_what_its_clients_send(tmp_path: Path) -> None:
    train = "\n\ndef train(client, *, times=1.0):\n    return {'delta': times * (client.descend() - client.model)}\n"
    aggregate = "\n\ndef aggregate(server):\n    return server.model + server.mean['delta']\n"
    with pytest.raises(ConfigError, match=r"client\.algorithm: algorithm\.py has train\(\), but does not say"):
        ready(tmp_path / "silent", LINEAR, train + aggregate, algorithm="own")
    sent = "SENT = {'delta': 'samples'}\n"
    loop = ready(tmp_path, LINEAR, sent + train + aggregate, algorithm="own", own={"times": 0.0}, recipe="client")
    before = loop.server.weights.clone()
    loop._round(1)
    assert torch.equal(loop.server.weights, before)


@pytest.mark.parametrize(
    ("algorithm", "error"),
    [
        ("return 3.0", r"aggregate\(\) of algorithm\.py returns a float, not the next model: 15 parameters"),
        ("pass", r"aggregate\(\) of algorithm\.py returns a NoneType"),
        ("return server.model.mean().reshape(1)", r"returns a tensor of shape \(1,\), not the next model: 15"),
        ("server.memory['n'] = torch.ones(2)\n    return server.model", r"left server\.memory\['n'\] as .*2.* was .*1"),
        ("server.memory['n'] = 1.0\n    return server.model", r"left server\.memory\['n'\] as float"),
        ("server.memory['more'] = torch.ones(1)\n    return server.model", r"left server\.memory\['more'\] as"),
    ],
)
def test_results_of_an_algorithm_are_checked(tmp_path: Path, algorithm: str, error: str) -> None:
    file = "import torch\n\n\ndef initial_server_state(model):\n    return {'n': torch.ones(1)}\n\n\n"
    file += "def aggregate(server):\n    "
    with pytest.raises(TypeError, match=error):
        started(tmp_path, LINEAR, file + algorithm, recipe="client", algorithm="own").run()


ROUND = """
import torch

CALLS = []


def initial_server_state(model):
    return {"n": torch.ones(1)}


def run_round(controller):
    CALLS.append(controller.round)
"""


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("controller.train()", r"run_round\(\) of algorithm\.py returns a NoneType, not the next model: 15 parameters"),
        ("return controller.server.shared[:3]", r"run_round\(\) of algorithm\.py returns a tensor of shape \(3,\)"),
        (
            "controller.server.memory['n'] = torch.ones(2)\n    return controller.server.shared",
            r"run_round\(\) of algorithm\.py left server\.memory\['n'\] as .*2.* was .*1",
        ),
    ],
)
def test_the_result_of_run_round_is_checked(tmp_path: Path, end: str, error: str) -> None:
    """A run_round() without a return is no lost round: it is not tried again."""
    loop = started(tmp_path, LINEAR, f"{ROUND}    {end}\n", recipe="client", algorithm="own")
    with pytest.raises(TypeError, match=error):
        loop.run()
    assert sys.modules["algorithm"].CALLS == [1]  # type: ignore[attr-defined]


def test_run_round_needs_no_aggregate(tmp_path: Path) -> None:
    end = "    return controller.server.shared.double() + controller.train().mean['delta']\n"
    files = {"run_round": ROUND + end, "aggregate": ALGORITHM}
    loops = [ready(tmp_path / name, LINEAR, file, recipe="client", algorithm="own") for name, file in files.items()]
    for loop in loops:
        loop._round(1)
    assert torch.equal(loops[0].server.weights, loops[1].server.weights)


@pytest.mark.parametrize("sent", ["'delta'", "{'delta': 'banana'}"])
def test_what_an_algorithm_sends_is_weighted_as_there_is(tmp_path: Path, sent: str) -> None:
    file = f"SENT = {sent}\n\n\ndef aggregate(server):\n    return server.model\n"
    with pytest.raises(ConfigError, match=r"client\.algorithm: algorithm\.py has SENT = "):
        ready(tmp_path, LINEAR, file, recipe="client", algorithm="own")


@pytest.mark.parametrize("change", ["= server.memory['v'] + 1", "+= 1", "= torch.ones(1).double().expand(15)"])
def test_memory_that_expand_has_made_is_saved_and_resumed(tmp_path: Path, change: str) -> None:
    """Fifteen numbers in one place can't be written to, as a resume does."""
    file = (
        "import torch\n\n\ndef initial_server_state(model):\n    return {'v': torch.zeros(1).double().expand(15)}\n\n\n"
    )
    file += f"def aggregate(server):\n    server.memory['v'] {change}\n    return server.model + server.memory['v']\n"
    for rounds in (2, 4):
        assert started(tmp_path, LINEAR, file, recipe="client", algorithm="own", rounds=rounds).run()
