"""A federation with failing clients: a recipe that raises, or returns non-finite numbers, for some clients' data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.ranks import Run

CLIENTS = 8

RECIPE = f'''
"""A linear model on made-up numbers of {CLIENTS} owners, whose data can't be looked up, or are no numbers, as told."""

from collections import Counter
from typing import Annotated

import numpy as np

from training.data import Labels, Prepared, Task

OWNERS = {CLIENTS}
'''
RECIPE += """

def prepare(cache, identity=None):
    return Prepared(cache, "planted_clients")


def labels(data, **options):
    of = {"train": np.zeros(20 * OWNERS, dtype=np.int64), "validation": np.zeros(2 * OWNERS, dtype=np.int64)}
    return Labels(of, ("value",), {split: np.arange(len(each)) % OWNERS for split, each in of.items()})


def has_owners(**options):
    return True


def build(
    data,
    *,
    raising: Annotated[str, "Owners whose data can't be looked up."] = "",
    since: Annotated[int, "From which of its look-ups on."] = 1,
    until: Annotated[int, "To which."] = 1_000_000,
    later: Annotated[int, "Not before so many look-ups of anybody's."] = 0,
    nan: Annotated[str, "Owners whose data are no numbers."] = "",
    batch_norm: Annotated[bool, "So that clients are computed one by one."] = False,
):
    import torch

    seen = Counter()
    broken, bad = (list(map(int, filter(None, told.split(",")))) for told in (raising, nan))

    def batch(split, ids):
        numbers = torch.from_numpy(ids).float()
        if split == "train":
            owners = set((ids % OWNERS).tolist())
            seen.update([*owners, "anybody"])
            for owner in sorted(owners & set(broken)):
                if since <= seen[owner] <= until and seen["anybody"] > later:
                    raise LookupError(f"the disk of owner {owner} is gone")
            numbers = torch.where(torch.from_numpy(np.isin(ids % OWNERS, bad)), torch.nan, numbers)
        return torch.sin(numbers[:, None] * torch.arange(1, 5)), torch.cos(7 * numbers)

    def each(model, batch):
        return {"loss": (model(batch[0])[:, 0] - batch[1]).square()}

    norm = [torch.nn.BatchNorm1d(4)] if batch_norm else []
    return Task(
        model=torch.nn.Sequential(*norm, torch.nn.Linear(4, 1)),
        samples={"train": 20 * OWNERS, "validation": 2 * OWNERS},
        batch=batch,
        loss=lambda model, batch: each(model, batch)["loss"].mean(),
        score=lambda model, batch: {"loss": each(model, batch)["loss"].mean()},
        score_samples=each,
    )
"""
RUN: dict[str, Any] = {
    "recipe": "planted_clients",
    "rounds": 6,
    "clients": CLIENTS,
    "split": "column",
    "batch": 20,
    "checkpoint_every": 0,
    "flush_steps": 1,
}
"""One look-up a client and round where clients are computed together; one more where one of them fails."""


def planted_clients(folder: Path, planted: dict[str, Any], **settings: Any) -> Run:
    """Configure a federation in which these options of the recipe select the clients that fail."""
    recipes = folder / "added" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "planted_clients.py").write_text(RECIPE)
    return Run(
        folder / "run", {**RUN, **settings, "planted_clients": planted}, added=folder / "added", kind="federated"
    )
