"""Check that no page, endpoint, export or notification shows a secret from a log or from what people wrote."""

from __future__ import annotations

import json

import pytest
from django.utils import timezone

from jobs.intake import reports
from jobs.models import Attempt, Diagnosis, Event, Incident, PostMortem
from jobs.postmortem import editing, examples
from jobs.postmortem.editing import Action
from portal import notify
from portal.models import Channel, Delivery, Notice
from portal.notify import SYSADMINS
from tests.jobs.postmortem.attempt_files import Left
from tests.jobs.reporting import Spooled, attempt_of, post
from tests.lab import a_job, a_project, bearer, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db
KEY = "0123456789abcdef0123456789abcdef01234567"
LOGIN = f"CalledProcessError: Command 'wandb login {KEY}' returned 1"


@pytest.fixture
def incident() -> Incident:
    """Return an incident that an older release diagnosed, which did not mask this form of a secret."""
    job = a_job(person("mira", a_project()), a_project(), state="failed")
    created = Incident.objects.create(
        attempt=job.latest, project=job.project, at=timezone.now(), version=1, cause="program.exception", confidence=0.9
    )
    evidence = [{"role": "root", "text": LOGIN, "file": "0.1.log", "line": 5, "cause": "program.exception"}]
    payload = {"cause": "program.exception", "says": "It raised.", "advice": "Read.", "evidence": evidence, "title": ""}
    rest = {"runner_up": None, "ruled_out": [], "not_seen": [], "rank": 1, "node": "", "exception": "", "frame": ""}
    Diagnosis.objects.create(
        incident=created, version=1, cause="program.exception", confidence=0.9,
        verdict={**payload, **rest, "confidence": 0.9, "owner": "researcher", "doing": "", "entry": ""},
    )  # fmt: skip
    return created


@pytest.mark.parametrize("door", ["page", "markdown", "rest", "rest markdown", "overview"])
def test_what_was_stored_before_is_masked_where_it_is_shown(incident: Incident, door: str) -> None:
    job, user = incident.attempt.job, incident.attempt.job.owner
    path, client = {
        "page": (f"/jobs/{job.pk}/postmortem", signed_in(user)),
        "markdown": (f"/jobs/{job.pk}/postmortem.md", signed_in(user)),
        "overview": (f"/jobs/{job.pk}", signed_in(user)),
        "rest": (f"/api/v1/jobs/{job.pk}/postmortem", bearer(user)),
        "rest markdown": (f"/api/v1/jobs/{job.pk}/postmortem.md", bearer(user)),
    }[door]
    text = client.get(path).content.decode()
    assert "wandb login" in text
    assert KEY not in text


def test_what_people_write_is_masked_before_it_is_stored(incident: Incident) -> None:
    user = incident.attempt.job.owner
    editing.write(user, incident, narrative=LOGIN, factors=[LOGIN], actions=[Action(text=LOGIN)])
    editing.overrule(user, incident, cause="program.config", why=LOGIN)
    written = PostMortem.objects.get()
    texts = [written.narrative, *written.factors, written.follow_ups.get().text, incident.overruled_why]
    assert all("wandb login" in text and KEY not in text for text in texts)
    assert KEY not in json.dumps(list(examples.examples()))


@pytest.mark.parametrize(("kind", "key"), [("run.failed", "error"), ("client.dropped", "traceback")])
def test_what_an_event_quotes_is_masked_before_it_is_stored(kind: str, key: str) -> None:
    reports.ingest(attempt_of().pk, post(Spooled().add_event(kind, **{key: LOGIN, "client": 1, "step": 1})))
    stored = Event.objects.get(kind=kind).data[key]
    assert "wandb login" in stored
    assert KEY not in stored


def test_the_last_words_of_a_rank_are_masked_before_they_are_stored(left: Left) -> None:
    left.failure["first_failure"] |= {"kind": "exception", "signal": None, "exit_code": 1, "error": LOGIN}
    left.write(
        "logs/0.1.log", f'Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: {LOGIN}\n'
    )
    left.diagnosed()
    attempt = Attempt.objects.get(pk=left.attempt.pk)
    assert "wandb login" in attempt.reason
    assert KEY not in f"{attempt.failure} {attempt.reason} {list(Diagnosis.objects.values_list('verdict'))}"


def test_a_notice_goes_out_without_it() -> None:
    """This holds for every notice and every channel."""
    sam = sysadmin()
    for kind, address in (
        ("email", "sam@lab.example"),
        ("slack", "https://hooks.slack.com/x"),
        ("webhook", "https://x/"),
    ):
        Channel.objects.create(user=sam, kind=kind, address=address)
    notify.raise_notice("k", kind="k", to=SYSADMINS, title=LOGIN, detail=LOGIN, facts=[("Evidence", LOGIN)])
    notice = Notice.objects.get()
    assert "wandb login" in notice.title
    text = f"{notice.title} {notice.detail} {notice.facts}"
    text += json.dumps(list(Delivery.objects.values_list("title", "content")), default=str)
    assert KEY not in text
