"""Test notices at home: raised once, read by each person, withdrawn; on the page, over REST and by `vigil`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.utils import timezone

from portal import notify
from portal.models import Notice, NoticeRead, User
from portal.notify import SYSADMINS, raise_notice, withdraw, withdraw_missing
from portal.tasks import tidy
from tests.jobs.pages.reading import text
from tests.lab import a_job, a_project, bearer, person, signed_in, sysadmin
from tests.stack import Stack
from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401

pytestmark = pytest.mark.django_db
IDLE = "notebook-oskar has held 1 GPU idle for 14 hours."


@pytest.fixture
def oskar() -> User:
    return person("oskar", a_project())


def idle(owner: User, key: str = "gpu.idle:GPU-1", **more: Any) -> bool:
    return raise_notice(key, **{"kind": "gpu.idle", "to": owner, "title": IDLE, "link": "/jobs/7", **more})


def listed(user: User, query: str = "") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = bearer(user, "read").get(f"/api/v1/notices{query}").json()["items"]
    return items


def home(user: User) -> str:
    return text(signed_in(user).get("/"))


class TestRecipients:
    def test_a_person_gets_a_notice(self, oskar: User) -> None:
        idle(oskar, detail="Release it, or explain why it is needed.")
        html = home(oskar)
        assert f'<a href="/jobs/7">{IDLE}</a>' in html
        assert "Release it, or explain why it is needed." in html
        assert "1 unread notification." in html
        (report,) = listed(oskar)
        assert (report["title"], report["kind"], report["link"], report["tone"]) == (
            IDLE,
            "gpu.idle",
            "/jobs/7",
            "notice",
        )
        assert (report["audience"], report["read_at"], report["withdrawn_at"]) == ("person", None, None)

    def test_nobody_else_not_even_sysadmins(self, oskar: User) -> None:
        idle(oskar)
        notice = Notice.objects.get()
        for other in (person("mira", a_project()), sysadmin()):
            assert "Notices" not in home(other)
            assert listed(other) == []
            assert signed_in(other).post(f"/notices/{notice.pk}/read").status_code == 404
            answer = bearer(other).post(f"/api/v1/notices/{notice.pk}/read")
            assert (answer.status_code, answer.json()["detail"]) == (404, f"You have no notice {notice.pk}.")
        assert not NoticeRead.objects.exists()

    def test_all_sysadmins_each_of_whom_reads_for_themselves(self, oskar: User) -> None:
        ann, sam = sysadmin("ann"), sysadmin("sam")
        raise_notice(
            "gpu.stray:GPU-2", kind="gpu.stray", to=SYSADMINS, title="A process is on a GPU that nobody holds."
        )
        assert listed(oskar) == []
        assert "to all sysadmins" in home(ann)
        notify.mark_read(Notice.objects.get(), ann)
        assert (len(listed(ann, "?unread=1")), len(listed(sam, "?unread=1"))) == (0, 1)
        User.objects.filter(pk=sam.pk).update(is_superuser=False)
        assert listed(User.objects.get(pk=sam.pk)) == []

    def test_a_row_is_for_a_single_audience(self, oskar: User) -> None:
        now = timezone.now()
        times = {"raised_at": now, "last_raised_at": now}
        for audience, user in (("person", None), ("sysadmins", oskar)):
            with pytest.raises(IntegrityError), transaction.atomic():
                Notice.objects.create(key="k", kind="k", title="t", audience=audience, user=user, **times)

    def test_without_notices_there_is_no_section(self, oskar: User) -> None:
        html = home(oskar)
        assert "h-notices" not in html
        assert "No jobs yet." in html
        assert "unread" not in html


class TestOnce:
    def test_what_stands_changes_only_its_words(self, oskar: User) -> None:
        assert idle(oskar)
        before = Notice.objects.get()
        notify.mark_read(before, oskar)
        assert not idle(oskar, title="… for 15 hours.", tone="warn")
        after = Notice.objects.get()
        assert (after.title, after.tone, after.raised_at) == ("… for 15 hours.", "warn", before.raised_at)
        assert after.last_raised_at > before.last_raised_at
        assert listed(oskar, "?unread=1") == [], "words alone are no news"

    def test_withdrawn_it_is_gone_and_raised_again_it_is_news(self, oskar: User) -> None:
        idle(oskar)
        first = Notice.objects.get()
        notify.mark_read(first, oskar)
        assert withdraw(first.key)
        assert not withdraw(first.key)
        assert not withdraw("never raised")
        assert (listed(oskar), "h-notices" in home(oskar)) == ([], False)
        assert idle(oskar)
        (report,) = listed(oskar, "?unread=1")
        assert (report["id"], report["read_at"], report["withdrawn_at"]) == (first.pk, None, None)
        assert Notice.objects.get().raised_at > first.raised_at

    def test_a_notice_raised_again_goes_to_the_present_user_of_the_gpu(self, oskar: User) -> None:
        idle(oskar)
        withdraw("gpu.idle:GPU-1")
        mira = person("mira", a_project())
        idle(mira)
        assert (len(listed(oskar)), len(listed(mira))) == (0, 1)

    def test_withdraws_what_is_so_no_longer(self, oskar: User) -> None:
        for number in range(3):
            idle(oskar, f"gpu.idle:GPU-{number}")
        idle(oskar, "mount.slow:nfs01", kind="mount.slow")
        assert withdraw_missing("gpu.idle", {"gpu.idle:GPU-1"}) == 2
        assert {notice["kind"] for notice in listed(oskar)} == {"gpu.idle", "mount.slow"}
        assert withdraw_missing("gpu.idle", ()) == 1
        assert [notice["kind"] for notice in listed(oskar)] == ["mount.slow"]

    def test_goes_through_a_single_function_once_it_is_committed(
        self, oskar: User, django_capture_on_commit_callbacks: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "portal.notify")
        with django_capture_on_commit_callbacks(execute=True) as callbacks:
            idle(oskar)
            idle(oskar)
        assert len(callbacks) == 1
        with django_capture_on_commit_callbacks(execute=True) as callbacks:
            withdraw("gpu.idle:GPU-1")
            idle(oskar)
        assert len(callbacks) == 1
        assert caplog.messages == ["notice gpu.idle:GPU-1 was raised"] * 2

    def test_somebody_else_raises_it_in_between(self, oskar: User, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between query and insert: the unique key decides, and the first title stays."""
        create = Notice.objects.get_or_create

        def late(**given: Any) -> Any:
            monkeypatch.undo()
            assert idle(oskar, title="First.")
            return create(**given)

        monkeypatch.setattr(Notice.objects, "get_or_create", late)
        assert not idle(oskar)
        assert [notice["title"] for notice in listed(oskar)] == ["First."]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"link": "https://elsewhere.example/"}, {"link": "//elsewhere.example/"}, {"link": "/\\elsewhere.example"},
            {"link": "javascript:alert(1)"}, {"link": "/a b"}, {"link": "/" + "x" * 500},
            {"kind": "Gpu idle"}, {"kind": ""}, {"title": " \n"}, {"key": ""}, {"key": "a\0b"}, {"key": "x" * 201},
        ],
    )  # fmt: skip
    def test_what_no_notice_can_be(self, oskar: User, wrong: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"notice|notification|valid key|path"):
            idle(oskar, **wrong)
        assert not Notice.objects.exists()


class TestReading:
    def test_by_a_button_without_a_script(self, oskar: User) -> None:
        idle(oskar)
        notice = Notice.objects.get()
        client = signed_in(oskar)
        for _ in range(2):
            answer = client.post(f"/notices/{notice.pk}/read")
            assert (answer.status_code, answer.headers["Location"]) == (302, "/")
        assert "h-notices" not in home(oskar)
        (report,) = listed(oskar)
        assert report["read_at"]
        assert client.get(f"/notices/{notice.pk}/read").status_code == 405
        assert client.post(f"/notices/{2**70}/read").status_code == 404
        assert Client().post(f"/notices/{notice.pk}/read").headers["Location"].startswith("/accounts/login/")

    def test_requires_the_token_of_the_page(self, oskar: User) -> None:
        idle(oskar)
        pk = Notice.objects.get().pk
        client = signed_in(oskar, enforce_csrf_checks=True)
        assert client.post(f"/notices/{pk}/read").status_code == 403
        assert client.post(f"/api/v1/notices/{pk}/read").status_code == 403
        assert not NoticeRead.objects.exists()
        token = client.get("/").context["csrf_token"]
        assert client.post(f"/notices/{pk}/read", {"csrfmiddlewaretoken": str(token)}).status_code == 302

    def test_over_rest(self, oskar: User) -> None:
        idle(oskar)
        pk = Notice.objects.get().pk
        assert bearer(oskar, "read").post(f"/api/v1/notices/{pk}/read").status_code == 403
        first, again = (bearer(oskar).post(f"/api/v1/notices/{pk}/read").json() for _ in range(2))
        assert first["read_at"] == again["read_at"] is not None
        assert listed(oskar, "?unread=1") == []
        assert bearer(oskar).post(f"/api/v1/notices/{2**70}/read").status_code == 404

    def test_page_by_page(self, oskar: User) -> None:
        for number in range(5):
            idle(oskar, f"gpu.idle:{number}", title=f"{number}.")
        client, page, titles = bearer(oskar), {"next": ""}, []
        while page["next"] is not None:
            page = client.get(f"/api/v1/notices?limit=2&cursor={page['next']}").json()
            titles += [notice["title"] for notice in page["items"]]
        assert titles == ["4.", "3.", "2.", "1.", "0."]
        assert client.get("/api/v1/notices?cursor=nonsense").status_code == 422
        assert client.get("/api/v1/notices?unread=maybe").status_code == 422


class TestHome:
    def test_what_strangers_wrote_is_text_on_one_line(self, oskar: User) -> None:
        evil = "<script>alert(1)</script>\n\N{RIGHT-TO-LEFT OVERRIDE}" + "x" * 400
        idle(oskar, title=evil, detail=evil * 9, link="/nodes/%22%3E%3Cscript%3E")
        html = home(oskar)
        assert "&lt;script&gt;alert(1)&lt;/script&gt; xxx" in html
        assert "<script>alert" not in html
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in html
        (report,) = listed(oskar)
        assert (len(report["title"]) <= 300, len(report["detail"]) <= 1000) == (True, True)

    def test_the_newest_come_first_and_the_rest_is_counted(self, oskar: User) -> None:
        for number in range(8):
            idle(oskar, f"gpu.idle:{number}", title=f"GPU {number} is idle.")
        html = home(oskar)
        assert html.index("GPU 7 is idle.") < html.index("GPU 2 is idle.")
        assert "GPU 1 is idle." not in html
        assert "the newest 6 of 8" in html
        assert "8 unread notifications." in html

    def test_what_is_worse_leads(self, oskar: User) -> None:
        idle(oskar)
        a_job(oskar, a_project(), state="completed", name="wren")
        assert '<p class="say"><a class="quiet" href="#h-notices">1 unread notification.</a>' in home(oskar)
        a_job(oskar, a_project(), state="failed", name="siskin")
        assert '<p class="say">siskin failed' in home(oskar)
        assert IDLE in home(oskar)


def test_withdrawn_ones_go_after_a_month(oskar: User) -> None:
    for key, days in (("long ago", 31), ("of late", 29), ("stands", None)):
        idle(oskar, key)
        notify.mark_read(Notice.objects.get(key=key), oskar)
        if days:
            withdraw(key)
            Notice.objects.filter(key=key).update(withdrawn_at=timezone.now() - timedelta(days=days))
    Notice.objects.filter(key="stands").update(raised_at=timezone.now() - timedelta(days=400))
    tidy()
    assert set(Notice.objects.values_list("key", flat=True)) == {"of late", "stands"}
    assert NoticeRead.objects.count() == 2


RACE = """
import sys, django
django.setup()
from portal import notify
print("ready", flush=True)
sys.stdin.readline()
raised = [notify.raise_notice(f"k{n}", kind="k", to=notify.SYSADMINS, title="t") for n in range(40)]
print(sum(raised), flush=True)
sys.stdin.readline()
print(sum(notify.raise_notice(f"k{n}", kind="k", to=notify.SYSADMINS, title="t") for n in range(40)), flush=True)
"""


@pytest.mark.slow
def test_processes_that_find_the_same_out_raise_it_once(prepared_home: Path) -> None:
    """First each key is new; then each is withdrawn, and raised by all of them again."""
    stack = Stack(prepared_home)
    environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    command = stack.command("-c", RACE)
    raisers = [
        subprocess.Popen(
            command, cwd=stack.checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]

    def all_at_once() -> int:
        for raiser in raisers:
            assert raiser.stdin
            raiser.stdin.write("\n")
            raiser.stdin.flush()
        return sum(int(line_of(raiser)) for raiser in raisers)

    def line_of(raiser: subprocess.Popen[str]) -> str:
        assert raiser.stdout
        return raiser.stdout.readline()

    try:
        assert [line_of(raiser) for raiser in raisers] == ["ready\n"] * 3
        assert all_at_once() == 40
        withdrawing = "import django; django.setup(); from portal import notify; notify.withdraw_missing('k', ())"
        subprocess.run([sys.executable, "-c", withdrawing], cwd=stack.checkout, env=environment, check=True)
        assert all_at_once() == 40
    finally:
        for raiser in raisers:
            raiser.communicate()
        stack.close()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="On SQLite one writes at a time: processes show it")
@pytest.mark.django_db(transaction=True)
def test_connections_that_find_the_same_out_raise_it_once() -> None:
    start = threading.Barrier(4, timeout=60)

    def raise_all(_: int) -> int:
        try:
            found = 0
            for number in range(20):
                start.wait()
                found += raise_notice(f"k{number}", kind="k", to=SYSADMINS, title="t")
            return found
        finally:
            connection.close()

    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(raise_all, range(4))) == 20
        withdraw_missing("k", ())


NOTICE = {
    "id": 7, "kind": "gpu.idle", "tone": "notice", "audience": "person", "title": IDLE, "detail": "It is yours.",
    "link": "/jobs/7", "raised_at": "2026-01-31T12:00:00Z", "last_raised_at": "2026-01-31T12:00:00Z",
    "withdrawn_at": None, "read_at": None,
}  # fmt: skip


class TestCommand:
    def test_lists(self, portal: Any) -> None:  # noqa: F811
        read = {**NOTICE, "id": 6, "link": "", "read_at": "2026-01-31T13:00:00Z"}
        portal.answers["GET", "notices"] = {"items": [NOTICE, read], "next": None}
        first, second = vigil("notices").stdout.splitlines()
        assert first.startswith("*     7  2026-01-31")
        assert first.endswith(f"{IDLE} It is yours.  /jobs/7")
        assert second.startswith("      6  ")
        assert json.loads(vigil("notices", "--json", "--unread").stdout)["items"] == [NOTICE, read]
        assert portal.asked[-1].url.params["unread"] == "true"
        portal.answers["GET", "notices"] = {"items": [], "next": None}
        assert vigil("notices").stdout == "No active notifications.\n"

    def test_reads(self, portal: Any) -> None:  # noqa: F811
        portal.answers["POST", "notices/7/read"] = NOTICE
        portal.answers["POST", "notices/8/read"] = problem(404, "You have no notice 8.")
        assert vigil("notices", "--read", "7").stdout == f"Marked 7 as read: {IDLE}\n"
        assert json.loads(vigil("notices", "--read", "7", "--json").stdout) == NOTICE
        assert "You have no notice 8." in vigil("notices", "--read", "8", status=1).stderr
        vigil("notices", "--read", "x", status=2)
