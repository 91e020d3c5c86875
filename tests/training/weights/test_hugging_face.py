"""Test that our weights are the same model in Hugging Face's library, imported and exported.

Everything that imports transformers in this process is in here, for that takes seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.checkpoint.saved import save
from tests.training.weights import origins
from tests.training.weights.exported import BYTES, checkpoint_of, tokenizer_of
from tests.training.weights.test_from_weights import model_of
from training.__main__ import main
from training.config.run_config import parse
from training.corpus.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from training.models.llama import frequencies
from training.recipes import language
from training.weights.llama import sizes_of
from training.weights.weight_files import open_weights


class _Transformers:
    """Import the library at its first use: it takes four seconds, which workers that run other files save."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("transformers"), name)


pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
transformers: Any = _Transformers()
TEXTS = ("the siskin sings at dawn", "", " \t\n\x00 é 日本 🎉 ÿ", "<|endoftext|></s><unk>", "a" * 300)


SCALED = {**origins.LLAMA3, "original_max_position_embeddings": 512}
NEW = {"rope_theta": None, "rope_parameters": {**SCALED, "rope_theta": 500_000.0}}
OLD = {"rope_scaling": SCALED}


@pytest.mark.parametrize(
    ("files", "changes", "first"),
    [
        (1, {}, 0),
        (3, {}, 0),
        (1, {"tie_word_embeddings": True}, 0),
        (1, {"rope_theta": 10_000.0, "rms_norm_eps": 1e-3}, 0),
        (1, {"max_position_embeddings": 131072}, 120_000),
        (1, {"max_position_embeddings": 131072, **OLD}, 0),
        (1, {"max_position_embeddings": 131072, **OLD}, 120_000),
        (1, {"max_position_embeddings": 131072, **NEW}, 120_000),
    ],
    ids=["one file", "three files", "tied", "other positions and norms", "far out", "llama3", "llama3 far out", "new"],
)
def test_the_logits_are_those_of_hugging_face(files: int, changes: dict[str, Any], first: int, tmp_path: Path) -> None:
    folder = origins.write(tmp_path / "llama", files=files, config=changes)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # Far from each other, so that slow waves count, too.
        places = first + torch.arange(40) * (first // 500 + 1)
        expected = theirs(tokens, position_ids=places[None]).logits
        ours = language.dims(**sizes_of(open_weights(folder)))
        assert ours.max_context == theirs.config.max_position_embeddings
        model = model_of(folder)
        model.positions = lambda device: places
        found = model(tokens)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": origins.LLAMA3}], ids=["plain", "llama3"])
def test_the_waves_are_those_of_hugging_face_to_the_last_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    """100,000 places on, the last bit of a wave is a hundredth of a radian."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"head_dim": 128, "rope_theta": 500_000.0, "max_position_embeddings": 131072}
    expected = LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, **changes)).inv_freq
    scaled = {"rope_factor": 8, "rope_original_context": 8192} if changes else {}
    found = frequencies(language.dims(head_width=128, rope_base=5e5, **scaled), torch.device("cpu"))
    assert torch.equal(found, expected)


@contextmanager
def without_a_warning() -> Iterator[None]:
    """Python's warnings are errors anyway."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not texts


def loaded(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer from the files in the folder alone."""
    with without_a_warning():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert not any(info.values()), info
    return model, tokenizer


SCALING = {"rope_factor": 8, "rope_original_context": 16, "max_context": 128, "rope_base": 5e5}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"rope_factor": 8, "rope_original_context": 64},
        SCALING,
        {"norm_epsilon": 1e-3, "vocabulary": 320, "dropout": 0.1},
    ],
    ids=["grouped", "tied", "scaled for its first time", "llama3", "padded"],
)
def test_the_folder_is_the_same_model(options: dict[str, Any], tmp_path: Path) -> None:
    """Compare by logits, and by what a run would load from it."""
    checkpoint, model = checkpoint_of(tmp_path / "run", **options)
    target = tmp_path / "out"
    shards = ["--shard-gb", "0.00002"] if "rope_factor" in options else []
    assert main(["export", str(checkpoint), "--hf", str(target), *shards]) == 0
    assert (target / "model.safetensors.index.json").exists() == bool(shards)
    theirs, tokenizer = loaded(target)
    assert theirs.dtype == torch.float32
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == bool(options.get("tied"))
    tokens = torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(1))
    model.positions = lambda device: torch.arange(100)
    with torch.no_grad(), without_a_warning():
        expected = model.eval()(tokens)
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        report = theirs.generate(**tokenizer("the siskin", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert expected.abs().max() > 0.1
    assert report.shape == (1, 13)
    assert theirs.config.max_position_embeddings == options.get("max_context", 512 if "rope_factor" in options else 32)
    again = language.resolve_options(target, **parse({"recipe": "language"}).recipe_options())
    assert sizes_of(open_weights(target)) == {name: again[name] for name in sizes_of(open_weights(target))}


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_it_is_what_it_was(tied: bool, tmp_path: Path) -> None:
    """A model that their library made up has the same tensors afterwards, and the settings that both have."""
    rope = {**origins.LLAMA3, "rope_theta": 500_000.0}
    config = transformers.LlamaConfig(
        **{**origins.CONFIG, "tie_word_embeddings": tied, "max_position_embeddings": 131072, "rope_parameters": rope}
    )
    source, target = tmp_path / "source", tmp_path / "target"
    with without_a_warning():
        transformers.LlamaForCausalLM(config).save_pretrained(source)
    weights = open_weights(source)
    options = {**sizes_of(weights), "from_weights": str(source)}
    state = {"model": {name: tensor.detach() for name, tensor in model_of(source).state_dict().items()}}
    checkpoint = save(tmp_path, state, config=parse({"recipe": "language", "language": options}).numerics(), data=BYTES)
    assert main(["export", str(checkpoint), "--hf", str(target)]) == 0
    loaded(target)
    exported = open_weights(target)
    assert set(exported.tensors) == set(weights.tensors)
    for name in weights.tensors:
        assert torch.equal(exported.read(name), weights.read(name))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    ignored = {"transformers_version", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {name: after[name] for name in before.keys() - ignored} == {
        name: before[name] for name in before.keys() - ignored
    }


def test_half_precision_can_be_requested(tmp_path: Path) -> None:
    checkpoint, model = checkpoint_of(tmp_path / "run")
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    theirs, _ = loaded(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.lm_head.weight, model.get_parameter("head.weight").bfloat16())


def test_bytes_are_a_tokenizer(tmp_path: Path) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "run")
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out")]) == 0
    model, tokenizer = loaded(tmp_path / "out")
    for text in TEXTS[:-1]:
        (ours,) = ByteTokenizer().encode([text])
        assert tokenizer(text).input_ids == ours.tolist()
        assert tokenizer.decode(ours.tolist()) == text
    assert len(tokenizer) == 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 255, None)
    assert model.generation_config.eos_token_id == 255
    _can_be_gone_on_from(tmp_path / "out", "bytes", "none of its own", tmp_path)


def _can_be_gone_on_from(folder: Path, name: str, sha256: str, tmp_path: Path) -> None:
    """Check that a run with the same tokens can start from it."""
    index = {"name": name, "sha256": sha256, "vocabulary": 256, "end_of_document": 255}
    files = {split: [{"file": f"{split}.bin", "tokens": 100}] for split in ("train", "validation")}
    shards = tmp_path / "shards"
    shards.mkdir()
    for split in files:
        (shards / f"{split}.bin").write_bytes(bytes(200))
    about = {"format": "vigil-tokens", "version": 1, "dtype": "uint16", "tokenizer": index, **files}
    (shards / "index.json").write_text(json.dumps(about))
    assert language.weights(folder, shards)("norm.weight") is not None


SENTENCES = ("the siskin sings at dawn", "dawn sings the , ", "")


def _exported(tmp_path: Path, path: Path, data: str, *more: str, **options: Any) -> Path:
    given = {"vocabulary": 16, "tokenizer": str(path), **options}
    checkpoint, _ = checkpoint_of(tmp_path / "run", data, **given)
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out"), *more]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, (None, 6, None)),
        ({"end": ""}, (None, 6, None)),
        ({"special_tokens_map": {"bos_token": "<unk>", "eos_token": {"content": "</s>"}}}, (0, 6, None)),
        (
            {"tokenizer_config": {"eos_token": "dawn", "pad_token": {"__type": "AddedToken", "content": "<unk>"}}},
            (None, 5, 0),
        ),
        (
            {
                "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
                "config": {"model_type": "llama", "bos_token_id": 1, "eos_token_id": [6, 5]},
                "generation_config": {"eos_token_id": [6, 5], "temperature": 0.5, "do_sample": True},
            },
            (1, [6, 5], None),
        ),
        (
            {
                "tokenizer_config": {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": "<|im_end|>",
                    "added_tokens_decoder": {
                        "6": {"content": "</s>", "special": True},
                        "7": {"content": "<|im_end|>", "special": True},
                    },
                }
            },
            (None, 7, None),
        ),
    ],
    ids=["alone", "no end of its own", "a map", "settings without a class", "a model's folder", "tokens added beside"],
)
def test_a_tokenizer_goes_along(files: dict[str, Any], ids: tuple[Any, ...], tmp_path: Path) -> None:
    """Encode as in training, with the same special tokens wherever they are stated."""
    path, data = tokenizer_of(tmp_path / "words", **files)
    out = _exported(tmp_path, path, data)
    model, tokenizer = loaded(out)
    for text, ours in zip(SENTENCES, HuggingFaceTokenizer(path).encode(list(SENTENCES)), strict=True):
        assert tokenizer(text).input_ids == ours.tolist()
    settings = json.loads((out / "tokenizer_config.json").read_text())
    carried = files.get("tokenizer_config", {})
    assert "tokenizer_class" in carried or settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    assert tuple(getattr(model.config, f"{meaning}_token_id") for meaning in ("bos", "eos", "pad")) == ids
    assert model.generation_config.eos_token_id == ids[1]
    assert tokenizer.eos_token_id in ([ids[1]] if isinstance(ids[1], int) else ids[1])
    assert len(tokenizer) <= model.config.vocab_size
    assert (out / "generation_config.json").exists() == ("generation_config" in files)
