"""Test replay, which changes nothing, and people's judgements as cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from django.utils import timezone

from diagnosis.trial.checks import EntryTrial, check_fields
from jobs.errors import SpecError
from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Diagnosis, Incident, Job, Replay, SiteCatalogue, SiteEntry
from jobs.postmortem import editing, examples, incidents, replay, site_catalogue
from portal.models import User
from tests.jobs.reporting import attempt_of, job_of
from tests.lab import sysadmin
from vigil_cli.main import main

pytestmark = pytest.mark.django_db
Fail = Callable[..., Incident]
LINE = "ourfs: volume scratch-07 went away after 512 ms"
OURS: dict[str, Any] = {
    "name": "storage.ours_down",
    "role": "root",
    "cause": "storage.io",
    "source": "our own mounter",
    "pattern": r"ourfs: volume \S+ went away after \d+ ms",
    "example": LINE,
    "look_alike": "ourfs: volume scratch-07 came back after 512 ms",
}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture
def ops() -> User:
    return sysadmin("ops")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the queued parts, which a test runs by hand."""
    requests: list[int] = []
    monkeypatch.setattr(replay, "enqueue", requests.append)
    return requests


@pytest.fixture(autouse=True)
def _tried_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip measuring the cost of a pattern."""

    def glance(raw: Any, others: Any) -> EntryTrial:
        check_fields(raw, trial := EntryTrial())
        return trial

    monkeypatch.setattr(site_catalogue, "try_entry", glance)


@pytest.fixture
def fail(runs: Path, ops: User) -> Fail:
    """End an attempt badly with these logs, and diagnose it."""

    def failed(judged: str = "", **logs: str) -> Incident:
        job = job_of()
        Job.objects.filter(pk=job.pk).update(directory=f"default/{job.pk}-abcdef")
        folder = runs / f"default/{job.pk}-abcdef"
        (folder / "job/attempt-1/logs").mkdir(parents=True)
        (folder / "portal").mkdir()
        job.refresh_from_db()
        attempt = attempt_of(job, scheduler_id=str(job.pk), nodes=["dgx-01"], directory="attempt-1")
        for name, text in logs.items():
            (folder / f"job/attempt-1/logs/{name.replace('_', '.').lstrip('r')}.log").write_text(text)
        assert ending.end(attempt, AttemptEnd("failed", 1, result={"cause": "failed"}))
        incident = Incident.objects.get(attempt=attempt)
        assert incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        if judged:
            editing.overrule(ops, incident, cause=judged, why="hf_abcdefghijklmnop said so")
        return incident

    return failed


def through(found: Replay) -> Replay:
    for _ in range(50):
        if not found.is_going:
            break
        replay.run_slice(found.pk)
        found.refresh_from_db()
    return found


def test_it_shows_what_would_change_and_changes_nothing(ops: User, fail: Fail) -> None:
    theirs = fail(r0_0=f"step 1 loss 2.0\n{LINE}\n")
    fail(r0_0=f"step 1 loss 2.0\n{OOM}\n")
    assert theirs.cause != "storage.io"
    before = list(Diagnosis.objects.order_by("pk").values())
    found = through(replay.start(ops, OURS))
    (change,) = found.changes
    assert (change["incident"], change["before"], change["after"]) == (theirs.pk, theirs.cause, "storage.io")
    assert change["job"] == theirs.attempt.job_id
    assert (found.place, found.read, found.named, found.outcome) == (2, 2, 1, "")
    assert list(Diagnosis.objects.order_by("pk").values()) == before
    assert Incident.objects.get(pk=theirs.pk).cause == theirs.cause
    assert not SiteEntry.objects.exists()


def test_an_entry_that_is_rewritten_stands_for_itself(ops: User, fail: Fail) -> None:
    SiteEntry.objects.create(**OURS)
    fail(r0_0=f"{LINE}\n")
    found = through(replay.start(ops, {**OURS, "cause": "storage.full"}))
    assert [(change["before"], change["after"]) for change in found.changes] == [("storage.io", "storage.full")]


def test_what_would_be_another_anyway_is_no_change_of_it(ops: User, fail: Fail) -> None:
    """Logs that were gone when it was diagnosed, a catalogue that has changed since."""
    incident = fail(r0_0=f"{OOM}\n")
    Diagnosis.objects.filter(incident=incident).update(cause="unknown")
    assert through(replay.start(ops, OURS)).changes == []


def test_logs_that_are_gone_and_those_that_take_long_are_passed_over(ops: User, fail: Fail) -> None:
    Attempt.objects.filter(pk=fail(r0_0=f"{LINE}\n").attempt_id).update(directory="elsewhere")
    Diagnosis.objects.filter(incident=fail(r0_0=f"{LINE}\n")).update(seconds=replay.MAX_DIAGNOSIS_S + 1)
    found = through(replay.start(ops, OURS))
    assert (found.of, found.place, found.read, found.changes) == (2, 2, 0, [])


def test_an_entry_that_agrees_with_a_person_is_confirmed(ops: User, fail: Fail) -> None:
    judged = fail("storage.io", r0_0=f"step 1 loss 2.0\n{LINE}\n")
    diagnosis = Diagnosis.objects.get().cause
    assert diagnosis != judged.cause == "storage.io"
    (change,) = through(replay.start(ops, OURS)).changes
    assert (change["before"], change["after"], change["by_person"]) == (diagnosis, "storage.io", "storage.io")


def test_what_people_judged_comes_first_and_from_what_the_verdict_stored(ops: User, fail: Fail) -> None:
    judged = fail("storage.io", r0_0=f"Traceback (most recent call last):\nRuntimeError: {LINE}\n")
    fail(r0_0=f"{OOM}\n")
    Attempt.objects.filter(pk=judged.attempt_id).update(directory="elsewhere")
    begun = replay.start(ops, OURS, most=1)
    assert begun.incidents == [judged.pk]
    (change,) = through(begun).changes
    assert (change["after"], change["by_person"]) == ("storage.io", "storage.io")


def test_what_is_due_comes_first(ops: User, fail: Fail, hurried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fail(r0_0=f"{LINE}\n")
    begun = replay.start(ops, OURS)
    requests: list[int] = []
    monkeypatch.setattr(incidents, "enqueue", lambda number=0: requests.append(number))
    Incident.objects.update(due_at=timezone.now())
    replay.run_slice(begun.pk)
    begun.refresh_from_db()
    assert (begun.place, requests, hurried[-1]) == (0, [0], begun.pk)


def test_it_goes_on_in_pieces(ops: User, fail: Fail, hurried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        fail(r0_0=f"{LINE}\n")
    monkeypatch.setattr(replay, "SLICE_S", 0.0)
    begun = replay.start(ops, OURS)
    replay.run_slice(begun.pk)
    begun.refresh_from_db()
    assert (begun.place, begun.read, len(begun.changes), begun.is_going) == (1, 1, 1, True)
    found = through(begun)
    assert (found.place, found.read, len(found.changes), found.outcome) == (3, 3, 3, "")


def test_two_workers_do_each_incident_once(ops: User, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        fail(r0_0=f"{LINE}\n")
    begun = replay.start(ops, OURS)
    judged, read = incidents.diagnose_with, []

    def meanwhile(incident: Incident, signatures: Any) -> Any:
        read.append(incident.pk)
        if len(read) == 1:
            replay.run_slice(begun.pk)
        return judged(incident, signatures)

    monkeypatch.setattr(incidents, "diagnose_with", meanwhile)
    replay.run_slice(begun.pk)
    begun.refresh_from_db()
    assert sorted(read) == sorted([*begun.incidents] * 2), "each once with the entry, and once without it"
    assert sorted(change["incident"] for change in begun.changes) == sorted(begun.incidents)
    assert (begun.place, begun.read, begun.named, begun.is_going) == (3, 3, 3, False)


def test_what_kills_its_reader_is_met_once(ops: User, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        fail(r0_0=f"{LINE}\n")
    begun = replay.start(ops, OURS)
    judged = incidents.diagnose_with

    def die(*about: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(incidents, "diagnose_with", die)
    with pytest.raises(KeyboardInterrupt):
        replay.run_slice(begun.pk)
    monkeypatch.setattr(incidents, "diagnose_with", judged)
    found = through(begun)
    found.refresh_from_db()
    assert (found.place, found.read, len(found.changes)) == (2, 1, 1)


def test_it_ends_when_nobody_watches_any_more_and_goes_on_when_somebody_does(
    ops: User, fail: Fail, hurried: list[int]
) -> None:
    fail(r0_0=f"{LINE}\n")
    begun = replay.start(ops, OURS)
    long_ago = timezone.now() - timedelta(minutes=5)
    Replay.objects.update(moved_at=long_ago, seen_at=long_ago)
    before = len(hurried)
    replay.refresh(begun)
    replay.refresh(begun)
    assert hurried[before:] == [begun.pk], "a lost message is sent again, once"
    Replay.objects.update(seen_at=long_ago)
    replay.run_slice(begun.pk)
    begun.refresh_from_db()
    assert (begun.is_going, begun.outcome, begun.place) == (False, "Stopped: nobody was watching.", 0)


def test_it_is_bounded_in_time_and_old_ones_go(ops: User, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        fail(r0_0=f"{LINE}\n")
    old = replay.start(ops, OURS)
    Replay.objects.update(asked_at=timezone.now() - timedelta(days=2))
    monkeypatch.setattr(replay, "MAX_READING_S", 0.0)
    found = through(replay.start(ops, OURS))
    assert found.outcome.startswith("Stopped after")
    assert found.place == 1
    assert not Replay.objects.filter(pk=old.pk).exists()


def test_a_replay_that_is_not_fit_is_not_begun(ops: User) -> None:
    with pytest.raises(SpecError):
        replay.start(ops, {**OURS, "cause": "storage.tape"})
    assert not Replay.objects.exists()


def test_a_changed_catalogue_rewrites_nothing(ops: User, fail: Fail) -> None:
    """Not even the verdict of an incident that is diagnosed once more, as evidence may come."""
    before = fail(r0_0=f"{LINE}\n")
    row = site_catalogue.add(ops, OURS)
    after = fail(r0_0=f"{LINE}\n")
    site_catalogue.remove(ops, row)
    assert after.cause == "storage.io"
    Incident.objects.update(due_at=timezone.now())
    for incident in (before, after):
        assert incidents.diagnose(incident.pk)
        assert Incident.objects.get(pk=incident.pk).cause == incident.cause
    assert fail(r0_0=f"{LINE}\n").cause == before.cause


def test_of_old_catalogues_only_what_revisions_need_is_retained(ops: User) -> None:
    row = site_catalogue.add(ops, OURS)
    for is_enabled in (False, True, False):
        site_catalogue.enable(ops, row, is_enabled)
    SiteCatalogue.objects.update(at=timezone.now() - timedelta(days=3))
    site_catalogue.enable(ops, row, True)
    assert SiteCatalogue.objects.count() == 2


class TestExamples:
    """Test exported judgements as cases for `vigil diagnose --evaluate`."""

    def scored(self, tmp_path: Path, *options: str) -> dict[str, Any]:
        path = tmp_path / "cases.jsonl"
        path.write_text("".join(json.dumps(example) + "\n" for example in examples.examples()))
        created = CliRunner().invoke(main, ["diagnose", "--evaluate", "--json", *options, str(path)])
        assert created.exit_code == 0, created.output
        payload: dict[str, Any] = json.loads(created.output)
        return payload

    def test_they_are_scored(self, fail: Fail, tmp_path: Path) -> None:
        fail("memory.gpu_oom", r0_0=f"step 1 loss 2.0\n{OOM}\n")
        fail("storage.io", r0_0=f"{LINE}\n")
        fail(r0_0=f"{OOM}\n")
        report = self.scored(tmp_path)
        assert (report["cases"], report["right"]) == (2, 1)
        ours = tmp_path / "ours.toml"
        ours.write_text("[[entry]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in OURS.items()))
        assert self.scored(tmp_path, "--catalogue", str(ours))["right"] == 2

    def test_ranks_stay_apart_and_secrets_are_masked(self, fail: Fail) -> None:
        gone = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9885"
        fail("memory.gpu_oom", r0_0=f"{gone}\n", r0_1=f"HF_TOKEN=hf_abcdefghijklmnop\n{OOM}\n")
        (example,) = examples.examples()
        assert set(example["logs"]) == {"0.0.log", "0.1.log", "sacct.txt"}
        assert "hf_abcdefghijklmnop" not in json.dumps(example)
        assert (example["label"], example["said"], example["why"]) == (
            "memory.gpu_oom",
            "memory.gpu_oom",
            "••• said so",
        )

    def test_they_show_what_the_machine_reported(self, fail: Fail) -> None:
        fail("storage.io", r0_0=f"{OOM}\n")
        (example,) = examples.examples()
        assert (example["label"], example["said"]) == ("storage.io", "memory.gpu_oom")

    def test_of_a_long_log_they_have_what_counts(self, fail: Fail) -> None:
        log = "".join(f"line {n} of nothing\n" for n in range(30_000)) + f"{OOM}\n" + "goodbye\n" * 500
        fail("memory.gpu_oom", r0_0=log)
        (example,) = examples.examples()
        text = example["logs"]["0.0.log"]
        assert len(text) < 10_000
        assert text.startswith("line 0 of nothing\n")
        assert "line 29999 of nothing\n" + OOM in text
        assert text.endswith("goodbye\n")

    def test_where_logs_are_gone_the_evidence_is_there(self, fail: Fail, tmp_path: Path) -> None:
        Attempt.objects.filter(pk=fail("memory.gpu_oom", r0_0=f"{OOM}\n").attempt_id).update(directory="elsewhere")
        assert self.scored(tmp_path)["right"] == 1

    def test_an_incident_without_anything_is_none(self, fail: Fail) -> None:
        incident = fail("memory.gpu_oom", r0_0=f"{OOM}\n")
        Attempt.objects.filter(pk=incident.attempt_id).update(directory="elsewhere")
        Diagnosis.objects.update(verdict={})
        assert list(examples.examples()) == []
