"""Read a Llama's weights as named by our own export or by Hugging Face, and the sizes that come with them.

This module has names and shapes of every tensor; training.weights.llama_config handles config.json. Hugging Face's
queries and keys use the same rotary layout as ours (a head's first half is rotated with its second), so a weight has
the same numbers under another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from training.models.llama_sizes import ROPE_SCALING, llama_dims, rope_options
from training.weights import llama_config
from training.weights.weight_files import Weights, first_names, weights_error

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
"""Old files contain these values, which follow from their config."""
SIZES = (
    *("layers", "heads", "kv_heads", "head_width", "hidden", "vocabulary", "rope_base", *ROPE_SCALING),
    *("norm_epsilon", "tied"),
)
"""The recipe's options that the weights determine."""


def hugging_face_name(ours: str) -> str:
    """Return Hugging Face's name of a module or parameter.

    Example: blocks.3.mlp.up.weight → model.layers.3.mlp.up_proj.weight.
    """
    head, _, rest = ours.partition(".")
    if head != "blocks":
        return OUTSIDE[head] + ("." + rest if rest else "")
    number, _, rest = rest.partition(".")
    module = next(module for module in IN_LAYER if rest == module or rest.startswith(module + "."))
    return f"model.layers.{number}.{IN_LAYER[module]}{rest.removeprefix(module)}"


def sizes_of(weights: Weights) -> dict[str, Any]:
    """Return what these weights determine: SIZES, `context` and `max_context`.

    Raises DataError if they are no Llama's.
    """
    sizes = llama_config.read(weights) if _is_hugging_face(weights) else _our_sizes(weights)
    _check_shapes(weights, sizes)
    return sizes


def reader(weights: Weights) -> Callable[[str], Tensor]:
    """Return a function that maps our name of a parameter to the whole tensor, mapped from disk."""
    is_theirs = _is_hugging_face(weights)
    return lambda name: weights.read(hugging_face_name(name) if is_theirs else name)


def _is_hugging_face(weights: Weights) -> bool:
    return any(name.startswith("model.") for name in weights.tensors)


def _our_sizes(weights: Weights) -> dict[str, Any]:
    try:
        options = json.loads(weights.metadata["options"])
        tokens = weights.tensors["tokens.weight"].shape
        if weights.metadata.get("recipe") != "language" or len(tokens) != 2:
            raise ValueError
        dims = llama_dims(**{**options, "vocabulary": tokens[0]})
    except (KeyError, ValueError, TypeError):
        message = f"{weights.path} is neither an export of the recipe language nor a Llama of Hugging Face's"
        raise weights_error(f"{message} (it has {first_names(weights.tensors) or 'no tensors'}).") from None
    sizes = {name: getattr(dims, name) for name in SIZES if name not in ROPE_SCALING}
    return {**sizes, **rope_options(dims.rope_scaling), "context": dims.context, "max_context": dims.longest_context}


def _check_shapes(weights: Weights, sizes: Mapping[str, Any]) -> None:
    """Check that exactly the parameters of such a model are there, with the right shapes. Raises DataError."""
    is_theirs = _is_hugging_face(weights)
    if sizes["layers"] > len(weights.tensors):  # before generating a name for each
        raise weights_error(f"{weights.path} has {len(weights.tensors)} tensors, too few for {sizes['layers']} layers.")
    expected = {hugging_face_name(name) if is_theirs else name: shape for name, shape in shapes(sizes).items()}
    stored = {name: stored for name, stored in weights.tensors.items() if not IGNORED.fullmatch(name)}
    if sizes["tied"]:
        stored.pop("lm_head.weight" if is_theirs else "head.weight", None)
    if missing := expected.keys() - stored.keys():
        raise weights_error(f"{weights.path} lacks {first_names(missing)}.")
    if unexpected := stored.keys() - expected.keys():
        raise weights_error(f"{weights.path} has {first_names(unexpected)}, which such a model does not have.")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise weights_error(
                f"{weights.path} has {name} as {list(stored[name].shape)}; by its sizes it should be {list(shape)}."
            )


def shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Map our name of each parameter to its whole shape."""
    width, kv_width = sizes["heads"] * sizes["head_width"], sizes["kv_heads"] * sizes["head_width"]
    hidden, vocabulary = sizes["hidden"], sizes["vocabulary"]
    block: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "attention.query": (width, width),
        "attention.key": (kv_width, width),
        "attention.value": (kv_width, width),
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
