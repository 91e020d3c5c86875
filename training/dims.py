"""The sizes of a decoder that decide what it costs and how it can be cut; numbers alone, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Of a Llama-like decoder. A recipe whose model can be cut by axes other than the data's tells them."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    """Of the gated two-layer network in each block."""
    context: int
    """Tokens a sample."""
    vocabulary: int
    tied: bool = False
    """The head's weight is the embedding's."""
    dropout: float = 0.0
    rope_base: float = 10_000.0
    """Of the rotary positions' wavelengths."""
    norm_epsilon: float = 1e-5
    vocabulary_is_known: bool = True
    """False: only the data will tell it, and nothing is refused for what was assumed."""
    frozen: bool = False
    """Only adapters are trained, next to nothing beside the rest, which gets no gradient."""

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
        """Those that every token passes: the head is a product, the embedding only a look-up (PROTOCOLS §7)."""
        return self.layers * self.block_parameters + self.embedding_parameters + self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6N + 12·L·d·T, d = heads × head_width, over the full T² (PROTOCOLS §7).

        4N where the weights are frozen: the third product of each, which gives their gradient, is left out.
        """
        return (
            4 if self.frozen else 6
        ) * self.active_parameters + 12 * self.layers * self.heads * self.head_width * self.context
