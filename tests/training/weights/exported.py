"""A checkpoint of an untrained model, and a tokenizer with which its data was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.training import tokenizers as made_up
from tests.training.checkpoint.saved import save
from training.config.run_config import parse
from training.corpus.tokenizer import HuggingFaceTokenizer
from training.models.llama import Llama, initialise
from training.models.llama_sizes import llama_dims

BYTES = "stdlib+bytes+0123456789"


def checkpoint_of(folder: Path, data: str = BYTES, **options: Any) -> tuple[Path, Llama]:
    """Return a committed checkpoint of an untrained model, and the model."""
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8, "hidden": 48, "context": 32, **options}
    config = parse({"recipe": "language", "language": sizes})
    dims = llama_dims(**{"vocabulary": 256, **config.recipe_options(), **{k: v for k, v in sizes.items() if v}})
    model = Llama(dims)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        initialise(dims, name, parameter.data, generator)
        parameter.data.mul_(4)  # so that logits differ
    state = {"model": {name: tensor.detach() for name, tensor in model.state_dict().items()}}
    folder.mkdir(parents=True, exist_ok=True)
    return save(folder, state, step=40, config=config.numerics(), data=data), model


def tokenizer_of(folder: Path, **files: Any) -> tuple[Path, str]:
    """Return a tokenizer.json next to other files, and the text with which a run identifies its data."""
    path = made_up.write_tokenizer(folder / "tokenizer.json", end=files.pop("end", "</s>"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return path, f"notes+{HuggingFaceTokenizer(path).id.label}+0123456789"
