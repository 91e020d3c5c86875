"""Read jobs, steps and nodes in the JSON of any version of Slurm: a reader takes the old place of a fact or the new."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodes.schedulers.base import ENDED, JobStatus, NodeStatus, SlurmStep
from nodes.schedulers.cluster import QueuedJob
from nodes.schedulers.launch import LAUNCH_FAILED
from nodes.schedulers.slurm.states import ended_before, hold_of, job_state, node_state
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
# What Slurm says of one that has ended, where it is more than its state and exit code say.
NOTABLE = frozenset(
    {
        "JobLaunchFailure", "SystemFailure", "NodeDown", "BadConstraints", "DeadLine", "DependencyNeverSatisfied",
        "InvalidAccount", "InvalidQOS", "FrontEndDown",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Record:
    """A job as slurmctld or the accounts tell it. `own_id`: a task of an array has one beside "<array>_<task>"."""

    own_id: str
    status: JobStatus
    user: str = ""
    tasks: tuple[int, ...] = ()  # of an array, still waiting together
    has_more: bool = False  # of these, than Slurm had room to tell
    is_array: bool = False  # what is left of one, for all tasks that never had a record of their own
    was_dropped: bool = False  # slurmctld came back without it, and nobody had asked for its end
    cancelled_by: str = ""  # the Slurm user who did, as the accounts have it

    def has(self, scheduler_id: str) -> bool:
        """Whether it tells of this id: its own, its place in an array, or one of the tasks waiting together."""
        if scheduler_id in {self.own_id, self.status.scheduler_id}:
            return True
        array, _, task = scheduler_id.partition("_")
        if not self.tasks or array != self.own_id or not task.isdecimal():
            return False
        return int(task) in self.tasks or (self.has_more and int(task) > self.tasks[-1])


CANCELLED = "Cancelled; Slurm is ending its processes."
"""Of a job that scancel has ended and whose processes are still going: for up to KillWait, 30 s by default."""


def keys_of(name: str, comment: str) -> tuple[str, str]:
    """The attempt's key, which we put into both: accounts may keep no comments, and people may change them.

    Then one if there are two: nobody can tell which of them is ours.
    """
    found = [match[1] for match in (KEY.search(comment), _KEY_IN_NAME.search(name)) if match]
    first, *others = [*dict.fromkeys(found), ""]
    return first, others[0] if others else ""


def record(raw: Raw) -> Record:
    """One of /jobs or /job/ID."""
    told = words(raw.get("job_state"))
    state = job_state(told)
    own_id = _own_id(raw)
    array, task = integer(raw.get("array_job_id")), number(raw.get("array_task_id"))
    waits, is_over = state == "pending", state in ENDED
    nodes, reason = hosts(raw.get("nodes")), text(raw.get("state_reason"))
    key, other_key = keys_of(text(raw.get("name")), text(raw.get("comment")))
    # Of one that never started Slurm says 1, as if by signal 1.
    code, died_of = _exit(raw.get("exit_code")) if is_over and nodes else (None, None)
    if reason == "JobLaunchFailure" and died_of not in {None, signal.SIGHUP}:
        reason = ""  # 22.05's word for a script that died of a signal; what cannot be launched ends with 1
    if is_over and reason not in NOTABLE:
        reason = ""
    if state == "completing" and "cancelled" in {word.lower() for word in told}:
        reason = CANCELLED
    if waits and text(raw.get("state_description")).startswith("launch failed"):
        reason = LAUNCH_FAILED  # the reason itself says JobHeldUser, as of a person's hold
    return Record(
        own_id=own_id,
        user=text(raw.get("user_name")),
        tasks=_task_numbers(text(raw.get("array_task_string"))),
        has_more="..." in text(raw.get("array_task_string")),
        is_array=str(array) == own_id and task is None,
        status=JobStatus(
            scheduler_id=f"{array}_{int(task)}" if array and task is not None else own_id,
            state=state,
            key=key,
            other_key=other_key,
            user=text(raw.get("user_name")),
            reason=" ".join(
                filter(None, (reason if state in {"pending"} | ENDED or reason == CANCELLED else "", hold_of(told)))
            ),
            exit_code=code,
            signal=died_of,
            submitted_at=moment(raw.get("submit_time")),
            started_at=None if waits else moment(raw.get("start_time")),
            ended_at=moment(raw.get("end_time")) if is_over else None,
            nodes=() if waits else nodes,
            restart_count=integer(raw.get("restart_cnt")),
        ),
    )


def accounted(raw: Raw, *, restart_count: int = 0) -> Record:
    """One of the accounts' jobs (slurmdb): what is left of one that slurmctld has forgotten."""
    told = words(at(raw, "state", "current"))
    state, before = job_state(told), ended_before(told)
    own_id = _own_id(raw)
    array, task = integer(at(raw, "array", "job_id")), number(at(raw, "array", "task_id"))
    is_over = state in ENDED
    key, other_key = keys_of(text(raw.get("name")), text(at(raw, "comment", "job")))
    code, died_of = _exit(raw.get("exit_code")) if is_over else (None, None)
    if state == "failed" and code == 0:
        code = None  # v0.0.38 tells 0 for every job
    return Record(
        own_id=own_id,
        user=text(raw.get("user")),
        was_dropped=state == "cancelled" and raw.get("kill_request_user") == "",
        cancelled_by=text(raw.get("kill_request_user")) if state == "cancelled" else "",
        status=JobStatus(
            scheduler_id=f"{array}_{int(task)}" if array and task is not None else own_id,
            state=state,
            key=key,
            other_key=other_key,
            user=text(raw.get("user")),
            exit_code=code,
            signal=died_of,
            submitted_at=moment(at(raw, "time", "submission")),
            started_at=moment(at(raw, "time", "start")),
            ended_at=moment(at(raw, "time", "end")) if is_over or before or _is_requeued(told) else None,
            nodes=hosts(raw.get("nodes")) if state != "pending" or before or _is_requeued(told) else (),
            restart_count=integer(raw.get("restart_cnt"), default=restart_count),
            before=before,
        ),
    )


def steps(raw: Raw) -> tuple[SlurmStep, ...]:
    """The steps of one of the accounts' jobs, the batch script first."""
    found = []
    for step in objects(raw.get("steps")):
        code, died_of = _exit(step.get("exit_code"))
        told = words(step.get("state"))
        if code == 0 and "FAILED" in told:
            code = None  # v0.0.38 tells 0 for every step
        identity = at(step, "step", "id")
        found.append(
            SlurmStep(
                name=text(at(step, "step", "name")) or "step",
                number=str(identity if identity is not None else "").rpartition(".")[2],
                state=next((word.lower() for word in told), ""),
                exit_code=code,
                signal=died_of,
                nodes=hosts(at(step, "nodes", "list")) or hosts(at(step, "nodes", "range")),
                started_at=moment(at(step, "time", "start")),
                ended_at=moment(at(step, "time", "end")),
            )
        )
    return tuple(found)


def queued(raw: Raw, told: Record) -> QueuedJob:
    """One of /jobs, as the queue shows it, beside its record."""
    asked = tres(raw.get("tres_alloc_str")) or tres(raw.get("tres_req_str"))
    count, kind = gpus_of_tres(asked)
    by_type = gpu_types_of_tres(asked)
    waits = told.status.state == "pending"
    minutes = number(raw.get("time_limit"))
    nodes = told.status.nodes
    details = raw.get("gres_detail")
    node_count = integer(raw.get("node_count"), default=1) or 1
    if not by_type:  # accounting may count gres/gpu without its types
        by_type = _sums(map(gpus, details)) if isinstance(details, list) and details else {
            kind: each * node_count for kind, each in gpus(raw.get("tres_per_node")).items()
        }  # fmt: skip
    indices = dict(zip(nodes, details, strict=False)) if isinstance(details, list) else {}
    return QueuedJob(
        scheduler_id=told.status.scheduler_id,
        component=_component(raw),
        name=text(raw.get("name")),
        user=told.user,
        state=told.status.state,
        account=text(raw.get("account")),
        partition=text(raw.get("partition")),
        qos=text(raw.get("qos")),
        reason=told.status.reason,
        priority=integer(raw.get("priority")),
        submitted_at=told.status.submitted_at,
        started_at=told.status.started_at,
        starts_at=moment(raw.get("start_time")) if waits else None,
        ends_at=None if waits else moment(raw.get("end_time")),
        time_limit_s=None if minutes is None else int(minutes) * 60,
        nodes=nodes,
        node_count=node_count,
        cpus=asked.get("cpu", integer(raw.get("cpus"))),
        gpus=count,
        gpu_type=kind or main_type(by_type),
        gpus_by_type=by_type if len(by_type) > 1 else {},
        memory_mib=asked.get("mem", 0),
        gpu_indices={name: found for name, detail in indices.items() if (found := gpu_indices(detail))},
        tasks=max(1, len(told.tasks)),
        reservation=text(raw.get("resv_name")),
        features=text(raw.get("features")),
        dependency=text(raw.get("dependency")),
        licenses=text(raw.get("licenses")),
        restart_count=told.status.restart_count,
    )


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by type. Slurm writes "gpu:h100:4(IDX:0-3),gpu:1g.10gb:0(IDX:)" where it gave none of a type."""
    found: dict[str, int] = {}
    for one in counts:
        for kind, count in one.items():
            found[kind] = found.get(kind, 0) + count
    return {kind: count for kind, count in found.items() if count}


def _of_vigil(reason: str) -> tuple[str, str]:
    """Slurm knows only that it was the portal's user: whom Vigil asked for stands behind its reasons."""
    found = re.search(r" \(vigil: ([^()]+)\)\Z", reason)
    return (reason[: found.start()], found[1]) if found else (reason, "")


def node(raw: Raw) -> NodeStatus:
    there, used = gpus(raw.get("gres")), tres(raw.get("tres_used"))
    spelling = {kind.lower(): kind for kind in there}  # TRES are lower-case, whatever the configuration says
    used_by_type = gpus(raw.get("gres_used")) or {
        spelling.get(kind, kind): count for kind, count in gpu_types_of_tres(used).items()
    }
    has_several = len(there) > 1
    load = number(raw.get("cpu_load"))
    reason, asked_by = _of_vigil(text(raw.get("reason")))
    return NodeStatus(
        name=name_of(raw),
        state=node_state([*words(raw.get("state")), *words(raw.get("state_flags"))]),
        reason=reason,
        reason_by=(asked_by or text(raw.get("reason_set_by_user"))) if reason else "",
        reason_at=moment(raw.get("reason_changed_at")) if reason else None,
        partitions=words(raw.get("partitions")),
        features=words(raw.get("active_features")) or words(raw.get("features")),
        cpus=integer(raw.get("effective_cpus")) or integer(raw.get("cpus")),
        cpus_used=integer(raw.get("alloc_cpus")),
        gpus=sum(there.values()),
        gpus_used=max(gpus_of_tres(used)[0], sum(used_by_type.values())),
        gpu_type=main_type(there),
        gpus_by_type=there if has_several else {},
        gpus_used_by_type=used_by_type if has_several else {},
        gpus_allocated=gpu_indices(raw.get("gres_used")),
        memory_mib=integer(raw.get("real_memory")),
        memory_used_mib=integer(raw.get("alloc_memory")),
        load=None if load is None else load / 100,
        booted_at=moment(raw.get("boot_time")),
    )


def _component(raw: Raw) -> str:
    """Return "85+1" for a component of heterogeneous job 85; "" for every other job."""
    leader, offset = integer(raw.get("het_job_id")), number(raw.get("het_job_offset"))
    return f"{leader}+{int(offset)}" if leader and offset is not None else ""


def _own_id(raw: Raw) -> str:
    found = integer(raw.get("job_id"))
    if not found:
        raise ValueError("a job without an id")
    return str(found)


def _is_requeued(told: Sequence[str]) -> bool:
    return "REQUEUED" in {word.upper() for word in told}


def _exit(value: object) -> tuple[int | None, int | None]:
    """Exit code and signal: of a wait status (768 is exit 3), or of {status, return_code, signal}."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (None, value & 0x7F) if value & 0x7F else (value >> 8 & 0xFF, None)
    told = mapping(value)
    if not told:
        return None, None
    died_of = integer(at(told, "signal", "id")) or integer(at(told, "signal", "signal_id"))
    if not died_of and "SIGNALED" in words(told.get("status")):
        died_of = _signal_number(text(at(told, "signal", "name")))
    code = number(told.get("return_code"))
    return (None, died_of) if died_of else (None if code is None else int(code) & 0xFF, None)


def _signal_number(name: str) -> int:
    found = getattr(signal, f"SIG{name.removeprefix('SIG')}", None)
    return int(found) if isinstance(found, signal.Signals) else int(signal.SIGKILL)


def _task_numbers(line: str) -> tuple[int, ...]:
    """ "2-9%2" is 2 … 9; Slurm cuts long ones short with "...", whose rest is not told."""
    found: list[int] = []
    for piece in line.partition("%")[0].strip("[]").split(","):
        first, dash, rest = piece.partition("-")
        last, _, step = rest.partition(":")
        if first.isdecimal() and not dash and len(first) < 8:
            found.append(int(first))
        elif first.isdecimal() and last.isdecimal() and len(last) < 8:
            found += range(int(first), int(last) + 1, int(step) if step.isdecimal() and int(step) else 1)
    return tuple(found)
