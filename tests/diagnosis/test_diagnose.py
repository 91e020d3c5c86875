"""Test finding one cause among many signs: the first, its consequences, survived errors, unexplained ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis import offline
from diagnosis.causes import CAUSES
from diagnosis.offline import diagnose_text
from diagnosis.signatures.entry import BadEntry, parse_entry
from diagnosis.signs.sign import rank_in_file_name
from diagnosis.verdict import Verdict
from tests.examples import examples
from vigil_cli.main import main

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.14 GiB. GPU 0 has a total capacity of 79.15 GiB"
RAISED = """Traceback (most recent call last):
  File "/home/mira/train.py", line 40, in main
    batch = data["label"]
KeyError: 'label'"""
GONE = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9885"
XID = "[449410.332316] NVRM: Xid (PCI:0000:ab:00): 79, pid=41833, name=python, GPU has fallen off the bus."


def rank_log(rank: int, text: str) -> str:
    return "\n".join(f"[rank{rank}]: {line}" for line in text.splitlines())


def steps(first: int, last: int) -> str:
    return "\n".join(f"step {n} loss 2.{n}" for n in range(first, last))


def verdict(text: str) -> Verdict:
    return offline.diagnose_text(text)


def test_the_first_root_counts_and_what_follows_are_echoes() -> None:
    found = verdict("\n".join([steps(0, 5), rank_log(1, RAISED), rank_log(0, GONE), rank_log(2, GONE)]))
    assert (found.cause, found.rank, found.exception) == ("program.exception", 1, "KeyError")
    assert found.frame == "/home/mira/train.py:main"
    assert [item.role for item in found.evidence] == ["root", "echo", "echo"]


def test_what_the_run_has_outlived_is_no_cause() -> None:
    found = verdict("\n".join([OOM, steps(0, 4), RAISED]))
    assert found.cause == "program.exception"
    assert {item.cause for item in found.evidence if item.role == "survived"} == {"memory.gpu_oom"}


def test_a_run_that_went_on_has_not_failed() -> None:
    found = verdict("\n".join([RAISED, "retrying with a smaller batch", steps(0, 9), "Training completed"]))
    assert (found.cause, found.owner) == ("none", "nobody")


def test_advice_is_no_evidence() -> None:
    found = verdict("\n".join([steps(0, 3), "this might be caused by CUDA out of memory. Tried to allocate", RAISED]))
    assert found.cause == "program.exception"


def test_a_peer_that_vanished_and_nothing_else_is_unknown() -> None:
    found = verdict("\n".join([steps(0, 3), rank_log(0, GONE), rank_log(2, GONE)]))
    assert (found.cause, found.owner) == ("unknown", "both")


def test_an_unexplained_kill_is_unknown_with_memory_as_an_alternative() -> None:
    found = verdict("\n".join([steps(0, 3), "srun: error: dgx-03: task 2: Killed", rank_log(0, GONE)]))
    assert found.cause == "unknown"
    assert found.runner_up is not None
    assert found.runner_up.cause == "memory.host_oom"
    assert (found.rank, found.node) == (2, "dgx-03")


def test_hardware_outranks_what_the_program_prints_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(f"{steps(0, 5)}\n{RAISED}\n")
    (tmp_path / "kern.log").write_text(f"{XID}\n")
    created = CliRunner().invoke(main, ["diagnose", "--json", str(tmp_path)])
    payload = json.loads(created.output)
    assert (payload["cause"], payload["owner"]) == ("gpu.off_bus", "sysadmin")
    assert [(item["file"], item["line"]) for item in payload["evidence"] if item["role"] == "root"] == [("kern.log", 1)]


@pytest.mark.parametrize(
    ("state", "code", "cause"),
    [
        ("TIMEOUT", "0:0", "scheduler.time_limit"),
        ("OUT_OF_MEMORY", "0:125", "memory.host_oom"),
        ("NODE_FAIL", "0:0", "scheduler.node_fail"),
        ("PREEMPTED", "0:15", "scheduler.preempted"),
        ("CANCELLED by 1001", "0:0", "scheduler.cancelled"),
        ("COMPLETED", "0:0", "none"),
        ("FAILED", "0:9", "unknown"),
    ],
)
def test_records_of_sacct(state: str, code: str, cause: str) -> None:
    rows = ("JobID|State|ExitCode|NodeList", f"412|{state}|{code}|dgx-03", "412.extern|COMPLETED|0:0|dgx-03", "")
    table = "\n".join(rows)
    assert offline.diagnose_logs([offline.log_from_text(table, "sacct.txt")]).cause == cause


def test_of_two_flight_recorders_the_deviating_one_is_named() -> None:
    def dump(operation: str) -> str:
        entries = [
            {"collective_seq_id": 7, "process_group": ["0", "default_pg"], "profiling_name": f"nccl:{operation}"}
        ]
        return json.dumps({"version": "2.4", "entries": entries})

    texts = {"0.0.json": "all_reduce", "0.1.json": "all_reduce", "0.2.json": "broadcast"}
    found = offline.diagnose_logs([offline.log_from_text(dump(what), name) for name, what in texts.items()])
    assert (found.cause, found.rank) == ("collective.mismatch", 2)


def test_missing_logs_are_listed_and_causes_that_logs_exclude_are_ruled_out() -> None:
    log, kernel = (
        f"{steps(0, 3)}\n{rank_log(0, GONE)}",
        "[4410.332316] usb 1-1: new device\n[4411.332316] eth0: link up\n",
    )
    assert any("kernel log" in item for item in verdict(log).unavailable)
    found = offline.diagnose_logs([offline.log_from_text(log, "log"), offline.log_from_text(kernel, "dmesg.txt")])
    assert not any("kernel log" in item for item in found.unavailable)
    assert {"gpu.off_bus", "memory.host_oom"} <= {item.cause for item in found.ruled_out}


def test_secrets_in_evidence_are_masked() -> None:
    found = verdict(
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. token=hf_abcdefghijklmnop https://u:pw@host/x"
    )
    text = json.dumps(found.as_json())
    assert "hf_abcdefghijklmnop" not in text
    assert "u:pw@" not in text


def test_the_command_answers_whatever_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\x00\xff" * 1000 + f"\n{OOM}\n".encode())
    created = CliRunner().invoke(main, ["diagnose", str(path), str(tmp_path / "missing")])
    assert created.exit_code == 0
    assert "memory.gpu_oom" in created.output
    created = CliRunner().invoke(main, ["diagnose", "-"], input=OOM)
    assert (created.exit_code, "memory.gpu_oom" in created.output) == (0, True)
    created = CliRunner().invoke(main, ["diagnose", str(tmp_path / "missing")])
    assert (created.exit_code, "Nothing to read" in created.output) == (1, True)
    assert CliRunner().invoke(main, ["diagnose"]).exit_code == 2


@given(
    st.lists(
        st.sampled_from([OOM, RAISED, GONE, XID, "step 7 loss 2", "Killed", "x", ""]) | st.text(max_size=60),
        max_size=30,
    )
)
@settings(max_examples=examples(80), deadline=None)
def test_any_log_has_a_verdict(lines: list[str]) -> None:
    found = verdict("\n".join(lines))
    assert found.cause in CAUSES
    assert 0 <= found.confidence <= 1
    json.dumps(found.as_json())


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("0.3.log", 3), ("logs/1.12.log", 12), ("rank_3.log", 3), ("train-rank3.err", 3), ("attempt_0/3/stderr.log", 3),
        ("slurm-4182.out", None), ("launcher.0.log", None), ("rank.txt", None), ("2026.11.log", 11),
    ],
)  # fmt: skip
def test_the_rank_of_a_log_by_its_name(name: str, rank: int | None) -> None:
    assert rank_in_file_name(name) == rank


def test_an_entry_may_be_more_specific_than_its_cause() -> None:
    line = "AssertionError: Torch not compiled with CUDA enabled"
    log = f'Traceback (most recent call last):\n  File "/u/train.py", line 3, in <module>\n    model.cuda()\n{line}\n'
    verdict = diagnose_text(log)
    assert (verdict.cause, verdict.owner) == ("environment.package", "researcher")
    assert verdict.summary == "PyTorch was built without CUDA on this node."


def test_a_site_writes_no_heading() -> None:
    entry = {"name": "a.b", "role": "root", "cause": "gpu.ecc", "source": "x", "pattern": "y", "heading": "z"}
    with pytest.raises(BadEntry, match="heading is not a field of an entry"):
        parse_entry(entry)


@pytest.mark.parametrize(
    "notice",
    [
        "W0309 04:10:31.134749 703818 preemption_notifier.cc:120] SIGTERM caught at 2026-03-09T04:10:31.2",
        "SIGTERM received, saving at the next step",
        "Received signal SIGTERM, saving",
        "signal 15 was delivered, leaving",
    ],
)
@pytest.mark.parametrize("state", ["PREEMPTED", "TIMEOUT"])
def test_errors_after_a_request_to_stop_are_no_cause(notice: str, state: str) -> None:
    """A full disk or a denied path at the last checkpoint is no cause: a sysadmin would search in vain."""
    log = f"step 100 loss 2.1\n{notice}\nsaving failed: [Errno 122] Disk quota exceeded: '/home/mira/step-101'\n"
    record = f"JobID|State|ExitCode|Reason\n55012|{state}|0:0|None\n"
    logs = offline.logs_from_texts({"train.log": log, "sacct.txt": record})
    assert offline.diagnose_logs(logs).owner == ("nobody" if state == "PREEMPTED" else "researcher")
