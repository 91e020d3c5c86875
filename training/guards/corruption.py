"""Is the hardware still right? Three checks at a step's boundary, of bits that must be the same (protocols.md §7).

replica   what several ranks hold alike (parameters, buffers, the optimizer's state) has equal digests
repeat    the same micro-batch twice gives the same loss and gradient; where determinism is bitwise
probe     a fixed block with weights of its own gives the same on all ranks of one kind of device

And one that is made by a step that was not finite: redo, which is when it is done again (training.guards.passing).

A mismatch counts only if it is there the second time, too. The rank in the minority is named; of two that differ nobody
can tell which is wrong, unless one of them also differs from itself.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from training.checkpoint.staging import walk
from training.config.run_config import RunConfig
from training.engine.assembling import Assembly
from training.engine.optimizer_step import OptimizerStep
from training.guards.digests import digests, together
from training.runtime.distributed import World, gather
from training.step.optimizer import gradients_of

Check = Literal["replica", "repeat", "probe", "redo"]
PROBE_WIDTH = 64


@dataclass(frozen=True)
class Corruption:
    """What was found wrong."""

    check: Check
    ranks: tuple[int, ...]
    """Who is wrong; empty: nobody can tell, `among` differ."""
    among: tuple[int, ...]
    what: str = ""

    def __str__(self) -> str:
        if self.check == "redo":
            of = f"of ranks {_list(self.among)} cannot be told" if not self.ranks else f"is rank {self.ranks[0]}"
            return f"{self.what}, but finite when it was done again: some hardware is wrong; which {of}"
        if self.ranks:
            who = ("rank " if len(self.ranks) == 1 else "ranks ") + _list(self.ranks)
            return f"the {self.check} check finds {who} wrong" + (f" ({self.what})" if self.what else "")
        told = f" ({self.what})" if self.what else ""
        return f"the {self.check} check finds ranks {_list(self.among)} to differ{told} and cannot tell which is wrong"


class CorruptionChecks:
    """One rank's side of them. All ranks call at the same boundaries."""

    def __init__(self, config: RunConfig, world: World, assembly: Assembly, update: OptimizerStep) -> None:
        self._config, self._world, self._assembly, self._update = config, world, assembly, update
        self._probed: int | None = None

    def is_due(self, step: int) -> bool:
        every = self._config.check_weights_every
        return bool(every) and step % every == 0

    def run(self, consumed: int, finished: int) -> Corruption | None:
        """The first that finds something, the same on all ranks."""
        return self._replica() or self._repeat(consumed, finished) or self._twice(self.probe)

    def _twice(self, check: Callable[[], Corruption | None]) -> Corruption | None:
        """What it finds, if it finds something again."""
        return None if check() is None else check()

    def _replica(self) -> Corruption | None:
        # Between two exchanges replicas that stay apart hold nothing alike.
        return None if self._assembly.model.exchange.is_apart else self._twice(self.replica)

    def _repeat(self, consumed: int, finished: int) -> Corruption | None:
        if self._config.determinism != "bitwise":
            return None
        return self._twice(lambda: self.repeat(consumed, finished))

    def replica(self) -> Corruption | None:
        # What is not trained lies in no checkpoint, but every step multiplies by it.
        held = self._assembly.model.held()
        return compare(self._world, {"model": held, "optimizer": self._assembly.optimizer.state()})

    # Repeat.

    def repeat(self, consumed: int, finished: int) -> Corruption | None:
        first, second = self._pass(consumed, finished), self._pass(consumed, finished)
        everybody = gather(self._world, (first[0] != second[0], first[1] != second[1]))
        apart = {name: tuple(r for r, told in enumerate(everybody) if told[i]) for i, name in enumerate(_PASS)}
        for name, ranks in apart.items():
            if ranks:
                # A gradient that was averaged is wrong everywhere at once; a loss is each rank's own.
                known = len(ranks) <= len(everybody) // 2 or len(everybody) == 1
                return Corruption("repeat", ranks if known else (), ranks, name)
        return None

    def _pass(self, consumed: int, finished: int) -> tuple[int, int]:
        """Digests of this rank's loss and gradient; leaves nothing behind."""
        loss = self._update.rehearse(consumed, finished)
        gradients = gradients_of(self._assembly.optimizer.parameters)
        found = digests([loss, *gradients])
        self._assembly.optimizer.zero_grad()
        return found[0], together(found[1:])

    # Probe.

    def probe(self) -> Corruption | None:
        found = probe(self._world.device)
        changed = self._probed is not None and found != self._probed
        self._probed = self._probed if changed else found
        everybody = gather(self._world, (device_kind(self._world.device), found, changed))
        if own := tuple(rank for rank, (_, _, differs) in enumerate(everybody) if differs):
            return Corruption("probe", own, own, "differs from what it gave before")
        for kind in sorted({kind for kind, _, _ in everybody}):
            votes = {rank: number for rank, (name, number, _) in enumerate(everybody) if name == kind}
            if len(set(votes.values())) > 1:
                wrong, among = minority(votes)
                return Corruption("probe", wrong, among, kind)
        return None


_PASS = ("loss", "gradient")


def compare(world: World, state: Mapping[str, Any]) -> Corruption | None:
    """What several ranks hold alike of {"model": …, "optimizer": …}; all ranks call and come to the same answer."""
    held = dict(held_alike(state))
    by_name = {key: digests(tensor for _, tensor in tensors) for key, tensors in held.items()}
    everybody = gather(world, {key: together(found) for key, found in by_name.items()})
    for key in sorted({key for theirs in everybody for key in theirs}):
        votes = {rank: theirs[key] for rank, theirs in enumerate(everybody) if key in theirs}
        if len(set(votes.values())) > 1:
            # By name only now: thousands of digests of each rank are worth sending once something is wrong.
            mine = [(name, number) for (name, _), number in zip(held.get(key, []), by_name.get(key, []), strict=True)]
            wrong, among = minority(votes)
            return Corruption("replica", wrong, among, _names_apart(gather(world, mine)))
    return None


def _names_apart(everybody: Sequence[Sequence[tuple[str, int]]]) -> str:
    """`everybody`: by rank, names and digests of the tensors in question; [] where it holds none of them."""
    known = zip(*(theirs for theirs in everybody if theirs), strict=True)
    names = [held[0][0] for held in known if len({number for _, number in held}) > 1]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def minority(votes: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(who is outvoted, who took part): nobody is unless more than half agree."""
    among = tuple(sorted(votes))
    winner, count = Counter(votes.values()).most_common(1)[0]
    if 2 * count <= len(votes):
        return (), among
    return tuple(rank for rank in among if votes[rank] != winner), among


def held_alike(state: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """This rank's tensors, put together by which ranks hold the very same: equal keys on two ranks, equal bits.

    Of a DTensor that is every rank with the same coordinate along the axes that divide it; of a plain one every rank
    that has a tensor of its name: parameters, means and squares each for themselves, as ZeRO-1 divides the latter.
    """
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for path, tensor in walk({name: state[name] for name in ("model", "optimizer") if name in state}):
        kind = ".".join(path[:2]) if path[0] == "optimizer" else path[0]
        found.setdefault(f"{_coordinate(tensor)} {kind}", []).append((".".join(path), tensor))
    for place, tensors in found.items():
        names = "\n".join(name for name, _ in tensors)
        yield f"{place} {together(names.encode())}", tensors


def _coordinate(tensor: Tensor) -> str:
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None:
        return ""
    axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    where = zip(axes, mesh.get_coordinate() or (), placements, strict=True)
    return ",".join(f"{axis}={place}" for axis, place, placement in where if not placement.is_replicate())


def probe(device: torch.device) -> int:
    """A block's output and gradients from fixed numbers: matrix products, softmax, normalisation, GELU; a digest."""
    generator = torch.Generator().manual_seed(20)
    width = PROBE_WIDTH

    def fixed(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator) / width**0.5
        placed: Tensor = numbers.to(device).requires_grad_()
        return placed

    inputs, up, down = fixed(4, width, width), fixed(width, 4 * width), fixed(4 * width, width)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        weights = torch.softmax(inputs @ inputs.transpose(1, 2), dim=-1)
        seen = nn.functional.layer_norm(weights @ inputs + inputs, (width,))
        out = nn.functional.gelu(seen @ up) @ down
        gradients = torch.autograd.grad(out.square().mean(), (inputs, up, down))
    return together(digests([out, *gradients]))


def device_kind(device: torch.device) -> str:
    """Ranks of one kind compute alike, bit for bit."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    able = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {able}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
