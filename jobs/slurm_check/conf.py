"""Check slurm.conf, as far as Vigil depends on it. One function per fact; `FACTS` lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from jobs.slurm_check.checked_site import CheckedSite
from jobs.slurm_check.finding import CheckFinding, failed, ok, skip, warn
from jobs.spec import STOP_SECONDS
from nodes.schedulers.base import SchedulerError

Conf = Mapping[str, str]
MIN_JOB_AGE_S = 120


def check(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check slurm.conf by scontrol on this machine, or else by a trial job's node."""
    try:
        conf = site.conf
    except SchedulerError as error:
        conf = site.conf_on_node
        if not conf:
            detail = f"not available: {str(error).partition('. ')[0]}"
            remedy = "Let it run trial jobs, whose nodes can read it, or install Slurm's client commands here."
            yield skip("slurm.conf", detail, remedy)
            return
    for fact in FACTS:
        yield fact(conf)


def _tokens(conf: Conf) -> CheckFinding:
    if "auth/jwt" in (conf.get("AuthAltTypes", ""), conf.get("AuthType", "")):
        return ok("AuthAltTypes", "auth/jwt")
    return failed(
        "AuthAltTypes", conf.get("AuthAltTypes") or "not set", "AuthAltTypes=auth/jwt, AuthAltParameters=jwt_key=…"
    )


def _requeue(conf: Conf) -> CheckFinding:
    if conf.get("JobRequeue") == "1":
        return ok("JobRequeue", "1")
    return warn(
        "JobRequeue",
        conf.get("JobRequeue", "not reported"),
        "JobRequeue=1: jobs then continue after preemption or a lost node.",
    )


def _age(conf: Conf) -> CheckFinding:
    seconds = _seconds(conf.get("MinJobAge", ""))
    if seconds is None or seconds >= MIN_JOB_AGE_S:
        return ok("MinJobAge", conf.get("MinJobAge", "not reported"))
    remedy = f"MinJobAge={MIN_JOB_AGE_S} or more (Slurm's default is 300), so that slurmctld still reports ended jobs."
    return warn("MinJobAge", f"{seconds} s: ended jobs are soon forgotten, and only accounting has them", remedy)


def _gpus_counted(conf: Conf) -> CheckFinding:
    counted = conf.get("AccountingStorageTRES", "")
    if "gpu" not in conf.get("GresTypes", "") or "gres/gpu" in counted.split(","):
        return ok("AccountingStorageTRES", counted or "no GPUs")
    return warn(
        "AccountingStorageTRES",
        counted,
        "AccountingStorageTRES=gres/gpu: without it GPUs are neither counted nor limited.",
    )


def _comments(conf: Conf) -> CheckFinding:
    flags = conf.get("AccountingStoreFlags", "")
    if "job_comment" in flags.split(","):
        return ok("AccountingStoreFlags", flags)
    remedy = "AccountingStoreFlags=job_comment: Vigil's key is then found there, too, not only in the job's name."
    return warn("AccountingStoreFlags", flags or "none", remedy)


def _tracking(conf: Conf) -> CheckFinding:
    kind = conf.get("ProctrackType", "")
    if kind == "proctrack/cgroup":
        return ok("ProctrackType", kind)
    remedy = "ProctrackType=proctrack/cgroup: processes that leave their session are then ended with their job."
    return warn("ProctrackType", kind or "not reported", remedy)


def _kill_wait(conf: Conf) -> CheckFinding:
    seconds = _seconds(conf.get("KillWait", ""))
    if seconds is None or seconds >= STOP_SECONDS:
        return ok("KillWait", conf.get("KillWait", "not reported"))
    remedy = f"KillWait={STOP_SECONDS} or more: the time to save a checkpoint where preemption comes without a warning."
    return warn("KillWait", f"{seconds} s", remedy)


def _preemption(conf: Conf) -> CheckFinding:
    kind, mode = conf.get("PreemptType", ""), conf.get("PreemptMode", "")
    more = f", PreemptParameters={conf['PreemptParameters']}" if conf.get("PreemptParameters") else ""
    settings = f"{kind or 'none'}, PreemptMode={mode or 'OFF'}{more}"
    if kind in {"", "preempt/none"} or "REQUEUE" in mode.upper():
        return ok("Preemption", settings)
    remedy = (
        "PreemptMode=REQUEUE, with a GraceTime of the partition or QOS: preempted jobs then continue by themselves."
    )
    return warn("Preemption", settings, remedy)


def _prolog(conf: Conf) -> CheckFinding:
    """Check whether a failed prolog leaves its job waiting for somebody to release it."""
    prolog, parameters = conf.get("Prolog", ""), conf.get("SchedulerParameters", "")
    if not prolog or "nohold_on_prolog_fail" in parameters.split(","):
        return ok("Prolog", prolog or "none")
    remedy = "SchedulerParameters=nohold_on_prolog_fail: the job then starts on other nodes. The node is still drained."
    return warn("Prolog", f"{prolog}: if it fails, Slurm holds the job until somebody releases it", remedy)


def _push(conf: Conf) -> CheckFinding:
    kind = conf.get("JobCompType", "")
    if kind == "jobcomp/script":
        return ok(
            "JobCompType",
            f"{kind} ({conf.get('JobCompLoc', '')}): Slurm may tell Vigil at once (docs/slurm/jobcomp.sh)",
        )
    return ok("JobCompType", f"{kind or 'none'}: Vigil polls every 2 s and needs no notification")


def _rate(conf: Conf) -> CheckFinding:
    parameters = conf.get("SlurmctldParameters", "")
    if "rl_enable" not in parameters:
        return ok("SlurmctldParameters", parameters or "none")
    remedy = "If Vigil's log shows refused calls, raise rl_bucket_size and rl_refill_rate."
    return warn("SlurmctldParameters", f"{parameters}: Slurm limits the calls of each user", remedy)


FACTS: tuple[Callable[[Conf], CheckFinding], ...] = (
    _tokens, _requeue, _age, _gpus_counted, _comments, _tracking, _kill_wait, _preemption, _prolog, _push,
    _rate,
)  # fmt: skip


def _seconds(value: str) -> int | None:
    """Return the seconds in a value such as "60 sec"; None if it does not begin with a number."""
    found = re.match(r"\d+", value)
    return int(found[0]) if found else None
