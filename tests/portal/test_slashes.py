"""A page's address with a slash too many or too few."""

import pytest
from django.test import Client

from tests import lab

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ("/jobs/", "/jobs"),
        ("/submit/?from=7&x=%2F", "/submit?from=7&x=%2F"),
        ("/jobs/7/logs/", "/jobs/7/logs"),
        ("/disk/", "/disk"),
        ("/me", "/me/"),
        ("/accounts/login?next=/jobs", "/accounts/login/?next=/jobs"),
        ("/admin?x=1", "/admin/?x=1"),
    ],
)
def test_who_reads_is_sent_on(asked, there):
    for ask in (Client().get, Client().head):
        answer = ask(asked)
        assert (answer.status_code, answer.headers["Location"]) == (301, there)


def test_the_address_works_then():
    browser = lab.signed_in(lab.person("mira", lab.a_project()))
    assert browser.get("/jobs/", follow=True).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/nowhere/", "/jobs//", "//evil.example/", "//evil.example", "//jobs/", "/\\evil.example/", "/\t/evil.example/",
     "/api", "/api/v1/nothing/", "/api/v1/jobs/"],
)  # fmt: skip
def test_nothing_else_is_sent_anywhere(path):
    answer = Client().get("/", PATH_INFO=path)  # as it is: the client would take "//…" for another site itself
    assert answer.status_code in {401, 404}
    assert "Location" not in answer.headers


def test_whoever_posts_is_not_sent_on():
    browser = lab.signed_in(lab.person("mira", lab.a_project()))
    for path in ("/submit/", "/me", "/jobs/cancel/"):
        assert browser.post(path).status_code == 404
