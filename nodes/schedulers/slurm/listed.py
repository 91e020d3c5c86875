"""Decode the list of all jobs, keeping only the fields that are read: with thousands of jobs the rest costs most."""

from __future__ import annotations

import msgspec

from nodes.schedulers.slurm.http import decoded

# The fields that shapes.record, shapes.queued and JobList.default_partition read; a test keeps this list complete.
FIELDS_READ = (
    "account", "array_job_id", "array_task_id", "array_task_string", "comment", "cpus", "dependency", "end_time",
    "exit_code", "features", "flags", "gres_detail", "het_job_id", "het_job_offset", "job_id", "job_state",
    "licenses", "name", "node_count", "nodes", "partition", "priority", "qos", "restart_cnt", "resv_name", "start_time",
    "state_description", "state_reason", "submit_time", "time_limit", "tres_alloc_str", "tres_per_node",
    "tres_req_str", "user_name",
)  # fmt: skip
_Job = msgspec.defstruct("_Job", [(name, object, None) for name in FIELDS_READ], gc=False)
_Answer = msgspec.defstruct("_Answer", [("jobs", list[_Job]), ("errors", object, None), ("warnings", object, None)])  # type: ignore[valid-type]
_decoder = msgspec.json.Decoder(_Answer)


def decode_job_list(content: bytes) -> object:
    """Decode a job list like decoded(), with only FIELDS_READ. Anything unexpected falls back to decoded()."""
    try:
        found = msgspec.structs.asdict(_decoder.decode(content))
    except (msgspec.MsgspecError, ValueError):
        return decoded(content)
    return {**found, "jobs": [msgspec.structs.asdict(job) for job in found["jobs"]]}
