"""Test adapters in a federation: what is declared is trained and sent, everything else stays unchanged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.federated.in_process import train
from tests.training.federated.texts import (
    Federation,
    rounds_of,
    stored,
    table,
    write_texts,
    write_weights,
)
from tests.training.weights.test_from_weights import model_of
from training import manifest
from training.__main__ import main
from training.federated.rounds import Rounds
from training.federation import config_checks
from training.federation.config import parse
from training.models import compression
from training.weights.safetensors import read_header

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
HIDDEN, WIDTH, LAYERS = 48, 32, 2
"""Of the weights that they are beside; keys and values are 16 wide."""
LORA = {"lora_rank": 4, "lora_targets": "query value"}
NUMBERS = {
    "lora": LAYERS * 4 * (WIDTH + WIDTH + WIDTH + 16),
    "ffa_lora": LAYERS * 4 * (WIDTH + 16),
    "scl": LAYERS * 8 * 2 * HIDDEN,
}
"""Declared, by hand: A and B of query and value; B alone; C1 and C2."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "llama")


def config_of(kind: str, texts: Path, weights: Path, **more: Any) -> dict[str, Any]:
    """Return [run] with these adapters."""
    given = {"from_weights": str(weights), **(LORA if "lora" in kind else {}), **more.pop("language", {})}
    return table(texts, adapters=kind, language=given, **{"learning_rate": 30.0, **more})


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"recipe": "tabular", "adapters": "lora"}, "adapters", "the model of tabular does not support it"),
        ({"recipe": "tabular", "adapters": "scl"}, "adapters", "the model of tabular does not support it"),
        ({"adapters": "lora", "language": {"from_weights": "/w"}}, "language.lora_rank", 'is 0, but adapters = "lora"'),
        ({"language": {"from_weights": "/w", "lora_rank": 4}}, "adapters", 'Write "lora" or "ffa_lora"'),
        ({"adapters": "scl", "language": {"from_weights": "/w", "lora_rank": 4}}, "adapters", "lora_rank asks"),
        ({"adapters": "lora", "language": {"lora_rank": 4}}, "language.lora_rank", "Name them in from_weights"),
        ({"adapters": "scl"}, "language.from_weights", "Name some"),
        (
            {"adapters": "lora", "language": {"from_weights": "/w", "lora_rank": 4, "lora_targets": "keys"}},
            "language.lora_targets",
            '"keys" is not a matrix',
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(change: dict[str, Any], field: str, words: str) -> None:
    (problem,) = config_checks.problems(parse({"recipe": "language", **change}), 1)
    assert problem.field == field
    assert words in problem.message


@pytest.mark.parametrize("kind", ["lora", "ffa_lora", "scl"])
def test_a_message_is_what_was_declared(kind: str, texts: Path, weights: Path, tmp_path: Path) -> None:
    """4 bytes a number, and the header; so in the counted bytes of a round."""
    rounds = rounds_of(tmp_path, config_of(kind, texts, weights))
    federation, work = rounds.federation, rounds.work
    assert work.unstacked_reason == "", "attention and adapters go through vmap"
    numbers = NUMBERS[kind]
    assert (federation.model.weights.size, federation.model.weights.shared) == (numbers, numbers)
    described = work.messages_of(work.training_task, rounds.server)
    delta = rounds.server.weights.clone()
    about = {"round_": rounds.config.rounds, "client": 3, "samples": int(federation.divided.sizes.max())}
    sent = described.up.encode({"delta": delta}, **about)
    assert described.up.body == 4 * numbers
    assert described.up.size(**about) == len(sent)
    down = described.down.encode(
        federation.model.weights.tensors(delta), round_=rounds.config.rounds, client=None, samples=None
    )
    assert described.down.body == 4 * numbers
    assert described.down.size(round_=rounds.config.rounds, client=None, samples=None) == len(down)
    assert train(rounds)[0].traffic.bytes_up > 4 * described.up.body


@pytest.mark.parametrize("kind", ["lora", "ffa_lora", "scl"])
def test_it_begins_at_the_weights_and_only_what_is_declared_changes(
    kind: str, texts: Path, weights: Path, tmp_path: Path
) -> None:
    plain = rounds_of(tmp_path / "plain", config_of("none", texts, weights))
    rounds = rounds_of(tmp_path / "adapted", config_of(kind, texts, weights))
    inputs = rounds.federation.model.task.batch("train", np.arange(8))[0]
    base, adapted = plain.federation.model.task.model, rounds.federation.model.task.model
    assert torch.equal(base(inputs), adapted(inputs)), "bit for bit"
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    start, loss = rounds.server.weights.clone(), _loss(rounds)
    train(rounds, 3)
    assert _loss(rounds) < loss - 0.005
    assert not torch.equal(rounds.server.weights, start)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


def _loss(rounds: Rounds) -> float:
    """Return the loss of the server's model."""
    judged = rounds.evaluator.evaluate(rounds.server, should_continue=lambda: True)
    assert judged is not None
    return judged.means["loss"]


def test_the_mean_of_products_is_the_product_of_means_only_where_a_is_fixed(
    texts: Path, weights: Path, tmp_path: Path
) -> None:
    apart = {}
    for kind in ("lora", "ffa_lora"):
        rounds = rounds_of(tmp_path / kind, config_of(kind, texts, weights, dtype="fp64"))
        train(rounds)  # B is no longer zero
        clients = _clients_of(rounds)
        shares = rounds.federation.divided.sizes / rounds.federation.divided.sizes.sum()
        products = [_product(rounds, client) for client in clients]
        mean = sum(float(share) * product for share, product in zip(shares, products, strict=True))
        train(rounds)
        server = _product(rounds, rounds.server.weights)
        assert isinstance(mean, Tensor)
        assert (server - _product(rounds, clients[0])).abs().max() > 1e-4, "clients differ"
        apart[kind] = float((server - mean).abs().max() / mean.abs().max())
    assert apart["ffa_lora"] < 1e-14
    assert apart["lora"] > 1e-5


def _clients_of(rounds: Rounds) -> list[Tensor]:
    """Return what each client arrives at in the next round."""
    found: dict[int, Tensor] = {}
    run = rounds.work.run

    def spy(chunk: Any, *arguments: Any, **options: Any) -> Any:
        sent = run(chunk, *arguments, **options)
        found.update(zip(sent.clients.tolist(), sent.values["delta"], strict=True))
        return sent

    rounds.work.run = spy  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in rounds.server.state()["model"].items()}
    start = rounds.server.weights.clone()
    rounds._round(rounds.step + 1)
    rounds.work.run = run  # type: ignore[method-assign]
    rounds.server.weights.copy_(start)
    assert all(torch.equal(value, before[name]) for name, value in rounds.server.state()["model"].items())
    return [start + found[client] for client in sorted(found)]


def _product(rounds: Rounds, vector: Tensor) -> Tensor:
    """Return BA of one matrix."""
    model = rounds.federation.model
    tensors = {**dict(model.task.model.named_parameters()), **model.weights.tensors(vector)}
    a, b = (tensors[f"blocks.0.attention.query.lora_{side}.default.weight"].detach() for side in "AB")
    return b @ a


def test_a_of_ffa_lora_stays_as_the_seed_gave_it_and_never_travels(texts: Path, weights: Path, tmp_path: Path) -> None:
    lora = rounds_of(tmp_path / "lora", config_of("lora", texts, weights)).federation.model
    rounds = rounds_of(tmp_path / "ffa", config_of("ffa_lora", texts, weights))
    model = rounds.federation.model
    assert all(".lora_B." in name for name in model.weights.shared_shapes)
    assert set(model.constants) == {name for name in lora.weights.shapes if ".lora_A." in name}
    train(rounds)
    for name, value in model.constants.items():
        assert torch.equal(value, lora.task.model.get_parameter(name).detach())
        assert value.abs().max() > 0
    assert set(rounds.server.state()["model"]) == set(lora.weights.shapes), "a whole adapter is in a checkpoint"


@pytest.mark.parametrize("train_down_proj", [False, True])
def test_scl_reports_what_it_sends_with_and_without_down_proj(
    train_down_proj: bool, texts: Path, weights: Path, tmp_path: Path
) -> None:
    scl = {"train_down_proj": train_down_proj, "rank": 8}
    rounds = rounds_of(tmp_path, {**config_of("scl", texts, weights), "scl": scl})
    model = rounds.federation.model
    down = LAYERS * WIDTH * HIDDEN
    assert model.weights.size == NUMBERS["scl"] + down * train_down_proj
    assert model.task.facts["compression_numbers"] == NUMBERS["scl"]
    assert model.task.facts["down_proj_numbers"] == down
    names = set(model.weights.shared_shapes)
    assert all(compression.is_part(name) or name.endswith(".down.weight") for name in names)
    assert any(name.endswith(".down.weight") for name in names) == train_down_proj
    assert set(rounds.server.state()["model"]) == names, "what stays is not in a checkpoint"


def test_scl_counts_what_the_paper_counts() -> None:
    """TinyLlama, rank 8: 1.98 M next to 253.8 M of down_proj."""
    from training.models.llama import Llama
    from training.models.llama_sizes import llama_dims

    sizes: dict[str, Any] = {
        "layers": 22,
        "heads": 32,
        "kv_heads": 4,
        "head_width": 64,
        "hidden": 5632,
        "context": 2048,
    }
    with torch.device("meta"):
        model = Llama(llama_dims(vocabulary=32000, **sizes))
        layers = compression.add(model, 8)
    added = sum(part.numel() for name, part in model.named_parameters() if compression.is_part(name))
    assert added == 1_982_464
    assert sum(layer.weight.numel() for layer in layers) == 253_755_392


@pytest.fixture(scope="module")
def trained(texts: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Federation]:
    """Train a federation of each kind with one rank."""
    folder = tmp_path_factory.mktemp("trained")
    found = {}
    for kind in NUMBERS:
        run = found[kind] = Federation(folder / kind, config_of(kind, texts, weights, checkpoint_every=2))
        run.finish(1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(NUMBERS))
def test_resumed_on_two_ranks_it_is_the_same_though_the_weights_are_gone(
    kind: str, trained: dict[str, Federation], texts: Path, weights: Path, tmp_path: Path
) -> None:
    again = Federation(tmp_path / "again", {**trained[kind].config, "rounds": 2})
    again.finish(2)
    again.write(rounds=3)
    moved = weights.rename(weights.with_name("moved"))
    try:
        again.finish(2, resume="step-2")
    finally:
        moved.rename(weights)
    last = Path("checkpoints") / "step-3"
    assert stored(again.job_dir / last) == stored(trained[kind].job_dir / last)
    assert again.series() == trained[kind].series()
    found = manifest.check(again.job_dir / last)
    assert found.state["base"]["sha256"]
    (started,) = again.events("run.started")
    assert (started["adapters"], started["travelling"]) == (kind, NUMBERS[kind])
    assert started["frozen"] > 30_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's use of transformers
@pytest.mark.parametrize("kind", ["lora", "ffa_lora"])
def test_peft_takes_what_a_federation_has_trained(
    kind: str, trained: dict[str, Federation], weights: Path, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from peft import PeftModel

    checkpoint = str(trained[kind].job_dir / "checkpoints" / "step-3")
    folder, merged, whole = tmp_path / "adapter", tmp_path / "merged.safetensors", tmp_path / "whole"
    assert main(["export", checkpoint, str(folder)]) == 0
    assert main(["export", checkpoint, "--merged", str(merged)]) == 0
    assert main(["export", checkpoint, "--hf", str(whole), "--merged"]) == 0
    base = transformers.LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        untrained = base(tokens).logits
        expected = PeftModel.from_pretrained(base, folder)(tokens).logits
        found = model_of(merged)(tokens)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager")(tokens).logits
    assert (expected - untrained).abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compression_layers_are_no_model_for_others(
    trained: dict[str, Federation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(trained["scl"].job_dir / "checkpoints" / "step-3")
    assert main(["export", checkpoint, "--hf", str(tmp_path / "whole")]) == 1
    assert "scl" in capsys.readouterr().err
    assert main(["export", checkpoint, str(tmp_path / "layers.safetensors")]) == 0
    tensors, about = read_header(tmp_path / "layers.safetensors")
    assert all(compression.is_part(name) for name in tensors)
    assert about["adapters"] == "scl"
