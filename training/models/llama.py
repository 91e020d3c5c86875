"""A Llama-like decoder (Touvron et al., 2023, arXiv 2302.13971): RMSNorm, rotary positions, grouped queries, SwiGLU.

Nothing in here knows of ranks. The parallelisms use: `blocks` by their number in the whole model, so that names survive
a split; TENSOR, which parts may be split over ranks and how; and two functions that context parallelism replaces,
`positions` and each attention's `attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.config.dims import Dims, RopeScaling

STD = 0.02

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query (samples, heads, T, head_width), key and value (samples, kv_heads, T, head_width) → as the query."""


class Llama(nn.Module):
    """(samples, T) tokens → (samples, T, vocabulary) logits; or, as a stage, from and to (samples, T, width)."""

    TENSOR = {
        "tokens": "embedding",
        "blocks.*.attention_norm": "norm",
        "blocks.*.attention": "attention",
        "blocks.*.attention.query": "columns",
        "blocks.*.attention.key": "columns",
        "blocks.*.attention.value": "columns",
        "blocks.*.attention.out": "rows",
        "blocks.*.mlp_norm": "norm",
        "blocks.*.mlp": "network",
        "blocks.*.mlp.gate": "columns",
        "blocks.*.mlp.up": "columns",
        "blocks.*.mlp.down": "rows",
        "norm": "norm",
        "head": "head",
    }
    """How tensor parallelism treats each part (training.parallel.tensor defines the words)."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.positions: Callable[[torch.device], Tensor] = lambda device: torch.arange(dims.context, device=device)
        """The positions of this rank's tokens in a sample, (T,) int64, on this device, as a copy would be waited
        for.
        """
        self.tokens: nn.Embedding | None = Embedding(dims.vocabulary, dims.width)
        self.blocks = nn.ModuleDict({str(number): Block(dims) for number in range(dims.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(dims.width, eps=dims.norm_epsilon)
        self.head: nn.Linear | None = Linear(dims.width, dims.vocabulary, bias=False)
        if dims.tied:
            self.head.weight = self.tokens.weight

    def keep_blocks(self, blocks: range, *, first: bool, last: bool) -> None:
        """Turn the model into one stage of a pipeline.

        The stage has these blocks, and the ends if it is the first or the last one.
        """
        self.blocks = nn.ModuleDict({name: block for name, block in self.blocks.items() if int(name) in blocks})
        if not first:
            self.tokens = None
        if not last:
            self.norm = self.head = None

    def forward(self, stream: Tensor) -> Tensor:
        angles = self._angles(stream.device)
        if self.tokens is not None:
            stream = self.tokens(stream)
        for block in self.blocks.values():
            stream = block(stream, *angles)
        if self.norm is not None and self.head is not None:
            stream = self.head(self.norm(stream))
        return stream

    def _angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each position's rotation, (T, head_width / 2) each, in float32."""
        angles = self.positions(device).float()[:, None] * frequencies(self.dims, device)
        return angles.cos(), angles.sin()


def frequencies(dims: Dims, device: torch.device) -> Tensor:
    """Return how far each half-pair of a head rotates per position, (head_width / 2,) in float32.

    Operation by operation like transformers: after 100,000 positions the last bit makes a hundredth of a radian.
    """
    half = torch.arange(0, dims.head_width, 2, device=device, dtype=torch.float32) / dims.head_width
    plain: Tensor = 1.0 / (dims.rope_base**half)
    return plain if dims.rope_scaling is None else _scaled(plain, dims.rope_scaling)


def _scaled(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's scaled frequencies (arXiv 2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    is_long = wavelengths > scaling.original_context / low
    is_short = wavelengths < scaling.original_context / high
    smooth = (scaling.original_context / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, between))


class Linear(nn.Linear):
    """A linear layer that does not initialise its weights, which are filled by name.

    torch's own would import its compiler for that.
    """

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding that does not initialise its weights, for the same reason as Linear."""

    def reset_parameters(self) -> None:
        pass


class Block(nn.Module):
    """Attention and a gated network, each added to the residual stream (samples, T, width)."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dims.width, eps=dims.norm_epsilon)
        self.attention = Attention(dims)
        self.mlp_norm = nn.RMSNorm(dims.width, eps=dims.norm_epsilon)
        self.mlp = Mlp(dims)
        self.dropout = nn.Dropout(dims.dropout)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention(self.attention_norm(stream), cosine, sine))
        result: Tensor = stream + self.dropout(self.mlp(self.mlp_norm(stream)))
        return result


class Attention(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head_width = dims.head_width
        self.query = Linear(dims.width, dims.heads * dims.head_width, bias=False)
        self.key = Linear(dims.width, dims.kv_heads * dims.head_width, bias=False)
        self.value = Linear(dims.width, dims.kv_heads * dims.head_width, bias=False)
        self.out = Linear(dims.heads * dims.head_width, dims.width, bias=False)
        self.attend: Attend = causal_attention

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (self._heads(project(stream)) for project in (self.query, self.key, self.value))
        mixed = self.attend(rotate(query, cosine, sine), rotate(key, cosine, sine), value)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, projected: Tensor) -> Tensor:
        """Reshape (samples, T, heads × head_width) → (samples, heads, T, head_width).

        For as many heads as this rank has.
        """
        samples, positions, _ = projected.shape
        return projected.view(samples, positions, -1, self.head_width).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate = Linear(dims.width, dims.hidden, bias=False)
        self.up = Linear(dims.width, dims.hidden, bias=False)
        self.down = Linear(dims.hidden, dims.width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(stream)) * self.up(stream))
        return result


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions (Su et al., 2021, arXiv 2104.09864).

    Each half-pair of a head rotates with its position.
    """
    left, right = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
    return rotated.to(heads.dtype)


def initialise(dims: Dims, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill one whole parameter; projections onto the residual stream start smaller the more blocks add to it."""
    if tensor.ndim < 2:
        tensor.fill_(1.0)
        return
    onto_stream = name.endswith((".out.weight", ".down.weight"))
    tensor.normal_(std=STD / math.sqrt(2 * dims.layers) if onto_stream else STD, generator=generator)
