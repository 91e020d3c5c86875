"""Test the sentence on top of a job's page: it is true, and names who has to act."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from jobs.presenting.job_page.sentence import SentenceFacts, describe_job

NOW = datetime(2026, 11, 21, 9, 14, tzinfo=UTC)


def sentence(state: str, **facts: Any) -> str:
    text = describe_job(SentenceFacts(state=state, now=NOW, **facts))
    return f"{text.lead} | {text.rest} | {text.move}".replace("\N{NO-BREAK SPACE}", " ")


def before(**passed: float) -> datetime:
    return NOW - timedelta(**passed)


def after(**ahead: float) -> datetime:
    return NOW + timedelta(**ahead)


RUNNING: dict[str, Any] = {"started_at": before(hours=6), "last_report_at": NOW, "step": 49_636, "steps": 72_000}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("Waiting for 2 ranks on 1 node. | In the queue for 12 min. | ",
         {"state": "pending", "wants": "2 ranks on 1 node", "queued_at": before(minutes=12)}),
        ("Waiting for attempt 2 for 8 GPUs. | Needs a whole node. | ",
         {"state": "pending", "number": 2, "wants": "8 GPUs", "reason": "Needs a whole node"}),
        ("Cancelling before it started. | It leaves the queue within seconds. | ",
         {"state": "pending", "cancelling": True}),
        ("Started 12 s ago, restoring a checkpoint. | The first values come once step 1 is done. | ",
         {"state": "running", "started_at": before(seconds=12), "phase": "restore"}),
        ("Running since 09:02. | The script has not reported any values; its logs and resource use are below. | ",
         {"state": "running", "started_at": before(minutes=12), "reports": False}),
        ("Training since 03:14, resumed from step 41,000. It should finish in 15 h, at Sun 01:08. | "
         "That is 2 h before its time limit. | ",
         {"state": "running", **RUNNING, "resumed_step": 41_000, "done_at": after(hours=15.9),
          "ends_by": after(hours=17.9)}),
        ("Training since 03:14. It should finish within a minute. |  | ",
         {"state": "running", **RUNNING, "done_at": after(seconds=20), "ends_by": after(hours=9)}),
        ("No report for 5 min. | The scheduler says it is running; its last report was at step 49,636. | ",
         {"state": "running", **RUNNING, "last_report_at": before(minutes=5)}),
        ("Cancelling. | The ranks save a last checkpoint and stop; those that do not exit in time are killed. | ",
         {"state": "running", **RUNNING, "cancelling": True}),
        ("Completed in 1 h 12 min over 2 attempts. | 200 steps, validation loss 2.604. | ",
         {"state": "completed", "number": 2, "ran_s": 4320.0, "started_at": before(minutes=9), "ended_at": NOW,
          "step": 200, "validation_loss": 2.6041}),
        ("Failed at step 57. | Rank 5: shapes differ. | Check the log, then clone the job with a fix.",
         {"state": "failed", "step": 57, "reason": "Rank 5: shapes differ"}),
        ("Failed at step 57. | Out of GPU memory on rank 5. | Lower the batch size.",
         {"state": "failed", "step": 57, "reason": "CUDA out of memory. Tried to allocate 2.00 GiB",
          "diagnosis": "Out of GPU memory on rank 5.", "advice": "Lower the batch size."}),
        ("Reached its time limit at step 13,950. |  | It can be resumed from step 13,900, 50 steps back.",
         {"state": "timeout", "step": 13_950, "newest_checkpoint": 13_900}),
        ("Failed at step 726. | Loss ran away. | Clone it with a lower learning rate.",
         {"state": "failed", "step": 726, "newest_checkpoint": 718, "reason": "Loss ran away",
          "instead": "Clone it with a lower learning rate."}),
        ("Cancelled by lena at step 3,600. | It can be resumed from step 3,600. | ",
         {"state": "cancelled", "step": 3_600, "newest_checkpoint": 3_600, "cancelled_by": "lena"}),
        ("Cancelled outside Vigil, as by scancel. | It can be resumed from step 30. | ",
         {"state": "cancelled", "step": 30, "newest_checkpoint": 30,
          "reason": "Cancelled outside Vigil, as by scancel."}),
        ("Lost a node. | dgx-03 silent. | Check the log, then clone the job with a fix.",
         {"state": "node_fail", "reason": "dgx-03 silent"}),
    ],
)  # fmt: skip
def test_sentences(text: str, facts: dict[str, Any]) -> None:
    assert sentence(**facts) == text


def test_a_limit_that_is_too_short_is_reported_before_it_strikes() -> None:
    text = sentence("running", **RUNNING, done_at=after(hours=9), ends_by=after(hours=7))
    assert "That is 2 h after its time limit: it will stop at 16:14 with a checkpoint, to be resumed." in text


@pytest.mark.parametrize(
    "state", ["suspended", "completing", "preempted", "requeued", "boot_fail", "deadline", "out_of_memory"]
)
def test_every_state_has_a_sentence(state: str) -> None:
    lead = describe_job(SentenceFacts(state=state, now=NOW)).lead
    assert lead[0].isupper()
    assert lead.endswith(".")
    assert "_" not in lead
