"""Test signing in: password, guessing, one-time link, first start; and the headers of every page."""

import os
import stat
import subprocess
import sys
import tomllib
from datetime import timedelta
from io import StringIO

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from portal.accounts import actions
from portal.models import AuditEntry, LoginLink, Membership, Project, User
from tests import lab

pytestmark = pytest.mark.django_db
LOGIN = "/accounts/login/"


@pytest.fixture
def home(tmp_path, settings):
    settings.VIGIL_HOME = tmp_path
    return tmp_path


def sign_in(client: Client, name: str, password: str = lab.PASSWORD):
    return client.post(LOGIN, {"login": name, "password": password})


def path_of(url: str) -> str:
    return url.removeprefix(settings.VIGIL_PUBLIC_URL)


# Passwords


def test_sign_in_and_out():
    lab.person("mira")
    client = Client()
    assert client.get(LOGIN).status_code == 200
    assert sign_in(client, "mira").headers["Location"] == "/"
    assert client.get("/me/").status_code == 200
    assert client.post("/accounts/logout/").status_code == 302
    assert client.get("/me/").headers["Location"].startswith(LOGIN)


def test_a_wrong_password_does_not_reveal_who_exists():
    lab.person("mira")
    answers = [
        sign_in(Client(), name, "wrong, quite wrong").context["form"].errors.as_text() for name in ("mira", "nobody")
    ]
    assert answers[0] == answers[1] != ""


def test_sign_up_is_closed():
    answer = Client().post(
        "/accounts/signup/", {"username": "eve", "password1": lab.PASSWORD, "password2": lab.PASSWORD}
    )
    assert answer.status_code == 200
    assert not User.objects.filter(username="eve").exists()


def test_guessing_ends_with_a_page_that_explains_it():
    lab.person("mira")
    client = Client()
    for _ in range(settings.AXES_FAILURE_LIMIT - 1):
        assert sign_in(client, "mira", "wrong, quite wrong").status_code == 200
    # Another spelling is the same person's password.
    locked = sign_in(client, "MIRA", "wrong, quite wrong")
    assert locked.status_code == 429
    assert locked.headers["Retry-After"] == "900"
    assert "15 min" in locked.content.decode()
    assert sign_in(client, "mira").status_code == 429, "even the right password must wait"
    lab.person("tomas")
    assert sign_in(Client(), "tomas").status_code == 302, "others still sign in"


def test_a_password_change_requires_the_old_password():
    client = lab.signed_in(lab.person("mira"))
    fields = {"password1": "an even longer one", "password2": "an even longer one"}
    assert client.post("/accounts/password/change/", {"oldpassword": "no", **fields}).status_code == 200
    assert client.post("/accounts/password/change/", {"oldpassword": lab.PASSWORD, **fields}).status_code == 302
    assert User.objects.get().check_password("an even longer one")


def test_the_dismissed_cannot_sign_in():
    lab.person("mira", is_active=False)
    client = Client()
    sign_in(client, "mira")
    assert client.get("/me/").status_code == 302


# One-time links


def test_link_shows_a_button_and_is_spent_by_pressing_it():
    user = lab.person("mira")
    path = path_of(actions.make_link(user))
    first, second = Client(), Client()
    for _ in range(3):  # previews and scanners only read
        page = first.get(path)
        assert page.status_code == 200
        assert "mira" in page.content.decode()
    assert page.headers["Referrer-Policy"] == "strict-origin"
    assert first.post(path).headers["Location"] == "/accounts/password/new/"
    assert first.get("/me/").status_code == 200
    assert second.post(path).status_code == 410
    assert second.get(path).status_code == 410
    assert second.get("/me/").status_code == 302


def test_link_lets_the_password_be_set_once_without_the_old():
    user = lab.person("mira")
    client = Client()
    client.post(path_of(actions.make_link(user)))
    fields = {"new_password1": "short", "new_password2": "short"}
    refused = client.post("/accounts/password/new/", fields)
    assert refused.status_code == 422
    assert "at least 10" in refused.context["form"].errors.as_text()
    fields = {"new_password1": "an even longer one", "new_password2": "an even longer one"}
    assert client.post("/accounts/password/new/", fields).headers["Location"] == "/"
    assert client.get("/me/").status_code == 200, "still signed in"
    assert client.get("/accounts/password/new/").headers["Location"] == "/accounts/password/change/"
    assert sign_in(Client(), "mira", "an even longer one").status_code == 302


def test_link_dies_after_an_hour_and_when_another_is_made():
    user = lab.person("mira")
    old, new = path_of(actions.make_link(user)), path_of(actions.make_link(user))
    assert Client().post(old).status_code == 410
    LoginLink.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert Client().post(new).status_code == 410


def test_link_of_the_dismissed_is_dead():
    user = lab.person("mira")
    path = path_of(actions.make_link(user))
    User.objects.update(is_active=False)
    assert Client().post(path).status_code == 410


def test_a_link_is_stored_as_a_digest_only():
    url = actions.make_link(lab.person("mira"))
    assert LoginLink.objects.get().digest not in url


def test_login_link_command():
    lab.sysadmin("sam")
    lab.person("mira")
    for name, expected in ((None, "sam"), ("mira", "mira")):
        out = StringIO()
        call_command("login_link", *([name] if name else []), stdout=out)
        url = out.getvalue().strip().removeprefix("Sign in: ")
        client = Client()
        client.post(path_of(url))
        assert expected in client.get("/me/").content.decode()
    assert AuditEntry.objects.filter(action="login_link.made").count() == 2
    with pytest.raises(CommandError, match="Users: mira, sam"):
        call_command("login_link", "nobody")


def test_a_login_link_leads_to_where_the_portal_was_started_last(home, monkeypatch):
    lab.sysadmin("sam")
    for name in ("VIGIL_PUBLIC_URL", "VIGIL_PORT"):
        monkeypatch.delenv(name, raising=False)
    (home / "cli.toml").write_text('url = "http://127.0.0.1:8112"\ntoken = "x"\n')
    assert link_of_sam().startswith("http://127.0.0.1:8112/accounts/link/")
    monkeypatch.setenv("VIGIL_PORT", "8000")
    assert link_of_sam().startswith(settings.VIGIL_PUBLIC_URL)


def link_of_sam() -> str:
    out = StringIO()
    call_command("login_link", stdout=out)
    return out.getvalue().strip().removeprefix("Sign in: ")


def test_a_login_link_of_a_portal_that_was_never_started(monkeypatch):
    def no_table(*args, **options):
        raise OperationalError("no such table: portal_user")

    monkeypatch.setattr("django.db.models.query.QuerySet.first", no_table)
    with pytest.raises(CommandError, match="make run"):
        call_command("login_link")


# First start


def test_first_start_makes_what_is_missing_and_no_more(home):
    url = actions.first_start()
    user = User.objects.get()
    assert user.is_sysadmin
    assert Membership.objects.get(user=user).role == "lead"
    assert Project.objects.get().slug == "default"
    assert url is not None
    path = home / "cli.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    payload = tomllib.loads(path.read_text())
    assert payload["url"] == settings.VIGIL_PUBLIC_URL
    answer = Client(headers={"Authorization": f"Bearer {payload['token']}"}).get("/api/v1/me").json()
    assert answer == {"username": user.username, "sysadmin": True, "slurm_user": None, "token_scope": "admin"}

    again = actions.first_start()
    assert again not in (None, url), "nobody has signed in: a fresh link at each start"
    assert tomllib.loads(path.read_text()) == payload
    Client().post(path_of(again))
    assert actions.first_start() is None
    assert User.objects.count() == Project.objects.count() == 1


def test_first_start_mends_the_cli_token(home, settings):
    actions.first_start()
    user = User.objects.get()
    user.tokens.update(expires_at=timezone.now())
    settings.VIGIL_PUBLIC_URL = "http://127.0.0.1:8123"
    actions.first_start()
    payload = tomllib.loads((home / "cli.toml").read_text())
    assert payload["url"] == "http://127.0.0.1:8123"
    assert user.tokens.alive().count() == 1
    assert os.listdir(home) == ["cli.toml"]


def test_first_start_leaves_an_established_lab_alone(home):
    sam = lab.sysadmin("sam")
    assert actions.first_start() is None, "sam has a password"
    assert User.objects.get() == sam
    assert Project.objects.filter(slug="default").exists()


@pytest.mark.parametrize(("name", "becomes"), [("root", "admin"), ("mira", "mira"), ("what ever", "admin")])
def test_the_first_sysadmin_is_named_as_who_starts(home, monkeypatch, name, becomes):
    monkeypatch.setattr("getpass.getuser", lambda: name)
    actions.first_start()
    assert User.objects.get().username == becomes


# What pages send along


@pytest.mark.parametrize(
    "path", [LOGIN, "/me/", "/nowhere", "/accounts/link/none/", "/api/docs", "/api/v1/me", "/api/nowhere", "/healthz"]
)
def test_every_answer_has_the_strict_policy(path):
    client = lab.signed_in(lab.person("mira")) if path == "/me/" else Client()
    policy = client.get(path).headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy


def test_errors_have_the_strict_policy_too(monkeypatch):
    client = lab.signed_in(lab.person("mira"))
    client.raise_request_exception = False

    def fail(*args):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(actions, "tokens_of", fail)
    answer = client.get("/me/")
    assert answer.status_code == 500
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    strict = Client(enforce_csrf_checks=True).post(LOGIN, {})
    assert strict.status_code == 403
    assert "unsafe" not in strict.headers["Content-Security-Policy"]
    bad_host = Client().get(LOGIN, headers={"host": "elsewhere.example"})
    assert bad_host.status_code == 400
    assert "unsafe" not in bad_host.headers["Content-Security-Policy"]


def test_docs_load_nothing_from_outside():
    page = Client().get("/api/docs").content.decode()
    assert "//" not in page.replace("<!--", "").replace("-->", "").replace("http://www.w3.org", "")
    assert "swagger-ui-bundle" in page


@pytest.mark.parametrize(("url", "secure"), [("http://127.0.0.1:8000", False), ("https://vigil.example.org", True)])
def test_cookies_are_secure_beyond_loopback(url, secure, tmp_path):
    names = ("SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_HSTS_SECONDS")
    code = f"from portal import settings; print(*(bool(getattr(settings, name)) for name in {names}))"
    environment = {**os.environ, "VIGIL_PUBLIC_URL": url, "VIGIL_HOME": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == [str(secure)] * 3


# Records

RECORDS = [
    *("portal/user", "portal/project", "portal/token", "portal/auditentry", "axes/accessattempt"),
    *("jobs/job", "jobs/attempt", "jobs/checkpoint", "nodes/node"),
]


@pytest.mark.parametrize(("fields", "status"), [({}, 403), ({"is_staff": True}, 403), ({"is_superuser": True}, 200)])
def test_records_are_for_sysadmins_alone(fields, status):
    client = lab.signed_in(lab.person("mira", **fields))
    assert client.get("/admin/").status_code == status
    assert client.get("/admin/portal/user/").status_code == status
    assert Client().get("/admin/login/").headers["Location"].startswith(LOGIN)


def test_every_record_page_opens():
    sam = lab.sysadmin()
    lab.a_job(sam, lab.a_project())
    client = lab.signed_in(sam)
    for name in RECORDS:
        assert client.get(f"/admin/{name}/").status_code == 200, name
    assert client.get(f"/admin/portal/user/{sam.pk}/change/").status_code == 200
    assert client.get("/admin/portal/user/add/").status_code == 200
    assert client.get(f"/admin/portal/user/{sam.pk}/password/").status_code == 200
    assert client.get("/admin/jobs/job/add/").status_code == 403


@pytest.mark.parametrize(
    ("name", "taken"), [("mira", True), ("root", False), ("0", False), ("daemon", False), ("lena", False), ("", True)]
)
def test_slurm_user_names_are_set_by_sysadmins_and_unique(name, taken):
    lab.person("lena", slurm_user="lena")
    mira, sam = lab.person("mira"), lab.sysadmin()
    fields = {
        "username": "mira", "slurm_user": name, "is_active": "on",
        "memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0",
    }  # fmt: skip
    answer = lab.signed_in(sam).post(f"/admin/portal/user/{mira.pk}/change/", fields)
    assert (answer.status_code == 302) is taken, answer.content.decode()[-3000:]
    mira.refresh_from_db()
    assert mira.slurm_user == ((name or None) if taken else None)
    assert AuditEntry.objects.filter(action="user.changed", user=sam).exists() is taken


def test_a_sysadmin_makes_a_person_and_adds_them_to_a_project():
    project, sam = lab.a_project(), lab.sysadmin()
    client = lab.signed_in(sam)
    fields = {"username": "mira", "usable_password": "true", "password1": lab.PASSWORD, "password2": lab.PASSWORD}
    inline = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    answer = client.post("/admin/portal/user/add/", {**fields, **inline})
    assert answer.status_code == 302, answer.content.decode()[-2000:]
    mira = User.objects.get(username="mira")
    inline = {
        "memberships-TOTAL_FORMS": "1", "memberships-INITIAL_FORMS": "0", "memberships-0-project": str(project.pk),
        "memberships-0-role": "lead", "memberships-0-user": str(mira.pk),
    }  # fmt: skip
    answer = client.post(f"/admin/portal/user/{mira.pk}/change/", {"username": "mira", "is_active": "on", **inline})
    assert answer.status_code == 302, answer.content.decode()[-2000:]
    assert Membership.objects.get().role == "lead"
    assert sign_in(Client(), "mira").status_code == 302
