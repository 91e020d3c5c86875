"""Attention of a part of the queries to all keys and values, which every rank gathers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right


class GatheredAttention:
    """A model's `attend` over this rank's two chunks, (samples, heads, T / ranks, head_width)."""

    def __init__(self, context: int, axis: DeviceMesh) -> None:
        self._rank, self._count, self._group = axis.get_local_rank(), axis.size(), axis.get_group()
        self._chunk = context // (2 * self._count)
        chunks = (self._rank, 2 * self._count - 1 - self._rank)
        # Created once: torch cannot create them while selective recomputation intercepts every operation.
        self._biases = [causal_lower_right(self._chunk, (chunk + 1) * self._chunk) for chunk in chunks]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = _GatherContext.apply(torch.stack((key, value)), self._group, self._chunk).unbind(0)  # type: ignore[no-untyped-call]
        parts = zip(torch.split(query, self._chunk, dim=2), self._biases, strict=True)
        return torch.cat([self._attend(part, keys, values, bias) for part, bias in parts], dim=2)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, bias: CausalBias) -> Tensor:
        """Attend from a chunk's queries to all positions up to the chunk's last one."""
        grouped = query.shape[1] != keys.shape[1]
        key, value = keys[:, :, : bias.seq_len_kv], values[:, :, : bias.seq_len_kv]
        if grouped:
            times = query.shape[1] // keys.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


class _GatherContext(torch.autograd.Function):
    """(…, T / ranks, head_width) of every rank → (…, T, head_width) in the sample's order; backward: the sum."""

    @staticmethod
    def forward(ctx, own_part: Tensor, group: dist.ProcessGroup, chunk: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group, ctx.chunk = group, chunk
        parts = own_part.new_empty((group.size() * own_part.shape[0], *own_part.shape[1:]))
        dist.all_gather_single(parts, own_part.contiguous(), group=group)
        parts = parts.view(group.size(), *own_part.shape)
        fronts = [part.narrow(-2, 0, chunk) for part in parts]
        backs = [part.narrow(-2, chunk, chunk) for part in reversed(parts.unbind(0))]
        return torch.cat([*fronts, *backs], dim=-2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        count, chunks = ctx.group.size(), torch.split(gradient, ctx.chunk, dim=-2)
        parts = torch.cat([torch.cat((chunks[r], chunks[2 * count - 1 - r]), dim=-2) for r in range(count)])
        own_part = gradient.new_empty((parts.shape[0] // count, *parts.shape[1:]))
        dist.reduce_scatter_single(own_part, parts, group=ctx.group)
        return own_part, None, None
