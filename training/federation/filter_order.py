"""Check which filters go together, and in which order; no torch. Filters change nothing but the update."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

from training.config import choices
from training.config.shape import Misfit
from training.federation.config import FOLDERS, FederationConfig

STAGES = ("difference", "part", "width")
"""What a filter may do with an update, in the only order that works: take the difference to the last one, send a part
of the coordinates, send fewer bits."""
UPDATE = "delta"
"""The name of the vector that filters and robust aggregations work on. All else that an algorithm sends is summed as it
is."""


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield the contradictions among the filters, and between them and the algorithm."""
    sent = choices.get(FOLDERS["algorithm"], config.algorithm).constants.get("SENT")
    stages = {
        name: choices.get(FOLDERS["filters"], name).constants.get("STAGE", "") for name in config.filters
    }  # a user's module may not define STAGE
    judged = [name for name in config.filters if stages[name] in STAGES]
    in_order = sorted(judged, key=lambda name: STAGES.index(str(stages[name])))
    if config.filters and isinstance(sent, dict) and UPDATE not in sent:
        yield Misfit(
            "filters",
            f"work on an update called {UPDATE}, but {config.algorithm} sends {', '.join(sorted(sent))}. "
            'Write filters = [], or algorithm = "fedavg".',
        )
    elif twice := next((pair for pair in pairwise(in_order) if stages[pair[0]] == stages[pair[1]]), None):
        what = {"part": "choose what part of an update is sent", "width": "reduce the bits of a number"}
        does = what.get(str(stages[twice[0]]), "send a difference")
        yield Misfit("filters", f'name "{twice[0]}" and "{twice[1]}", which both {does}. Keep one of them.')
    elif in_order != judged:
        yield Misfit("filters", f"must be in this order. Write filters = {json.dumps(in_order)}.")
    else:
        yield from _differences(config)


def _differences(config: FederationConfig) -> Iterator[Misfit]:
    """Yield what does not go with a filter that sends again whatever later filters have lost."""
    if "delta" not in config.filters:
        return
    if "sketch" in config.filters:
        yield Misfit(
            "filters",
            'name "delta" and "sketch", but the error of a sketch may exceed its input, and delta would resend that '
            "error in every round, growing without bound. Keep one of them.",
        )
    if config.options_of("topk").get("feedback"):
        yield Misfit(
            "topk.feedback",
            "is true, and delta is there: both would send again what was left out, so it would be sent twice. "
            'Write false, or leave out "delta".',
        )
