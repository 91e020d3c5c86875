"""Test who may do what, by the one function that every check uses."""

import pytest
from django.contrib.auth.models import AnonymousUser

from jobs.models import Job
from portal.access import can, note_if_sysadmin
from portal.models import AuditEntry, Project
from tests import lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def people():
    project = lab.a_project("nightjar")
    return {
        "project": project,
        "owner": lab.person("mira", project),
        "colleague": lab.person("tomas", project),
        "lead": lab.person("lena", project, role="lead"),
        "stranger": lab.person("oskar", lab.a_project("siskin")),
        "sysadmin": lab.sysadmin(),
    }


@pytest.mark.parametrize(
    ("who", "see", "change", "submit", "manage"),
    [
        ("owner", True, True, True, False),
        ("colleague", True, False, True, False),
        ("lead", True, True, True, True),
        ("stranger", False, False, False, False),
        ("sysadmin", True, True, True, True),
    ],
)
def test_what_each_may_do(people, who, see, change, submit, manage):
    job = lab.a_job(people["owner"], people["project"])
    user = people[who]
    assert can(user, "see", job) is see
    assert can(user, "change", job) is change
    assert can(user, "submit", people["project"]) is submit
    assert can(user, "manage", people["project"]) is manage
    assert Job.objects.visible_to(user).filter(pk=job.pk).exists() is see
    assert Project.objects.visible_to(user).filter(pk=people["project"].pk).exists() is see


def test_nobody_and_the_dismissed_may_do_nothing(people):
    job = lab.a_job(people["owner"], people["project"])
    people["owner"].is_active = False
    people["sysadmin"].is_active = False
    for user in (AnonymousUser(), people["owner"], people["sysadmin"]):
        assert not any(can(user, action, job) for action in ("see", "submit", "change", "manage"))


def test_a_person_who_left_the_project_loses_access_even_to_their_jobs(people):
    job = lab.a_job(people["owner"], people["project"])
    people["owner"].memberships.all().delete()
    assert not can(people["owner"], "see", job)


def test_the_audit_log_keeps_what_only_a_sysadmin_may(people):
    job = lab.a_job(people["owner"], people["project"])
    note_if_sysadmin(people["owner"], "job.cancelled", job)
    note_if_sysadmin(people["lead"], "job.cancelled", job)
    assert not AuditEntry.objects.exists()
    note_if_sysadmin(people["sysadmin"], "job.cancelled", job)
    entry = AuditEntry.objects.get()
    assert (entry.user, entry.action, entry.thing) == (people["sysadmin"], "job.cancelled", str(job))
