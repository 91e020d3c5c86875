"""Test what a job's page shows of its guards, GPUs and layout."""

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Event
from portal.models import Project, User
from tests.jobs.pages.reading import save, text
from tests.lab import a_job
from vigil_core import formatting

pytestmark = pytest.mark.django_db


def test_findings_of_the_guards_are_shown_in_order(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="failed")
    attempt = job.attempts.get()
    skipped = {"step": 60, "norm": 5200.0, "mean": 1.3, "limit": 26.0, "samples": {"first_place": 944, "count": 16}}
    for kind, report in (
        *[("guard.skipped", {**skipped, "step": 60 + i}) for i in range(8)],
        ("straggler", {"rank": 3, "node": "dgx<02>", "factor": 12.34, "part": "compute"}),
        ("guard.nonfinite", {"step": 1200, "where": "the output of blocks.1.mlp", "rank": 2}),
        ("guard.corruption", {"step": 80, "check": "replica", "ranks": [2]}),
        ("guard.corruption", {"step": 90, "check": "replica", "ranks": []}),
        ("guard.corruption", {"step": 91, "check": "redo", "ranks": [1], "node": "dgx<02>"}),
        ("guard.corruption", {"step": 92, "check": "redo", "ranks": [], "node": None}),
        ("guard.level", {"step": 67, "norm": 52.0, "mean": 1.3}),
        ("guard.level", {"norm": "NaN"}),
        ("guard.divergence", {"step": 3000, "what": "10 of 28 steps had a gradient norm above 20 times the usual"}),
        ("checkpoint.skipped", {"step": 70, "reason": "the one before is still being written", "failed": False}),
        ("checkpoint.skipped", {"step": 80, "reason": "[Errno 28] No space left on device", "failed": True}),
        ("checkpoint.damaged", {"step": 60, "reason": "its sha256 differs"}),
        ("guard.skipped", {"step": [1], "norm": "NaN", "samples": 7}),
        ("straggler", {}),
        ("guard.corruption", {"ranks": {"a": 1}}),
    ):
        Event.objects.create(attempt=attempt, time=timezone.now(), kind=kind, data=report)
    page = client.get(f"/jobs/{job.pk}/attempts").content.decode()
    for line in (
        "step 60 skipped: gradient norm 5,200, usually 1.3 (samples from place 944)",
        "and 4 more of this kind, the last",
        "rank 3 on dgx&lt;02&gt; delays the others: 12.3 times its usual step time, most of it computing",
        "step 1,200 was not finite, first in the output of blocks.1.mlp on rank 2",
        "the replica check at step 80 failed on rank 2",
        "the replica check at step 90 found ranks that differ, but not which is wrong",
        "step 91 was not finite, but finite when repeated: hardware fault on rank 1 on dgx&lt;02&gt;",
        "finite when repeated: hardware fault on an unknown rank",
        "the gradient norm&#x27;s level changed at step 67: usually 1.3, now 52",
        "diverged at step 3,000: 10 of 28 steps",
        "not saved at step 80: [Errno 28] No space left on device",
        "the checkpoint of step 60 is damaged: its sha256 differs",
    ):
        assert line in page
    assert "step 66 skipped" not in page
    assert "still being written" not in page


def test_what_became_of_gpus_stands_on_the_overview(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    for kind, report, line in (
        (
            "gpu.lost",
            {"gpu": "3", "uuid": "GPU-5", "bus": "0000:05", "node": "<02>"},
            "GPU 3 on <02> is lost (GPU-5, 0000",
        ),
        ("gpu.lost", {"gpu": [1]}, "A GPU is lost, according to its driver"),
        ("gpu.silent", {"since": 1, "node": "dgx01"}, "The GPUs on dgx01 report nothing"),
        (
            "gpu.answers",
            {"seconds": 90.0, "node": "dgx01"},
            f"The GPUs on dgx01 respond again after 1{formatting.NBSP}min 30{formatting.NBSP}s",
        ),
        ("gpu.answers", {"seconds": "NaN"}, "The GPUs respond again"),
    ):
        Event.objects.create(attempt=job.latest, time=timezone.now(), kind=kind, data=report)
        assert line.replace("<", "&lt;").replace(">", "&gt;") in client.get(f"/jobs/{job.pk}").content.decode()


def test_the_newest_warnings_stand_on_the_overview(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    assert "Warnings" not in text(client.get(f"/jobs/{job.pk}"))
    pinned = "memory for checkpoints can't be pinned, so saves stall longer: ENOMEM. See ulimit -l (memlock)."
    for kind, report in (
        ("guard.skipped", {"step": 60}),
        ("straggler", {"rank": 3, "node": "dgx<02>", "factor": 12.34}),
        ("checkpoint.skipped", {"step": 80, "reason": "No space left on device", "failed": True}),
        ("checkpoint.unpinned", {"reason": pinned}),
    ):
        Event.objects.create(attempt=job.latest, time=timezone.now(), kind=kind, data=report)
    for address in (f"/jobs/{job.pk}", f"/jobs/{job.pk}/life?tab=overview"):
        page = client.get(address).content.decode()
        assert "Memory for checkpoints can&#x27;t be pinned" in page
        assert "Not saved at step 80: No space left on device" in page
        assert "Rank 3 on dgx&lt;02&gt; delays" in page
        assert "tep 60 skipped" not in page
        assert "All of them, by attempt" in page
    assert "delays the others" not in client.get(f"/jobs/{job.pk}/life?tab=spec").content.decode()


def test_the_layout_that_auto_chose_is_shown_with_the_reasons(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    why = ["a copy on each rank (ddp): no, 141 GiB of 64 GiB usable", "shards within a node: yes, <42 GiB fits"]
    for rank, report in (
        (0, {"mesh": {"dp": 2}, "parallelism": "ddp", "why": []}),
        (0, {"mesh": {"dp": 4, "shard": 8, "tp": 1}, "parallelism": "fsdp", "why": why}),
        (1, {"mesh": {"dp": 99}, "parallelism": "ddp", "why": ["nobody asked it"]}),
    ):
        Event.objects.create(
            attempt=job.latest, time=timezone.now(), kind="plan.chosen", rank=rank, incarnation=0, data=report
        )
    page = text(client.get(f"/jobs/{job.pk}/attempts"))
    assert "fsdp: dp 4 × shard 8" in page
    assert f"{why[0]}; shards within a node: yes, &lt;42 GiB fits" in page
    assert "dp 99" not in page
    for incarnation, parallelism in ((1, "tensor"), (0, "ddp")):  # streams may be posted in any order
        report = {"mesh": {"dp": 2}, "parallelism": parallelism, "why": []}
        Event.objects.create(
            attempt=job.latest, time=timezone.now(), kind="plan.chosen", rank=0, incarnation=incarnation, data=report
        )
    assert "tensor: dp 2" in text(client.get(f"/jobs/{job.pk}/attempts"))
    Event.objects.create(
        attempt=job.latest, time=timezone.now(), kind="plan.chosen", rank=0, data={"mesh": [], "why": 5}
    )
    assert client.get(f"/jobs/{job.pk}/attempts").status_code == 200


def test_who_has_ended_is_promised_no_checkpoint(client: Client, mira: User, project: Project) -> None:
    alive, ended = (text(client.get(f"/jobs/{a_job(mira, project, state=s).pk}")) for s in ("running", "failed"))
    assert "none yet" in alive
    assert "No checkpoints yet" in alive
    assert "none yet" not in ended
    assert "No checkpoints yet" not in ended


def test_a_finding_after_many_stragglers_is_shown_all_the_same(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="failed")
    at = timezone.now()
    slow = [Event(attempt=job.latest, time=at, kind="straggler", data={"rank": 3, "factor": 2.0}) for _ in range(250)]
    Event.objects.bulk_create(slow)
    payload = {"step": 1200, "where": "the output of blocks.1.mlp", "rank": 2}
    Event.objects.create(attempt=job.latest, time=at, kind="guard.nonfinite", data=payload)
    page = client.get(f"/jobs/{job.pk}/attempts").content.decode()
    assert "and 245 more of this kind, the last" in page
    assert "step 1,200 was not finite" in page


def test_a_finding_of_the_guards_stands_alone_whichever_rank_failed_first(
    client: Client, mira: User, project: Project
) -> None:
    error = "NumericsError: numerics.nonfinite: step 2: loss inf, first in the output of blocks.1 on rank 0"
    failure = {"kind": "exception", "rank": 1, "error": error}
    reason = "Step 2: loss inf, first in the output of blocks.1 on rank 0."
    ended = {"step": 7, "steps": 400, "cause": "nonfinite", "reason": reason, "failure": failure}
    job = a_job(mira, project, state="failed", attempt=ended)
    for address in (f"/jobs/{job.pk}", f"/jobs/{job.pk}/attempts"):
        page = text(client.get(address))
        assert reason in page
        assert "numerics.nonfinite" not in page
        assert "Rank 1" not in page


def test_a_diverged_job_is_not_advised_to_resume_there(client: Client, mira: User, project: Project) -> None:
    ended = {"number": 1, "step": 726, "steps": 900, "cause": "diverged", "reason": "Its loss ran away."}
    job = a_job(mira, project, state="failed", attempt=ended)
    save(job, 718)
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "Clone it with a lower learning rate." in html
    assert "It can be resumed from step 718" not in html


def test_a_single_rank_has_no_others_to_compare(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    assert 'data-chart="ranks"' not in text(client.get(f"/jobs/{job.pk}"))
    for changed in ({"ranks_per_node": 2}, {"nodes": "1:2"}):
        job.spec = {**job.spec, "resources": {**job.spec["resources"], **changed}}
        job.save(update_fields=["spec"])
        assert 'data-chart="ranks"' in text(client.get(f"/jobs/{job.pk}"))
        job.spec["resources"] |= {"ranks_per_node": 1}
