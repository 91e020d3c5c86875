"""The server waits until a deadline that it sets in each round, and for a quorum; slower clients are late.

Semi-synchronous rounds with over-selection, as Bonawitz et al. describe them (2019, arXiv 1902.01046).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np

from training.config.shape import Misfit
from training.federation.config import FederationConfig
from training.federation.round_plan import PaceContext, RoundPlan


def schedule(
    context: PaceContext,
    *,
    quantile: Annotated[
        float, "0.05..1", "The deadline: when this share of the selected clients is expected to be done."
    ] = 0.8,
    over_selection: Annotated[float, "1..10", "Number of clients to select, as a multiple of those wanted."] = 1.0,
    quorum: Annotated[float, "0.01..1", "Share of the wanted clients that a new model needs at least."] = 0.5,
    late: Annotated[
        Literal["use", "drop"],
        "What happens to an update that arrives after its round: it counts in a later one, or is dropped.",
    ] = "use",
    late_exponent: Annotated[float, "0..10", "Weight (1 + τ)^-exponent of an update that is τ rounds late."] = 0.5,
) -> RoundPlan:
    needed = max(1, int(np.ceil(quorum * context.wanted)))
    clients = context.select(int(np.ceil(context.wanted * over_selection)), context.flight.clients)
    full, takes = context.full_steps(clients), context.seconds(clients)
    # The deadline follows from usual speeds; actual times in the round differ.
    ends = context.now + float(np.quantile(context.usual_seconds(clients), quantile)) if len(clients) else context.now
    arriving = context.flight.arriving_by(ends)
    missing = needed - len(arriving) - int((context.now + takes <= ends).sum())
    if missing > 0 and len(clients):  # wait for the client that completes the quorum
        slower = np.sort(context.now + takes[context.now + takes > ends])
        ends = float(slower[min(missing, len(slower)) - 1])
        arriving = context.flight.arriving_by(ends)
    on_time = context.now + takes <= ends
    share = np.where(on_time, 1.0, (ends - context.now) / takes)
    steps = np.where(on_time, full, np.floor(full * share).astype(np.int64)) if context.is_partial else full
    works = steps > 0 if context.is_partial else on_time | (late == "use")
    later = works & ~on_time & (not context.is_partial)
    return RoundPlan(
        context.round,
        clients[works],
        steps[works],
        later=clients[later],
        later_at=context.now + takes[later],
        arriving=arriving,
        staleness_exponent=late_exponent,
        too_slow=clients[~works],
        ends_at=ends,
        seconds=dict(zip(clients.tolist(), takes.tolist(), strict=True)),
        quorum=needed,
    )


def check(config: FederationConfig) -> Iterator[Misfit]:
    options = config.options_of("deadline")
    selected = int(np.ceil(config.selected * float(options["over_selection"] or 1)))
    if selected > config.clients and config.per_round is not None:
        message = (
            f"selects {selected} clients a round, but there are {config.clients}. "
            f"Write at most {config.clients / config.selected:g}."
        )
        yield Misfit("deadline.over_selection", message)
