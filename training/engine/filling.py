"""A model without memory gets some, and its weights: as they lie on disk, or as the run's seed and their names give.

A parameter's numbers follow from the seed and its name in the whole model, so they are the same on every layout.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from training.data import Task
from training.runtime.seeds import derive_seed


def fill(task: Task, seed: int, device: torch.device) -> None:
    """The whole model on one device. One that comes with its weights is left as it is."""
    if task.initialise is None:
        return
    tied = shared(task.model)
    give_memory(task.model, device)
    tie(task.model, tied)
    for name, parameter in task.model.named_parameters():
        with torch.no_grad():
            parameter.copy_(whole_parameter(task, seed, name, parameter, device))


def whole_parameter(task: Task, seed: int, name: str, like: Tensor, device: torch.device) -> Tensor:
    """The whole parameter as it lies on disk, mapped and not yet read, or as the seed gives it."""
    assert task.initialise is not None
    if task.weights is not None and (stored := task.weights(name)) is not None:
        return stored
    generator = torch.Generator(device).manual_seed(_seed_of(seed, name))
    whole = torch.empty(like.shape, dtype=like.dtype, device=device)
    task.initialise(name, whole, generator)
    return whole


def shared(model: nn.Module) -> dict[str, str]:
    """Name of a parameter that is another one's, too → the other's name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: known for name, parameter in named if (known := first.setdefault(parameter, name)) != name}


def give_memory(part: nn.Module, device: torch.device | str) -> None:
    """Memory for what is on the meta device, whatever is in it."""
    if any(hasattr(parameter, "to_local") for parameter in part.parameters()):
        part.to_empty(device=device)
        return
    # To make each tensor like one on meta, as to_empty does, imports sympy: a third of a second before the first step.
    empty = {
        name: torch.empty(found.shape, dtype=found.dtype, device=device) for name, found in part.state_dict().items()
    }
    part.load_state_dict(empty, assign=True)


def tie(part: nn.Module, tied: dict[str, str]) -> None:
    """Makes parameters one again: each step of wrapping, and the memory that comes at last, made them two."""
    for name, other in tied.items():
        module, _, attribute = name.rpartition(".")
        setattr(part.get_submodule(module), attribute, part.get_parameter(other))


def _seed_of(seed: int, name: str) -> int:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return derive_seed(seed, number)
