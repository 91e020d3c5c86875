"""Test which rank failed first and why, by exit code, signal and the end of its log."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from training.launch.failures import RankFailure, classify_exit, first_failure

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
{error}
"""


TERMINATED = """terminate called after throwing an instance of 'gloo::IoException'
  what():  [../pair.cc:544] Connection closed by peer [10.5.0.34]:33956
"""
DUMP = """Fatal Python error: {of}

Current thread 0x00007f2b90267b80 (most recent call first):
  File "/opt/vigil/training/rank.py", line 105 in _train

Extension modules: numpy._core._multiarray_umath, torch._C (total: 23)
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (TRACEBACK.format(error="ValueError: no such recipe"), "ValueError: no such recipe"),
        (
            TRACEBACK.format(error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.")
            + "[W1121 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        ),
        ("[rank1]: RuntimeError: boom\n\n", "[rank1]: RuntimeError: boom"),
        ("loss 3.1\nkilled for no reason  \n\n", "killed for no reason"),
        ("./run.sh: line 3: trian: command not found\n", "./run.sh: line 3: trian: command not found"),
        ("cp: cannot stat 'x': No such file or directory", "cp: cannot stat 'x': No such file or directory"),
        ("\x1b[31mGPU has fallen off the bus\x1b[0m\n", "GPU has fallen off the bus"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("Error: " + "x" * 60_000, "Error: " + "x" * 493),
        ("", ""),
        (f"loss 3.1\n{DUMP.format(of='Segmentation fault')}", "Fatal Python error: Segmentation fault"),
        (f"{TERMINATED}{DUMP.format(of='Aborted')}", "[../pair.cc:544] Connection closed by peer [10.5.0.34]:33956"),
    ],
    ids=[
        "plain",
        "warnings after it",
        "prefixed",
        "no traceback",
        "bare",
        "shell",
        "cp",
        "coloured",
        "one long line",
        "nothing",
        "dump",
        "C++",
    ],
)
def test_the_last_word_of_a_log(tmp_path: Path, log: str, error: str) -> None:
    path = tmp_path / "0.0.log"
    path.write_text(log)
    assert classify_exit(0, 1, None, path, order=0.0).error == error
    assert classify_exit(0, 1, None, tmp_path / "missing.log", order=0.0).error == ""


@pytest.mark.parametrize(
    "last",
    [
        "epoch 3 saved to /data/out",
        "Epoch 3 | val_error=0.12",
        "test error 0.23",
        "0 errors, 2 warnings",
        '{"step": 3, "error": null}',
        "Using backend: gloo",
    ],
)
def test_ordinary_output_is_context_and_not_why_a_program_left(tmp_path: Path, last: str) -> None:
    path = tmp_path / "0.0.log"
    path.write_text(f"one\ntwo\n\nthree\n{last}\n")
    failure = classify_exit(0, 3, None, path, order=0.0)
    assert (failure.kind, failure.error) == ("exception", "")
    assert failure.last_lines == ["two", "three", last]
    assert failure.summary == "exit code 3"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:42", "lost_peer"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process", "lost_peer"),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a "
            "network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer",
            "lost_peer",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2"
            "\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            "exception",
        ),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0", "lost_peer"),
        (
            "RuntimeError: The server socket has failed to listen on any address. EADDRINUSE",
            "address_in_use",
        ),
        ("ValueError: global_batch 30 does not divide by 4", "exception"),
        ("torch.OutOfMemoryError: CUDA out of memory", "exception"),
        ("ConfigError: run.steps: …", "exception"),
    ],
)
def test_the_kind_of_a_failure(tmp_path: Path, error: str, kind: str) -> None:
    path = tmp_path / "0.0.log"
    path.write_text(TRACEBACK.format(error=error))
    failure = classify_exit(0, 1, None, path, order=0.0)
    assert failure.kind == kind
    assert failure.may_restart(spares=False) == (kind != "exception")
    assert classify_exit(0, None, 9, path, order=0.0).kind == "signal"


CAUGHT = TRACEBACK.format(error="ValueError: bad sample, skipped")


@pytest.mark.parametrize(
    ("log", "exit_code", "number", "error"),
    [
        ("step 900 loss 1.9\n", None, signal.SIGKILL, "killed by SIGKILL"),
        (f"{CAUGHT}step 900 loss 1.9\n", None, signal.SIGKILL, "killed by SIGKILL"),
        ("step 900 loss 1.9\n", None, signal.SIGSEGV, "killed by SIGSEGV"),
        (
            f"step 900\n{DUMP.format(of='Segmentation fault')}",
            None,
            signal.SIGSEGV,
            "Fatal Python error: Segmentation fault",
        ),
        ("step 900 loss 1.9\n", None, 34, "killed by SIGRTMIN"),
        ("", None, 40, "killed by signal 40"),
        ("step 900\n./run.sh: line 3: 4711 Killed  python train.py\n", 137, None, "killed by SIGKILL"),
    ],
)
def test_what_a_program_printed_last_is_not_why_a_signal_ended_it(
    tmp_path: Path, log: str, exit_code: int | None, number: int | None, error: str
) -> None:
    path = tmp_path / "0.0.log"
    path.write_text(log)
    failure = classify_exit(0, exit_code, number, path, order=0.0)
    assert (failure.kind, failure.error) == ("signal", error)


NCCL_WATCHDOG = """[rank9]:[E1122 18:37:01.83 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 9] {what}
Last error:
NET/IB : Got completion from peer 10.5.0.34<33956> with error 5, opcode 0, len 1, vendor err 244 (Recv)
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2571 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7fb6 in torch/lib/libc10.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 9] {what}
Fatal Python error: Aborted

Extension modules: numpy._core._multiarray_umath, torch._C (total: 23)
"""


@pytest.mark.parametrize(
    ("error", "explained", "kind"),
    [
        (
            "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9",
            "\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "lost_peer",
        ),
        ("CUDA error: an illegal memory access was encountered", "", "signal"),
    ],
)
def test_nccl_s_watchdog_ends_a_rank_for_its_peers_or_for_itself(
    tmp_path: Path, error: str, explained: str, kind: str
) -> None:
    path = tmp_path / "0.9.log"
    what = f"Process group watchdog thread terminated with exception: {error}{explained}"
    path.write_text(NCCL_WATCHDOG.format(what=what))
    failure = classify_exit(9, None, signal.SIGABRT, path, order=0.0)
    assert (failure.kind, failure.error, failure.may_restart(spares=False)) == (kind, error, True)
    assert classify_exit(9, None, signal.SIGKILL, path, order=0.0).kind == "signal"


def test_a_rank_that_gloo_ended_has_lost_its_peers(tmp_path: Path) -> None:
    path = tmp_path / "0.9.log"
    path.write_text(TERMINATED + DUMP.format(of="Aborted"))
    assert classify_exit(9, None, signal.SIGABRT, path, order=0.0).kind == "lost_peer"
    assert classify_exit(9, None, signal.SIGSEGV, path, order=0.0).kind == "signal"


def test_the_root_is_who_failed_first_and_not_by_losing_a_peer() -> None:
    echo = RankFailure(0, "lost_peer", 1, order=1.0)
    root = RankFailure(3, "signal", None, 9, order=1.2)
    later = RankFailure(2, "exception", 1, order=1.3)
    assert first_failure([echo, later, root]) == root
    assert first_failure([echo]) == echo
    assert (root.code, later.code, RankFailure(1, "exception", 42).code) == (137, 1, 42)
