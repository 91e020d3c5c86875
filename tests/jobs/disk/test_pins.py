"""Test pinning a checkpoint: who may, what the trainer reads, and a pin that races with pruning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from jobs.disk import prepare, rundir, trash
from jobs.following import follow
from jobs.models import Checkpoint, Job
from portal.models import AuditEntry, Project, User
from tests import lab
from tests.jobs.reporting import note_checkpoints
from tests.jobs.schedulers import ScriptedScheduler
from training.checkpoint import pruning

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(oskar: User) -> Client:
    return lab.bearer(oskar)


@pytest.fixture
def job(oskar: User, project: Project) -> Job:
    """Return a running job with two checkpoints, in the database and on disk."""
    job = lab.a_job(oskar, project, state="running")
    lab.on_disk(job)
    for step in (4, 8):
        commit(job, step)
    return job


def commit(job: Job, step: int, **fields: Any) -> Checkpoint:
    created = lab.a_checkpoint(job, step, **fields)
    folder = rundir.path_of(job.directory) / "job" / "checkpoints" / created.name
    folder.mkdir(parents=True)
    (folder / "COMMITTED").write_text("{}")
    return created


def patch(client: Client, job: Job, name: str, body: Any = None) -> Any:
    return lab.send(client, "patch", f"/api/v1/jobs/{job.pk}/checkpoints/{name}", body or {"pinned": True})


def pins(job: Job) -> frozenset[tuple[int, int]]:
    """Return the pins that a trainer reads."""
    return pruning.pinned(rundir.path_of(job.directory) / "job")


def pinned(job: Job) -> list[str]:
    return sorted(job.checkpoints.filter(pinned=True).values_list("name", flat=True))


def test_pinned_and_unpinned_in_the_row_and_for_the_trainer(client: Client, job: Job) -> None:
    answer = patch(client, job, "step-4")
    assert answer.status_code == 200
    assert (answer.json()["name"], answer.json()["pinned"], answer.json()["attempt"]) == ("step-4", True, 1)
    assert pins(job) == {(4, 1)}
    assert patch(client, job, "step-8").status_code == patch(client, job, "step-8").status_code == 200
    file = rundir.path_of(job.directory) / "portal" / "pinned.json"
    assert json.loads(file.read_text()) == {
        "pinned": [
            {"name": "step-4", "step": 4, "generation": 1},
            {"name": "step-8", "step": 8, "generation": 1},
        ]
    }
    assert file.stat().st_mode & 0o777 == 0o640, "its trainer is another Unix user of the group"
    assert patch(client, job, "step-4", {"pinned": False}).json()["pinned"] is False
    assert pins(job) == {(8, 1)}
    patch(client, job, "step-8", {"pinned": False})
    assert pins(job) == frozenset()
    assert [path.name for path in file.parent.iterdir()] == ["pinned.json"], "nothing half-written is left"
    assert not AuditEntry.objects.exists(), "one's own jobs are nobody's business"


@pytest.mark.parametrize(
    "body",
    [{"pinned": "yes"}, {"pinned": 1}, {"pinned": None}, {"pin": True}, {"pinned": True, "state": "x"}, [], "x"],
)
def test_nonsense_is_refused(client: Client, job: Job, body: Any) -> None:
    assert lab.send(client, "patch", f"/api/v1/jobs/{job.pk}/checkpoints/step-4", body).status_code in {400, 422}
    assert lab.send(client, "patch", f"/api/v1/jobs/{job.pk}/checkpoints/step-4").status_code in {400, 422}
    assert pinned(job) == []


def test_who_may(job: Job, project: Project) -> None:
    stranger, colleague = lab.bearer(lab.person("stan")), lab.bearer(lab.person("yuki", project))
    lead, reader = lab.bearer(lab.person("lea", project, role="lead")), lab.bearer(job.owner, "read")
    assert patch(stranger, job, "step-4").status_code == 404
    refused = patch(colleague, job, "step-4")
    assert refused.status_code == 403
    assert "oskar" in refused.json()["detail"]
    assert patch(reader, job, "step-4").status_code == 403
    assert patch(Client(), job, "step-4").status_code == 401
    assert pinned(job) == []
    assert patch(lead, job, "step-4").status_code == 200
    assert not AuditEntry.objects.exists()


def test_what_a_sysadmin_pins_for_somebody_is_noted_once(job: Job) -> None:
    sam = lab.bearer(lab.sysadmin())
    for body in ({"pinned": True}, {"pinned": True}, {"pinned": False}):
        assert patch(sam, job, "step-4", body).status_code == 200
    text = AuditEntry.objects.order_by("pk").values_list("action", "detail")
    assert list(text) == [("checkpoint.pinned", "step-4"), ("checkpoint.unpinned", "step-4")]


@pytest.mark.parametrize("name", ["step-5", "step-4.g2", "step-5%00", "..%2F..", "4", f"step-{'9' * 30}.g1"])
def test_there_is_no_such_checkpoint(client: Client, job: Job, name: str) -> None:
    assert patch(client, job, name).status_code == 404
    assert pinned(job) == []


def test_a_pruned_checkpoint_cannot_be_pinned(client: Client, job: Job) -> None:
    note_checkpoints(job.latest, {"kind": "checkpoint.pruned", "step": 4, "generation": 1})  # type: ignore[arg-type]
    answer = patch(client, job, "step-4")
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith("Not pinned. step-4 of #")
    assert pinned(job) == []


def test_a_pin_follows_the_checkpoint_when_another_of_its_step_is_written(client: Client, job: Job) -> None:
    patch(client, job, "step-4")
    folder = rundir.path_of(job.directory) / "job" / "checkpoints"
    (folder / "step-4").rename(folder / "step-4.g1")
    (folder / "step-4").mkdir()
    (folder / "step-4" / "COMMITTED").write_text("{}")
    event = {"kind": "checkpoint.committed", "step": 4, "name": "step-4", "generation": 2, "time": 2e9}
    note_checkpoints(job.latest, event)  # type: ignore[arg-type]
    assert pinned(job) == ["step-4.g1"]
    assert pins(job) == {(4, 1)}
    patch(client, job, "step-4")
    assert pins(job) == {(4, 1), (4, 2)}, "by its name it is the new one"
    patch(client, job, "step-4.g1", {"pinned": False})
    assert pins(job) == {(4, 2)}
    assert patch(client, job, "step-4.g2", {"pinned": False}).json()["name"] == "step-4"
    assert pins(job) == frozenset()


def test_a_name_means_the_checkpoint_that_exists(client: Client, job: Job) -> None:
    """A pruned checkpoint keeps its name, and the same step may have been saved again."""
    Checkpoint.objects.filter(job=job, step=4).update(state="pruned", generation=7)
    newer = lab.a_checkpoint(job, 4, generation=5)
    assert patch(client, job, "step-4").json()["id"] == newer.pk


# Races with the trainer


def test_what_its_trainer_has_just_pruned_is_not_pinned(client: Client, job: Job) -> None:
    """The folder is gone, but the report of that has not arrived."""
    trash.discard_checkpoint(job.directory, "step-4")
    answer = patch(client, job, "step-4")
    assert answer.status_code == 409
    assert "no longer on disk" in answer.json()["detail"]
    assert pinned(job) == []
    assert pins(job) == frozenset()


def test_where_the_file_system_is_away_it_is_pinned_and_written_later(
    client: Client, job: Job, runs: Path, scheduler: ScriptedScheduler
) -> None:
    runs.rename(runs.with_name("away"))
    assert patch(client, job, "step-4").status_code == 200
    assert pinned(job) == ["step-4"]
    runs.with_name("away").rename(runs)
    assert pins(job) == frozenset()
    assert follow.tick(scheduler)
    assert pins(job) == {(4, 1)}


@pytest.mark.parametrize("damage", ["{", '{"pinned": []}', "[]", None])
def test_a_file_with_other_content_is_rewritten(
    client: Client, job: Job, scheduler: ScriptedScheduler, damage: str | None
) -> None:
    patch(client, job, "step-4")
    file = rundir.path_of(job.directory) / "portal" / "pinned.json"
    file.unlink() if damage is None else file.write_text(damage)
    assert follow.tick(scheduler)
    assert pins(job) == {(4, 1)}
    written = file.stat().st_ino
    follow.tick(scheduler)
    assert file.stat().st_ino == written, "and then left alone"


def test_every_attempt_starts_with_what_is_pinned(client: Client, job: Job) -> None:
    patch(client, job, "step-8")
    file = rundir.path_of(job.directory) / "portal" / "pinned.json"
    file.unlink()
    assert job.latest
    prepare.prepare(job.latest)
    assert pins(job) == {(8, 1)}


def test_a_job_without_pins_has_no_such_file(job: Job, scheduler: ScriptedScheduler) -> None:
    assert job.latest
    prepare.prepare(job.latest)
    follow.tick(scheduler)
    assert not (rundir.path_of(job.directory) / "portal" / "pinned.json").exists()


def test_changes_that_cross_each_other_end_with_all_of_them(
    client: Client, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request pins after this one has read the rows, and its file is overwritten."""
    write = rundir.write
    crossing = [True]

    def slow(path: Path, text: str, **options: Any) -> None:
        if crossing:
            crossing.clear()
            patch(client, job, "step-8")
        write(path, text, **options)

    monkeypatch.setattr(rundir, "write", slow)
    patch(client, job, "step-4")
    assert pins(job) == {(4, 1), (8, 1)}


def test_a_checkpoint_that_is_pruned_all_the_same_is_not_called_pinned(client: Client, job: Job) -> None:
    patch(client, job, "step-4")
    note_checkpoints(job.latest, {"kind": "checkpoint.pruned", "step": 4, "generation": 1})  # type: ignore[arg-type]
    assert pinned(job) == []
    assert patch(client, job, "step-4", {"pinned": False}).json()["state"] == "pruned"
