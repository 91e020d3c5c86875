"""A line of the loss as small as a word, for lists."""

from __future__ import annotations


def sparks(attempt_ids: list[int]) -> dict[int, str]:
    """{attempt: the points of an SVG polyline, 84 × 20}; attempts without values are missing."""
    return {}
