"""API tokens: shown once, kept as digests, bounded by scope and time; made and revoked on a page and by the API."""

from datetime import timedelta

import pytest
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from portal.models import AuditEntry, Token
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira():
    return lab.person("mira", lab.a_project())


def asks(secret: str) -> Client:
    return Client(headers={"Authorization": f"Bearer {secret}"})


def test_page_makes_a_token_and_shows_it_once(mira):
    browser = lab.signed_in(mira)
    page = browser.post("/me/tokens/", {"name": "laptop", "scope": "write", "days": "30"})
    secret = page.context["new_secret"]
    assert secret in page.content.decode()
    assert page.headers["Cache-Control"] == "private, no-store"
    assert secret not in browser.get("/me/").content.decode()
    token = Token.objects.get()
    assert secret not in f"{token.digest}{token.hint}"
    assert secret.startswith(token.hint)
    assert timedelta(days=29) < token.expires_at - timezone.now() < timedelta(days=30)
    assert asks(secret).get("/api/v1/me").json()["username"] == "mira"


def test_page_revokes(mira):
    token, secret = Token.issue(mira, "laptop")
    assert lab.signed_in(lab.person("eve")).post(f"/me/tokens/{token.pk}/revoke/").status_code == 302
    assert asks(secret).get("/api/v1/me").status_code == 200, "not hers"
    lab.signed_in(mira).post(f"/me/tokens/{token.pk}/revoke/")
    assert asks(secret).get("/api/v1/me").status_code == 401


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "", "scope": "write", "days": "30"},
        {"name": "x", "scope": "everything", "days": "30"},
        {"name": "x", "scope": "admin", "days": "30"},
        {"name": "x", "scope": "write", "days": "0"},
        {"name": "x", "scope": "write", "days": "100000"},
    ],
)
def test_page_refuses_with_the_form(mira, fields):
    page = lab.signed_in(mira).post("/me/tokens/", fields)
    assert page.status_code == 422
    assert page.context["token_form"].errors
    assert not Token.objects.exists()


def test_api_makes_lists_and_revokes(mira):
    browser = lab.signed_in(mira)
    made = send(browser, "post", "/api/v1/tokens", {"name": "ci", "scope": "read", "days": 7})
    assert made.status_code == 201
    listed = browser.get("/api/v1/tokens").json()["items"]
    assert [item["name"] for item in listed] == ["ci"]
    assert made.json()["secret"] not in str(listed)
    assert browser.delete(f"/api/v1/tokens/{made.json()['id']}").status_code == 204
    assert browser.delete(f"/api/v1/tokens/{made.json()['id']}").status_code == 404
    assert asks(made.json()["secret"]).get("/api/v1/me").status_code == 401


def test_a_token_of_somebody_else_is_not_there(mira):
    token, _ = Token.issue(lab.person("oskar"), "his")
    assert lab.bearer(mira).delete(f"/api/v1/tokens/{token.pk}").status_code == 404
    assert Token.objects.alive().filter(pk=token.pk).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"expires_at": timezone.now() - timedelta(seconds=1)},
        {"revoked_at": timezone.now()},
    ],
)
def test_dead_tokens_open_nothing(mira, change):
    token, secret = Token.issue(mira, "old")
    Token.objects.filter(pk=token.pk).update(**change)
    answer = asks(secret).get("/api/v1/me")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_the_tokens_of_the_dismissed_are_dead(mira):
    _, secret = Token.issue(mira, "laptop")
    mira.is_active = False
    mira.save()
    assert asks(secret).get("/api/v1/me").status_code == 401


@pytest.mark.parametrize("header", ["Bearer nonsense", "Bearer ", "Bearer", "Basic bWlyYTp4", "nonsense", ""])
def test_nonsense_is_nobody(mira, header):
    client = Client(headers={"Authorization": header})
    client.force_login(mira, backend="allauth.account.auth_backends.AuthenticationBackend")
    status = client.get("/api/v1/me").status_code
    assert status == (200 if header == "" else 401), "whoever sends a token is judged by it alone"


def test_read_scope_reads_only(mira):
    client = lab.bearer(mira, "read")
    assert client.get("/api/v1/jobs").status_code == 200
    refused = send(client, "post", "/api/v1/jobs", {"spec": lab.SPEC})
    assert refused.status_code == 403
    assert refused.json()["type"] == "urn:vigil:problem:scope"
    assert "scope write" in refused.json()["detail"]


def test_a_token_cannot_make_a_mightier_one(mira):
    sam = lab.sysadmin()
    assert send(lab.bearer(sam), "post", "/api/v1/tokens", {"name": "x", "scope": "admin"}).status_code == 403
    assert send(lab.bearer(sam, "admin"), "post", "/api/v1/tokens", {"name": "x", "scope": "admin"}).status_code == 201
    assert AuditEntry.objects.filter(action="token.made", user=sam).count() == 1
    refused = send(lab.signed_in(mira), "post", "/api/v1/tokens", {"name": "x", "scope": "admin"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "scope"


def test_use_is_noted_at_most_once_a_minute(mira, django_assert_num_queries):
    token, secret = Token.issue(mira, "laptop")
    asks(secret).get("/api/v1/me")
    token.refresh_from_db()
    assert token.last_used_at is not None
    client = asks(secret)
    with django_assert_num_queries(1):
        client.get("/api/v1/me")


def test_a_session_needs_its_csrf_token_for_everything_but_reading(mira):
    browser = lab.signed_in(mira, enforce_csrf_checks=True)
    assert browser.get("/api/v1/me").status_code == 200
    body = {"name": "ci", "scope": "read"}
    refused = send(browser, "post", "/api/v1/tokens", body)
    assert refused.status_code == 403
    assert refused.json()["type"] == "urn:vigil:problem:csrf"
    browser.get("/me/")  # the page brings the cookie
    cookie = browser.cookies["csrftoken"].value
    assert send(browser, "post", "/api/v1/tokens", body, X_CSRFToken=cookie).status_code == 201
    _, secret = Token.issue(mira, "laptop")
    strict = Client(enforce_csrf_checks=True, headers={"Authorization": f"Bearer {secret}"})
    assert send(strict, "post", "/api/v1/tokens", body).status_code == 201, "a bearer has no need of one"


def test_requests_are_bounded_a_minute(mira, settings):
    settings.VIGIL_API_RATE = 3
    cache.clear()
    client = lab.bearer(mira)
    answers = [client.get("/api/v1/me") for _ in range(9)]
    assert {answer.status_code for answer in answers} == {200, 429}
    late = next(answer for answer in answers if answer.status_code == 429)
    assert late.headers["Content-Type"] == "application/problem+json"
    assert 0 < int(late.headers["Retry-After"]) <= 60
    assert lab.bearer(lab.person("tomas")).get("/api/v1/me").status_code == 200
