"""Clients of your own: a file client.py with model() and data(client).

docs/how-to/federated-code.md lists what it may define; training.federated.custom runs it. Its options, [run.client],
are passed by name to those of its functions that have such keyword-only arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit, Shape
from training.data import Labels, Prepared, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from training.config.base import BaseRunConfig
    from training.federated.custom.client import CustomClient

KIND = "federated"
OPEN = True
TAKES_CLIENT_CODE = True


def check(config: BaseRunConfig, shape: Shape) -> Iterator[Misfit]:
    """Yield options that cannot work."""
    if config.recipe_options().get("held_out") == 1:
        yield Misfit("client.held_out", "is 1, which leaves no sample for training. Write 0, or at least 2.")


def has_owners(**options: object) -> bool:
    """Return True: each client owns what its data() returns."""
    return True


def prepare(
    client_code: CustomClient,
    cache: Path,
    identity: str | None = None,
    report_progress: Callable[..., None] = lambda *progress: None,
    *,
    held_out: Annotated[
        int, "0..1000", "If data() returns nothing for validation: one of this many samples is used for it; 0: none."
    ] = 6,
) -> Prepared:
    return client_code.prepare(identity, holdout_interval=held_out, report=report_progress)


def labels(client_code: CustomClient, data: Path) -> Labels:
    return client_code.labels(data)


def build(client_code: CustomClient, data: Path) -> Task:
    return client_code.task(data)
