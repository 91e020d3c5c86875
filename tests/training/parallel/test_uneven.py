"""Test unequal shares: every coordinate takes part in every micro-batch, and missing samples count as nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.parallel import pool
from tests.training.ranks import TINY, Run
from training.loader.order import Share, fixed_batch

FSDP = {"parallelism": "fsdp", "validate_every": 0}


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16), st.integers(0, 200))
def test_all_cut_into_as_many_micro_batches(count: int, batch: int, micro: int, samples: int) -> None:
    shares = [Share(index, count, batch, micro) for index in range(count)]
    pieces = [share.cuts() for share in shares]
    assert len({len(cuts) for cuts in pieces}) == 1
    assert all(0 <= cut.stop - cut.start <= micro for cuts in pieces for cut in cuts)
    assert [sum(cut.stop - cut.start for cut in cuts) for cuts in pieces] == [share.size for share in shares]
    taken = [fixed_batch(0, batches=1, samples=samples, share=share) for share in shares]
    assert len({len(parts) for parts in taken}) == 1
    indices = {int(i) for parts in taken for part in parts for i in part}
    assert len(indices) == sum(len(part) for parts in taken for part in parts) == min(samples, batch)
    assert indices <= set(range(samples))


@pytest.mark.slow
def test_a_validation_that_runs_out_of_samples_waits_for_nobody(tmp_path: Path) -> None:
    """300 digits in batches of 48 on two ranks: of the seventh the second rank has none."""
    table = {"recipe": "vision", "steps": 2, "global_batch": 48, "validate_every": 2, "validation_batches": 8}
    table["vision"] = {"dropout": 0.0}
    alone, shared = Run(tmp_path / "alone", dict(table)), Run(tmp_path / "shared", {**table, "parallelism": "fsdp"})
    pool.finish([alone], 1, tmp_path / "one")
    pool.finish([shared], 2, tmp_path / "two")
    assert shared.series("validation_loss")[2] == pytest.approx(alone.series("validation_loss")[2], abs=1e-5)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_three_of_four_ranks(tmp_path: Path) -> None:
    """8 samples, one at a time: 3, 3 and 2 of them, the last with a third micro-batch that counts nothing."""
    table = {**TINY, **FSDP, "global_batch": 8, "micro_batch": 1, "steps": 6, "checkpoint_every": 4}
    table["language"] = {**table["language"], "dropout": 0.0}
    run, whole = Run(tmp_path / "run", table), Run(tmp_path / "whole", table)
    pool.finish([whole, run], 4, tmp_path / "four")
    shutil.rmtree(run.job_dir / "checkpoints" / "step-6")
    pool.finish([run], 3, tmp_path / "three", resume="step-4")
    expected = np.mean([whole.series(rank=rank)[5] for rank in range(4)])
    found = np.average([run.series(rank=rank)[5] for rank in range(3)], weights=[2, 3, 3])
    assert found == pytest.approx(expected, rel=1e-6)
    assert run.series("gradient_norm")[5] == pytest.approx(whole.series("gradient_norm")[5], rel=1e-4)
