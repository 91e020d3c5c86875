"""Test API tokens: shown once, stored as digests, limited by scope and time; made and revoked by page and API."""

import tomllib
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from portal.accounts import actions
from portal.models import AuditEntry, Token, User
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira():
    return lab.person("mira", lab.a_project())


def client_with(secret: str) -> Client:
    return Client(headers={"Authorization": f"Bearer {secret}"})


def test_page_makes_a_token_and_shows_it_once(mira):
    browser = lab.signed_in(mira)
    assert browser.get("/me/tokens/").headers["Location"] == "/me/", "a page that is opened again"
    page = browser.post("/me/tokens/", {"name": "laptop", "scope": "write", "days": "30"})
    secret = page.context["new_secret"]
    assert secret in page.content.decode()
    assert page.headers["Cache-Control"] == "private, no-store"
    assert secret not in browser.get("/me/").content.decode()
    token = Token.objects.get()
    assert secret not in f"{token.digest}{token.hint}"
    assert secret.startswith(token.hint)
    assert timedelta(days=29) < token.expires_at - timezone.now() < timedelta(days=30)
    assert client_with(secret).get("/api/v1/me").json()["username"] == "mira"


def test_page_revokes(mira):
    token, secret = Token.issue(mira, "laptop")
    assert lab.signed_in(lab.person("eve")).post(f"/me/tokens/{token.pk}/revoke/").status_code == 302
    assert client_with(secret).get("/api/v1/me").status_code == 200, "not hers"
    lab.signed_in(mira).post(f"/me/tokens/{token.pk}/revoke/")
    assert client_with(secret).get("/api/v1/me").status_code == 401


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
    created = send(browser, "post", "/api/v1/tokens", {"name": "ci", "scope": "read", "days": 7})
    assert created.status_code == 201
    listed = browser.get("/api/v1/tokens").json()["items"]
    assert [item["name"] for item in listed] == ["ci"]
    assert created.json()["secret"] not in str(listed)
    assert browser.delete(f"/api/v1/tokens/{created.json()['id']}").status_code == 204
    assert browser.delete(f"/api/v1/tokens/{created.json()['id']}").status_code == 404
    assert client_with(created.json()["secret"]).get("/api/v1/me").status_code == 401


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
    answer = client_with(secret).get("/api/v1/me")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_the_tokens_of_the_dismissed_are_dead(mira):
    _, secret = Token.issue(mira, "laptop")
    mira.is_active = False
    mira.save()
    assert client_with(secret).get("/api/v1/me").status_code == 401


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


def test_a_token_cannot_make_a_token_with_more_rights(mira):
    sam = lab.sysadmin()
    assert send(lab.bearer(sam), "post", "/api/v1/tokens", {"name": "x", "scope": "admin"}).status_code == 403
    assert send(lab.bearer(sam, "admin"), "post", "/api/v1/tokens", {"name": "x", "scope": "admin"}).status_code == 201
    assert AuditEntry.objects.filter(action="token.made", user=sam).count() == 1
    refused = send(lab.signed_in(mira), "post", "/api/v1/tokens", {"name": "x", "scope": "admin"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "scope"


def test_use_is_noted_at_most_once_a_minute(mira, django_assert_num_queries):
    token, secret = Token.issue(mira, "laptop")
    client_with(secret).get("/api/v1/me")
    token.refresh_from_db()
    assert token.last_used_at is not None
    client = client_with(secret)
    with django_assert_num_queries(1):
        client.get("/api/v1/me")


def test_a_session_needs_its_csrf_token_for_everything_but_reading(mira):
    browser = lab.signed_in(mira, enforce_csrf_checks=True)
    assert browser.get("/api/v1/me").status_code == 200
    body = {"name": "ci", "scope": "read"}
    refused = send(browser, "post", "/api/v1/tokens", body)
    assert refused.status_code == 403
    assert refused.json()["type"] == "urn:vigil:problem:csrf"
    page = browser.get("/me/")  # it brings the token, for scripts in the page itself
    assert browser.cookies["csrftoken"]["httponly"]
    assert browser.cookies["csrftoken"]["samesite"] == "Lax"
    token = str(page.context["csrf_token"])
    assert send(browser, "post", "/api/v1/tokens", body, X_CSRFToken=token).status_code == 201
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


# A password that changes, and the tokens


@pytest.fixture
def _nobody_has_tried():
    """allauth counts tries by address in the cache."""
    cache.clear()
    yield
    cache.clear()


NEW = {"oldpassword": lab.PASSWORD, "password1": "quite new indeed", "password2": "quite new indeed"}


@pytest.mark.usefixtures("_nobody_has_tried")
@pytest.mark.parametrize("is_sysadmin", [False, True])
def test_a_changed_password_offers_to_revoke_tokens_and_for_sysadmins_by_default(mira, is_sysadmin):
    mira.is_superuser = is_sysadmin
    mira.save()
    _, secret = Token.issue(mira, "laptop")
    browser = lab.signed_in(mira)
    page = browser.get("/accounts/password/change/").content.decode()
    assert "laptop (write, never used)" in page
    assert ("checked" in page.split('id="id_revoke_tokens"')[1].split(">")[0]) == is_sysadmin
    browser.post("/accounts/password/change/", NEW)
    assert client_with(secret).get("/api/v1/me").status_code == 200, "not chosen"
    again = {"oldpassword": "quite new indeed", "password1": "newer than that", "password2": "newer than that"}
    browser.post("/accounts/password/change/", {**again, "revoke_tokens": "on"})
    mira.refresh_from_db()
    assert mira.check_password("newer than that")
    assert client_with(secret).get("/api/v1/me").status_code == 401


@pytest.mark.usefixtures("_nobody_has_tried")
def test_a_refused_password_revokes_nothing(mira):
    _, secret = Token.issue(mira, "laptop")
    lab.signed_in(mira).post("/accounts/password/change/", {**NEW, "oldpassword": "wrong", "revoke_tokens": "on"})
    assert client_with(secret).get("/api/v1/me").status_code == 200


def test_a_new_password_by_link_offers_it_too_but_a_first_password_does_not(mira):
    _, secret = Token.issue(mira, "laptop")
    fields = {"new_password1": "quite new indeed", "new_password2": "quite new indeed", "revoke_tokens": "on"}
    browser = by_link(mira)
    assert "laptop" in browser.get("/accounts/password/new/").content.decode()
    browser.post("/accounts/password/new/", fields)
    assert client_with(secret).get("/api/v1/me").status_code == 401
    sam = lab.sysadmin()
    sam.set_unusable_password()
    sam.save()
    _, secret = Token.issue(sam, "cli.toml")
    browser = by_link(sam)
    assert "revoke_tokens" not in browser.get("/accounts/password/new/").content.decode()
    browser.post("/accounts/password/new/", fields)
    assert client_with(secret).get("/api/v1/me").status_code == 200, "vigil on the portal's machine goes on"


def test_a_sysadmin_who_sets_somebodys_password_is_offered_it(mira):
    _, secret = Token.issue(mira, "laptop")
    path = f"/admin/portal/user/{mira.pk}/password/"
    browser = lab.signed_in(lab.sysadmin())
    assert "They have 1\N{NO-BREAK SPACE}token: laptop (write, never used)." in browser.get(path).content.decode()
    Token.objects.update(name="<b>laptop</b>")
    assert "token: &lt;b&gt;laptop&lt;/b&gt; (write" in browser.get(path).content.decode(), "help texts are not escaped"
    fields = {"password1": "quite new indeed", "password2": "quite new indeed", "set-password": "1"}
    browser.post(path, {**fields, "usable_password": "true", "revoke_tokens": "on"})
    mira.refresh_from_db()
    assert mira.check_password("quite new indeed")
    assert client_with(secret).get("/api/v1/me").status_code == 401


def test_vigil_on_this_machine_goes_on_after_its_token_was_revoked(
    settings, tmp_path, django_capture_on_commit_callbacks
):
    settings.VIGIL_HOME = tmp_path
    actions.first_start()
    sam = User.objects.get()
    before = tomllib.loads((tmp_path / "cli.toml").read_text())["token"]
    with django_capture_on_commit_callbacks(execute=True):
        assert actions.revoke_all_tokens(sam) == 1
    after = tomllib.loads((tmp_path / "cli.toml").read_text())["token"]
    assert client_with(before).get("/api/v1/me").status_code == 401
    assert client_with(after).get("/api/v1/me").status_code == 200


# Their longest life


def test_the_site_limits_how_long_tokens_live_at_every_door(mira, settings, tmp_path):
    settings.VIGIL_TOKEN_MAX_DAYS, settings.VIGIL_HOME = 30, tmp_path
    browser = lab.signed_in(mira)
    assert "Until it expires; at most 30" in browser.get("/me/").content.decode()
    assert browser.post("/me/tokens/", {"name": "x", "scope": "write", "days": "31"}).status_code == 422
    refused = send(browser, "post", "/api/v1/tokens", {"name": "x", "days": 31})
    assert refused.status_code == 422
    assert refused.json()["errors"] == [
        {"field": "days", "message": "A token is valid for at most 30 days here. Choose 30 or fewer."}
    ]
    assert send(browser, "post", "/api/v1/tokens", {"name": "x"}).status_code == 201, "the default fits"
    actions.first_start()
    assert [token.name for token in Token.objects.all()] == ["cli.toml", "x"]
    assert all(token.expires_at <= timezone.now() + timedelta(days=30) for token in Token.objects.all())


def test_a_shorter_life_ends_older_tokens_too(mira, settings):
    _, secret = Token.issue(mira, "laptop", days=365)
    Token.objects.update(created_at=timezone.now() - timedelta(days=40))
    assert client_with(secret).get("/api/v1/me").status_code == 200
    settings.VIGIL_TOKEN_MAX_DAYS = 30
    assert client_with(secret).get("/api/v1/me").status_code == 401
    (listed,) = lab.signed_in(mira).get("/api/v1/tokens").json()["items"]
    assert listed["expired"]


def by_link(user: User) -> Client:
    browser = Client()
    browser.post(urlsplit(actions.make_link(user)).path)
    return browser
