"""Test the sentence about the limit that blocks a job: of a QOS, an account, a person."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.waiting.limits import Usage, checks
from jobs.waiting.requests import request_of
from nodes.schedulers.cluster import AssociationInfo, Limits, QosInfo
from tests.jobs.waiting.queues import GPU, cluster, gpu_spec, node, now, plain, queued, texts, why


def test_names_the_very_limit() -> None:
    small = QosInfo(name="small", limits=Limits(user={GPU: 2}))
    running = queued("5", 2, state="running", qos="small")
    where = cluster(node("a"), qos=(small,), queue=(running, queued("77", 2, qos="small")))
    found = why(gpu_spec(1, 2), where, "QOSMaxGRESPerUser", you="oskar")
    assert texts(found) == ["QOS small lets each person use 2 GPUs at once; you use 2, this job requests 2."]
    block = found.blocks[0]
    assert (block.kind, block.name, block.amount) == ("limit", "QOS small", GPU)
    assert (block.limit, block.used, block.requested, block.is_reason, block.is_final) == (2, 2, 2, True, False)
    assert now(found) == []  # whatever it requests, 2 are used


def test_less_than_the_limit_leaves_would_start() -> None:
    small = QosInfo(name="small", limits=Limits(user={GPU: 4}))
    queue = (queued("5", 2, state="running", qos="small"), queued("77", 4, qos="small"))
    found = why(gpu_spec(1, 4), cluster(node("a"), qos=(small,), queue=queue), "QOSMaxGRESPerUser")
    assert {"resources.gpus_per_node": 2} in now(found)
    assert "oskar uses 2" in texts(found)[0]


def test_warns_when_several_limits_apply() -> None:
    small = QosInfo(name="small", limits=Limits(group={GPU: 4}, job={"node": 1}, max_time_s=3600))
    accounts = (
        AssociationInfo(account="root"),
        AssociationInfo(account="lab", parent="root", limits=Limits(group={"cpu": 10})),
        AssociationInfo(account="vision", parent="lab", limits=Limits(group={GPU: 1})),
        AssociationInfo(account="vision", user="oskar", is_default=True, limits=Limits(user_jobs=1)),
    )
    queue = (queued("5", 4, state="running", qos="small"), queued("77", 4, nodes=2, qos="small"))
    found = why(gpu_spec(2, 4), cluster(node("a"), node("b"), qos=(small,), associations=accounts, queue=queue),
                "AssocGrpCpuLimit")  # fmt: skip
    names = [(block.name, block.amount) for block in found.blocks if block.kind in {"limit", "time"}]
    assert names[0] == ("Account lab", "cpu")  # the one that Slurm names
    assert set(names) == {
        ("Account lab", "cpu"), ("QOS small", GPU), ("QOS small", "node"), ("QOS small", "time"),
        ("Account vision", "jobs"),
    }  # fmt: skip
    assert found.never
    final = {plain(block.text) for block in found.blocks if block.is_final}
    assert "QOS small lets one job use 1 node; this job requests 2. It can never start as requested." in final
    assert "QOS small limits jobs to 1 h; this job requests 12 h. It can never start as requested." in final


@pytest.mark.parametrize(
    ("limits", "word", "text"),
    [
        (Limits(group={GPU: 4}), "QOSGrpGRES", "lets everybody in it together use 4 GPUs at once; 4 in use"),
        (Limits(account={"cpu": 4}), "MaxCpuPerAccount", "lets each account use 4 CPUs at once; vision uses 4"),
        (Limits(user={"cpu": 4}), "QOSMaxCpuPerUserLimit", "lets each person use 4 CPUs at once; oskar uses 4"),
        (Limits(user_jobs=1), "QOSMaxJobsPerUserLimit", "lets each person run 1 job at once; oskar runs 1"),
        (Limits(group_jobs=1), "QOSGrpJobsLimit", "lets everybody in it together run 1 job at once; there run 1"),
        (Limits(job={GPU: 4}), "QOSMaxGRESPerJob", "lets one job use 4 GPUs; this job requests 8"),
        (Limits(node={GPU: 4}), "QOSMaxGRESPerNode", "lets one job use 4 GPUs on each node; this job requests 8"),
        (Limits(max_time_s=60), "QOSMaxWallDurationPerJobLimit", "limits jobs to 1 min; this job requests 12 h"),
        (Limits(group={"mem": 1024}), "QOSGrpMemLimit", "use 1 GiB of memory at once; 2 GiB in use"),
        (Limits(group={"gres/gpu:H100": 4}), "QOSGrpGRES", "use 4 H100 GPUs at once; 4 in use"),
        (Limits(group_minutes={GPU: 600}), "QOSGrpGRESMinutes", "may use 600 GPU-minutes; they are used up"),
    ],
)
def test_each_limit_has_slurms_word_and_a_sentence(limits: Limits, word: str, text: str) -> None:
    running = queued("5", 4, state="running", qos="q", gpu_type="h100", memory_mib=2048)
    where = cluster(node("a", 4), qos=(QosInfo(name="q", limits=limits),), queue=(running, queued("77", 8, qos="q")))
    found = why(gpu_spec(), where, word)
    assert found.blocks[0].is_reason
    assert text in texts(found)[0]
    assert sum(block.is_reason for block in found.blocks) == 1


def test_a_qos_goes_before_its_accounts_limit() -> None:
    qos = (QosInfo(name="big", limits=Limits(job={GPU: 16})),)
    accounts = (AssociationInfo(account="vision", limits=Limits(job={GPU: 4})),)
    request = request_of(gpu_spec(), user="oskar", account="vision")
    where = cluster(node("a"), qos=qos, associations=accounts)
    assert [c.is_over for c in checks(request, where, Usage(where))] == [True]
    assert [c.source for c in checks(replace(request, qos="big"), where, Usage(where))] == ["QOS big"]


def test_an_unknown_limit_is_reported_in_slurms_words() -> None:
    found = why(gpu_spec(), cluster(node("a")), "AssocGrpGRES")
    assert found.blocks[0].kind == "limit"
    assert "its account has reached its limit" in found.blocks[0].text
