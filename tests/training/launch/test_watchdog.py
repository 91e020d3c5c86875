"""Test which rank is stuck and which only waits, from heartbeats, logs and flight recorders, without processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import TINY, Run
from training.attempt import hang
from training.attempt.heartbeat import Heartbeat, heartbeat_path, read_beat
from training.launch import watchdog
from training.launch.watchdog import Watchdog, behind_in_collectives

LIMITS = {
    "start": 300,
    "init": 20,
    "restore": 100,
    "compile": 200,
    "step": 60,
    "data": 100,
    "validate": 500,
    "save": 500,
}


class Ranks:
    """Heartbeats of a few ranks, on a clock that the test sets."""

    def __init__(self, folder: Path, count: int) -> None:
        self.beats = [Heartbeat.open(folder, rank=rank, incarnation=0) for rank in range(count)]
        self.watchdog = Watchdog(folder, incarnation=0, ranks=range(count), limits=LIMITS)
        self.now = self.watchdog._watched[0].changed_at

    def all(self, phase: str, step: int = 0) -> None:
        for beat in self.beats:
            beat.beat(phase, step)

    def stuck_after(self, seconds: float, *, every: float = 1.0) -> list[int] | None:
        """Return the ranks that are found stuck after this many seconds of polling."""
        until = self.now + seconds
        while True:
            self.now = min(self.now + every, until)
            hang = self.watchdog.poll(self.now)
            if self.now == until:
                return hang.ranks if hang else None

    def step(self, steps: int, *, seconds: float = 1.0, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.all("step", step)
            assert self.stuck_after(seconds) is None


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, 4)


def test_the_rank_behind_is_stuck_not_those_that_wait(ranks: Ranks) -> None:
    ranks.step(20)
    for rank in (0, 1, 3):
        ranks.beats[rank].beat("step", 20)
    assert ranks.stuck_after(59) is None
    assert ranks.stuck_after(5) == [2]
    hang = ranks.watchdog.poll(ranks.now)
    assert hang is not None
    assert (hang.phase, hang.step) == ("step", 19)
    assert str(hang).startswith("rank 2 is behind: step at step 19, nothing for 6")


def test_slow_steps_raise_the_limit(ranks: Ranks) -> None:
    ranks.step(10, seconds=20.0)
    assert ranks.stuck_after(150) is None
    assert ranks.stuck_after(80) == [0, 1, 2, 3]


def test_the_first_steps_may_take_as_long_as_a_compile(ranks: Ranks) -> None:
    ranks.step(3)
    assert ranks.stuck_after(150) is None
    assert ranks.stuck_after(60) == [0, 1, 2, 3]


def test_a_resumed_run_is_armed_by_its_steps_alone(ranks: Ranks) -> None:
    ranks.step(3, first=1000)
    assert ranks.stuck_after(150) is None


def test_steps_too_quick_to_be_observed_arm_it_too(ranks: Ranks) -> None:
    for step in range(50):
        ranks.all("step", step)
    assert ranks.stuck_after(0.25) is None
    assert ranks.stuck_after(61) == [0, 1, 2, 3]


@pytest.mark.parametrize("phase", ["validate", "save", "data", "compile"])
def test_a_rank_in_a_long_phase_protects_those_that_wait(ranks: Ranks, phase: str) -> None:
    """The others wait for it in a collective, at the same step or the next, far beyond their limit."""
    ranks.step(20)
    ranks.beats[1].beat(phase, 19)
    for rank in (0, 2, 3):
        ranks.beats[rank].beat("step", 20 if rank == 3 else 19)
    assert ranks.stuck_after(0) is None
    assert ranks.stuck_after(99) is None
    assert ranks.stuck_after(LIMITS[phase]) is not None


def test_init_counts_from_when_all_are_there(ranks: Ranks) -> None:
    """A rank still imports from a slow disk: the others, which wait for it, are not stuck."""
    for rank in (0, 1, 2):
        ranks.beats[rank].beat("init")
    assert ranks.stuck_after(15) is None
    assert ranks.stuck_after(200) is None
    ranks.beats[3].beat("init")
    assert ranks.stuck_after(1) is None
    assert ranks.stuck_after(15) is None
    for rank in (0, 1, 2):
        ranks.beats[rank].beat("compile")
    assert ranks.stuck_after(10) == [3]


def test_a_process_that_never_begins_is_found(ranks: Ranks) -> None:
    for rank in (0, 1, 2):
        ranks.beats[rank].beat("init")
    assert ranks.stuck_after(299) is None
    assert ranks.stuck_after(2) == [3]


def test_who_has_finished_holds_up_nobody(ranks: Ranks) -> None:
    ranks.step(20)
    for rank in (0, 1):
        ranks.beats[rank].beat("end", 20)
    assert ranks.stuck_after(61) == [2, 3]


def test_time_without_polls_is_no_silence(ranks: Ranks) -> None:
    """The job was suspended for an hour, or its file system hung: launcher and ranks go on together."""
    ranks.step(20)
    assert ranks.stuck_after(3600, every=3600) is None
    assert ranks.stuck_after(50) is None
    ranks.all("step", 20)
    assert ranks.stuck_after(1) is None
    assert ranks.stuck_after(70) == [0, 1, 2, 3]


def test_slow_polls_find_a_hang_all_the_same(ranks: Ranks) -> None:
    ranks.step(20)
    assert ranks.stuck_after(180, every=4.0) == [0, 1, 2, 3]


def test_a_torn_heartbeat_is_read_again_later(ranks: Ranks, tmp_path: Path) -> None:
    ranks.step(6)
    (tmp_path / "heartbeat" / "0.0").write_text('{"incarnation":0,"pha')
    assert ranks.stuck_after(1) is None
    beat = read_beat(tmp_path / "heartbeat" / "0.1")
    assert beat is not None
    assert (beat.phase, beat.step) == ("step", 5)
    assert read_beat(tmp_path / "heartbeat" / "0.0") is None


def _flight(folder: Path, rank: int, begun: dict[str, int], *, library: str = "gloo") -> None:
    (folder / f"0.{rank}.json").write_text(_record(begun, library=library))


def _record(begun: dict[str, int], *, library: str) -> str:
    """A flight recorder's, by group how many collectives."""
    entries = [
        {
            "process_group": [group, "a group"],
            "profiling_name": f"{library}:all_reduce",
            "collective_seq_id": seq,
            "state": "scheduled",
        }
        for group, last in begun.items()
        for seq in range(1, last + 1)
    ]
    return json.dumps({"version": "2.10", "entries": entries})


def test_collectives_show_which_rank_is_behind(tmp_path: Path) -> None:
    assert behind_in_collectives(tmp_path, incarnation=0, ranks=[0, 1]) == [0, 1]
    for rank, begun in ((0, 7), (1, 6), (2, 7)):
        _flight(tmp_path, rank, {"0": 3, "1": begun})
    assert behind_in_collectives(tmp_path, incarnation=0, ranks=[0, 1, 2]) == [1]
    assert behind_in_collectives(tmp_path, incarnation=0, ranks=[0, 1, 2, 3]) == [3]
    (tmp_path / "0.1.json").write_text("{")
    assert behind_in_collectives(tmp_path, incarnation=0, ranks=[0, 1]) == [1]


def test_a_stage_that_has_fewer_blocks_is_not_behind(tmp_path: Path) -> None:
    for rank, begun in ((0, {"all": 3, "first": 40}), (1, {"all": 3, "first": 39}), (2, {"all": 3, "last": 20})):
        _flight(tmp_path, rank, begun)
    assert behind_in_collectives(tmp_path, incarnation=0, ranks=[0, 1, 2]) == [1]


def test_collectives_of_the_gpu_are_recorded_apart_from_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has its own flight recorder; collectives of NCCL and gloo in the same group are counted separately."""
    c10d: Any = torch._C._distributed_c10d
    for rank, nccl in ((0, 5), (1, 4)):
        monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: _record({"0": 7}, library="gloo"))
        record = _record({"0": nccl}, library="nccl").encode()
        monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda record=record: record, raising=False)
        read, write = os.pipe()
        os.write(write, hang.DUMP)
        os.close(write)
        hang._serve(read, tmp_path / f"0.{rank}.json")
        os.close(read)
    assert behind_in_collectives(tmp_path, incarnation=0, ranks=[0, 1]) == [1]


def record_phase_of_exchanges() -> None:
    """Report the heartbeat's text of a rank while replicas that train apart become one model again."""
    from training.comm._replicas import Replicas

    average = Replicas._average

    def recording_average(replicas: Replicas, tensors: Iterable[torch.Tensor]) -> None:
        attempt = Path(os.environ["VIGIL_ATTEMPT_DIR"])
        beat = read_beat(heartbeat_path(attempt, rank=int(os.environ["RANK"]), incarnation=0))
        (attempt / f"phase.{os.environ['RANK']}").write_text(beat.phase if beat else "start")
        average(replicas, tensors)

    Replicas._average = recording_average  # type: ignore[method-assign]


@pytest.mark.slow
def test_an_exchange_of_whole_models_may_take_longer_than_a_step(tmp_path: Path) -> None:
    """Replicas stay apart where the network is slow: steps do not show how long it takes."""
    changes = {"steps": 8, "checkpoint_every": 0, "communication": "local_sgd", "local_sgd": {"every": 4}}
    run = Run(tmp_path / "run", {**TINY, **changes}, spy=f"{__name__}:record_phase_of_exchanges")
    incarnation = run.finish(2)
    for rank in range(2):
        assert watchdog.LIMITS[(incarnation.attempt_dir / f"phase.{rank}").read_text()] > 10 * watchdog.LIMITS["step"]
