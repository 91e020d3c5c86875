"""Test the points of curves in SVG drawings."""

from __future__ import annotations

import numpy as np

from portal.drawing import polyline


def test_fractions_become_points_with_y_upwards() -> None:
    found = polyline(np.array([0.0, 0.25, 1.0]), np.array([0.0, 0.5, 1.0]), 200, 100, margin=10)
    assert found == "0.0,90.0 50.0,50.0 200.0,10.0"


def test_what_lies_outside_is_drawn_on_the_edge() -> None:
    assert polyline(np.array([-1.0, 2.0]), np.array([-1.0, 2.0]), 100, 20) == "0.0,20.0 100.0,0.0"
