"""slurm.conf, as far as Vigil depends on it. One function a fact; `FACTS` lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from jobs.checking.finding import Finding, bad, ok, skip, warn
from jobs.checking.site import Site
from jobs.spec import STOP_SECONDS
from nodes.schedulers.base import SchedulerError

Conf = Mapping[str, str]
LEAST_JOB_AGE_S = 120


def look(site: Site) -> Iterator[Finding]:
    """Looks at slurm.conf as scontrol here tells it, or else as a job's node told it."""
    try:
        conf = site.conf
    except SchedulerError as error:
        conf = site.told_by_node
        if not conf:
            detail = f"not seen: {str(error).partition('. ')[0]}"
            remedy = "Let it run its jobs, whose node can tell, or install Slurm's client commands here."
            yield skip("slurm.conf", detail, remedy)
            return
    for fact in FACTS:
        yield fact(conf)


def _tokens(conf: Conf) -> Finding:
    if "auth/jwt" in (conf.get("AuthAltTypes", ""), conf.get("AuthType", "")):
        return ok("AuthAltTypes", "auth/jwt")
    return bad(
        "AuthAltTypes", conf.get("AuthAltTypes") or "not set", "AuthAltTypes=auth/jwt, AuthAltParameters=jwt_key=…"
    )


def _requeue(conf: Conf) -> Finding:
    if conf.get("JobRequeue") == "1":
        return ok("JobRequeue", "1")
    return warn(
        "JobRequeue", conf.get("JobRequeue", "not told"), "JobRequeue=1: what is preempted or loses a node goes on."
    )


def _age(conf: Conf) -> Finding:
    seconds = _seconds(conf.get("MinJobAge", ""))
    if seconds is None or seconds >= LEAST_JOB_AGE_S:
        return ok("MinJobAge", conf.get("MinJobAge", "not told"))
    remedy = f"MinJobAge={LEAST_JOB_AGE_S} or more (Slurm's default is 300), so that ends are told by slurmctld itself."
    return warn("MinJobAge", f"{seconds} s: what ended is soon forgotten, and only the accounts tell", remedy)


def _gpus_counted(conf: Conf) -> Finding:
    counted = conf.get("AccountingStorageTRES", "")
    if "gpu" not in conf.get("GresTypes", "") or "gres/gpu" in counted.split(","):
        return ok("AccountingStorageTRES", counted or "no GPUs")
    return warn(
        "AccountingStorageTRES",
        counted,
        "AccountingStorageTRES=gres/gpu: without it nobody counts GPUs, nor limits them.",
    )


def _comments(conf: Conf) -> Finding:
    kept = conf.get("AccountingStoreFlags", "")
    if "job_comment" in kept.split(","):
        return ok("AccountingStoreFlags", kept)
    remedy = "AccountingStoreFlags=job_comment: Vigil's mark is then found there too, not in the job's name alone."
    return warn("AccountingStoreFlags", kept or "none", remedy)


def _tracking(conf: Conf) -> Finding:
    kind = conf.get("ProctrackType", "")
    if kind == "proctrack/cgroup":
        return ok("ProctrackType", kind)
    remedy = "ProctrackType=proctrack/cgroup: processes that leave their session are then ended with their job."
    return warn("ProctrackType", kind or "not told", remedy)


def _kill_wait(conf: Conf) -> Finding:
    seconds = _seconds(conf.get("KillWait", ""))
    if seconds is None or seconds >= STOP_SECONDS:
        return ok("KillWait", conf.get("KillWait", "not told"))
    remedy = f"KillWait={STOP_SECONDS} or more: preempted without a warning, a job has only that to save a checkpoint."
    return warn("KillWait", f"{seconds} s", remedy)


def _preemption(conf: Conf) -> Finding:
    kind, mode = conf.get("PreemptType", ""), conf.get("PreemptMode", "")
    more = f", PreemptParameters={conf['PreemptParameters']}" if conf.get("PreemptParameters") else ""
    seen = f"{kind or 'none'}, PreemptMode={mode or 'OFF'}{more}"
    if kind in {"", "preempt/none"} or "REQUEUE" in mode.upper():
        return ok("Preemption", seen)
    remedy = "PreemptMode=REQUEUE, with a GraceTime of the partition or QOS: what is preempted then goes on by itself."
    return warn("Preemption", seen, remedy)


def _prolog(conf: Conf) -> Finding:
    """Return whether a failed prolog leaves its job waiting for somebody to release it."""
    prolog, parameters = conf.get("Prolog", ""), conf.get("SchedulerParameters", "")
    if not prolog or "nohold_on_prolog_fail" in parameters.split(","):
        return ok("Prolog", prolog or "none")
    remedy = (
        "SchedulerParameters=nohold_on_prolog_fail: the job then goes on elsewhere. The node is drained all the same."
    )
    return warn("Prolog", f"{prolog}: where it fails, Slurm holds the job until somebody releases it", remedy)


def _push(conf: Conf) -> Finding:
    kind = conf.get("JobCompType", "")
    if kind == "jobcomp/script":
        return ok(
            "JobCompType",
            f"{kind} ({conf.get('JobCompLoc', '')}): Slurm may tell Vigil at once (docs/slurm/jobcomp.sh)",
        )
    return ok("JobCompType", f"{kind or 'none'}: Vigil asks every 2 s, and need not be told")


def _rate(conf: Conf) -> Finding:
    said = conf.get("SlurmctldParameters", "")
    if "rl_enable" not in said:
        return ok("SlurmctldParameters", said or "none")
    remedy = "Where Vigil's log tells of refused calls, raise rl_bucket_size and rl_refill_rate."
    return warn("SlurmctldParameters", f"{said}: Slurm limits how often one user may ask", remedy)


FACTS: tuple[Callable[[Conf], Finding], ...] = (
    _tokens, _requeue, _age, _gpus_counted, _comments, _tracking, _kill_wait, _preemption, _prolog, _push,
    _rate,
)  # fmt: skip


def _seconds(value: str) -> int | None:
    """The seconds in a value such as "60 sec"; None where it begins with no number."""
    found = re.match(r"\d+", value)
    return int(found[0]) if found else None
