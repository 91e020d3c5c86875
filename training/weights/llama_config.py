"""A Llama's config.json as Hugging Face has it: read as the options of a run, and written from a model's sizes.

Two spellings of the rotary positions are about. transformers 5 writes one object, `rope_parameters`; those before it
`rope_theta` and, where positions are scaled, `rope_scaling`. Both are read, and both are written: an old reader would
pass over the new one without a word, and turn by another base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.config.dims import Dims, RopeScaling
from training.models.llama_sizes import ROPE_SCALING, rope_options
from training.weights.opening import CONFIG, Weights, wrong

CONTEXT = 2048
"""Tokens of a sample where neither the run nor the weights' own run says: what a GPU has room for, not what the model
could see."""
LARGEST = 1e300
"""No number of a model is as large; JSON may spell some that no float can hold."""
LLAMA3 = "llama3"
THEIR_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
"""The recipe's options, and Hugging Face's names for them."""


def read(weights: Weights) -> dict[str, Any]:
    """The recipe's options that a folder's config.json settles; DataError if it is of no Llama that is known here."""
    if weights.config is None:
        raise wrong(
            f"{weights.path} has weights as Hugging Face names them, but no {CONFIG} beside them. Name its folder."
        )
    said = _Said(weights, weights.config)
    _check_architecture(weights, weights.config)
    heads, width = said.whole("num_attention_heads"), said.whole("hidden_size")
    head_width = said.whole("head_dim", width // heads)
    if heads * head_width != width:
        message = f"has {heads} heads of {head_width} on a stream of {width}; here the two are the same width."
        raise wrong(f"{weights.path} {message}")
    longest = said.whole("max_position_embeddings", CONTEXT)
    return {
        "layers": said.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": said.whole("num_key_value_heads", heads),
        "head_width": head_width,
        "hidden": said.whole("intermediate_size"),
        "vocabulary": said.whole("vocab_size"),
        **_rope(said),
        "norm_epsilon": said.number("rms_norm_eps", 1e-6),
        "tied": bool(weights.config.get("tie_word_embeddings", False)),
        "context": min(CONTEXT, longest),
        "max_context": longest,
    }


def written(dims: Dims, dtype: str) -> dict[str, Any]:
    """What config.json says of a model of these sizes, but for the tokens with a meaning (bos, eos, pad)."""
    scaling = _their_scaling(dims.rope_scaling)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_size": dims.width,
        "intermediate_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_width,
        "max_position_embeddings": dims.longest,
        "vocab_size": dims.vocabulary,
        "tie_word_embeddings": dims.tied,
        "rms_norm_eps": dims.norm_epsilon,
        "rope_theta": dims.rope_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": dims.rope_base},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _their_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    ours = rope_options(scaling)
    return {"rope_type": LLAMA3, **{theirs: ours[option] for option, theirs in THEIR_SCALING.items()}}


class _Said:
    """What an object of the file says, each thing of its kind."""

    def __init__(self, weights: Weights, content: Mapping[str, Any]) -> None:
        self.weights, self.content = weights, content

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise wrong(f"{self.weights.path / CONFIG} has no {name}, or one that is no whole number.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.content.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            what = f"has no {name}" if value is None else f"has a {name} that is no number"
            raise wrong(f"{self.weights.path / CONFIG} {what}.")
        return float(value)

    def within(self, name: str) -> _Said:
        content = self.content.get(name)
        if not isinstance(content or {}, dict):
            raise wrong(f"{self.weights.path / CONFIG} has a {name} that is no JSON object.")
        return _Said(self.weights, content or {})


def _rope(said: _Said) -> dict[str, Any]:
    """The base and, where positions are scaled, what they are scaled by."""
    new, old = said.within("rope_parameters"), said.within("rope_scaling")
    found: dict[str, Any] = {"rope_base": new.number("rope_theta", said.number("rope_theta", 10_000.0))}
    scaling = old if old.content else new
    if odd := next((name for name, value in scaling.content.items() if isinstance(value, dict)), None):
        raise wrong(f"{said.weights.path} turns positions by layer ({odd}); here all layers do alike.")
    kind = scaling.content.get("rope_type", scaling.content.get("type", "default"))
    if kind == "default":
        return found | dict.fromkeys(ROPE_SCALING)
    if kind != LLAMA3:
        message = f"scales positions by rope_type {kind!r:.40}; what can be started from has {LLAMA3!r}, or none."
        raise wrong(f"{said.weights.path} {message}")
    found |= {option: scaling.number(theirs) for option, theirs in THEIR_SCALING.items()}
    return found | {"rope_original_context": scaling.whole(THEIR_SCALING["rope_original_context"])}


def _check_architecture(weights: Weights, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind != "llama":
        raise wrong(f"{weights.path} is of the architecture {kind!r}; what can be started from is a llama.")
    unlike = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "partial_rotary_factor": (_partial(config), 1.0),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for name, (has, wanted) in unlike.items():
        if has != wanted:
            raise wrong(f"{weights.path} has {name} {has!r:.100} in its {CONFIG}; here a llama has {wanted!r}.")


def _partial(config: Mapping[str, Any]) -> Any:
    """What part of each head turns."""
    places = (config, config.get("rope_parameters"), config.get("rope_scaling"))
    said = [
        place["partial_rotary_factor"]
        for place in places
        if isinstance(place, dict) and "partial_rotary_factor" in place
    ]
    return next((value for value in said if value is not None), 1.0)
