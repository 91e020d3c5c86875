"""A Llama's weights as others name them: our own export, or Hugging Face's; and the sizes that come with them.

Names and shapes of every tensor are in here; what config.json says is in training.weights.llama_config.

Hugging Face keeps queries and keys for the same rotary positions as ours (a head's first half turns with its second),
so a weight is the same numbers under another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from training.models.llama_sizes import ROPE_SCALING, llama_dims, rope_options
from training.weights import llama_config
from training.weights.opening import Weights, some, wrong

if TYPE_CHECKING:
    from torch import Tensor

IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
OUTSIDE = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old files have what follows from their config."""
SIZES = (
    *("layers", "heads", "kv_heads", "head_width", "hidden", "vocabulary", "rope_base", *ROPE_SCALING),
    *("norm_epsilon", "tied"),
)
"""The recipe's options that weights settle."""


def their_name(ours: str) -> str:
    """Hugging Face's name of a module or a parameter: blocks.3.mlp.up.weight → model.layers.3.mlp.up_proj.weight."""
    head, _, rest = ours.partition(".")
    if head != "blocks":
        return OUTSIDE[head] + ("." + rest if rest else "")
    number, _, rest = rest.partition(".")
    module = next(module for module in IN_LAYER if rest == module or rest.startswith(module + "."))
    return f"model.layers.{number}.{IN_LAYER[module]}{rest.removeprefix(module)}"


def sizes_of(weights: Weights) -> dict[str, Any]:
    """What these weights were made with: SIZES, `context` and `max_context`; DataError if it is no Llama."""
    found = llama_config.read(weights) if _is_theirs(weights) else _our_sizes(weights)
    _check_shapes(weights, found)
    return found


def reader(weights: Weights) -> Callable[[str], Tensor]:
    """Our name of a parameter → the whole tensor, mapped."""
    theirs = _is_theirs(weights)
    return lambda name: weights.read(their_name(name) if theirs else name)


def _is_theirs(weights: Weights) -> bool:
    return any(name.startswith("model.") for name in weights.tensors)


def _our_sizes(weights: Weights) -> dict[str, Any]:
    try:
        options = json.loads(weights.about["options"])
        tokens = weights.tensors["tokens.weight"].shape
        if weights.about.get("recipe") != "language" or len(tokens) != 2:
            raise ValueError
        dims = llama_dims(**{**options, "vocabulary": tokens[0]})
    except (KeyError, ValueError, TypeError):
        message = f"{weights.path} is neither an export of the recipe language nor a Llama of Hugging Face's"
        raise wrong(f"{message} (it has {some(weights.tensors) or 'no tensors'}).") from None
    sizes = {name: getattr(dims, name) for name in SIZES if name not in ROPE_SCALING}
    return {**sizes, **rope_options(dims.rope_scaling), "context": dims.context, "max_context": dims.longest}


def _check_shapes(weights: Weights, sizes: Mapping[str, Any]) -> None:
    """Every parameter of such a model is there, in its shape, and nothing else."""
    theirs = _is_theirs(weights)
    if sizes["layers"] > len(weights.tensors):  # before a name is made of each
        raise wrong(f"{weights.path} has {len(weights.tensors)} tensors, too few for {sizes['layers']} layers.")
    expected = {their_name(name) if theirs else name: shape for name, shape in shapes(sizes).items()}
    there = {name: stored for name, stored in weights.tensors.items() if not IGNORED.fullmatch(name)}
    if sizes["tied"]:
        there.pop("lm_head.weight" if theirs else "head.weight", None)
    if missing := expected.keys() - there.keys():
        raise wrong(f"{weights.path} lacks {some(missing)}.")
    if more := there.keys() - expected.keys():
        raise wrong(f"{weights.path} has {some(more)}, for which such a model has no place.")
    for name, shape in expected.items():
        if there[name].shape != shape:
            raise wrong(f"{weights.path} has {name} as {list(there[name].shape)}; its sizes make it {list(shape)}.")


def shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Our name of each parameter → its whole shape."""
    width, each = sizes["heads"] * sizes["head_width"], sizes["kv_heads"] * sizes["head_width"]
    hidden, vocabulary = sizes["hidden"], sizes["vocabulary"]
    block: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "attention.query": (width, width),
        "attention.key": (each, width),
        "attention.value": (each, width),
        "attention.out": (width, width),
        "mlp_norm": (width,),
        "mlp.gate": (hidden, width),
        "mlp.up": (hidden, width),
        "mlp.down": (width, hidden),
    }
    found: dict[str, tuple[int, ...]] = {"tokens.weight": (vocabulary, width), "norm.weight": (width,)}
    if not sizes["tied"]:
        found["head.weight"] = (vocabulary, width)
    for number in range(sizes["layers"]):
        found |= {f"blocks.{number}.{name}.weight": shape for name, shape in block.items()}
    return found
