"""The sizes of a Llama: presets by name, and what follows from given sizes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.config.dims import Dims, RopeScaling

VOCABULARY = 256
"""Vocabulary of bytes: for a model whose data are not known yet."""
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 3, "heads": 4, "kv_heads": 4, "head_width": 24, "hidden": 256, "context": 96},
    "1m": {"layers": 4, "heads": 4, "kv_heads": 4, "head_width": 32, "hidden": 448, "context": 256},
    "10m": {"layers": 6, "heads": 6, "kv_heads": 6, "head_width": 64, "hidden": 1024, "context": 512},
    "125m": {"layers": 12, "heads": 12, "kv_heads": 12, "head_width": 64, "hidden": 2048, "context": 1024},
    "350m": {"layers": 24, "heads": 16, "kv_heads": 16, "head_width": 64, "hidden": 2816, "context": 2048},
    "1b": {"layers": 16, "heads": 32, "kv_heads": 8, "head_width": 64, "hidden": 8192, "context": 2048},
    "3b": {"layers": 28, "heads": 24, "kv_heads": 8, "head_width": 128, "hidden": 8192, "context": 4096},
    "7b": {"layers": 32, "heads": 32, "kv_heads": 32, "head_width": 128, "hidden": 11008, "context": 4096},
}
"""Sizes by number of parameters, within 15 %: 1m and 10m with bytes, the larger ones with 32,000 tokens."""

ROPE_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_context",
}
"""The recipe's options that define a RopeScaling → its fields."""


def llama_dims(*, vocabulary: int | None = None, preset: str = "tiny", **given: Any) -> Dims:
    """Return the preset's sizes, overridden by those that are given. Raises ValueError if they do not fit together."""
    sizes = {**PRESETS[preset], **{name: given[name] for name in PRESETS["tiny"] if given.get(name) is not None}}
    if given.get("kv_heads") is None and given.get("heads") is not None:
        sizes["kv_heads"] = sizes["heads"]
    if given.get("hidden") is None and (given.get("heads") is not None or given.get("head_width") is not None):
        sizes["hidden"] = -(-sizes["heads"] * sizes["head_width"] * 8 // 3 // 16) * 16
    if sizes["heads"] % sizes["kv_heads"]:
        fits = [count for count in range(1, sizes["heads"] + 1) if sizes["heads"] % count == 0]
        raise ValueError(f"kv_heads {sizes['kv_heads']} does not divide {sizes['heads']} heads. Take one of {fits}.")
    if (odd := sizes["head_width"]) % 2:
        reason = "but rotary positions rotate pairs of halves"
        raise ValueError(f"head_width {odd} is odd, {reason}. Take {odd - 1} or {odd + 1}.")
    if (longest := given.get("max_context")) and longest < sizes["context"]:
        raise ValueError(f"max_context {longest} is less than the context, {sizes['context']}. Leave it out.")
    return Dims(
        width=sizes["heads"] * sizes["head_width"],
        vocabulary=vocabulary or VOCABULARY,
        vocabulary_is_known=vocabulary is not None,
        tied=bool(given.get("tied")),
        dropout=float(given.get("dropout") or 0.0),
        frozen=bool(given.get("lora_rank")),
        rope_base=float(given.get("rope_base") or 10_000.0),
        rope_scaling=_rope_scaling(given),
        max_context=longest,
        norm_epsilon=float(given.get("norm_epsilon") or 1e-5),
        **sizes,
    )


def _rope_scaling(given: Mapping[str, Any]) -> RopeScaling | None:
    fields = {field: given[option] for option, field in ROPE_SCALING.items() if given.get(option) is not None}
    if not fields:
        return None
    if "factor" not in fields:
        option = next(option for option, field in ROPE_SCALING.items() if field in fields)
        raise ValueError(f"{option} belongs to scaled positions, which need rope_factor. Write that, or leave it out.")
    scaling = RopeScaling(**fields)
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise ValueError(f"rope_high_freq_factor {high:g} must be more than rope_low_freq_factor, {low:g}.")
    return scaling


def rope_options(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the recipe's options that define this scaling."""
    return {option: getattr(scaling, field, None) for option, field in ROPE_SCALING.items()}
