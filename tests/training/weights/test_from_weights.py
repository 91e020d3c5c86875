"""Test `from_weights`: a run reads weights and sizes from a file, and reports an error in one sentence."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import TINY, Run
from tests.training.weights import origins
from training.__main__ import main
from training.config import layout_checks
from training.config.run_config import parse
from training.contracts import recipe
from training.corpus.errors import DataError
from training.models.llama import Llama
from training.recipes import language
from training.weights.configured import with_sizes
from training.weights.llama import reader, sizes_of
from training.weights.weight_files import open_weights

OPTIONS = parse({"recipe": "language"}).recipe_options()


def model_of(folder: Path) -> Llama:
    """Return the model with the weights of a folder, as a run loads it."""
    weights = open_weights(folder)
    dims = language.dims(**sizes_of(weights))
    read = reader(weights)
    model = Llama(dims)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
    return model


def test_every_kind_of_number_is_read_where_it_lies(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for padding in (0, 1):  # the format allows data at odd places
            path = origins.write_file(tmp_path / "a.safetensors", found := origins.tensors(dtype), padding=padding)
            weights = open_weights(path)
            for name, expected in found.items():
                assert torch.equal(weights.read(name), expected)


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _rope(folder: Path, **changes: Any) -> None:
    payload = {**origins.LLAMA3, **changes}
    _config(folder, rope_scaling={name: value for name, value in payload.items() if value is not None})


def _file(folder: Path) -> Path:
    return folder / "model.safetensors"


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = origins.tensors()
    change(found)
    origins.write_file(_file(folder), found)


def _index(folder: Path, file: str) -> None:
    _file(folder).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


def _header(folder: Path, header: object) -> None:
    written = json.dumps(header).encode()
    _file(folder).write_bytes(len(written).to_bytes(8, "little") + written + b"four")


def _entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "can't be read (No such file or directory). Name"),
    "an empty folder": (lambda f: _file(f).unlink(), "has no *.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "but no config.json next to them"),
    "another architecture": (lambda f: _config(f, model_type="mixtral"), "architecture 'mixtral'"),
    "positions scaled otherwise": (lambda f: _rope(f, rope_type="yarn"), "scales positions with rope_type 'yarn'"),
    "the same of old": (lambda f: _rope(f, rope_type=None, type="linear"), "scales positions with rope_type 'linear'"),
    "half of the scaling": (lambda f: _rope(f, low_freq_factor=None), "config.json has no low_freq_factor"),
    "scaling by a word": (lambda f: _rope(f, factor="8"), "has a factor that is not a number"),
    "from no whole place": (lambda f: _rope(f, original_max_position_embeddings=1.5), "no original_max_position_emb"),
    "positions by layer": (
        lambda f: _config(f, rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rotary positions per layer (full_attention)",
    ),
    "half of a head": (lambda f: _config(f, partial_rotary_factor=0.5), "has partial_rotary_factor 0.5"),
    "quantised": (lambda f: _config(f, quantization_config={"bits": 4}), "has quantization_config {'bits': 4}"),
    "another activation": (lambda f: _config(f, hidden_act="gelu"), "has hidden_act 'gelu'"),
    "biases": (lambda f: _config(f, attention_bias=True), "has attention_bias True"),
    "a size missing": (lambda f: _config(f, hidden_size=None), "has no hidden_size"),
    "other sizes": (
        lambda f: _config(f, intermediate_size=64),
        "gate_proj.weight as [48, 32]; by its sizes it should be [64",
    ),
    "more blocks": (lambda f: _config(f, num_hidden_layers=3), "lacks model.layers.2."),
    "fewer blocks": (lambda f: _config(f, num_hidden_layers=1), "which such a model does not have"),
    "a narrow model": (lambda f: _config(f, head_dim=16), "4 heads of 16 on a stream of 32"),
    "a tensor missing": (lambda f: _rewrite(f, lambda t: t.pop("model.norm.weight")), "lacks model.norm.weight"),
    "half a file": (lambda f: _file(f).write_bytes(_file(f).read_bytes()[:-100]), "ends early"),
    "a pipe": (lambda f: (_file(f).unlink(), os.mkfifo(_file(f))), "can't be read (it is not a regular file)"),
    "a device": (
        lambda f: (_file(f).unlink(), _file(f).symlink_to("/dev/zero")),
        "can't be read (it is not a regular file)",
    ),
    "not the format": (lambda f: _file(f).write_bytes(b"PK" * 500), "is no safetensors file: it has no header"),
    "a header of brackets": (
        lambda f: _file(f).write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        "its header is not JSON",
    ),
    "sizes of a thousand digits": (
        lambda f: _header(f, {"a": _entry(shape=[10**4000, 10**4000])}),
        "the offsets or shape of a are not whole numbers",
    ),
    "dimensions without number": (lambda f: _header(f, {"a": _entry(shape=[1] * 9999)}), "a has 9,999 dimensions"),
    "no header": (lambda f: _header(f, ["a"]), "its header is not a JSON object"),
    "a type that is none": (
        lambda f: _header(f, {"a": _entry(dtype=["F32"])}),
        "has a as ['F32'], which is an unknown type",
    ),
    "a type to come": (lambda f: _header(f, {"a": _entry(dtype="F4")}), "has a as 'F4', which is an unknown type"),
    "whole numbers": (lambda f: _header(f, {"a": _entry(dtype="I32")}), "as I32; weights to start from are F64, F32"),
    "a place that is none": (lambda f: _header(f, {"a": _entry(data_offsets=[0])}), "does not say where a is"),
    "more than it has room for": (lambda f: _header(f, {"a": _entry(shape=[2])}), "can't lie in 4 bytes of F32"),
    "a place in words": (lambda f: _header(f, {"a": _entry(data_offsets=["0", 4])}), "are not whole numbers"),
    "nothing said in a list": (lambda f: _header(f, {"__metadata__": ["x"], "a": _entry()}), "neither an export"),
    "more blocks than there can be": (
        lambda f: _config(f, num_hidden_layers=10**7),
        "too few for 10000000 layers",
    ),
    "no end of a number": (lambda f: _config(f, rms_norm_eps=math.inf), "has a rms_norm_eps that is not a number"),
    "a number beyond all": (lambda f: _config(f, rms_norm_eps=10**400), "has a rms_norm_eps that is not a number"),
    "a base of words": (lambda f: _config(f, rope_theta="1e6"), "has a rope_theta that is not a number"),
    "scaling in a word": (lambda f: _config(f, rope_scaling="linear"), "has a rope_scaling that is not a JSON object"),
    "brackets alone": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    "broken JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "an index to elsewhere": (
        lambda f: _index(f, "../b.safetensors"),
        "not a file in the same folder",
    ),
    "an index without its file": (
        lambda f: _index(f, "b.safetensors"),
        "b.safetensors can't be read",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), SPOILT.values(), ids=SPOILT)
def test_what_cannot_be_started_from_is_refused_in_a_sentence(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = origins.write(tmp_path / "llama")
    spoil(folder)
    with pytest.raises(DataError) as caught:
        language.resolve_options(folder, **OPTIONS)
    assert caught.value.option == "from_weights"
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "option", "words"),
    [
        ({"layers": 3}, "layers", "makes layers 3, but the weights in"),
        ({"preset": "1b"}, "preset", "have 2. Leave it out"),
        ({"vocabulary": 512}, "vocabulary", "have 256"),
        ({"tied": True}, "tied", "have False"),
        ({"rope_base": 10_000.0}, "rope_base", "have 500000.0"),
        ({"context": 128}, "context", "support 64 positions"),
    ],
)
def test_conflicting_options_are_refused_by_name(
    changes: dict[str, Any], option: str, words: str, tmp_path: Path
) -> None:
    folder = origins.write(tmp_path / "llama")
    with pytest.raises(DataError) as caught:
        language.resolve_options(folder, **{**OPTIONS, **changes})
    assert caught.value.option == option
    assert words in caught.value.message


def test_what_agrees_is_let_through(tmp_path: Path) -> None:
    folder = origins.write(tmp_path / "llama", config={"tie_word_embeddings": True})
    resolved = language.resolve_options(folder, **{**OPTIONS, "layers": 2, "context": 32})
    assert (resolved["layers"], resolved["context"], resolved["tied"]) == (2, 32, True)


def test_a_path_that_cannot_be_read_is_reported_as_such() -> None:
    with pytest.raises(
        DataError, match=r"nn can't be read \(File name too long\). Name a safetensors file or a folder"
    ):
        language.resolve_options(Path("n" * 300), **OPTIONS)


def test_the_ending_of_weights_means_the_same_in_any_case(tmp_path: Path) -> None:
    folder = origins.write(tmp_path / "llama")
    _file(folder).rename(folder / "Model.SafeTensors")
    assert language.resolve_options(folder, **OPTIONS)["layers"] == 2


def test_hidden_files_that_a_copy_left_next_to_the_weights_are_ignored(tmp_path: Path) -> None:
    folder = origins.write(tmp_path / "llama")
    (folder / "._model.safetensors").write_bytes(b"Mac OS X")
    assert language.resolve_options(folder, **OPTIONS)["layers"] == 2


@pytest.mark.parametrize("others", [True, False], ids=["an index and its files", "an index alone"])
def test_a_single_file_counts_whatever_lies_next_to_it(others: bool, tmp_path: Path) -> None:
    """Hugging Face's library saves one file into a folder of several and leaves the index."""
    folder = origins.write(tmp_path / "llama", files=2)
    if not others:
        for part in folder.glob("model-*"):
            part.unlink()
    saved = {name: 2 * tensor for name, tensor in origins.tensors().items()}
    origins.write_file(_file(folder), saved)
    assert language.resolve_options(folder, **OPTIONS)["layers"] == 2
    found = open_weights(folder)
    assert all(torch.equal(found.read(name), tensor) for name, tensor in saved.items())


def test_what_a_config_leaves_open_is_as_hugging_face_has_it(tmp_path: Path) -> None:
    left_open: dict[str, Any] = {"rms_norm_eps": None, "rope_theta": None, "rope_parameters": {"rope_theta": None}}
    resolved = language.resolve_options(origins.write(tmp_path / "llama", config=left_open), **OPTIONS)
    assert (resolved["norm_epsilon"], resolved["rope_base"]) == (1e-6, 10_000.0)


def test_before_it_starts_only_what_needs_no_sizes_is_checked() -> None:
    """The tiny preset's four heads must not stand for the weights'."""
    table = {"recipe": "language", "mesh": {"tp": 8}, "language": {"from_weights": "/data/llama"}}
    assert not list(layout_checks.check(parse(table), 8))


def test_a_pipeline_of_tied_weights_is_refused_with_what_works(tmp_path: Path) -> None:
    """Writing `tied = false` changes nothing where the weights are tied."""
    folder = origins.write(tmp_path / "llama", config={"tie_word_embeddings": True})
    options = {"from_weights": str(folder), "tied": False}
    config = with_sizes(recipe("language"), parse({"recipe": "language", "mesh": {"pp": 2}, "language": options}))
    (problem,) = layout_checks.check(config, 2)
    assert problem.field == "language.tied"
    assert "Leave out mesh.pp, or write false; tied initial weights stay tied." in problem.message


def _shards(folder: Path, tokenizer: dict[str, Any]) -> Path:
    """Ready-made tokens."""
    folder.mkdir()
    files = {}
    for split in ("train", "validation"):
        (folder / f"{split}-00000.bin").write_bytes(bytes(2000))
        files[split] = [{"file": f"{split}-00000.bin", "tokens": 1000, "sha256": ""}]
    about = {"format": "vigil-tokens", "version": 1, "dtype": "uint16", "tokenizer": tokenizer, **files}
    (folder / "index.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("tokens", "tokenizer", "words"),
    [
        (256, None, ""),
        (200, None, ""),
        (256, b"this very file", ""),
        (256, b"another", "is words-"),
        (250, b"another", "the weights are for"),
    ],
)
def test_the_tokens_must_be_those_of_the_weights(
    tokens: int, tokenizer: bytes | None, words: str, tmp_path: Path
) -> None:
    folder = origins.write(tmp_path / "llama")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    sha256 = hashlib.sha256(b"this very file").hexdigest()
    about = {"name": "words", "sha256": sha256, "vocabulary": tokens, "end_of_document": 2}
    shards = _shards(tmp_path / "shards", about)
    if not words:
        assert language.weights(folder, shards)("norm.weight") is not None
        return
    with pytest.raises(DataError, match=words) as caught:
        language.weights(folder, shards)
    assert caught.value.option == "tokenizer"


def test_a_tokenizer_is_the_same_in_any_folder(tmp_path: Path) -> None:
    export = origins.write_export(tmp_path / "tuned.safetensors", data="notes+llama-7b-abababab+0123456789")
    tokens = {"name": "mine", "vocabulary": 256, "end_of_document": 2}
    same = _shards(tmp_path / "same", {**tokens, "sha256": "ab" * 32})
    assert language.weights(export, same)("norm.weight") is not None
    other = _shards(tmp_path / "other", {**tokens, "sha256": "cd" * 32})
    with pytest.raises(DataError, match="is mine-cdcdcdcd, but the weights in .* are for llama-7b-abababab"):
        language.weights(export, other)


def test_bytes_are_no_tokens_of_a_large_vocabulary(tmp_path: Path) -> None:
    found = {**origins.tensors(), "model.embed_tokens.weight": torch.zeros(32_000, 32)}
    found["lm_head.weight"] = torch.zeros(32_000, 32)
    folder = origins.write(tmp_path / "llama", config={"vocab_size": 32_000})
    origins.write_file(_file(folder), found)
    about = {"name": "bytes", "sha256": "0" * 64, "vocabulary": 256, "end_of_document": 255}
    with pytest.raises(DataError, match="is bytes, of 256 tokens, but the weights in .* have 32000"):
        language.weights(folder, _shards(tmp_path / "shards", about))


def test_an_export_may_have_many_more_rows_than_its_tokenizer_has_tokens(tmp_path: Path) -> None:
    """Some models come like this, or a run requested it (`vocabulary`)."""
    export = origins.write_export(tmp_path / "a.safetensors", data="notes+mine-abababab+0123456789", vocabulary=3000)
    about = {"name": "mine", "sha256": "ab" * 32, "vocabulary": 1000, "end_of_document": 2}
    assert language.weights(export, _shards(tmp_path / "shards", about))("tokens.weight") is not None


LANGUAGE = {"context": 16}


def table(folder: Path, **more: Any) -> dict[str, Any]:
    return {**TINY, "steps": 6, "checkpoint_every": 3, "language": {**LANGUAGE, "from_weights": str(folder)}, **more}


@pytest.mark.slow
def test_a_run_starts_there_on_any_layout_and_resumes_without(tmp_path: Path) -> None:
    folder = origins.write(tmp_path / "llama", files=2, dtype=torch.bfloat16)
    alone = Run(tmp_path / "alone", table(folder))
    alone.finish(1)
    (started,) = alone.events("run.started")
    assert started["parameters"] == sum(tensor.numel() for tensor in origins.tensors().values())
    cut = Run(tmp_path / "cut", table(folder, parallelism="fsdp", mesh={"shard": 2, "tp": 2}))
    cut.finish(4)
    losses = [cut.series(rank=rank) for rank in range(4)]
    for step, loss in alone.series().items():
        assert sum(rank[step] for rank in losses) / 4 == pytest.approx(loss, abs=1e-4)

    expected = alone.series()
    shutil.rmtree(folder)  # from here on the checkpoint is all there is
    manifest = alone.job_dir / "checkpoints" / "step-3" / "COMMITTED"
    before = json.loads(manifest.read_text())
    del before["config"]["language"]["lora_rank"]  # as if that option had not been there yet
    manifest.write_text(json.dumps(before))
    alone.finish(1, resume="step-3")
    assert alone.series() == expected
    (resumed,) = alone.events("run.started")
    assert resumed["resumed_from"] == "step-3"

    target = tmp_path / "tuned.safetensors"
    assert main(["export", str(alone.job_dir / "checkpoints" / "step-6"), str(target)]) == 0
    again = Run(tmp_path / "again", table(target, steps=1))
    again.finish(1)
    assert len(again.series()) == 1
    other = Run(tmp_path / "other", {**table(target), "language": {"from_weights": str(target), "heads": 2}})
    assert other.start(1).wait() == [1]
    (failed,) = other.events("run.failed")
    assert "run.language.heads: makes heads 2, but the weights in" in failed["error"]
