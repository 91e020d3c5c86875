"""Detect faulty hardware: three checks at a step boundary that compare bits which must be equal (protocols.md §7).

replica   state that several ranks share (parameters, buffers, the optimizer's state) has equal digests
repeat    the same micro-batch twice gives the same loss and gradient; only where determinism is bitwise
probe     a fixed block with its own weights gives the same result on all ranks with the same kind of device

A fourth one, redo, is made when a step is not finite but finite when repeated (training.guards.transient).

A mismatch counts only if it appears twice. The rank in the minority is named; of two ranks that differ nobody can tell
which one is wrong, unless one of them also differs from itself.
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
from training.guards.digests import combine, digests
from training.runtime.distributed import World, gather
from training.step.optimizer import gradients_of

Check = Literal["replica", "repeat", "probe", "redo"]
PROBE_WIDTH = 64


@dataclass(frozen=True)
class Corruption:
    """A mismatch, and the ranks involved."""

    check: Check
    ranks: tuple[int, ...]
    """The faulty ranks; empty: it is unknown which of `among` is wrong."""
    among: tuple[int, ...]
    what: str = ""

    def __str__(self) -> str:
        if self.check == "redo":
            where = f"on rank {self.ranks[0]}" if self.ranks else f"on one of ranks {_list(self.among)}"
            return f"{self.what}, but finite when the step was repeated: hardware fault {where}"
        if self.ranks:
            who = ("rank " if len(self.ranks) == 1 else "ranks ") + _list(self.ranks)
            return f"the {self.check} check finds {who} wrong" + (f" ({self.what})" if self.what else "")
        detail = f" ({self.what})" if self.what else ""
        return (
            f"the {self.check} check finds ranks {_list(self.among)} to differ{detail} and cannot tell which is wrong"
        )


class CorruptionChecks:
    """One rank's side of the checks. All ranks call at the same boundaries."""

    def __init__(self, config: RunConfig, world: World, assembly: Assembly, update: OptimizerStep) -> None:
        self._config, self._world, self._assembly, self._update = config, world, assembly, update
        self._last_probe: int | None = None

    def is_due(self, step: int) -> bool:
        interval = self._config.check_weights_every
        return bool(interval) and step % interval == 0

    def run(self, consumed: int, finished: int) -> Corruption | None:
        """Run the checks in order and return the first mismatch, which is the same on all ranks."""
        return self._replica() or self._repeat(consumed, finished) or self._confirm(self.probe)

    def _confirm(self, check: Callable[[], Corruption | None]) -> Corruption | None:
        """Return what a check finds if it finds something twice."""
        return None if check() is None else check()

    def _replica(self) -> Corruption | None:
        # Replicas that synchronise only now and then have nothing in common between two exchanges.
        return None if self._assembly.model.exchange.has_independent_replicas else self._confirm(self.replica)

    def _repeat(self, consumed: int, finished: int) -> Corruption | None:
        if self._config.determinism != "bitwise":
            return None
        return self._confirm(lambda: self.repeat(consumed, finished))

    def replica(self) -> Corruption | None:
        # Includes frozen weights: they are in no checkpoint, but every step multiplies by them.
        model = self._assembly.model.all_state()
        return compare(self._world, {"model": model, "optimizer": self._assembly.optimizer.state()})

    # Repeat.

    def repeat(self, consumed: int, finished: int) -> Corruption | None:
        first, second = self._pass(consumed, finished), self._pass(consumed, finished)
        differences = gather(self._world, (first[0] != second[0], first[1] != second[1]))
        differing = {
            name: tuple(r for r, rank_differs in enumerate(differences) if rank_differs[i])
            for i, name in enumerate(_PASS)
        }
        for name, ranks in differing.items():
            if ranks:
                # An averaged gradient is wrong on all ranks at once; a loss is computed by each rank alone.
                is_attributable = len(ranks) <= len(differences) // 2 or len(differences) == 1
                return Corruption("repeat", ranks if is_attributable else (), ranks, name)
        return None

    def _pass(self, consumed: int, finished: int) -> tuple[int, int]:
        """Return digests of this rank's loss and gradient; changes no state."""
        loss = self._update.differentiate_keeping_buffers(consumed, finished)
        gradients = gradients_of(self._assembly.optimizer.parameters)
        digests_ = digests([loss, *gradients])
        self._assembly.optimizer.zero_grad()
        return digests_[0], combine(digests_[1:])

    # Probe.

    def probe(self) -> Corruption | None:
        found = probe(self._world.device)
        changed = self._last_probe is not None and found != self._last_probe
        self._last_probe = self._last_probe if changed else found
        probes = gather(self._world, (device_kind(self._world.device), found, changed))
        if changed_ranks := tuple(rank for rank, (_, _, differs) in enumerate(probes) if differs):
            return Corruption("probe", changed_ranks, changed_ranks, "differs from what it gave before")
        for kind in sorted({kind for kind, _, _ in probes}):
            votes = {rank: number for rank, (name, number, _) in enumerate(probes) if name == kind}
            if len(set(votes.values())) > 1:
                wrong, among = minority(votes)
                return Corruption("probe", wrong, among, kind)
        return None


_PASS = ("loss", "gradient")


def compare(world: World, state: Mapping[str, Any]) -> Corruption | None:
    """Compare what several ranks share of {"model": …, "optimizer": …}; all ranks call and get the same result."""
    groups = dict(shared_groups(state))
    by_name = {key: digests(tensor for _, tensor in tensors) for key, tensors in groups.items()}
    digests_by_rank = gather(world, {key: combine(found) for key, found in by_name.items()})
    for key in sorted({key for rank_digests in digests_by_rank for key in rank_digests}):
        votes = {rank: theirs[key] for rank, theirs in enumerate(digests_by_rank) if key in theirs}
        if len(set(votes.values())) > 1:
            # By name only now: thousands of digests per rank are worth sending only once something is wrong.
            own_digests = [
                (name, number) for (name, _), number in zip(groups.get(key, []), by_name.get(key, []), strict=True)
            ]
            wrong, among = minority(votes)
            return Corruption("replica", wrong, among, _differing_names(gather(world, own_digests)))
    return None


def _differing_names(by_rank: Sequence[Sequence[tuple[str, int]]]) -> str:
    """List tensors whose digests differ. `by_rank`: each rank's names and digests; [] if it has none of the tensors."""
    columns = zip(*(theirs for theirs in by_rank if theirs), strict=True)
    names = [column[0][0] for column in columns if len({number for _, number in column}) > 1]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def minority(votes: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (ranks that are outvoted, ranks that voted): nobody is outvoted unless more than half agree."""
    among = tuple(sorted(votes))
    winner, count = Counter(votes.values()).most_common(1)[0]
    if 2 * count <= len(votes):
        return (), among
    return tuple(rank for rank in among if votes[rank] != winner), among


def shared_groups(state: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Group this rank's tensors by the set of ranks that store exactly the same: equal key on two ranks, equal bits.

    For a DTensor these are the ranks with the same coordinate along the axes that divide it; for a plain tensor all
    ranks that have one of its name. Parameters, means and squares are separate groups, as ZeRO-1 divides only the
    latter.
    """
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for path, tensor in walk({name: state[name] for name in ("model", "optimizer") if name in state}):
        kind = ".".join(path[:2]) if path[0] == "optimizer" else path[0]
        groups.setdefault(f"{_coordinate(tensor)} {kind}", []).append((".".join(path), tensor))
    for place, tensors in groups.items():
        names = "\n".join(name for name, _ in tensors)
        yield f"{place} {combine(names.encode())}", tensors


def _coordinate(tensor: Tensor) -> str:
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None:
        return ""
    axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    coordinates = zip(axes, mesh.get_coordinate() or (), placements, strict=True)
    return ",".join(f"{axis}={place}" for axis, place, placement in coordinates if not placement.is_replicate())


def probe(device: torch.device) -> int:
    """Return a digest of a block's output and gradients for fixed inputs.

    The block has matrix products, softmax, normalisation and GELU.
    """
    generator = torch.Generator().manual_seed(20)
    width = PROBE_WIDTH

    def fixed(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator) / width**0.5
        placed: Tensor = numbers.to(device).requires_grad_()
        return placed

    inputs, up, down = fixed(4, width, width), fixed(width, 4 * width), fixed(4 * width, width)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        weights = torch.softmax(inputs @ inputs.transpose(1, 2), dim=-1)
        normalized = nn.functional.layer_norm(weights @ inputs + inputs, (width,))
        out = nn.functional.gelu(normalized @ up) @ down
        gradients = torch.autograd.grad(out.square().mean(), (inputs, up, down))
    return combine(digests([out, *gradients]))


def device_kind(device: torch.device) -> str:
    """Describe the device: ranks with the same kind compute identical bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
