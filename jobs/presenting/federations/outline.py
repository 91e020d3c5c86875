"""Draw how a federation's data would be split: a bar per client, or one band for many clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobs.client_name import client_name
from jobs.presenting.federations.clients import COLOUR_COUNT, BarShare, counts_text, first_colour, legend, shares
from training.federation.outline import DataOutline
from training.federation.tables import QUANTILES
from vigil_core import formatting

MAX_ROWS = 16
"""Largest number of clients with one bar each."""
COLUMNS = 100
"""Columns of a band; with more clients it shows a sample."""
HEIGHT = 1000
UNEVEN_FACTOR = 20
"""If the largest client exceeds the median by this factor, heights are square roots, or all others would be flat."""


@dataclass(frozen=True, kw_only=True)
class ClientBar:
    """A client. `most_common` is its most frequent label, `part` that label's share of the samples."""

    number: int
    name: str
    shares: list[BarShare]
    shares_text: str
    samples: int
    most_common: str
    part: float


@dataclass(frozen=True, kw_only=True)
class ClientBand:
    """Columns of clients, their height proportional to their samples; `paths` holds one path per colour."""

    paths: list[tuple[int, str]]
    columns: int
    first: str
    last: str
    most: int
    caption: str


@dataclass(frozen=True, kw_only=True)
class DrawnOutline:
    """The drawing: either `rows` or a `band`."""

    summary: str
    labels: list[str]
    rows: list[ClientBar]
    band: ClientBand | None
    spreads: list[tuple[str, list[str]]]


def draw(outline: DataOutline, summary: str) -> DrawnOutline:
    """Draw the outline. `summary` is the same as a sentence, for screen readers."""
    is_few = len(outline.counts) <= MAX_ROWS
    return DrawnOutline(
        summary=summary,
        labels=legend(outline.labels),
        rows=[_row(outline, client) for client in range(len(outline.counts))] if is_few else [],
        band=None if is_few else _band(outline),
        spreads=list(_spreads(outline)),
    )


def _row(outline: DataOutline, client: int) -> ClientBar:
    counts = outline.counts[client].tolist()
    return ClientBar(
        number=client,
        name=outline.name(client),
        shares=shares(counts, max(1, int(outline.sizes.max()))),
        shares_text=counts_text(counts, outline.labels),
        samples=int(outline.sizes[client]),
        most_common=outline.labels[outline.most_common_labels[client]],
        part=float(outline.most_common_shares[client]),
    )


def _band(outline: DataOutline) -> ClientBand:
    many = len(outline.counts)
    if many <= COLUMNS:
        chosen, caption = np.arange(many), "Each column is a client"
        ends = [client_name(client, outline.name(client)) for client in (0, many - 1)]
    else:
        order = np.argsort(outline.sizes, kind="stable")
        chosen = order[np.linspace(0, many - 1, COLUMNS).astype(np.int64)]
        caption = f"{COLUMNS} of {formatting.count(many)} clients, the smallest first"
        ends = ["the smallest", "the largest"]
    most = int(outline.sizes.max())
    counts = outline.counts[chosen]
    if counts.shape[1] > COLOUR_COUNT:
        counts = np.concatenate(
            [counts[:, : COLOUR_COUNT - 1], counts[:, COLOUR_COUNT - 1 :].sum(axis=1, keepdims=True)], axis=1
        )
    is_uneven = most > UNEVEN_FACTOR * float(np.median(outline.sizes))
    if is_uneven:
        caption += "; heights are square roots"
    paths = _paths(counts, most, is_uneven=is_uneven)
    return ClientBand(paths=paths, columns=len(chosen), first=ends[0], last=ends[1], most=most, caption=caption)


def _paths(counts: NDArray[np.int64], most: int, *, is_uneven: bool) -> list[tuple[int, str]]:
    """Return one path per colour. Coordinates are whole numbers so that segments meet; empty segments are left out."""
    sizes = counts.sum(axis=1, keepdims=True) / max(1, most)
    parts = counts.cumsum(axis=1) / np.maximum(1, counts.sum(axis=1, keepdims=True))
    tops = HEIGHT - np.rint(HEIGHT * parts * (np.sqrt(sizes) if is_uneven else sizes)).astype(np.int64)
    bottoms = np.concatenate([np.full((len(counts), 1), HEIGHT), tops[:, :-1]], axis=1)
    paths = []
    for colour in range(counts.shape[1]):
        pieces = zip(tops[:, colour].tolist(), (bottoms - tops)[:, colour].tolist(), strict=True)
        path = "".join(f"M{x} {top}h1v{tall}h-1z" for x, (top, tall) in enumerate(pieces) if tall)
        if path:
            paths.append((first_colour(counts[0].tolist()) + colour, path))
    return paths


def _spreads(outline: DataOutline) -> list[tuple[str, list[str]]]:
    words = {"samples": "Samples", "labels": "Labels", "commonest_share": "Share of the most common label"}
    rows = []
    for what, values in outline.spreads.items():
        if what != "samples" and len(outline.labels) < 2:
            continue
        is_share = what == "commonest_share"
        cells = [values[quantile] for quantile in QUANTILES]
        rows.append(
            (words[what], [formatting.share(value) if is_share else formatting.count(round(value)) for value in cells])
        )
    return rows
