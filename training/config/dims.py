"""The sizes of a decoder that decide what it costs and how it can be split; numbers alone, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary positions for a longer context than a model was trained with, as in Llama 3.1 (`rope_type: llama3`).

    Wavelengths above original_context / low_freq_factor are stretched by `factor`, those below original_context /
    high_freq_factor stay as they are; in between, the two are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a Llama-like decoder.

    Recipes whose model can be split along axes other than the data's report them.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    """The inner width of the gated two-layer network in each block."""
    context: int
    """Tokens per sample."""
    vocabulary: int
    tied: bool = False
    """Whether the head shares the embedding's weight."""
    dropout: float = 0.0
    rope_base: float = 10_000.0
    """The base of the rotary positions' wavelengths."""
    rope_scaling: RopeScaling | None = None
    """None: the wavelengths follow from the base alone."""
    max_context: int | None = None
    """Positions that the model is meant for, at least `context`; None: see `longest`. It does not affect training."""
    norm_epsilon: float = 1e-5
    vocabulary_is_known: bool = True
    """False: the data will determine it, and nothing is refused because of the assumed value."""
    frozen: bool = False
    """Only adapters are trained, which are tiny compared with the weights; those get no gradient."""

    @property
    def longest_context(self) -> int:
        """`max_context`; if that is not set, the context that positions are scaled for, or a sample's."""
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
        """Number of all parameters, a tied head counted once."""
        heads = 1 if self.tied else 2
        return self.layers * self.block_parameters + heads * self.embedding_parameters + self.width

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that every token passes (protocols.md §7).

        The head is a product and counts; the embedding is only a look-up.
        """
        return self.layers * self.block_parameters + self.embedding_parameters + self.width

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6N + 12·L·d·T, d = heads × head_width, over the full T² (protocols.md §7).

        4N for frozen weights: the third product of each, which computes their gradient, is left out.
        """
        return (
            4 if self.frozen else 6
        ) * self.active_parameters + 12 * self.layers * self.heads * self.head_width * self.context
