"""Test channels: created, changed, tested, paused, removed by their owners; the outbox, REST, `vigil`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core import mail as letters
from django.utils import timezone

from portal.models import AuditEntry, Channel, Delivery, Notice, User
from portal.notify import raise_notice
from portal.outbox.kinds import KINDS
from portal.sending.due import send_due
from portal.tasks import tidy
from tests.jobs.pages.reading import text
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.portal.outbox import receiving
from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

pytestmark = pytest.mark.django_db
Make = Callable[..., Channel]
FORM = {
    "kinds": ["incident", "job.held", "gpu.idle"],
    "digest": "",
    "time_zone": "Europe/Berlin",
    "quiet_from": "",
    "quiet_until": "",
}
HOOK = "https://hooks.slack.com/services/T000/B000/s3cret"


def add(user: User, kind: str, status: int = 302, query: str = "", **changes: Any) -> str:
    answer = signed_in(user).post(f"/channels/new?kind={kind}{query}", {**FORM, **changes})
    assert answer.status_code == status, text(answer)
    return text(answer)


def test_the_guide_lists_every_kind_of_notice() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "notices.md").read_text()
    codes = [line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")]
    assert codes == [kind.code for kind in KINDS]


class TestMaking:
    def test_an_e_mail_address(self, oskar: User) -> None:
        page = text(signed_in(oskar).get("/channels/new?kind=email"))
        assert 'value="oskar@lab.example"' in page
        assert "incident.site" not in page, "sysadmins choose that"
        add(oskar, "email", address="oskar@lab.example", quiet_from="22:00", quiet_until="07:00", digest="hourly")
        channel = Channel.objects.get()
        assert (channel.user, channel.project, channel.address) == (oskar, None, "oskar@lab.example")
        assert (channel.left_out, channel.digest, channel.time_zone) == (
            ["federation.coverage", "channel", "program.failing"],
            "hourly",
            "Europe/Berlin",
        )
        page = text(signed_in(oskar).get("/me/"))
        assert "E-mail, oskar@lab.example" in page
        assert "quiet 22:00 to 07:00 Europe/Berlin" in page

    def test_the_address_of_a_webhook_is_not_shown_again(self, oskar: User) -> None:
        add(oskar, "slack", address=HOOK)
        channel = Channel.objects.get()
        client = signed_in(oskar)
        for address in ("/me/", f"/channels/{channel.pk}", "/me/sent"):
            assert "s3cret" not in text(client.get(address))
        assert "hooks.slack.com" in text(client.get("/me/"))
        assert client.post(f"/channels/{channel.pk}", {**FORM, "address": "", "digest": "daily"}).status_code == 302
        channel.refresh_from_db()
        assert (channel.address, channel.digest) == (HOOK, "daily"), "left empty it is kept"

    def test_a_signing_secret_is_shown_once(self, oskar: User) -> None:
        page = add(oskar, "webhook", 200, address="https://ci.lab.example/vigil")
        assert "whsec_" in page
        channel = Channel.objects.get()
        client = signed_in(oskar)
        assert "whsec_" not in text(client.get(f"/channels/{channel.pk}"))
        again = text(client.post(f"/channels/{channel.pk}/secret"))
        assert "whsec_" in again
        assert page[page.index("whsec_") :][:50] != again[again.index("whsec_") :][:50]
        slack = Channel.objects.create(user=oskar, kind="slack", address=HOOK)
        assert client.post(f"/channels/{slack.pk}/secret").status_code == 404

    @pytest.mark.parametrize(
        ("kind", "changes", "words"),
        [
            ("email", {"address": "no"}, "This is not an e-mail address"),
            ("email", {"address": ""}, "The address is missing."),
            ("email", {"address": "a@b.example\nBcc: c@d.example"}, "This is not an e-mail address"),
            ("slack", {"address": "http://hooks.example/x"}, "Use an https:// address"),
            ("slack", {"address": "https://169.254.169.254/latest"}, "internal address"),
            ("webhook", {"address": "https://u:p@hooks.example/"}, "Remove user name and password"),
            ("webhook", {"address": "https://x.example/" + "x" * 500}, "The address is too long."),
            ("email", {"address": "a@b.example", "quiet_from": "22:00"}, "both a start and an end"),
            ("email", {"address": "a@b.example", "quiet_from": "7", "quiet_until": "x"}, "Enter a time such as"),
            ("email", {"address": "a@b.example", "quiet_from": "07:00", "quiet_until": "07:00"}, "at the same time"),
            ("email", {"address": "a@b.example", "time_zone": "../../etc"}, "Unknown time zone"),
            ("email", {"address": "a@b.example", "kinds": ["gpu.unheld"]}, "kind of notification is not available"),
        ],
    )
    def test_what_cannot_be(self, oskar: User, kind: str, changes: dict[str, Any], words: str) -> None:
        assert words in add(oskar, kind, 422, **changes)
        assert not Channel.objects.exists()

    def test_ten_are_the_most(self, oskar: User) -> None:
        Channel.objects.bulk_create([Channel(user=oskar, kind="slack", address=HOOK) for _ in range(10)])
        assert "at most 10 channels" in add(oskar, "slack", 422, address=HOOK)

    def test_no_such_kind(self, oskar: User) -> None:
        assert signed_in(oskar).get("/channels/new?kind=pigeon").status_code == 404
        assert signed_in(oskar).get("/channels/new").status_code == 404

    def test_of_a_project_by_its_leads(self, oskar: User) -> None:
        lead = person("lena", a_project(), role="lead")
        assert signed_in(oskar).get("/channels/new?kind=slack&project=default").status_code == 403
        assert signed_in(person("x")).get("/channels/new?kind=slack&project=default").status_code == 404
        add(lead, "slack", query="&project=default", address=HOOK, kinds=["incident"])
        channel = Channel.objects.get()
        assert (channel.user, channel.project.slug) == (None, "default")
        assert "of default" in text(signed_in(lead).get("/me/"))
        assert "hooks.slack.com" not in text(signed_in(oskar).get("/me/"))
        assert signed_in(oskar).get(f"/channels/{channel.pk}").status_code == 404
        assert list(AuditEntry.objects.values_list("action", "detail")) == [("channel.made", "Slack, hooks.slack.com")]


class TestChannel:
    def test_is_nobody_else_s_not_even_a_sysadmin_s(self, channel: Make) -> None:
        item = channel()
        for other in (person("mira", a_project()), sysadmin()):
            client = signed_in(other)
            assert client.get(f"/channels/{item.pk}").status_code == 404
            for act in ("test", "secret", "remove"):
                assert client.post(f"/channels/{item.pk}/{act}").status_code == 404
        assert Channel.objects.exists()

    def test_a_test_goes_out_and_its_state_is_shown(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        item = channel(quiet_from="00:00", quiet_until="23:59", digest="daily")
        client = signed_in(oskar)
        assert client.post(f"/channels/{item.pk}/test").status_code == 302
        assert "Waiting" in text(client.get(f"/channels/{item.pk}"))
        send_due(5)
        assert (
            "A test message, requested by oskar. If you can read it, the channel works."
            in web.got[0].json["data"]["title"]
        )
        assert ">sent <time" in text(client.get(f"/channels/{item.pk}"))
        web.answers = [receiving.status(500, b"<b>no</b>")]
        client.post(f"/channels/{item.pk}/test")
        send_due(5)
        assert "answered 500: &lt;b&gt;no&lt;/b&gt;" in text(client.get(f"/channels/{item.pk}"))

    def test_paused_it_gets_nothing(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        item = channel()
        raise_notice("incident:1", kind="incident", to=oskar, title="wren died.")
        client = signed_in(oskar)
        client.post(f"/channels/{item.pk}", {**FORM, "address": "", "is_paused": "on"})
        raise_notice("incident:2", kind="incident", to=oskar, title="wren died.")
        client.post(f"/channels/{item.pk}/test")
        assert send_due(5) == 0
        assert list(Delivery.objects.values_list("state", "error")) == [("dropped", "The channel was paused.")]

    @pytest.mark.parametrize("act", ["pause", "move", "remove"])
    def test_its_trouble_ends_with_it(self, oskar: User, channel: Make, web: receiving.Web, act: str) -> None:
        item = channel(address=web.url)
        raise_notice("incident:1", kind="incident", to=oskar, title="wren died.")
        web.answers = [receiving.status(404)]
        send_due(5)
        assert Notice.objects.active().filter(kind="channel").exists()
        client = signed_in(oskar)
        if act == "remove":
            client.post(f"/channels/{item.pk}/remove")
        else:
            changes = {"pause": {"address": "", "is_paused": "on"}, "move": {"address": "https://1.1.1.1/x"}}[act]
            assert client.post(f"/channels/{item.pk}", {**FORM, **changes}).status_code == 302
        assert not Notice.objects.active().filter(kind="channel").exists()

    def test_so_it_does_where_its_project_is_deleted(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(project=a_project("other"), address=web.url)
        raise_notice("incident:1", kind="incident", to=oskar, title="wren died.", project=a_project("other"))
        web.answers = [receiving.status(404)]
        send_due(5)
        tidy()
        assert Notice.objects.active().filter(kind="channel").exists()
        a_project("other").delete()
        tidy()
        assert not Notice.objects.active().filter(kind="channel").exists()

    def test_removed(self, oskar: User, channel: Make) -> None:
        item = channel()
        raise_notice("incident:1", kind="incident", to=oskar, title="wren died.")
        assert signed_in(oskar).post(f"/channels/{item.pk}/remove").status_code == 302
        assert not Delivery.objects.exists()
        assert signed_in(oskar).get(f"/channels/{item.pk}/remove").status_code == 405


class TestOutbox:
    @pytest.fixture
    def delivery(self, oskar: User, channel: Make) -> Delivery:
        channel(kind="email", address="oskar@lab.example")
        raise_notice("incident:1", kind="incident", to=oskar, title="wren <i>died</i>.")
        return Delivery.objects.get()

    def test_everybody_s_is_for_sysadmins(self, delivery: Delivery, oskar: User) -> None:
        assert signed_in(oskar).get("/outbox").status_code == 403
        page = text(signed_in(sysadmin()).get("/outbox"))
        assert "wren &lt;i&gt;died&lt;/i&gt;." in page
        assert "1 unsent" in page
        assert "wren" in text(signed_in(oskar).get("/me/sent"))
        assert "wren" not in text(signed_in(person("mira", a_project())).get("/me/sent"))
        assert "wren" not in text(signed_in(sysadmin("ann")).get("/me/sent"))

    def test_by_state_and_page_by_page(self, oskar: User, channel: Make) -> None:
        item = channel(kind="email", address="oskar@lab.example")
        now = timezone.now()
        Delivery.objects.bulk_create(
            [Delivery(channel=item, key=str(n), kind="k", title=f"T{n}.", due_at=now, state="sent") for n in range(60)]
        )
        client = signed_in(oskar)
        page = client.get("/me/sent?state=sent")
        assert "T59." in text(page)
        assert "T9." not in text(page)
        assert "T9." in text(client.get(f"/me/sent?state=sent&after={page.context['next']}"))
        assert "No messages." in text(client.get("/me/sent?state=held"))
        assert client.get("/me/sent?after=nonsense").status_code == 302
        assert client.get("/me/sent?state=nonsense").status_code == 200

    def test_given_up_and_sent_again(self, delivery: Delivery, oskar: User) -> None:
        client = signed_in(oskar)
        assert client.post(f"/outbox/{delivery.pk}/give-up").status_code == 302
        assert send_due(5) == 0
        delivery.refresh_from_db()
        assert (delivery.state, delivery.error) == ("given_up", "Given up by oskar.")
        assert client.post(f"/outbox/{delivery.pk}/resend", {"from": "outbox"}).headers["Location"] == "/me/sent"
        assert send_due(5) == 1
        assert len(letters.outbox) == 1
        Delivery.objects.update(state="gathered")
        client.post(f"/outbox/{delivery.pk}/resend")
        assert Delivery.objects.get().state == "gathered"
        stranger = signed_in(person("mira", a_project()))
        for act in ("resend", "give-up"):
            assert stranger.post(f"/outbox/{delivery.pk}/{act}").status_code == 404

    def test_not_where_it_is_paused(self, delivery: Delivery, oskar: User) -> None:
        send_due(5)
        Channel.objects.update(is_paused=True)
        client = signed_in(oskar)
        assert "is paused" in text(client.post(f"/outbox/{delivery.pk}/resend", follow=True))
        answer = bearer(oskar).post(f"/api/v1/outbox/{delivery.pk}/resend")
        assert (answer.status_code, "is paused" in answer.json()["detail"]) == (409, True)
        delivery.refresh_from_db()
        assert delivery.state == "sent"

    def test_what_was_sent_goes_again_though_it_is_no_longer_so(self, delivery: Delivery, oskar: User) -> None:
        """They go as they were when a person sends them again, however many there are."""
        for number in range(2, 8):
            raise_notice(f"incident:{number}", kind="incident", to=oskar, title="wren died.")
            send_due(5)
        Notice.objects.update(withdrawn_at=timezone.now())
        for item in Delivery.objects.all():
            signed_in(oskar).post(f"/outbox/{item.pk}/resend")
        assert send_due(5) == 7
        assert len(letters.outbox) == 14

    def test_over_rest(self, delivery: Delivery, oskar: User) -> None:
        client = bearer(oskar)
        (item,) = client.get("/api/v1/outbox?state=waiting").json()["items"]
        assert (item["state"], item["where"], item["person"], item["tries"]) == (
            "waiting", "oskar@lab.example", "oskar", 0,
        )  # fmt: skip
        assert client.post(f"/api/v1/outbox/{item['id']}/give-up").json()["state"] == "given_up"
        assert client.post(f"/api/v1/outbox/{item['id']}/give-up").status_code == 409
        assert client.post(f"/api/v1/outbox/{item['id']}/resend").json()["state"] == "waiting"
        Delivery.objects.update(state="dropped")
        assert client.post(f"/api/v1/outbox/{item['id']}/resend").status_code == 409
        assert bearer(oskar, "read").post(f"/api/v1/outbox/{item['id']}/resend").status_code == 403
        assert bearer(person("mira", a_project())).get("/api/v1/outbox").json()["items"] == []
        assert bearer(person("nils")).post(f"/api/v1/outbox/{item['id']}/resend").status_code == 404
        assert len(bearer(sysadmin()).get("/api/v1/outbox").json()["items"]) == 1
        assert client.get("/api/v1/outbox?state=lost").status_code == 422


MESSAGE = {
    "id": 7, "uid": "x", "kind": "incident", "title": "wren died.", "channel": 1, "channel_kind": "slack",
    "where": "hooks.slack.com", "person": "oskar", "project": None, "state": "given_up",
    "due_at": "2026-01-31T12:00:00Z", "tries": 12, "error": "It answered 500.", "created_at": "2026-01-31T12:00:00Z",
    "sent_at": None, "carried_by": None,
}  # fmt: skip


class TestCommand:
    def test_lists_and_acts(self, portal: Any) -> None:  # noqa: F811
        portal.answers["GET", "outbox"] = {"items": [MESSAGE], "next": None}
        line = vigil("outbox", "--state", "given_up").stdout.splitlines()[1]
        assert line.split()[:5] == ["7", "given", "up", "slack", "hooks.slack.com"]
        assert line.endswith("wren died. (It answered 500.)")
        assert portal.asked[-1].url.params["state"] == "given_up"
        assert json.loads(vigil("outbox", "--json").stdout)["items"] == [MESSAGE]
        portal.answers["POST", "outbox/7/resend"] = MESSAGE
        portal.answers["POST", "outbox/7/give-up"] = MESSAGE
        assert vigil("outbox", "--resend", "7").stdout == "Message 7 will be sent again within seconds.\n"
        assert vigil("outbox", "--give-up", "7").stdout == "Message 7 will not be sent.\n"
        vigil("outbox", "--give-up", "7", "--resend", "7", status=2)
        portal.answers["GET", "outbox"] = {"items": [], "next": None}
        assert "No messages in the last" in vigil("outbox").stdout
