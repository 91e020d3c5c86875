"""Export adapters of a checkpoint as a peft folder, or merged into their base weights.

The folder uses the names of Hugging Face's Llama, so that `PeftModel.from_pretrained(base, folder)` loads it.
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
from training.weights.base import BaseWeights
from training.weights.export import CheckpointModel, metadata_of, recipe_of
from training.weights.llama import hugging_face_name, reader, shapes, sizes_of
from training.weights.lora import NAME, PART, Lora
from training.weights.safetensors import TensorEntry, write
from training.weights.weight_files import open_weights

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def has_adapters(checkpoint: Path) -> bool:
    """Return whether a checkpoint contains adapters. Raises CheckpointError if it is not a checkpoint."""
    return _lora(manifests.check(checkpoint)) is not None


def export(checkpoint: Path, target: Path) -> tuple[int, int]:
    """Write a folder `target`, which appears complete or not at all; return (tensors, their bytes).

    Raises CheckpointError if the checkpoint is damaged, FileExistsError if `target` exists.
    """
    manifest = manifests.verify(checkpoint)
    stored = CheckpointModel(checkpoint, manifest)
    ours = {_peft_name(entry.name): entry.name for entry in stored.entries}
    entries = [TensorEntry(_peft_name(entry.name), entry.dtype, entry.shape) for entry in stored.entries]
    if target.exists():
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir()
        written = write(partial / WEIGHTS, entries, metadata_of(manifest), lambda entry: stored.read(ours[entry.name]))
        (partial / CONFIG).write_text(json.dumps(_config(manifest), indent=2))
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def export_merged(checkpoint: Path, target: Path) -> tuple[int, int]:
    """Write one file of the whole weights by our names; otherwise like `export`."""
    merged = MergedModel(checkpoint, manifests.verify(checkpoint))
    return write(target, merged.entries, merged.metadata, lambda entry: merged.read(entry.name))


class MergedModel:
    """The whole weights including a verified checkpoint's adapters, W + alpha / rank · B·A in float32.

    Raises CheckpointError if the base weights are missing or not those of the checkpoint.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        lora = _lora(manifest)
        assert lora is not None
        base = BaseWeights(checkpoint.resolve().parent.parent)
        state = manifest.state.get("base")
        base.load_state_dict(state if isinstance(state, dict) else {})
        base.verify()
        weights = open_weights(base.path)
        self._lora, self._manifest = lora, manifest
        self._adapters = CheckpointModel(checkpoint, manifest)
        self._names = {entry.name for entry in self._adapters.entries}
        self._sizes, self._read = sizes_of(weights), reader(weights)

    @property
    def entries(self) -> list[TensorEntry]:
        return [TensorEntry(name, torch.float32, shape) for name, shape in shapes(self._sizes).items()]

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata like that of a run without adapters."""
        metadata = metadata_of(self._manifest)
        options = {
            name: value for name, value in json.loads(metadata["options"]).items() if not name.startswith("lora_")
        }
        return {**metadata, "options": json.dumps(options, sort_keys=True)}

    def read(self, name: str) -> Tensor:
        weight = self._read(name).float()
        module = name.removesuffix(".weight")
        below, above = (f"{module}.lora_{side}.{NAME}.weight" for side in "AB")
        if below not in self._names:
            return weight
        b_matrix, a_matrix = self._adapters.read(above).float(), self._adapters.read(below).float()
        return torch.addmm(weight, b_matrix, a_matrix, alpha=self._lora.scale)


def _lora(manifest: Manifest) -> Lora | None:
    _, options = recipe_of(manifest)
    try:
        return Lora.from_options(options)
    except (ArithmeticError, ValueError, TypeError, AttributeError):
        raise CheckpointError("its manifest is damaged: its adapter options are invalid") from None


def _peft_name(ours: str) -> str:
    """Convert blocks.0.mlp.up.lora_A.default.weight → base_model.model.model.layers.0.mlp.up_proj.lora_A.weight."""
    match = PART.search(ours)
    if match is None:
        raise CheckpointError(f"it holds {ours}, which is no part of an adapter")
    return f"{PREFIX}{hugging_face_name(ours[: match.start()])}.lora_{match['side']}.weight"


def _config(manifest: Manifest) -> dict[str, object]:
    lora = _lora(manifest)
    assert lora is not None
    options = manifest.config[manifest.config["recipe"]]
    targets = [hugging_face_name(f"blocks.0.{_module_of(target)}").rpartition(".")[2] for target in lora.targets]
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


def _module_of(target: str) -> str:
    return f"{'mlp' if target in ('gate', 'up', 'down') else 'attention'}.{target}"
