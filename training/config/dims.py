"""The sizes of a decoder that decide what it costs and how it can be cut; numbers alone, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary positions for more places than a model began with, as Llama 3.1 has them (`rope_type: llama3`).

    Waves longer than original_context / low_freq_factor turn `factor` times slower, those shorter than original_context
    / high_freq_factor as before; between the two it is a bit of both.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a Llama-like decoder. A recipe whose model can be cut by axes other than the data's tells them."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    """The inner width of the gated two-layer network in each block."""
    context: int
    """Tokens a sample."""
    vocabulary: int
    tied: bool = False
    """The head's weight is the embedding's."""
    dropout: float = 0.0
    rope_base: float = 10_000.0
    """The base of the rotary positions' wavelengths."""
    rope_scaling: RopeScaling | None = None
    """None: the waves are as the base makes them."""
    max_context: int | None = None
    """Places that the model is meant for, at least `context`; None: `longest` has it. It changes nothing of a run."""
    norm_epsilon: float = 1e-5
    vocabulary_is_known: bool = True
    """False: only the data will tell it, and nothing is refused for what was assumed."""
    frozen: bool = False
    """Only adapters are trained, next to nothing beside the rest, which gets no gradient."""

    @property
    def longest(self) -> int:
        """`max_context`; where nobody said it, what positions are scaled for, or a sample's."""
        scaled = self.rope_scaling.original_context * self.rope_scaling.factor if self.rope_scaling else 0
        return self.max_context or max(self.context, int(scaled))

    @property
    def block_parameters(self) -> int:
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All of them, a tied head counted once."""
        heads = 1 if self.tied else 2
        return self.layers * self.block_parameters + heads * self.embedding_parameters + self.width

    @property
    def active_parameters(self) -> int:
        """Those that every token passes: the head is a product, the embedding only a look-up (protocols.md §7)."""
        return self.layers * self.block_parameters + self.embedding_parameters + self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6N + 12·L·d·T, d = heads × head_width, over the full T² (protocols.md §7).

        4N where the weights are frozen: the third product of each, which gives their gradient, is left out.
        """
        return (
            4 if self.frozen else 6
        ) * self.active_parameters + 12 * self.layers * self.heads * self.head_width * self.context
