"""Isolate the random numbers of users' code that rank 0 alone runs from all other random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_draws(seed: int | None = None) -> Iterator[None]:
    """Restore the generators of Python, numpy and torch afterwards: rank 0 must go on with the same numbers as others.

    `seed`: the seed inside the block; None: the generators continue from their current state.
    """
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 (users' code draws from this one)
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if is_on_gpu else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
