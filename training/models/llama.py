"""A Llama-like decoder (Touvron et al., 2023, arXiv 2302.13971): RMSNorm, rotary positions, grouped queries, SwiGLU.

Nothing in here knows of ranks. What the parallelisms need is said in plain words: `blocks` by their number in the whole
model, so that names survive a cut; TENSOR, what may be split over ranks and how; and two functions that context
parallelism puts its own in place of, `positions` and each attention's `attend`.
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
    """(samples, T) tokens → (samples, T, vocabulary) logits; or, cut to a stage, from and to (samples, T, width)."""

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
    """What each part is to tensor parallelism (training.parallel.tensor says what the words mean)."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.positions: Callable[[torch.device], Tensor] = lambda device: torch.arange(dims.context, device=device)
        """Which places of a sample this rank's tokens have, (T,) int64, on this device: a copy would be waited for."""
        self.tokens: nn.Embedding | None = Embedding(dims.vocabulary, dims.width)
        self.blocks = nn.ModuleDict({str(number): Block(dims) for number in range(dims.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(dims.width, eps=dims.norm_epsilon)
        self.head: nn.Linear | None = Linear(dims.width, dims.vocabulary, bias=False)
        if dims.tied:
            self.head.weight = self.tokens.weight

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Makes it one stage of a pipeline: these blocks, and the ends where it is the first or the last."""
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
        """Cosine and sine of each place's rotation, (T, head_width / 2) each, in float32."""
        angles = self.positions(device).float()[:, None] * frequencies(self.dims, device)
        return angles.cos(), angles.sin()


def frequencies(dims: Dims, device: torch.device) -> Tensor:
    """How much each half-pair of a head turns from one place to the next, (head_width / 2,) in float32.

    Operation by operation as transformers has it: after 100,000 places a last bit makes a hundredth of a radian.
    """
    half = torch.arange(0, dims.head_width, 2, device=device, dtype=torch.float32) / dims.head_width
    plain: Tensor = 1.0 / (dims.rope_base**half)
    return plain if dims.rope_scaling is None else _scaled(plain, dims.rope_scaling)


def _scaled(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's (arXiv 2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / plain
    is_long = waves > scaling.original_context / low
    is_short = waves < scaling.original_context / high
    smooth = (scaling.original_context / waves - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, between))


class Linear(nn.Linear):
    """A layer without weights of its own making: they are filled by name. (torch's would load its compiler for it.)"""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding without weights of its own making, for the same reason as Linear."""

    def reset_parameters(self) -> None:
        pass


class Block(nn.Module):
    """Attention and a gated network, each added to the stream (samples, T, width)."""

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
        """(samples, T, heads × head_width) → (samples, heads, T, head_width), however many heads this rank has."""
        samples, places, _ = projected.shape
        return projected.view(samples, places, -1, self.head_width).transpose(1, 2)


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
    """Rotary positions (Su et al., 2021, arXiv 2104.09864): each half-pair of a head turns with its place."""
    left, right = heads.float().chunk(2, dim=-1)
    turned = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
    return turned.to(heads.dtype)


def initialise(dims: Dims, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fills one whole parameter; what is added to the stream starts smaller, the more blocks add to it."""
    if tensor.ndim < 2:
        tensor.fill_(1.0)
        return
    onto_stream = name.endswith((".out.weight", ".down.weight"))
    tensor.normal_(std=STD / math.sqrt(2 * dims.layers) if onto_stream else STD, generator=generator)
