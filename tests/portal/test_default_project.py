"""Test the project of jobs without one: it always exists, and whoever deletes it names the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from jobs.models import Job
from portal.accounts import actions
from portal.models import AuditEntry, Project, User
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db


@pytest.fixture
def default(settings: Any, tmp_path: Path) -> Project:
    """The default project, as the first start makes it; vision is there, too."""
    settings.VIGIL_HOME = tmp_path
    actions.first_start()
    lab.a_project("vision")
    return Project.objects.get(is_default=True)


@pytest.fixture
def browser(default: Project) -> Client:
    return lab.signed_in(lab.sysadmin())


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def path_of(project: Project) -> str:
    return f"/admin/portal/project/{project.pk}/delete/"


def test_it_is_not_deleted_without_a_successor(browser: Client, default: Project) -> None:
    for answer in (browser.get(path_of(default)), browser.post(path_of(default), {"post": "yes"})):
        assert "default is the default project: jobs without a project belong to it." in words(answer.text)
        assert "Which project replaces it?" in words(answer.text)
    for nobody in (default.pk, 999, "x", ""):
        browser.post(f"{path_of(default)}?successor={nobody}", {"post": "yes"})
    assert Project.objects.count() == 2


@pytest.mark.parametrize("answer", [{}, {"post": "yes"}])
def test_several_projects_are_deleted_together_or_none(
    browser: Client, default: Project, answer: dict[str, str]
) -> None:
    """A record that cannot be deleted is named with the reason and a remedy before the confirmation."""
    vision, spare = Project.objects.get(slug="vision"), lab.a_project("spare")
    mira = lab.person("mira", vision)
    for name in ("wren", "finch"):
        lab.a_job(mira, vision, name=name)

    def delete(*chosen: Project) -> str:
        several = {"action": "delete_selected", "_selected_action": [project.pk for project in chosen]}
        return words(browser.post("/admin/portal/project/", {**several, **answer}, follow=True).text)

    refused = delete(default, vision, spare)
    assert "Nothing was deleted. vision has 2 jobs. Delete them on their pages first" in refused
    assert "default is the default project: delete it by itself, and choose the one that takes its place." in refused
    assert "protected" not in refused
    assert "vision" not in delete(default, spare).partition("Nothing was deleted.")[2].partition("place.")[0]
    assert Project.objects.count() == 3
    assert ("Are you sure" in delete(spare)) is not answer
    assert Project.objects.count() == (2 if answer else 3)


def test_deleting_a_project_with_jobs_explains_what_to_do_first(browser: Client, default: Project) -> None:
    lab.a_job(lab.person("mira", default), default)
    for query in ("", f"?successor={Project.objects.get(slug='vision').pk}"):
        refused = browser.post(path_of(default) + query, {"post": "yes"}, follow=True)
        assert "Not deleted: default has 1 job. Delete them on their pages first" in words(refused.text)
    assert Project.objects.filter(pk=default.pk, is_default=True).exists()


def test_deleting_the_last_project_explains_what_to_do(browser: Client, default: Project) -> None:
    browser.post(path_of(Project.objects.get(slug="vision")), {"post": "yes"})
    assert "No other project can replace it" in words(browser.get(path_of(default)).text)


def test_what_names_no_project_goes_to_the_successor(
    browser: Client, default: Project, tmp_path: Path, settings: Any
) -> None:
    vision = Project.objects.get(slug="vision")
    path = f"{path_of(default)}?successor={vision.pk}"
    assert "Are you sure" in words(browser.get(path).text)
    assert browser.post(path, {"post": "yes"}).status_code == 302
    assert [(project.slug, project.is_default) for project in Project.objects.all()] == [("vision", True)]
    entry = AuditEntry.objects.get(action="project.default")
    assert (entry.before, entry.after) == ({"default project": "default"}, {"default project": "vision"})
    mira = lab.person("mira", vision)
    created = send(lab.bearer(mira), "post", "/api/v1/jobs", {"spec": {"name": "wren"}})
    assert created.status_code == 201, created.content
    assert Job.objects.get().project == vision
    assert "project = &quot;vision&quot;" in lab.signed_in(mira).get("/submit").text
    actions.first_start()
    assert [project.slug for project in Project.objects.all()] == ["vision"], "no start makes the old one again"


def test_a_renamed_project_stays_the_default(browser: Client, default: Project, tmp_path: Path, settings: Any) -> None:
    mira = lab.person("mira", default)
    rows = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    browser.post(f"/admin/portal/project/{default.pk}/change/", {"slug": "commons", "title": "", **rows})
    assert Project.objects.get(pk=default.pk).slug == "commons"
    created = send(lab.bearer(mira), "post", "/api/v1/jobs", {"spec": {"name": "wren"}})
    assert created.status_code == 201, created.content
    assert Job.objects.get().project_id == default.pk


def test_somebody_outside_the_successor_is_refused_at_the_field(default: Project) -> None:
    yuki = User.objects.create_user("yuki")
    refused = send(lab.bearer(yuki), "post", "/api/v1/jobs", {"spec": {"name": "wren"}})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "project"
