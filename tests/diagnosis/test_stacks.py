"""Test stacks of a hanging process, taken by py-spy or faulthandler."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from diagnosis import offline
from diagnosis.signs import stacks
from diagnosis.source_kind import kind_of
from vigil_cli.main import main

TIMED_OUT = (
    "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds\n"
)
WAITS = """Process 4240: python train.py --rank 0
Python v3.10.12 (/usr/bin/python3.10)

Thread 4240 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    reduce_loss (mine/loop.py:71)
    <module> (train.py:60)
"""
READS = """Process 4243: python train.py --rank 3
Python v3.10.12 (/usr/bin/python3.10)

Thread 4243 (idle): "MainThread"
    poll (multiprocessing/connection.py:931)
    __next__ (torch/utils/data/dataloader.py:633)
    next_batch (mine/loop.py:33)
    <module> (train.py:60)
Thread 4250 (idle): "Thread-1 (_pin_memory_loop)"
    select (selectors.py:416)
"""
DUMPED = """Timeout (0:05:00)!
Thread 0x00007f1c (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007f2d (most recent call first):
  File "/usr/lib/python3.11/ssl.py", line 1166 in read
  File "/home/mira/fetch.py", line 12 in fetch
  File "/home/mira/train.py", line 40 in <module>
"""


def test_the_rank_that_was_elsewhere_and_its_frame(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(TIMED_OUT)
    for name, text in (("spy-0.txt", WAITS), ("spy-3.txt", READS)):
        (tmp_path / name).write_text(text)
    created = CliRunner().invoke(main, ["diagnose", str(tmp_path)])
    assert created.exit_code == 0
    assert (
        "rank 3 was in next_batch (mine/loop.py:33), there in poll (connection.py:931), while the others"
        in created.output
    )
    verdict = offline.diagnose_logs(
        [offline.log_from_text(text, name) for name, text in (("a.log", TIMED_OUT), ("b", WAITS), ("c", READS))]
    )
    assert (verdict.cause, verdict.rank) == ("collective.timeout", 3)
    assert verdict.frame == "mine/loop.py:next_batch"


def test_of_a_dump_the_main_thread() -> None:
    (stack,) = stacks.parse_stacks("stacks/0.5.txt", DUMPED)
    assert stack.rank == 5
    assert [frame.function for frame in stack.frames] == ["<module>", "fetch", "read"]
    (sign,) = stacks.signs_of_stacks([stack])
    assert sign.text == "rank 5 was in fetch (/home/mira/fetch.py:12), there in read (ssl.py:1166)"


def test_what_is_a_dump_and_what_is_a_log() -> None:
    assert kind_of(DUMPED.encode()) == "stacks"
    assert kind_of(WAITS.encode()) == "stacks"
    fatal = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f2d (most recent call first):\n"
    assert kind_of(fatal.encode()) == "log"


def test_rubbish_has_none() -> None:
    for text in ("", "Thread 0x1 (most recent call first):\n", "Process 1: x\n", "Process 1: x\n    f (\n", "\0" * 99):
        assert stacks.parse_stacks("x.txt", text) == []
