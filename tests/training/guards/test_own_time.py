"""Test a rank's own time with a controlled clock: it excludes time spent waiting for others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.runtime.distributed import World
from training.step.own_time import OwnTime


class Turned:
    """A clock, and a rank that lives by it."""

    def __init__(self) -> None:
        self.now = 100.0
        layer = nn.Linear(2, 2)
        self.parameters = list(layer.parameters())
        world = World(0, 2, torch.device("cpu"))
        self.own = OwnTime(world, self.parameters, exchanges_late=True, clock=lambda: self.now)

    def step(self, *, data: float, compute: float, exchange: float, host: float, waited: float) -> None:
        self.now += data
        self.own.enter()
        self.now += compute
        sum(parameter.sum() for parameter in self.parameters).backward()  # type: ignore[union-attr]
        self.now += exchange
        self.own.leave()
        self.now += waited
        self.own.wait(waited)
        self.own.note_data(data)
        self.now += host


def _parts(turned: Turned) -> tuple[float, float, float]:
    """Data, compute, host."""
    spent = turned.own.means()
    return spent.data, spent.compute, spent.host


def test_waiting_for_a_slow_rank_makes_nobody_slow() -> None:
    """Exchanges do not block a GPU's host: a rank waits for the slow one where all exchange flags."""
    quick, slow = Turned(), Turned()
    for _ in range(5):
        quick.step(data=0.25, compute=1.0, exchange=0.0, host=0.5, waited=8.0)
        slow.step(data=0.25, compute=9.0, exchange=0.0, host=0.5, waited=0.0)
    # No host time of the first step: nothing went before it.
    assert _parts(quick) == pytest.approx((0.25, 1.0, 0.4))
    assert _parts(slow) == pytest.approx((0.25, 9.0, 0.4))


def test_what_was_waited_before_a_pause_is_forgotten_with_it() -> None:
    turned = Turned()
    turned.step(data=0.0, compute=1.0, exchange=1.0, host=0.5, waited=4.0)
    turned.own.forget()
    for _ in range(2):
        turned.step(data=0.0, compute=1.0, exchange=1.0, host=0.5, waited=0.0)
    assert _parts(turned) == pytest.approx((0.0, 1.0, 0.5 / 3))


def test_the_length_of_a_step_is_read_later() -> None:
    """The host runs ahead of a GPU; what is read later may be of other steps than those of this window."""
    turned = Turned()
    for _ in range(4):
        turned.step(data=0.0, compute=0.001, exchange=0.0, host=0.0, waited=0.0)
    turned.own.note_step(0.25)
    turned.own.note_step(0.75)
    assert turned.own.means().step == 0.5
    assert turned.own.means().step == 0.5, "nothing new was read meanwhile"
    turned.own.note_step(1.0)
    assert turned.own.means().step == 1.0
