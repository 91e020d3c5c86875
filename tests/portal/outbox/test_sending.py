"""Test the outbox: filled with a notice, sent once, retried at growing intervals, pruned."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from django.core import mail as letters
from django.utils import timezone

from portal import notify
from portal.models import Channel, Delivery, Notice, User
from portal.notify import SYSADMINS
from portal.outbox.pruning import remove_old
from portal.sending import due, outside, webhook
from tests.lab import a_project, person, sysadmin
from tests.portal.outbox import receiving
from tests.portal.outbox.notices import is_due, only, raise_notice_to, send
from tests.portal.outbox.receiving import status

pytestmark = pytest.mark.django_db
Make = Callable[..., Channel]


class TestWhoGetsIt:
    def test_each_channel_gets_a_single_message_per_notice(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel()
        for _ in range(3):
            raise_notice_to(oskar)
        assert send() == 1
        assert send() == 0
        (post,) = web.got
        assert post.json["type"] == "notice.incident"
        data = post.json["data"]
        assert (data["title"], data["key"], data["link"]) == (
            "wren died.",
            "incident:1",
            "http://127.0.0.1:8000/jobs/7",
        )
        item = only()
        assert (item.state, item.tries, item.error) == ("sent", 1, "")
        assert item.sent_at is not None

    def test_nobody_else(self, oskar: User, channel: Make) -> None:
        channel(user=person("mira", a_project()))
        channel(user=sysadmin())
        raise_notice_to(oskar)
        assert not Delivery.objects.exists()

    def test_all_sysadmins_who_are_there(self, channel: Make) -> None:
        channel(user=sysadmin("ann"))
        channel(user=person("gone", is_superuser=True, is_active=False))
        raise_notice_to(SYSADMINS)
        assert only().channel.user.username == "ann"

    def test_the_project_s_channel_too(self, oskar: User, channel: Make) -> None:
        personal, shared = channel(), channel(project=a_project())
        channel(project=a_project("other"))
        raise_notice_to(oskar, project=a_project())
        assert {delivery.channel_id for delivery in Delivery.objects.all()} == {personal.pk, shared.pk}

    def test_not_what_they_left_out_nor_where_it_is_paused(self, oskar: User, channel: Make) -> None:
        channel(left_out=["incident"])
        channel(is_paused=True)
        raise_notice_to(oskar)
        assert not Delivery.objects.exists()

    def test_with_another_edition_it_is_news_again(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel()
        raise_notice_to(oskar, edition="researcher")
        send()
        raise_notice_to(oskar, edition="researcher", title="wren died: no, otherwise.")
        assert send() == 0
        raise_notice_to(oskar, edition="sysadmin", title="wren died of a GPU.")
        assert send() == 1
        assert [post.json["data"]["title"] for post in web.got] == ["wren died.", "wren died of a GPU."]
        assert Notice.objects.count() == 1

    def test_words_that_change_before_it_is_sent_are_in_it(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel()
        raise_notice_to(oskar, settle=timedelta(minutes=1))
        raise_notice_to(oskar, title="3 jobs died.", facts=[("What Vigil did", "stopped the sweep")])
        assert send() == 0, "it waits for more"
        is_due()
        send()
        assert web.got[0].json["data"]["title"] == "3 jobs died."
        assert web.got[0].json["data"]["facts"] == [["What Vigil did", "stopped the sweep"]]

    def test_a_notice_raised_again_while_it_waits_is_sent_once(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel(digest="daily")
        for number in range(6):
            raise_notice_to(oskar, title=f"wren idles for {number} h.")
            notify.withdraw("incident:1")
        raise_notice_to(oskar, title="wren idles for 6 h.")
        is_due()
        assert send() == 1
        assert (web.got[0].json["type"], web.got[0].json["data"]["title"]) == ("notice.incident", "wren idles for 6 h.")
        assert Delivery.objects.filter(error="Superseded by a newer message.").count() == 6

    def test_what_is_no_longer_so_is_not_sent(self, oskar: User, channel: Make) -> None:
        channel()
        raise_notice_to(oskar, settle=timedelta(minutes=1))
        notify.withdraw("incident:1")
        is_due()
        assert send() == 0
        assert only().state == "dropped"

    def test_who_has_left_gets_nothing_that_waits(self, oskar: User, channel: Make) -> None:
        channel()
        raise_notice_to(oskar)
        User.objects.update(is_active=False)
        assert send() == 0
        assert only().state == "dropped"


class TestWebhook:
    def test_a_receiver_can_check_it_in_ten_lines(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        secret = webhook.secret_of(channel())
        raise_notice_to(oskar)
        send()
        headers = {name.lower(): value for name, value in web.got[0].headers.items()}
        document = (Path(__file__).parents[3] / "docs/how-to/notices.md").read_text(encoding="utf-8")
        shown: dict[str, Any] = {}
        exec(document.partition("```python\n")[2].partition("```")[0], shown)
        assert shown["notice"](headers, web.got[0].body, secret)["data"]["title"] == "wren died."
        for wrong in ({"webhook-timestamp": "1"}, {"webhook-signature": "v1,xxxx"}, {"webhook-id": "other"}):
            with pytest.raises(ValueError, match="not signed by Vigil"):
                shown["notice"](headers | wrong, web.got[0].body, secret)
        assert headers["idempotency-key"] == headers["webhook-id"] == str(only().uid)

    def test_each_has_a_different_secret(self, channel: Make, settings: Any) -> None:
        item, other = channel(), channel()
        secret = webhook.secret_of(item)
        assert secret.startswith("whsec_")
        assert secret != webhook.secret_of(other)
        settings.SECRET_KEY = "another"
        assert secret != webhook.secret_of(item), "no table holds it"


def with_date() -> receiving.Answer:
    """Answer 429 with the time in two minutes, the other form of Retry-After."""
    return lambda handler: status(429, Retry_After=formatdate(time.time() + 120, usegmt=True))(handler)


class TestTriedAgain:
    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (status(500, b"<b>\x1b[31moops</b>\nline two"), "127.0.0.1 answered 500: <b>[31moops</b> line two"),
            (status(503), "127.0.0.1 answered 503."),
            (status(429, Retry_After="120"), "127.0.0.1 answered 429."),
            (with_date(), "127.0.0.1 answered 429."),
            (status(408), "127.0.0.1 answered 408."),
        ],
    )
    def test_what_may_work_later(
        self, oskar: User, channel: Make, web: receiving.Web, answer: receiving.Answer, words: str
    ) -> None:
        channel()
        raise_notice_to(oskar)
        web.answers = [answer]
        send()
        item = only()
        assert (item.state, item.error) == ("waiting", words)
        wait = (item.due_at - timezone.now()).total_seconds()
        assert 10 < wait < 130
        assert wait > 100 or "429" not in words
        assert send() == 0
        is_due()
        assert send() == 1
        assert only().state == "sent"
        ids = {post.headers["webhook-id"] for post in web.got}
        assert (len(web.got), len(ids)) == (2, 1), "the same id at each try"
        assert web.got[0].body == web.got[1].body

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (400, "answered 400"), (401, "answered 401"), (404, "answered 404"), (410, "answered 410"),
            (302, "redirects to another address"), (308, "redirects to another address"),
        ],
    )  # fmt: skip
    def test_what_never_will(self, oskar: User, channel: Make, web: receiving.Web, code: int, words: str) -> None:
        item = channel()
        raise_notice_to(oskar)
        web.answers = [status(code, Location="http://169.254.169.254/")]
        send()
        assert (only().state, only().tries) == ("given_up", 1)
        assert words in only().error
        notice = Notice.objects.get(key=f"channel:{item.pk}")
        assert notice.title == "Messages to Signed webhook, 127.0.0.1 cannot be delivered."
        assert "s3cret" not in f"{notice.title}{notice.detail}{only().error}"
        assert len(web.got) == 1

    def test_an_address_inside_is_given_up_with_the_remedy(self, oskar: User, channel: Make, settings: Any) -> None:
        channel()
        settings.VIGIL_WEBHOOK_ALLOW = ""
        raise_notice_to(oskar)
        send()
        assert (only().state, "VIGIL_WEBHOOK_ALLOW" in only().error) == ("given_up", True)

    def test_who_does_not_answer(
        self, oskar: User, channel: Make, web: receiving.Web, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(outside, "TOTAL_S", 0.3)

        def hang(handler: BaseHTTPRequestHandler) -> None:
            handler.rfile.read(1)  # until it hangs up

        channel()
        raise_notice_to(oskar)
        web.answers = [hang]
        send()
        assert only().error == "127.0.0.1 did not answer within 0.3 seconds."

    def test_after_twelve_tries_it_is_given_up_and_reported(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel()
        raise_notice_to(oskar)
        web.answers = [status(500)] * due.MAX_TRIES
        for _ in range(due.MAX_TRIES):
            assert only().state == "waiting"
            is_due()
            send()
        assert (only().state, only().tries) == ("given_up", 12)
        assert Notice.objects.filter(kind="channel").exists()
        is_due()
        assert send() == 0

    def test_ever_later(self) -> None:
        waits = [due.wait_s(tries) for tries in range(1, due.MAX_TRIES)]
        assert all(0.5 * 30 * 2**n <= waits[n] <= 1.5 * 30 * 2**n for n in range(8))
        assert max(waits) <= 1.5 * due.MAX_RETRY_S
        assert 3600 * 3 < sum(waits) < 3600 * 13
        assert len(set(waits)) == len(waits), "spread, so that not all come at once"

    def test_a_channel_that_fails_rests_and_holds_up_no_other(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel()
        for number in range(3):
            raise_notice_to(oskar, f"incident:{number}")
        web.answers = [status(500)]
        assert send() == 1, "the others of this channel wait, too"
        channel(kind="email", address="oskar@lab.example")
        raise_notice_to(oskar, "incident:9")
        assert send() == 1
        assert letters.outbox[0].to == ["oskar@lab.example"]

    def test_what_works_again_is_withdrawn(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel()
        raise_notice_to(oskar)
        web.answers = [status(404)]
        send()
        assert Notice.objects.active().filter(kind="channel").exists()
        raise_notice_to(oskar, "incident:2")
        send()
        assert not Notice.objects.active().filter(kind="channel").exists()


class TestOnce:
    def test_who_comes_second_finds_it_taken(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel()
        raise_notice_to(oskar)
        first = list(Delivery.objects.select_related("channel__user", "notice"))
        second = list(Delivery.objects.select_related("channel__user", "notice"))
        now = timezone.now()
        assert [due._is_ours(item, now) for item in (*first, *second)] == [True, False]
        assert send() == 0
        assert only().tries == 1

    def test_after_a_sender_died_it_is_sent_later_under_the_same_id(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel()
        raise_notice_to(oskar)
        assert len(due._take(timezone.now())) == 1  # and dies
        assert send() == 0
        assert only().due_at > timezone.now() + timedelta(seconds=100)
        is_due()
        assert send() == 1
        assert only().tries == 2

    def test_a_late_failure_takes_nothing_back(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        """Two have it, after a pause longer than the lease: the one that failed does not undo the other's note."""
        channel()
        raise_notice_to(oskar)
        (slow,) = due._take(timezone.now())
        is_due()
        assert send() == 1
        due._note(slow, due.DeliveryFailure("too late", is_for_good=True))
        assert (only().state, only().error) == ("sent", "")


def test_old_rows_go(oskar: User, channel: Make) -> None:
    channel()
    for number in range(3):
        raise_notice_to(oskar, f"incident:{number}")
    Delivery.objects.filter(key__startswith="incident:0@").update(created_at=timezone.now() - timedelta(days=31))
    assert remove_old() == 1
    assert Delivery.objects.count() == 2
