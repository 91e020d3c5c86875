"""A burn-in that cannot test its nodes is refused at once, with the reason."""

from __future__ import annotations

import pytest
from django.utils import timezone

from jobs.burnins.start import CannotBurnIn, cancel, start
from jobs.errors import Conflict
from nodes.models import BurnIn, Gpu
from tests.jobs.burnins.bench import Bench

pytestmark = pytest.mark.django_db


def test_the_second_burn_in_of_a_node_is_refused(bench: Bench) -> None:
    bench.start("dgx-01", "dgx-02")
    with pytest.raises(Conflict, match="dgx-02 is being tested by burn-in"):
        start(bench.user, ["dgx-02", "dgx-03"], 60)
    assert BurnIn.objects.count() == 1
    pass_or_cancel(bench)
    start(bench.user, ["dgx-02"], 60)


def pass_or_cancel(bench: Bench) -> None:
    cancel(bench.user, bench.burn_in)
    bench.until_ended()


@pytest.mark.parametrize("seconds", [0, 59, 48 * 3600 + 1, -1])
def test_refuses_a_duration(bench: Bench, seconds: int) -> None:
    with pytest.raises(CannotBurnIn):
        bench.start(seconds=seconds)


def test_refuses_unknown_nodes(bench: Bench) -> None:
    with pytest.raises(CannotBurnIn, match="dgx-99"):
        bench.start("dgx-99")
    with pytest.raises(CannotBurnIn):
        start(bench.user, [], 60)


def test_refuses_gpus_in_mig_mode(bench: Bench) -> None:
    bench.lab.machine()
    Gpu.objects.filter(index=1).update(has_mig=True)
    with pytest.raises(CannotBurnIn, match="The GPUs of dgx-01 are cut into MIG slices"):
        bench.start("dgx-01", "dgx-02")
    Gpu.objects.filter(index=1).update(gone_at=timezone.now())
    bench.start("dgx-01", "dgx-02")
