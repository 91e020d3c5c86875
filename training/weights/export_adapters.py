"""Adapters of a checkpoint as peft's own folder, or merged into the weights that they are beside.

The folder has the names that Hugging Face's Llama has, so `PeftModel.from_pretrained(base, folder)` takes it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from training import manifest as manifests
from training.manifest import CheckpointError, Manifest
from training.weights.base import Base
from training.weights.export import Stored, about_of, recipe_of
from training.weights.llama import reader, shapes, sizes_of, their_name
from training.weights.lora import NAME, PART, Lora
from training.weights.opening import open_weights
from training.weights.safetensors import Entry, write

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def are_in(checkpoint: Path) -> bool:
    """Whether a checkpoint is of adapters; CheckpointError if it is none."""
    return _lora(manifests.check(checkpoint)) is not None


def export(checkpoint: Path, target: Path) -> tuple[int, int]:
    """A folder `target`, which appears whole or not at all; answers (tensors, bytes of them).

    CheckpointError if the checkpoint is damaged; FileExistsError if there is something at `target`.
    """
    found = manifests.verify(checkpoint)
    stored = Stored(checkpoint, found)
    ours = {_peft_name(entry.name): entry.name for entry in stored.entries}
    entries = [Entry(_peft_name(entry.name), entry.dtype, entry.shape) for entry in stored.entries]
    if target.exists():
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir()
        made = write(partial / WEIGHTS, entries, about_of(found), lambda entry: stored.read(ours[entry.name]))
        (partial / CONFIG).write_text(json.dumps(_config(found), indent=2))
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def export_merged(checkpoint: Path, target: Path) -> tuple[int, int]:
    """One file of the whole weights by our names; as `export` otherwise."""
    merged = Merged(checkpoint, manifests.verify(checkpoint))
    return write(target, merged.entries, merged.about, lambda entry: merged.read(entry.name))


class Merged:
    """The whole weights with the adapters of a verified checkpoint in them, W + alpha / rank · B·A in float32.

    CheckpointError where the weights that its adapters are beside are not there any more, or others.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        lora = _lora(manifest)
        assert lora is not None
        base = Base(checkpoint.resolve().parent.parent)
        told = manifest.state.get("base")
        base.recall(told if isinstance(told, dict) else {})
        base.verify()
        weights = open_weights(base.path)
        self._lora, self._manifest = lora, manifest
        self._adapters = Stored(checkpoint, manifest)
        self._names = {entry.name for entry in self._adapters.entries}
        self._sizes, self._read = sizes_of(weights), reader(weights)

    @property
    def entries(self) -> list[Entry]:
        return [Entry(name, torch.float32, shape) for name, shape in shapes(self._sizes).items()]

    @property
    def about(self) -> dict[str, str]:
        """What the file says of itself: as of a run without adapters."""
        about = about_of(self._manifest)
        options = {name: value for name, value in json.loads(about["options"]).items() if not name.startswith("lora_")}
        return {**about, "options": json.dumps(options, sort_keys=True)}

    def read(self, name: str) -> Tensor:
        whole = self._read(name).float()
        module = name.removesuffix(".weight")
        below, above = (f"{module}.lora_{side}.{NAME}.weight" for side in "AB")
        if below not in self._names:
            return whole
        more, less = self._adapters.read(above).float(), self._adapters.read(below).float()
        return torch.addmm(whole, more, less, alpha=self._lora.scale)


def _lora(manifest: Manifest) -> Lora | None:
    _, options = recipe_of(manifest)
    try:
        return Lora.told(options)
    except (ArithmeticError, ValueError, TypeError, AttributeError):
        raise CheckpointError("its manifest is damaged: it asks for adapters that can't be") from None


def _peft_name(ours: str) -> str:
    """blocks.0.mlp.up.lora_A.default.weight → base_model.model.model.layers.0.mlp.up_proj.lora_A.weight."""
    found = PART.search(ours)
    if found is None:
        raise CheckpointError(f"it holds {ours}, which is no part of an adapter")
    return f"{PREFIX}{their_name(ours[: found.start()])}.lora_{found['side']}.weight"


def _config(manifest: Manifest) -> dict[str, object]:
    lora = _lora(manifest)
    assert lora is not None
    options = manifest.config[manifest.config["recipe"]]
    targets = [their_name(f"blocks.0.{_of_block(target)}").rpartition(".")[2] for target in lora.targets]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": options["from_weights"],
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }


def _of_block(target: str) -> str:
    return f"{'mlp' if target in ('gate', 'up', 'down') else 'attention'}.{target}"
