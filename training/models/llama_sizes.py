"""How large a Llama is: presets by name, and what follows from the sizes that were given. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.config.dims import Dims, RopeScaling

VOCABULARY = 256
"""Bytes: of a model whose data are not known yet."""
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
"""Sizes by the parameters they come to, within 15 %: 1m and 10m with bytes, the larger ones with 32,000 tokens."""

ROPE_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_context",
}
"""The options that make a RopeScaling, and its fields."""


def llama_dims(*, vocabulary: int | None = None, preset: str = "tiny", **given: Any) -> Dims:
    """The preset's, but for those that were given; ValueError if they don't fit together."""
    known = {**PRESETS[preset], **{name: given[name] for name in PRESETS["tiny"] if given.get(name) is not None}}
    if given.get("kv_heads") is None and given.get("heads") is not None:
        known["kv_heads"] = known["heads"]
    if given.get("hidden") is None and (given.get("heads") is not None or given.get("head_width") is not None):
        known["hidden"] = -(-known["heads"] * known["head_width"] * 8 // 3 // 16) * 16
    if known["heads"] % known["kv_heads"]:
        fits = [count for count in range(1, known["heads"] + 1) if known["heads"] % count == 0]
        raise ValueError(f"kv_heads {known['kv_heads']} does not divide {known['heads']} heads. Take one of {fits}.")
    if (odd := known["head_width"]) % 2:
        halves = "so rotary positions have no halves to turn"
        raise ValueError(f"head_width {odd} is odd, {halves}. Take {odd - 1} or {odd + 1}.")
    if (longest := given.get("max_context")) and longest < known["context"]:
        raise ValueError(f"max_context {longest} is less than the context, {known['context']}. Leave it out.")
    return Dims(
        width=known["heads"] * known["head_width"],
        vocabulary=vocabulary or VOCABULARY,
        vocabulary_is_known=vocabulary is not None,
        tied=bool(given.get("tied")),
        dropout=float(given.get("dropout") or 0.0),
        frozen=bool(given.get("lora_rank")),
        rope_base=float(given.get("rope_base") or 10_000.0),
        rope_scaling=_rope_scaling(given),
        max_context=longest,
        norm_epsilon=float(given.get("norm_epsilon") or 1e-5),
        **known,
    )


def _rope_scaling(given: Mapping[str, Any]) -> RopeScaling | None:
    told = {field: given[option] for option, field in ROPE_SCALING.items() if given.get(option) is not None}
    if not told:
        return None
    if "factor" not in told:
        option = next(option for option, field in ROPE_SCALING.items() if field in told)
        raise ValueError(f"{option} belongs to scaled positions, which need rope_factor. Write that, or leave it out.")
    found = RopeScaling(**told)
    if found.high_freq_factor <= found.low_freq_factor:
        low, high = found.low_freq_factor, found.high_freq_factor
        raise ValueError(f"rope_high_freq_factor {high:g} must be more than rope_low_freq_factor, {low:g}.")
    return found


def rope_options(scaling: RopeScaling | None) -> dict[str, Any]:
    """The recipe's options that make it."""
    return {option: getattr(scaling, field, None) for option, field in ROPE_SCALING.items()}
