"""Reasons as Slurm, NHC, health checks and people really write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nodes.drains.reasons import DrainCause, DrainHolder, read_reason

RULES = frozenset({"off-bus", "blocked-processes"})

# Reason, who set it, whose drain it is, what it means. Sources: slurmctld's and slurmd's code (20.11 to 24.11), NHC
# 1.4.3's checks, outputs of `sinfo -R` that sites have published, Soperator, HLRS's checknode.
REASONS = [
    ("Kill task failed", "root", DrainHolder.SLURM, DrainCause.KILL_FAILED),
    ("Kill task failed [root@2026-11-28T19:30:00]", "root", DrainHolder.SLURM, DrainCause.KILL_FAILED),
    ("Not responding", "slurm", DrainHolder.SLURM, DrainCause.NOT_RESPONDING),
    ("Not responding [slurm@2026-11-28T19:30:00]", "", DrainHolder.SLURM, DrainCause.NOT_RESPONDING),
    ("Prolog error", "root", DrainHolder.SLURM, DrainCause.PROLOG),
    ("Epilog error", "slurm", DrainHolder.SLURM, DrainCause.EPILOG),
    ("Prolog/Epilog failure", "slurm", DrainHolder.SLURM, DrainCause.PROLOG),
    ("batch job complete failure", "slurm", DrainHolder.SLURM, DrainCause.LAUNCH),
    ("Duplicate jobid", "slurm", DrainHolder.SLURM, DrainCause.LAUNCH),
    ("Node unexpectedly rebooted", "slurm", DrainHolder.SLURM, DrainCause.REBOOTED),
    ("Node silently failed and came back", "slurm", DrainHolder.SLURM, DrainCause.REBOOTED),
    ("Reboot ASAP : new kernel", "slurm", DrainHolder.SLURM, DrainCause.REBOOT_REQUESTED),
    ("reboot timed out", "slurm", DrainHolder.SLURM, DrainCause.POWER),
    ("ResumeTimeout reached", "slurm", DrainHolder.SLURM, DrainCause.POWER),
    ("gres/gpu count reported lower than configured (0 < 8)", "slurm", DrainHolder.SLURM, DrainCause.FEWER_GPUS),
    ("gres/gpu count too low (7 < 8)", "slurm", DrainHolder.SLURM, DrainCause.FEWER_GPUS),
    ("Low RealMemory", "slurm(64030)", DrainHolder.SLURM, DrainCause.LESS_MEMORY),
    (
        "Low RealMemory (reported:32082 < 100.00% of configured:32768)", "slurm",
        DrainHolder.SLURM, DrainCause.LESS_MEMORY,
    ),
    ("Low socket*core*thread count, Low CPUs", "slurm", DrainHolder.SLURM, DrainCause.CONFIGURATION),
    ("Low TmpDisk", "slurm", DrainHolder.SLURM, DrainCause.CONFIGURATION),
    ("NHC: check_fs_mount:  /global/scratch not mounted", "root", DrainHolder.NHC, DrainCause.CHECK_FAILED),
    (
        "NHC: check_hw_physmem:  Actual RAM size (57459408 kB) less than minimum allowed (67108864 kB).", "root",
        DrainHolder.NHC, DrainCause.CHECK_FAILED,
    ),
    ("NHC: Terminated by signal SIGTERM.", "root", DrainHolder.NHC, DrainCause.CHECK_FAILED),
    ("NHC: check_nv_smi_temp: 5 GPUs are overheated", "root", DrainHolder.NHC, DrainCause.CHECK_FAILED),
    ("[node_problem] gpu_health_check", "root", DrainHolder.HEALTH_CHECK, DrainCause.CHECK_FAILED),
    ("[user_problem] disk_usage", "root", DrainHolder.HEALTH_CHECK, DrainCause.USER_PROBLEM),
    ("checknode(1) /lustre not mounted;", "root", DrainHolder.HEALTH_CHECK, DrainCause.CHECK_FAILED),
    ("Health check failed: ib0 down", "root", DrainHolder.HEALTH_CHECK, DrainCause.CHECK_FAILED),
    ("[node] Xid 79 on GPU 0 (vigil: off-bus)", "vigil", DrainHolder.RULE, DrainCause.OTHER),
    ("[node] Xid 79 on GPU 0", "off-bus", DrainHolder.RULE, DrainCause.OTHER),
    ("[user] GPU processes of an ended job (vigil: blocked-processes)", "", DrainHolder.RULE, DrainCause.USER_PROBLEM),
    ("[node] Xid 79 on GPU 0: off-bus (vigil: ops)", "vigil", DrainHolder.PERSON, DrainCause.OTHER),
    ("[node] hot spare (vigil: spare)", "", DrainHolder.SPARE, DrainCause.OTHER),
    ("[node] new switch", "maintenance-3", DrainHolder.MAINTENANCE, DrainCause.OTHER),
    ("ECC on gpu3, RMA 4711", "mira", DrainHolder.PERSON, DrainCause.OTHER),
    ("INC0661212_nick", "root", DrainHolder.UNKNOWN, DrainCause.OTHER),
    ("HW:shutdownAgainWontPowerOn_openCase", "root(0)", DrainHolder.UNKNOWN, DrainCause.OTHER),
    ("", "", DrainHolder.UNKNOWN, DrainCause.OTHER),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "set_by", "holder", "cause"), REASONS)
def test_names_who_and_why(reason: str, set_by: str, holder: DrainHolder, cause: DrainCause) -> None:
    found = read_reason(reason, set_by, RULES)
    assert (found.holder, found.cause) == (holder, cause)


def test_splits_off_whom_vigil_names_and_the_stamp() -> None:
    found = read_reason("[node] Xid 79 on GPU 0 (vigil: off-bus)", "", RULES)
    assert (found.text, found.requester, found.about) == ("[node] Xid 79 on GPU 0", "off-bus", "node")
    assert read_reason("fan (vigil: ops) [root@2026-11-28T19:30:00]").requester == "ops"
    assert read_reason("see [ticket 7]").text == "see [ticket 7]"


@pytest.mark.parametrize("reason", ["x" * 100_000, "a\0b\nc\u202e", "(vigil: )", "[node]", " (vigil: x)"])
def test_is_bounded_and_printable(reason: str) -> None:
    found = read_reason(reason)
    assert len(found.text) <= 500
    assert found.text.isprintable()


def test_every_cause_has_advice() -> None:
    assert all(read_reason(reason).advice for reason, _, _, cause in REASONS if cause != DrainCause.OTHER and reason)


def test_the_documented_health_check_is_recognised() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "agent.md").read_text()
    (reason,) = re.findall(r'"Reason=(.*)\$problem"', guide)
    assert read_reason(f"{reason}GPU 2 is lost", "root").holder == DrainHolder.HEALTH_CHECK
