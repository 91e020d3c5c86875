"""Parse jobs, steps and nodes from the JSON of any Slurm version, from a field's old place or its new one."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodes.schedulers.base import ENDED, JobStatus, NodeStatus, SlurmStep
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.schedulers.launch import LAUNCH_FAILED
from nodes.schedulers.slurm.states import ended_before, job_state, node_state, wait_reason
from nodes.schedulers.slurm.values import (
    at,
    gpu_indices,
    gpu_types_of_tres,
    gpus,
    gpus_of_tres,
    hosts,
    integer,
    main_type,
    mapping,
    moment,
    name_of,
    number,
    objects,
    text,
    tres,
    words,
)  # fmt: skip

Raw = Mapping[str, object]
KEY = re.compile(r"vigil:([0-9a-f]{16})\b")
_KEY_IN_NAME = re.compile(r"\.([0-9a-f]{16})\Z")
# Reasons of an ended job that add something to its state and exit code.
INFORMATIVE_REASONS = frozenset(
    {
        "JobLaunchFailure", "SystemFailure", "NodeDown", "BadConstraints", "DeadLine", "DependencyNeverSatisfied",
        "InvalidAccount", "InvalidQOS", "FrontEndDown",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job as slurmctld or accounting reports it. `job_id`: an array task has one besides "<array>_<task>"."""

    job_id: str
    status: JobStatus
    user: str = ""
    tasks: tuple[int, ...] = ()  # of an array, still pending together
    has_more: bool = False  # more such tasks than Slurm lists
    is_array: bool = False  # the rest of an array: covers tasks that never had a record
    was_dropped: bool = False  # slurmctld restarted without it; nobody had cancelled it
    cancelled_by: str = ""  # the Slurm user who cancelled it, from accounting

    def has(self, scheduler_id: str) -> bool:
        """Return whether it covers this id: its job id, its array place, or one of the tasks pending together."""
        if scheduler_id in {self.job_id, self.status.scheduler_id}:
            return True
        array, _, task = scheduler_id.partition("_")
        if not self.tasks or array != self.job_id or not task.isdecimal():
            return False
        return int(task) in self.tasks or (self.has_more and int(task) > self.tasks[-1])


CANCELLED = "Cancelled; Slurm is ending its processes."
"""The reason of a cancelled job whose processes still run, for up to KillWait (30 s by default)."""


def keys_of(name: str, comment: str) -> tuple[str, str]:
    """Return the attempt's key from comment and name, and a second one if they differ.

    We put it into both: accounting may store no comments, and people may edit either. Nobody can tell which of two is
    ours.
    """
    found = [match[1] for match in (KEY.search(comment), _KEY_IN_NAME.search(name)) if match]
    first, *others = [*dict.fromkeys(found), ""]
    return first, others[0] if others else ""


def record(raw: Raw) -> JobRecord:
    """Parse a job of /jobs or /job/ID."""
    state_words = words(raw.get("job_state"))
    state = job_state(state_words)
    job_id = _job_id(raw)
    array, task = integer(raw.get("array_job_id")), number(raw.get("array_task_id"))
    is_pending, has_ended = state == "pending", state in ENDED
    nodes, reason = hosts(raw.get("nodes")), text(raw.get("state_reason"))
    key, other_key = keys_of(text(raw.get("name")), text(raw.get("comment")))
    # A job that never started has exit code 1, as if killed by signal 1.
    code, died_of = _exit(raw.get("exit_code")) if has_ended and nodes else (None, None)
    if reason == "JobLaunchFailure" and died_of not in {None, signal.SIGHUP}:
        reason = ""  # 22.05 says so of a script killed by a signal; a failed launch exits with 1
    if has_ended and reason not in INFORMATIVE_REASONS:
        reason = ""
    if state == "completing" and "cancelled" in {word.lower() for word in state_words}:
        reason = CANCELLED
    if is_pending and text(raw.get("state_description")).startswith("launch failed"):
        reason = LAUNCH_FAILED  # the reason itself is JobHeldUser, as for a user's hold
    return JobRecord(
        job_id=job_id,
        user=text(raw.get("user_name")),
        tasks=_task_numbers(text(raw.get("array_task_string"))),
        has_more="..." in text(raw.get("array_task_string")),
        is_array=str(array) == job_id and task is None,
        status=JobStatus(
            scheduler_id=f"{array}_{int(task)}" if array and task is not None else job_id,
            state=state,
            key=key,
            other_key=other_key,
            user=text(raw.get("user_name")),
            reason=" ".join(
                filter(
                    None,
                    (reason if state in {"pending"} | ENDED or reason == CANCELLED else "", wait_reason(state_words)),
                )
            ),
            exit_code=code,
            signal=died_of,
            submitted_at=moment(raw.get("submit_time")),
            started_at=None if is_pending else moment(raw.get("start_time")),
            ended_at=moment(raw.get("end_time")) if has_ended else None,
            nodes=() if is_pending else nodes,
            restart_count=integer(raw.get("restart_cnt")),
        ),
    )


def accounted(raw: Raw, *, restart_count: int = 0) -> JobRecord:
    """Parse a job of accounting (slurmdb), which remains after slurmctld has forgotten it."""
    state_words = words(at(raw, "state", "current"))
    state, previous_end = job_state(state_words), ended_before(state_words)
    job_id = _job_id(raw)
    array, task = integer(at(raw, "array", "job_id")), number(at(raw, "array", "task_id"))
    has_ended = state in ENDED
    key, other_key = keys_of(text(raw.get("name")), text(at(raw, "comment", "job")))
    code, died_of = _exit(raw.get("exit_code")) if has_ended else (None, None)
    if state == "failed" and code == 0:
        code = None  # v0.0.38 reports 0 for every job
    return JobRecord(
        job_id=job_id,
        user=text(raw.get("user")),
        was_dropped=state == "cancelled" and raw.get("kill_request_user") == "",
        cancelled_by=text(raw.get("kill_request_user")) if state == "cancelled" else "",
        status=JobStatus(
            scheduler_id=f"{array}_{int(task)}" if array and task is not None else job_id,
            state=state,
            key=key,
            other_key=other_key,
            user=text(raw.get("user")),
            exit_code=code,
            signal=died_of,
            submitted_at=moment(at(raw, "time", "submission")),
            started_at=moment(at(raw, "time", "start")),
            ended_at=moment(at(raw, "time", "end")) if has_ended or previous_end or _is_requeued(state_words) else None,
            nodes=hosts(raw.get("nodes")) if state != "pending" or previous_end or _is_requeued(state_words) else (),
            restart_count=integer(raw.get("restart_cnt"), default=restart_count),
            previous_end=previous_end,
        ),
    )


def steps(raw: Raw) -> tuple[SlurmStep, ...]:
    """Parse the steps of a job of accounting, the batch script first."""
    found = []
    for step in objects(raw.get("steps")):
        code, died_of = _exit(step.get("exit_code"))
        state_words = words(step.get("state"))
        if code == 0 and "FAILED" in state_words:
            code = None  # v0.0.38 reports 0 for every step
        identity = at(step, "step", "id")
        found.append(
            SlurmStep(
                name=text(at(step, "step", "name")) or "step",
                number=str(identity if identity is not None else "").rpartition(".")[2],
                state=next((word.lower() for word in state_words), ""),
                exit_code=code,
                signal=died_of,
                nodes=hosts(at(step, "nodes", "list")) or hosts(at(step, "nodes", "range")),
                started_at=moment(at(step, "time", "start")),
                ended_at=moment(at(step, "time", "end")),
            )
        )
    return tuple(found)


def queued(raw: Raw, record: JobRecord) -> QueuedJobInfo:
    """Parse a job of /jobs as queue entry; `record` is its parsed record."""
    resources = tres(raw.get("tres_alloc_str")) or tres(raw.get("tres_req_str"))
    count, kind = gpus_of_tres(resources)
    by_type = gpu_types_of_tres(resources)
    is_pending = record.status.state == "pending"
    minutes = number(raw.get("time_limit"))
    nodes = record.status.nodes
    details = raw.get("gres_detail")
    node_count = integer(raw.get("node_count"), default=1) or 1
    if not by_type:  # accounting may count gres/gpu without types
        by_type = _sums(map(gpus, details)) if isinstance(details, list) and details else {
            kind: each * node_count for kind, each in gpus(raw.get("tres_per_node")).items()
        }  # fmt: skip
    indices = dict(zip(nodes, details, strict=False)) if isinstance(details, list) else {}
    return QueuedJobInfo(
        scheduler_id=record.status.scheduler_id,
        component=_component(raw),
        name=text(raw.get("name")),
        user=record.user,
        state=record.status.state,
        account=text(raw.get("account")),
        partition=text(raw.get("partition")),
        qos=text(raw.get("qos")),
        reason=record.status.reason,
        priority=integer(raw.get("priority")),
        submitted_at=record.status.submitted_at,
        started_at=record.status.started_at,
        starts_at=moment(raw.get("start_time")) if is_pending else None,
        ends_at=None if is_pending else moment(raw.get("end_time")),
        time_limit_s=None if minutes is None else int(minutes) * 60,
        nodes=nodes,
        node_count=node_count,
        cpus=resources.get("cpu", integer(raw.get("cpus"))),
        gpus=count,
        gpu_type=kind or main_type(by_type),
        gpus_by_type=by_type if len(by_type) > 1 else {},
        memory_mib=resources.get("mem", 0),
        gpu_indices={name: found for name, detail in indices.items() if (found := gpu_indices(detail))},
        tasks=max(1, len(record.tasks)),
        reservation=text(raw.get("resv_name")),
        features=text(raw.get("features")),
        dependency=text(raw.get("dependency")),
        licenses=text(raw.get("licenses")),
        restart_count=record.status.restart_count,
    )


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by type. Slurm writes "gpu:h100:4(IDX:0-3),gpu:1g.10gb:0(IDX:)" if none of a type is allocated."""
    found: dict[str, int] = {}
    for by_type in counts:
        for kind, count in by_type.items():
            found[kind] = found.get(kind, 0) + count
    return {kind: count for kind, count in found.items() if count}


def _split_vigil_user(reason: str) -> tuple[str, str]:
    """Split Vigil's suffix off a drain reason: Slurm sees only the portal's user, so Vigil appends the requester."""
    found = re.search(r" \(vigil: ([^()]+)\)\Z", reason)
    return (reason[: found.start()], found[1]) if found else (reason, "")


def node(raw: Raw) -> NodeStatus:
    installed, used = gpus(raw.get("gres")), tres(raw.get("tres_used"))
    spelling = {kind.lower(): kind for kind in installed}  # TRES are lower-case, whatever the case in the configuration
    used_by_type = gpus(raw.get("gres_used")) or {
        spelling.get(kind, kind): count for kind, count in gpu_types_of_tres(used).items()
    }
    has_several = len(installed) > 1
    load = number(raw.get("cpu_load"))
    reason, requested_by = _split_vigil_user(text(raw.get("reason")))
    return NodeStatus(
        name=name_of(raw),
        state=node_state([*words(raw.get("state")), *words(raw.get("state_flags"))]),
        reason=reason,
        reason_by=(requested_by or text(raw.get("reason_set_by_user"))) if reason else "",
        reason_at=moment(raw.get("reason_changed_at")) if reason else None,
        partitions=words(raw.get("partitions")),
        features=words(raw.get("active_features")) or words(raw.get("features")),
        cpus=integer(raw.get("effective_cpus")) or integer(raw.get("cpus")),
        cpus_used=integer(raw.get("alloc_cpus")),
        gpus=sum(installed.values()),
        gpus_used=max(gpus_of_tres(used)[0], sum(used_by_type.values())),
        gpu_type=main_type(installed),
        gpus_by_type=installed if has_several else {},
        gpus_used_by_type=used_by_type if has_several else {},
        gpus_allocated=gpu_indices(raw.get("gres_used")),
        memory_mib=integer(raw.get("real_memory")),
        memory_used_mib=integer(raw.get("alloc_memory")),
        load=None if load is None else load / 100,
        booted_at=moment(raw.get("boot_time")),
    )


def _component(raw: Raw) -> str:
    """Return "85+1" for a component of heterogeneous job 85; "" for any other job."""
    leader, offset = integer(raw.get("het_job_id")), number(raw.get("het_job_offset"))
    return f"{leader}+{int(offset)}" if leader and offset is not None else ""


def _job_id(raw: Raw) -> str:
    found = integer(raw.get("job_id"))
    if not found:
        raise ValueError("a job without an id")
    return str(found)


def _is_requeued(record: Sequence[str]) -> bool:
    return "REQUEUED" in {word.upper() for word in record}


def _exit(value: object) -> tuple[int | None, int | None]:
    """Return (exit code, signal) from a wait status (768 is exit 3), or from {status, return_code, signal}."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (None, value & 0x7F) if value & 0x7F else (value >> 8 & 0xFF, None)
    status = mapping(value)
    if not status:
        return None, None
    died_of = integer(at(status, "signal", "id")) or integer(at(status, "signal", "signal_id"))
    if not died_of and "SIGNALED" in words(status.get("status")):
        died_of = _signal_number(text(at(status, "signal", "name")))
    code = number(status.get("return_code"))
    return (None, died_of) if died_of else (None if code is None else int(code) & 0xFF, None)


def _signal_number(name: str) -> int:
    found = getattr(signal, f"SIG{name.removeprefix('SIG')}", None)
    return int(found) if isinstance(found, signal.Signals) else int(signal.SIGKILL)


def _task_numbers(line: str) -> tuple[int, ...]:
    """Parse "2-9%2" as 2 … 9. Slurm truncates long lists with "..."; the rest is not listed."""
    found: list[int] = []
    for piece in line.partition("%")[0].strip("[]").split(","):
        first, dash, rest = piece.partition("-")
        last, _, step = rest.partition(":")
        if first.isdecimal() and not dash and len(first) < 8:
            found.append(int(first))
        elif first.isdecimal() and last.isdecimal() and len(last) < 8:
            found += range(int(first), int(last) + 1, int(step) if step.isdecimal() and int(step) else 1)
    return tuple(found)
