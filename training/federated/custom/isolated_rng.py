"""Random numbers of somebody's own code that rank 0 alone runs: they follow from the seed and disturb no other draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_draws(seed: int | None = None) -> Iterator[None]:
    """Restore the generators of Python, numpy and torch afterwards: else rank 0 would go on with other draws.

    `seed`: what they begin with inside; None: where they stand.
    """
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 (what others' code draws from is this one)
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
