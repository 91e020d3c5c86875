"""Read a Hugging Face Llama's config.json as options of a run, and write one from a model's sizes.

There are two spellings of the rotary positions. transformers 5 writes one object, `rope_parameters`; earlier versions
`rope_theta` and, where positions are scaled, `rope_scaling`. Both are read, and both are written: an old reader would
silently ignore the new one and use another base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.config.dims import Dims, RopeScaling
from training.models.llama_sizes import ROPE_SCALING, rope_options
from training.weights.weight_files import CONFIG, Weights, weights_error

CONTEXT = 2048
"""Default tokens per sample, if neither the run nor the weights' own run sets it: limited by a GPU's memory rather than
by the model."""
MAX_VALUE = 1e300
"""Upper limit of numbers: JSON can express some that no float can represent."""
LLAMA3 = "llama3"
HUGGING_FACE_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
"""The recipe's options, and Hugging Face's names for them."""


def read(weights: Weights) -> dict[str, Any]:
    """Return the recipe's options that a config.json determines. Raises DataError if it is no supported Llama."""
    if weights.config is None:
        raise weights_error(
            f"{weights.path} has weights with Hugging Face's names, but no {CONFIG} next to them. Name the model's "
            "folder."
        )
    config = _ConfigReader(weights, weights.config)
    _check_architecture(weights, weights.config)
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_width = config.integer("head_dim", width // heads)
    if heads * head_width != width:
        message = f"has {heads} heads of {head_width} on a stream of {width}; here the two are the same width."
        raise weights_error(f"{weights.path} {message}")
    longest = config.integer("max_position_embeddings", CONTEXT)
    return {
        "layers": config.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", heads),
        "head_width": head_width,
        "hidden": config.integer("intermediate_size"),
        "vocabulary": config.integer("vocab_size"),
        **_rope(config),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "tied": bool(weights.config.get("tie_word_embeddings", False)),
        "context": min(CONTEXT, longest),
        "max_context": longest,
    }


def to_config(dims: Dims, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model with these sizes, without the special tokens (bos, eos, pad)."""
    scaling = _hugging_face_scaling(dims.rope_scaling)
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
        "max_position_embeddings": dims.longest_context,
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


def _hugging_face_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    ours = rope_options(scaling)
    return {"rope_type": LLAMA3, **{their_name: ours[option] for option, their_name in HUGGING_FACE_SCALING.items()}}


class _ConfigReader:
    """Reads an object of the file, checking the type of each value."""

    def __init__(self, weights: Weights, content: Mapping[str, Any]) -> None:
        self.weights, self.content = weights, content

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise weights_error(f"{self.weights.path / CONFIG} has no {name}, or one that is not a whole number.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.content.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_VALUE:
            what = f"has no {name}" if value is None else f"has a {name} that is not a number"
            raise weights_error(f"{self.weights.path / CONFIG} {what}.")
        return float(value)

    def nested(self, name: str) -> _ConfigReader:
        content = self.content.get(name)
        if not isinstance(content or {}, dict):
            raise weights_error(f"{self.weights.path / CONFIG} has a {name} that is not a JSON object.")
        return _ConfigReader(self.weights, content or {})


def _rope(config: _ConfigReader) -> dict[str, Any]:
    """Return the base of the rotary positions and their scaling, if any."""
    new, old = config.nested("rope_parameters"), config.nested("rope_scaling")
    options: dict[str, Any] = {"rope_base": new.number("rope_theta", config.number("rope_theta", 10_000.0))}
    scaling = old if old.content else new
    if odd := next((name for name, value in scaling.content.items() if isinstance(value, dict)), None):
        raise weights_error(
            f"{config.weights.path} has rotary positions per layer ({odd}); only the same for all layers are supported."
        )
    kind = scaling.content.get("rope_type", scaling.content.get("type", "default"))
    if kind == "default":
        return options | dict.fromkeys(ROPE_SCALING)
    if kind != LLAMA3:
        message = f"scales positions with rope_type {kind!r:.40}; only {LLAMA3!r} or none is supported."
        raise weights_error(f"{config.weights.path} {message}")
    options |= {option: scaling.number(theirs) for option, theirs in HUGGING_FACE_SCALING.items()}
    return options | {"rope_original_context": scaling.integer(HUGGING_FACE_SCALING["rope_original_context"])}


def _check_architecture(weights: Weights, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind != "llama":
        raise weights_error(f"{weights.path} has the architecture {kind!r}; only llama is supported.")
    unlike = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "partial_rotary_factor": (_partial(config), 1.0),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for name, (has, wanted) in unlike.items():
        if has != wanted:
            raise weights_error(
                f"{weights.path} has {name} {has!r:.100} in its {CONFIG}; only {wanted!r} is supported."
            )


def _partial(config: Mapping[str, Any]) -> Any:
    """Return the fraction of each head that is rotated."""
    tables = (config, config.get("rope_parameters"), config.get("rope_scaling"))
    values = [
        table["partial_rotary_factor"]
        for table in tables
        if isinstance(table, dict) and "partial_rotary_factor" in table
    ]
    return next((value for value in values if value is not None), 1.0)
