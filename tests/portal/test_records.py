"""Test the records pages: Django's admin with Vigil's name, wording and colours, for sysadmins."""

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from django.contrib.staticfiles import finders
from django.db import connection
from django.test import Client

from jobs.models import Attempt
from portal import admin
from portal.models import AuditEntry, User
from tests import lab

pytestmark = pytest.mark.django_db
PAGES = (
    "/admin/",
    "/admin/portal/user/",
    "/admin/portal/user/add/",
    "/admin/nodes/qos/",
    "/admin/nodes/nodeevent/",
    "/admin/nodes/enrolmentsecret/",
    "/admin/axes/accessattempt/",
)


@pytest.fixture
def browser() -> Client:
    return lab.signed_in(lab.sysadmin())


def words(html: str) -> str:
    """Return the text that a reader sees."""
    html = re.sub(r"<(script|style|template)\b.*?</\1>", "", html, flags=re.S)
    html = re.sub(r'<span class="material-symbols[^>]*>[^<]*</span>', "", html)  # drawn, not read
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.mark.parametrize("path", PAGES)
def test_they_have_vigils_name_and_lead_back(browser: Client, path: str) -> None:
    html = browser.get(path).text
    title = html.partition("<title>")[2].partition("</title>")[0]
    assert title.strip().endswith("| Vigil"), title
    text = words(html)
    assert "unfold" not in text.lower()
    assert "django" not in text.lower()
    assert "Axes" not in text
    for there in ("/", "/jobs", "/nodes", "/me/"):
        assert f'href="{there}"' in html


def test_they_speak_our_words(browser: Client) -> None:
    text = words(browser.get("/admin/").text)
    for name in ("People and projects", "People", "Audit log", "Failed sign-ins", "Cluster", "QOS"):
        assert name in text
    assert "Axes" not in text
    assert "Access attempts" not in text
    assert "Sysadmin" in words(browser.get("/admin/portal/user/").text)
    assert "uperuser" not in words(
        browser.get("/admin/portal/user/add/").text + browser.get("/admin/portal/user/").text
    )


def test_their_colours_come_from_our_styles(browser: Client) -> None:
    html = browser.get("/admin/").text
    for name in ("css/tokens.css", "css/records.css", "favicon.svg"):
        assert f"/static/{name}" in html
        assert finders.find(name)
    assert "unfold-theme-colors" not in html


def test_they_come_in_the_theme_that_was_chosen(browser: Client) -> None:
    browser.cookies["theme"] = "dark"
    assert 'class="dark"' in browser.get("/admin/").text.partition("<head>")[0]
    browser.cookies["theme"] = '"><script>'
    assert 'class="' not in browser.get("/admin/").text.partition("<head>")[0]


def test_they_are_for_sysadmins_alone() -> None:
    member = lab.signed_in(lab.person("mira", lab.a_project(), is_staff=True))
    for path in ("/admin/", "/admin/portal/user/", "/admin/nonsense/", "/admin/logout/"):
        refused = member.get(path)
        assert refused.status_code == 403, path
        assert "Only sysadmins can open the administration pages." in words(refused.text)
        assert 'href="/"' in refused.text
    assert member.get("/admin/login/?next=/admin/", follow=True).status_code == 403, "no loop"
    assert Client().get("/admin/").status_code == 302, "whoever is not signed in is asked to"


def person_form(user: User, **changes: str) -> dict[str, str]:
    """Return the form that the browser sends to change a person; an empty right is withdrawn."""
    form = {
        "username": user.username,
        "is_active": "on",
        "is_superuser": "on",
        "memberships-TOTAL_FORMS": "0",
        "memberships-INITIAL_FORMS": "0",
        **changes,
    }
    return {name: value for name, value in form.items() if value}


@pytest.mark.parametrize("right", ["is_superuser", "is_active"])
def test_the_last_sysadmin_remains_a_sysadmin(browser: Client, right: str) -> None:
    sam = User.objects.get()
    path = f"/admin/portal/user/{sam.pk}/change/"
    text = words(browser.post(path, person_form(sam, **{right: ""})).text)
    assert "sam is the last sysadmin" in text
    assert browser.get("/admin/").status_code == 200
    lab.sysadmin("sue")
    assert browser.post(path, person_form(sam, **{right: ""})).status_code == 302
    assert [user.username for user in User.objects.filter(is_superuser=True, is_active=True)] == ["sue"]


def test_a_deactivated_sysadmin_counts_for_none(browser: Client) -> None:
    sam = User.objects.get()
    lab.person("sue", is_superuser=True, is_active=False)
    browser.post(f"/admin/portal/user/{sam.pk}/change/", person_form(sam, is_superuser=""))
    assert User.objects.get(pk=sam.pk).is_superuser


def test_the_last_sysadmin_is_not_deleted_alone_or_among_others(browser: Client) -> None:
    sam, sue = User.objects.get(), lab.sysadmin("sue")
    mo = lab.person("mo")
    both = {"action": "delete_selected", "_selected_action": [sam.pk, sue.pk, mo.pk], "post": "yes"}
    assert "last sysadmin" in words(browser.post("/admin/portal/user/", both).text)
    assert User.objects.count() == 3
    assert browser.post(f"/admin/portal/user/{sue.pk}/delete/", {"post": "yes"}).status_code == 302
    assert "last sysadmin" in words(browser.post(f"/admin/portal/user/{sam.pk}/delete/", {"post": "yes"}).text)
    assert browser.post(f"/admin/portal/user/{mo.pk}/delete/", {"post": "yes"}).status_code == 302
    assert [user.username for user in User.objects.all()] == ["sam"]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="On SQLite one writes at a time")
@pytest.mark.django_db(transaction=True)
def test_of_two_sysadmins_who_demote_each_other_one_remains() -> None:
    users = [lab.sysadmin("sam"), lab.sysadmin("sue")]
    browsers, start = [lab.signed_in(user) for user in users], Barrier(2)

    def take(browser: Client, victim: User) -> int:
        start.wait(10)
        try:
            form = person_form(victim, is_superuser="")
            return browser.post(f"/admin/portal/user/{victim.pk}/change/", form).status_code
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(take, browsers, reversed(users))]
    assert User.objects.filter(is_superuser=True, is_active=True).count() == 1


@pytest.mark.parametrize("selected", ["\0", "9" * 30, "x", "-1"])
def test_what_is_no_record_is_not_deleted(browser: Client, selected: str) -> None:
    for path in ("/admin/portal/user/", "/admin/portal/token/", "/admin/axes/accessattempt/"):
        form = {"action": "delete_selected", "_selected_action": selected, "post": "yes"}
        assert browser.post(path, form).status_code in {200, 302}
    assert User.objects.count() == 1


@pytest.mark.parametrize(
    "query", ["at__year=99999", "at__gte=99999-99-99", "q=%00", "o=99.-1", "p=99999999999999999999"]
)
def test_invalid_queries_of_a_list_lead_to_a_page(browser: Client, query: str) -> None:
    assert browser.get(f"/admin/portal/auditentry/?{query}", follow=True).status_code == 200


def test_long_lists_are_counted_up_to_a_limit_and_paged(browser: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_ROWS", 3)
    monkeypatch.setattr(admin.HistoryAdmin, "list_per_page", 2)
    for number in range(5):
        AuditEntry.objects.create(action="job.cancel", thing=f"#{number}")
    first = words(browser.get("/admin/portal/auditentry/").text)
    assert "3+ audit log" in first
    assert "#4" in first
    assert "#2" not in first, "the newest come first, and a page is a page"
    assert "#2" in words(browser.get("/admin/portal/auditentry/?p=2").text)


def test_a_word_is_searched_among_the_newest(browser: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "SEARCHED_ROWS", 2)
    for number in range(4):
        AuditEntry.objects.create(action="job.cancel", thing=f"heron-{number}")
    html = browser.get("/admin/portal/auditentry/?q=heron").text
    text = words(html)
    assert "heron-3" in text
    assert "heron-2" in text
    assert "heron-1" not in text
    assert "Among the newest" in html
    assert "Show counts" not in text


def test_jobs_are_found_as_on_their_page_and_attempts_by_their_numbers(browser: Client) -> None:
    mira, project = lab.person("mira"), lab.a_project()
    heron, wren = (lab.a_job(mira, project, name=name) for name in ("heron", "wren"))
    Attempt.objects.filter(job=wren).update(scheduler_id="4711")
    text = words(browser.get("/admin/jobs/job/?q=hero").text)
    assert "heron" in text
    assert "wren" not in text
    for word in ("4711", f"#{wren.pk}", wren.latest.key):
        text = words(browser.get("/admin/jobs/attempt/", {"q": word}).text)
        assert "wren" in text
        assert "heron" not in text
