"""List published failure rates of other clusters, per 1,000 node-days of nodes with 8 GPUs. No Django."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedRate:
    name: str
    per_thousand: float
    basis: str
    """The published failures and the node-days they are based on."""
    source: str


PUBLISHED = (
    PublishedRate(
        "OPT-175B",
        1000 * (35 + 70) / (124 * 60),
        "35 manual and about 70 automatic restarts after hardware failures in two months on 992 A100 (124 nodes)",
        "arXiv 2205.01068",
    ),
    PublishedRate(
        "Meta RSC-1",
        6.50,
        "measured over 11 months on 16,000 A100; extrapolated to 16,384 GPUs, a failure every 1.8 hours",
        "arXiv 2410.21680",
    ),
    PublishedRate(
        "BLOOM",
        1000 * 1.5 / (48 * 7),
        "one to two GPUs a week on 384 A100 (48 nodes)",
        "arXiv 2211.05100",
    ),
    PublishedRate(
        "Llama 3 405B",
        1000 * 419 / (2048 * 54),
        "419 unexpected interruptions in 54 days on 16,384 H100 (2,048 nodes)",
        "arXiv 2407.21783",
    ),
    PublishedRate(
        "Meta RSC-2",
        2.34,
        "measured over 11 months on 8,000 A100",
        "arXiv 2410.21680",
    ),
)

TYPICAL_RATE = 6.5
"""Rate per 1,000 node-days assumed if too few failures were observed here, as measured by Meta."""
