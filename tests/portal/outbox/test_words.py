"""Test a message's text, and that nothing in it is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core import mail as letters

from portal.models import Channel, Delivery, Notice, User
from portal.sending import mail
from tests.portal.outbox import receiving
from tests.portal.outbox.notices import is_due, only, raise_notice_to, send
from vigil_core import formatting

pytestmark = pytest.mark.django_db
Make = Callable[..., Channel]
EVIL = "<script>alert(1)</script> *bold* [here](http://evil.example) @channel <!here> & \x1b[31mred\x1b[0m `code`"


class TestWords:
    def test_slack_gets_plain_text(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(kind="slack")
        raise_notice_to(oskar, title=EVIL, detail=EVIL, facts=[("Evidence", EVIL)])
        send()
        body = web.got[0].json
        kinds = [part["text"]["type"] for part in body["blocks"] if "text" in part]
        assert kinds == ["plain_text"]
        assert "<script>" not in body["text"]
        assert "<!here>" not in body["text"]
        assert "&lt;!here&gt; &amp; red" in body["text"].replace("\u200b", "")
        for mark in ("*bold", "](", "@channel", "`code", "http://evil"):
            assert mark not in body["text"]
        assert "\x1b" not in web.got[0].body.decode()
        assert "[31m" not in body["blocks"][0]["text"]["text"]
        assert "<http://127.0.0.1:8000/jobs/7|Open in Vigil>" in body["text"]
        assert body["blocks"][0]["fields"][0]["type"] == "plain_text"

    def test_a_name_with_low_lines_can_be_copied(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(kind="slack")
        raise_notice_to(oskar, title="my_first_run died at 0.98.")
        send()
        assert web.got[0].json["text"].startswith("my_first_run died at 0.98.")

    def test_a_slack_digest_is_bounded(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(kind="slack")
        for number in range(60):
            raise_notice_to(oskar, f"incident:{number}", title="x" * 300, detail="y" * 1000)
        send()
        body = web.got[0].json
        assert len(body["blocks"]) <= 50
        assert len(body["text"]) <= 3000
        assert body["blocks"][-1]["text"]["text"] == "and 40 more"

    def test_a_letter(self, oskar: User, channel: Make) -> None:
        channel(kind="email", address="oskar@lab.example")
        raise_notice_to(oskar, title=EVIL, detail="It went on: {{ x }} & more.", facts=[("Evidence", EVIL)])
        send()
        (letter,) = letters.outbox
        assert letter.subject.startswith("[Vigil] <script>")
        assert "\n" not in letter.subject
        assert "It went on: {{ x }} & more." in letter.body
        assert "http://127.0.0.1:8000/jobs/7" in letter.body
        html = letter.alternatives[0][0]
        assert "<script>" not in html
        assert "&lt;script&gt;" in html
        assert "\x1b" not in html + letter.body
        assert letter.extra_headers["Message-ID"].startswith(f"<{only().uid}@")

    def test_each_message_shows_when_it_was_raised(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(kind="email", address="oskar@lab.example")
        channel(kind="slack")
        raise_notice_to(oskar)
        raised = f"Raised {formatting.minute(Notice.objects.get().raised_at)}"
        send()
        (letter,) = letters.outbox
        assert raised in letter.body
        assert raised in letter.alternatives[0][0]
        body = web.got[0].json
        assert f"wren died. {raised}. <http" in body["text"]
        assert body["blocks"][1]["elements"][0] == {"type": "plain_text", "text": raised, "emoji": False}

    def test_by_a_real_mail_server(self, oskar: User, channel: Make, settings: Any) -> None:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        with receiving.mail() as server:
            settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
            channel(kind="email", address="oskar@lab.example")
            raise_notice_to(oskar)
            send()
            assert only().state == "sent"
            (letter,) = server.got
            assert (letter["To"], letter["Auto-Submitted"]) == ("oskar@lab.example", "auto-generated")
            assert [part.get_content_type() for part in letter.walk()][1:] == ["text/plain", "text/html"]
            server.refuses = "550 no such person <b>here</b>"
            raise_notice_to(oskar, "incident:2")
            send()
            refused = Delivery.objects.get(state="given_up")
            assert refused.error.startswith("The mail server refused the address: 550 no such person")
            server.refuses = "451 later"
            raise_notice_to(oskar, "incident:3")
            send()
            assert "451 later" in Delivery.objects.get(state="waiting").error
        is_due()
        send()
        assert "cannot be reached" in Delivery.objects.get(state="waiting").error

    @pytest.mark.parametrize(
        ("refused", "answer", "state"),
        [
            (b"DATA", "554 this is spam", "given_up"),
            (b"MAIL", "550 not from you", "given_up"),
            (b"MAIL", "530 sign in first", "waiting"),
            (b"RCPT", "538 not without TLS", "waiting"),
            (b"DATA", "452 the disk is full", "waiting"),
        ],
    )
    def test_what_the_server_refuses_for_good(
        self, oskar: User, channel: Make, settings: Any, refused: bytes, answer: str, state: str
    ) -> None:
        """But for what a sysadmin sets right."""
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        channel(kind="email", address="oskar@lab.example")
        raise_notice_to(oskar)
        with receiving.mail() as server:
            settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
            server.refused, server.refuses = refused, answer
            send()
        assert only().state == state
        assert answer in only().error

    def test_a_missing_mail_server_is_reported(self, oskar: User, channel: Make, settings: Any) -> None:
        settings.EMAIL_BACKEND, settings.EMAIL_HOST = "django.core.mail.backends.smtp.EmailBackend", ""
        channel(kind="email", address="oskar@lab.example")
        assert not mail.is_set_up()
        raise_notice_to(oskar)
        send()
        assert only().error == "This site cannot send e-mail: a sysadmin must set EMAIL_URL."
