"""Small weights to start from: a Llama folder in Hugging Face's format, written without its library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.weights.llama import shapes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.1's positions."""
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def tensors(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> dict[str, Tensor]:
    """Return tensors by the names that Hugging Face's library gives them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, 32), "model.norm.weight": (32,)}
    if not tied:
        shapes["lm_head.weight"] = (256, 32)
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (32,),
                "self_attn.q_proj": (32, 32),
                "self_attn.k_proj": (16, 32),
                "self_attn.v_proj": (16, 32),
                "self_attn.o_proj": (32, 32),
                "post_attention_layernorm": (32,),
                "mlp.gate_proj": (48, 32),
                "mlp.up_proj": (48, 32),
                "mlp.down_proj": (32, 48),
            }.items()
        }
    generator = torch.Generator().manual_seed(7)
    return {name: (torch.randn(shape, generator=generator) * 0.1).to(dtype) for name, shape in shapes.items()}


def write(
    folder: Path, *, files: int = 1, dtype: torch.dtype = torch.float32, config: Mapping[str, Any] | None = None
) -> Path:
    """Write a model's folder, in so many files."""
    folder.mkdir(parents=True)
    payload = {**CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps(payload))
    found = tensors(dtype, tied=payload["tie_word_embeddings"])
    if files == 1:
        write_file(folder / "model.safetensors", found)
        return folder
    where: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(found.items())[number::files])
        write_file(folder / name, part)
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_export(path: Path, *, data: str = "", vocabulary: int = 256) -> Path:
    """Write the same as `python -m training export` would, from a run on `data`."""
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8, "hidden": 48, "context": 16}
    sizes["vocabulary"] = vocabulary
    found = {name: torch.zeros(shape) for name, shape in shapes({**sizes, "tied": False}).items()}
    return write_file(path, found, about={"recipe": "language", "options": json.dumps(sizes), "data": data})


def write_file(
    path: Path, found: Mapping[str, Tensor], *, padding: int = 0, about: Mapping[str, str] | None = None
) -> Path:
    """Write one file of the format; `padding`, of its header, puts data at an offset that no view may have."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(about or {})}}
    end = 0
    for name, tensor in found.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    content = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in found.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path
