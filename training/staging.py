"""A copy of the state on the CPU, taken between two steps and written while training goes on.

Of what several ranks hold alike (all of it under data parallelism, replicas of shards) one rank stages each tensor: the
one that will write it. The memory is kept from save to save, pinned where there is a GPU: on fresh pages the same copy
took 50 times as long (measured on a CPU), and pageable memory takes a GPU's copies at a fraction of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, Any]
"""A tree of dicts whose leaves are tensors: plain ones, or DTensors that hold a part."""
Path = tuple[str, ...]
Piece = tuple[str, tuple[int, ...], int]
"""A tensor's dotted name, where in it a rank's part begins, and that part's bytes."""

PIN_BYTES = 1 << 20
"""Smaller buffers are not pinned: registering one takes longer than it saves."""


class Staging:
    """The buffers of one rank. All ranks of the group call `copy` at the same step boundary."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._buffers: dict[Path, Tensor] = {}
        self._shape: list[object] = []
        self._mine: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """What the buffers hold."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, state: State) -> State:
        """This rank's part of the state, on the CPU and no longer training's own. Valid until the next call."""
        leaves = dict(walk(state))
        self._share_out(leaves)
        mine = {path: tensor for path, tensor in leaves.items() if ".".join(path) in self._mine}
        copied = {path: self._stage(path, tensor.detach()) for path, tensor in mine.items()}
        if any(tensor.device.type == "cuda" for tensor in mine.values()):
            torch.cuda.current_stream().synchronize()  # until then the buffers are not filled
        return tree(copied)

    def _share_out(self, leaves: Mapping[Path, Tensor]) -> None:
        """Settles who writes what; asks the others again only when some rank's state has another shape than before."""
        shape: list[object] = [
            (
                path,
                tensor.shape,
                tensor.dtype,
                getattr(tensor, "placements", None),
                id(getattr(tensor, "device_mesh", None)),
            )
            for path, tensor in leaves.items()
        ]
        if not _any(shape != self._shape, self._group):
            return
        pieces = [_piece(path, tensor) for path, tensor in leaves.items()]
        everybody: list[list[Piece]] = [pieces]
        if self._group is not None:
            everybody *= dist.get_world_size(self._group)
            dist.all_gather_object(everybody, pieces, group=self._group)
        rank = dist.get_rank(self._group) if self._group is not None else 0
        self._shape, self._mine = shape, frozenset(owned(everybody)[rank])
        for buffer in self._buffers.values():
            _unpin(buffer)
        self._buffers.clear()

    def _stage(self, path: Path, tensor: Tensor) -> Tensor:
        if hasattr(type(tensor), "__tensor_flatten__"):  # a DTensor stays one, its local part on the CPU
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(tensor, name) for name in names}  # the mesh is among them
            inner = {
                name: self._stage((*path, name), part) if isinstance(part, Tensor) else part
                for name, part in parts.items()
            }
            rebuilt: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
                inner, context, tensor.size(), tensor.stride()
            )
            return rebuilt
        buffer = self._buffers.get(path)
        if buffer is None:
            buffer = self._buffers[path] = torch.empty_like(tensor, device="cpu")
            if tensor.device.type == "cuda":
                _pin(buffer)
        return buffer.copy_(tensor, non_blocking=True)


def walk(state: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a tree with its path."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from walk(value, (*above, name))
        else:
            yield (*above, name), value


def owned(everybody: Sequence[Iterable[Piece]]) -> list[list[str]]:
    """By rank, the names of what it writes: each piece once, by whichever of its holders has the least to write.

    A function of the list alone, so that every rank comes to the same answer.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(everybody):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    load = [0] * len(everybody)
    found: list[list[str]] = [[] for _ in everybody]
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]) > 1, -piece[2], piece)):
        rank = min(holders[piece], key=lambda rank: load[rank])
        load[rank] += piece[2]
        found[rank].append(piece[0])
    return found


def _piece(path: Path, tensor: Tensor) -> Piece:
    name = ".".join(path)
    if not hasattr(tensor, "device_mesh"):
        return name, (0,) * tensor.ndim, tensor.nbytes
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where: tuple[Any, Any] = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, *where)
    elements = 1
    for size in shape:
        elements *= size
    return name, tuple(offsets), elements * tensor.element_size()


def _any(mine: bool, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return mine
    flag = torch.tensor(int(mine), dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def tree(leaves: Mapping[Path, Tensor]) -> State:
    """The tree that `walk` gives these leaves of."""
    found: State = {}
    for path, tensor in leaves.items():
        node = found
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = tensor
    return found


def _pin(buffer: Tensor) -> None:
    """Registers memory as it is: torch's own pinned memory comes in powers of two, up to twice what is needed."""
    if buffer.nbytes >= PIN_BYTES:
        _cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1)  # 1: for every device


def _unpin(buffer: Tensor) -> None:
    if buffer.nbytes >= PIN_BYTES and torch.cuda.is_available() and buffer.is_pinned():
        _cudart().cudaHostUnregister(buffer.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
