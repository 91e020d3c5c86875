"""Test the errors of the account pages: the field by name, and the fix, in our own words."""

import re
from html import unescape

import pytest
from django.core.cache import cache
from django.test import Client

from tests import lab

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


@pytest.fixture
def browser():
    cache.clear()  # where allauth counts who tries
    mira = lab.person("miranda", lab.a_project())
    mira.set_password(PASSWORD)
    mira.save()
    yield lab.signed_in(mira)
    cache.clear()


def complaints(browser: Client, path: str, fields: dict[str, str]) -> list[str]:
    page = browser.post(path, fields).content.decode()
    return [unescape(text) for text in re.findall(r'class="error".*?<span>(.*?)</span>', page)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["Name is missing. Enter what the token is for, such as the machine that uses it.",
              "Choose what it may do.", "Days is missing. Fill it in."]),
        ({"name": "x" * 101, "days": "0"},
         ["Name is too long: use at most 100 characters.", "A token is valid for at least 1 day."]),
        ({"name": "x\0", "scope": "admin", "days": "366"},
         ["Name contains a NUL character. Remove it.", "This scope is not available to you. Choose one from the list.",
          "A token is valid for at most 365 days."]),
        ({"days": "ten"}, ["Days must be a whole number, such as 90."]),
    ],
)  # fmt: skip
def test_a_token(browser, fields, expected):
    request = fields if not fields else {"name": "ci", "scope": "write", "days": "9", **fields}
    assert complaints(browser, "/me/tokens/", request) == expected


@pytest.mark.parametrize(
    ("new", "again", "expected"),
    [
        ("", "", ["The new password is missing. Fill it in.", "Enter the new password again."]),
        ("quite new indeed", "other", ["The passwords differ. Enter the new password again in both fields."]),
        ("short", "short", ["Too short: use at least 10 characters."]),
        ("password1234", "password1234", ["Too common and easily guessed. Choose another."]),
        ("miranda1234", "miranda1234", ["Too similar to your name. Choose another."]),
    ],
)
def test_changing_a_password(browser, new, again, expected):
    fields = {"oldpassword": PASSWORD, "password1": new, "password2": again}
    assert complaints(browser, "/accounts/password/change/", fields) == expected


def test_the_password_now(browser):
    fields = {"oldpassword": "wrong", "password1": "quite new indeed", "password2": "quite new indeed"}
    text = "This is not your current password. Enter the one that you sign in with."
    assert complaints(browser, "/accounts/password/change/", fields) == [text]


def test_who_tries_too_often_has_to_wait(browser):
    fields = {"oldpassword": "wrong", "password1": "quite new indeed", "password2": "quite new indeed"}
    for _ in range(5):
        browser.post("/accounts/password/change/", fields)
    page = browser.post("/accounts/password/change/", fields)
    assert page.status_code == 429
    assert "Wait a minute, then try again." in page.content.decode()


def test_a_first_password(browser):
    session = browser.session
    session["may_set_password"] = True
    session.save()
    texts = ["Password is missing. Fill it in.", "Enter the password again."]
    assert complaints(browser, "/accounts/password/new/", {"new_password1": ""}) == texts
    fields = {"new_password1": "quite new indeed", "new_password2": "x"}
    texts = ["The passwords differ. Enter the new password again in both fields."]
    assert complaints(browser, "/accounts/password/new/", fields) == texts


def test_signing_in():
    browser = Client()
    texts = ["User name is missing. Fill it in.", "Password is missing. Fill it in."]
    assert complaints(browser, "/accounts/login/", {}) == texts
    (texts,) = complaints(browser, "/accounts/login/", {"login": "nobody", "password": "x"})
    assert texts.startswith("Wrong user name or password.")
