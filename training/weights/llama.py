"""A Llama's weights as others name them: our own export, or Hugging Face's; and the sizes that come with them.

Hugging Face keeps queries and keys for the same rotary positions as ours (a head's first half turns with its second),
so a weight is the same numbers under another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from training.models.llama_sizes import llama_dims
from training.weights.opening import CONFIG, Weights, some, wrong

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT = 2048
"""Tokens of a sample where neither the run nor the weights' own run says: what a GPU has room for, not what the model
could see."""
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
SIZES = ("layers", "heads", "kv_heads", "head_width", "hidden", "vocabulary", "rope_base", "norm_epsilon", "tied")
"""The recipe's options that weights settle."""


def their_name(ours: str) -> str:
    """Of a module or a parameter: blocks.3.mlp.up.weight → model.layers.3.mlp.up_proj.weight."""
    head, _, rest = ours.partition(".")
    if head != "blocks":
        return OUTSIDE[head] + ("." + rest if rest else "")
    number, _, rest = rest.partition(".")
    module = next(module for module in IN_LAYER if rest == module or rest.startswith(module + "."))
    return f"model.layers.{number}.{IN_LAYER[module]}{rest.removeprefix(module)}"


def sizes_of(weights: Weights) -> dict[str, Any]:
    """The values of SIZES, and `context`, that these weights were made with; DataError if it is no Llama."""
    found = _their_sizes(weights) if _is_theirs(weights) else _our_sizes(weights)
    _check_shapes(weights, found)
    return found


def reader(weights: Weights) -> Callable[[str], Tensor]:
    """Our name of a parameter → the whole tensor, mapped."""
    theirs = _is_theirs(weights)
    return lambda name: weights.read(their_name(name) if theirs else name)


def _is_theirs(weights: Weights) -> bool:
    return any(name.startswith("model.") for name in weights.tensors)


def _their_sizes(weights: Weights) -> dict[str, Any]:
    config = weights.config
    if config is None:
        raise wrong(
            f"{weights.path} has weights as Hugging Face names them, but no {CONFIG} beside them. Name its folder."
        )
    _check_architecture(weights, config)

    def whole(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise wrong(f"{weights.path / CONFIG} has no {name}, or one that is no whole number.")
        return value

    def number(name: str, default: float, among: Mapping[str, Any] = config) -> float:
        value = among.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(f"{weights.path / CONFIG} has a {name} that is no number.")
        return float(value)

    heads, width = whole("num_attention_heads"), whole("hidden_size")
    head_width = whole("head_dim", width // heads)
    if heads * head_width != width:
        message = f"has {heads} heads of {head_width} on a stream of {width}; here the two are the same width."
        raise wrong(f"{weights.path} {message}")
    return {
        "layers": whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": whole("num_key_value_heads", heads),
        "head_width": head_width,
        "hidden": whole("intermediate_size"),
        "vocabulary": whole("vocab_size"),
        "rope_base": number("rope_theta", number("rope_theta", 10_000.0), config.get("rope_parameters") or {}),
        "norm_epsilon": number("rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "context": min(CONTEXT, whole("max_position_embeddings", CONTEXT)),
    }


def _check_architecture(weights: Weights, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind != "llama":
        raise wrong(f"{weights.path} is of the architecture {kind!r}; what can be started from is a llama.")
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise wrong(f"{weights.path / CONFIG} has a {name} that is no JSON object.")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    unlike = {
        "rope_type": (rope, "default"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
    }
    for name, (has, wanted) in unlike.items():
        if has != wanted:
            raise wrong(f"{weights.path} has {name} {has!r} in its {CONFIG}; here a llama has {wanted!r}.")


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
    return {**{name: getattr(dims, name) for name in SIZES}, "context": dims.context}


def _check_shapes(weights: Weights, sizes: Mapping[str, Any]) -> None:
    """Every parameter of such a model is there, in its shape, and nothing else."""
    theirs = _is_theirs(weights)
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
