"""Test the catalogue's pages: the site's entries, the form and its trial, the replay; for sysadmins only."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest
from django.test import Client

from diagnosis.signatures.entry import read_entries
from diagnosis.trial.checks import EntryTrial
from diagnosis.trial.checks import check_fields as glance
from jobs.models import Replay, SiteEntry
from jobs.postmortem import replay, site_catalogue
from portal.models import User
from tests.jobs.pages.reading import plain_text
from tests.lab import a_job, signed_in, sysadmin

pytestmark = pytest.mark.django_db
OURS: dict[str, Any] = {
    "name": "storage.ours_down",
    "role": "root",
    "cause": "storage.io",
    "source": "our own mounter",
    "pattern": r"ourfs: <b>volume</b> \S+ went away",
    "example": "ourfs: <b>volume</b> scratch-07 went away after 512 ms",
    "look_alike": "ourfs: volume scratch-07 came back",
}
TEXT = "[[entry]]\n" + "".join(f"{name} = '{value}'\n" for name, value in OURS.items())


@pytest.fixture
def ops() -> Client:
    return signed_in(sysadmin("ops"))


@pytest.fixture(autouse=True)
def _tried_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip measuring what a pattern costs."""

    def try_entry(raw: Any, others: Any) -> EntryTrial:
        glance(raw, trial := EntryTrial(seconds=0.04, megabytes=5.2))
        return trial

    monkeypatch.setattr(site_catalogue, "try_entry", try_entry)
    monkeypatch.setattr(replay, "enqueue", lambda number: None)


def test_a_life_of_an_entry(ops: Client) -> None:
    assert "This site adds none yet." in plain_text(ops.get("/catalogue"))
    assert ops.post("/catalogue/new", {**OURS, "do": "save"}).status_code == 302
    page = ops.get("/catalogue")
    assert "This site adds 1 entry to the 1," in plain_text(page)
    assert "&lt;b&gt;volume" in page.text
    assert "<b>volume" not in page.text
    form = ops.get("/catalogue/entries/storage.ours_down")
    assert OURS["pattern"] in unescape(form.text)
    assert "<b>volume" not in form.text
    changed = {
        **OURS,
        "name": "x.y",
        "during": "data, step",
        "is_generic": "1",
        "advice": "Wait.\r\nThen call.",
        "do": "save",
    }
    assert ops.post("/catalogue/entries/storage.ours_down", changed).status_code == 302
    row = SiteEntry.objects.get()
    assert (row.name, row.during, row.is_generic, row.advice) == ("x.y", ["data", "step"], True, "Wait.\nThen call.")
    ops.post("/catalogue/entries/x.y/enable", {"enabled": "0"})
    assert "The entries of this site are all disabled." in plain_text(ops.get("/catalogue"))
    ops.post("/catalogue/entries/x.y/remove")
    assert not SiteEntry.objects.exists()
    assert ops.get("/catalogue/entries/x.y").status_code == 404
    assert ops.get("/catalogue/entries/x%00y").status_code == 404


def test_errors_are_shown_at_their_fields_and_no_input_is_lost(ops: Client) -> None:
    answer = ops.post("/catalogue/new", {**OURS, "cause": "storage.tape", "do": "save"})
    assert answer.status_code == 422
    assert "'storage.tape' is not a cause." in plain_text(answer)
    assert OURS["pattern"] in unescape(answer.text)
    SiteEntry.objects.create(**OURS)
    answer = ops.post("/catalogue/new", {**OURS, "do": "save"})
    assert answer.status_code == 422
    assert "The site has an entry storage.ours_down." in plain_text(answer)
    assert SiteEntry.objects.count() == 1


def test_the_trial_next_to_the_form(ops: Client) -> None:
    assert "Enter a pattern" in plain_text(ops.post("/catalogue/check", {}))
    assert "The entry works." in plain_text(ops.post("/catalogue/check", OURS))
    assert "0.04 s for 5.2" in plain_text(ops.post("/catalogue/check", OURS))
    hostile = ops.post("/catalogue/check", {**OURS, "during": "<script>alert(1)</script>"})
    assert "<script>" not in hostile.text
    assert ops.post("/catalogue/new", {**OURS, "do": "check"}).status_code == 200


def test_a_form_that_a_link_fills_in(ops: Client) -> None:
    page = ops.get("/catalogue/new", {"example": "a <i>line</i>", "cause": "storage.io", "advice": "not this"})
    assert "a &lt;i&gt;line" in page.text
    assert "not this" not in page.text


def test_entries_as_text(ops: Client) -> None:
    two = TEXT + TEXT.replace("storage.ours_down", "x.y").replace("storage.io", "storage.tape")
    answer = ops.post("/catalogue/take", {"text": two})
    assert answer.status_code == 422
    assert "'storage.tape' is not a cause" in plain_text(answer)
    assert not SiteEntry.objects.exists()
    assert ops.post("/catalogue/take", {"text": TEXT.replace("\n", "\r\n")}).status_code == 302
    assert SiteEntry.objects.get().pattern == OURS["pattern"]
    assert "The site has an entry of this name." in plain_text(ops.post("/catalogue/take", {"text": TEXT}))
    (entry,) = read_entries(ops.get("/catalogue?format=toml").text)
    assert (entry.name, entry.pattern, entry.advice) == (OURS["name"], OURS["pattern"], "")


@pytest.mark.parametrize("wrong", ["", "[[", "entry = 5", TEXT * 21, TEXT + "#" * 200_000])
def test_text_that_is_none(ops: Client, wrong: str) -> None:
    answer = ops.post("/catalogue/take", {"text": wrong})
    assert answer.status_code == 422
    assert "Nothing was added." in plain_text(answer)


def test_a_replay_from_the_form_to_saving(ops: Client, mira: User) -> None:
    begun = ops.post("/catalogue/new", {**OURS, "do": "replay"})
    assert begun.status_code == 302
    found = Replay.objects.get()
    job = a_job(mira, mira.memberships.get().project)
    change = {
        "incident": 1, "job": job.pk, "name": "<b>wren", "attempt": 1, "incarnation": None, "before": "unknown",
        "after": "storage.io", "confidence": 0.96, "says": "x", "by_person": "storage.io",
    }  # fmt: skip
    Replay.objects.update(changes=[change], incidents=[1, 2], place=1, read=1, named=1)
    page = ops.get(begun["Location"])
    message = plain_text(page)
    assert "1 verdict would change. " in message
    assert "1 of them to the cause named by a person." in message
    assert "1 of 2 incidents, 1 with readable logs" in message
    assert "&lt;b&gt;wren" in page.text
    assert 'hx-trigger="every 1s"' in page.text
    fragment = ops.get(begun["Location"], headers={"HX-Target": "replay"})
    assert fragment.text.startswith('<div id="replay"')
    ops.post(f"/catalogue/replays/{found.pk}/stop")
    page = ops.get(begun["Location"])
    assert "Stopped." in plain_text(page)
    assert 'hx-trigger="every 1s"' not in page.text
    assert OURS["pattern"] in unescape(ops.get(f"/catalogue/new?replay={found.pk}").text)
    assert ops.post(f"/catalogue/replays/{found.pk}/save").status_code == 302
    assert SiteEntry.objects.get().name == OURS["name"]


def test_a_replay_of_a_changed_entry_takes_its_place(ops: Client) -> None:
    SiteEntry.objects.create(**OURS)
    ops.post("/catalogue/entries/storage.ours_down", {**OURS, "name": "x.y", "do": "replay"})
    found = Replay.objects.get()
    assert found.instead_of == OURS["name"]
    ops.post(f"/catalogue/replays/{found.pk}/save")
    assert SiteEntry.objects.get().name == "x.y"


def test_a_replay_of_a_new_entry_overwrites_none_of_its_name(ops: Client) -> None:
    row = SiteEntry.objects.create(**OURS, is_enabled=False)
    ops.post("/catalogue/new", {**OURS, "source": "another", "do": "replay"})
    answer = ops.post(f"/catalogue/replays/{Replay.objects.get().pk}/save", follow=True)
    assert "Not saved: The site has an entry storage.ours_down" in plain_text(answer)
    assert SiteEntry.objects.get().source == row.source
    saved = ops.post(f"/catalogue/entries/{row.name}", {**OURS, "do": "save"}, follow=True)
    assert "It is disabled and not used" in plain_text(saved)


def test_for_sysadmins_alone(mira: User) -> None:
    row = SiteEntry.objects.create(**OURS)
    found = Replay.objects.create(asked_by=mira, entry=OURS)
    client = signed_in(mira)
    for path in ("", "/new", f"/entries/{row.name}", f"/replays/{found.pk}", "?format=toml"):
        answer = client.get(f"/catalogue{path}")
        assert answer.status_code == 403, path
        assert "ourfs" not in answer.text
    entry, replayed = f"entries/{row.name}", f"replays/{found.pk}"
    several = (
        "take",
        "check",
        "new",
        entry,
        f"{entry}/enable",
        f"{entry}/remove",
        f"{replayed}/save",
        f"{replayed}/stop",
    )
    for path in several:
        assert client.post(f"/catalogue/{path}", OURS).status_code == 403, path
    assert Client().get("/catalogue").status_code == 302
