"""Test the page of racks: sysadmins place nodes one by one or by a file; a mistake changes nothing."""

from __future__ import annotations

from html import unescape

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from nodes.cluster import racks
from nodes.models import Node, RackPlace
from portal.models import User
from tests.jobs.pages.reading import page_text
from tests.lab import person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


@pytest.fixture
def ops() -> User:
    return sysadmin("ops")


def there() -> dict[str, tuple[str, int]]:
    return {row.node: (row.rack, row.slot) for row in RackPlace.objects.all()}


def text(user: User) -> str:
    return page_text(user, "/racks")


def upload(content: bytes) -> SimpleUploadedFile:
    return SimpleUploadedFile("racks.csv", content)


def test_a_file_replaces_all(ops: User) -> None:
    Node.objects.create(name="dgx-01")
    Node.objects.create(name="dgx-03")
    client = signed_in(ops)
    answer = client.post(
        "/racks/all", {"file": upload(b"\xef\xbb\xbfnode;rack;slot\r\ndgx-01;A1;1\r\ndgx-02;A1;2\r\n")}
    )
    assert answer.status_code == 302
    assert there() == {"dgx-01": ("A1", 1), "dgx-02": ("A1", 2)}
    html = text(ops)
    assert "2 nodes in 1 rack. " in html
    assert "1 node is in no rack. 1 name in racks matches no known node." in html
    assert client.get("/racks?format=csv").text == "node,rack,slot,order\ndgx-01,A1,1,0\ndgx-02,A1,2,0\n"
    client.post("/racks/all", {"text": "dgx-01,B1"})
    assert there() == {"dgx-01": ("B1", 0)}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"text": "dgx-01,A1\n?<b>,A1"}, "Line 2: '?<b>' is not a valid node name."),
        ({"text": " "}, "It is empty."),
        ({"file": upload(b"\xff\xfe\x00")}, "The file is not UTF-8 text."),
        ({"file": upload(b"a,R\n" * 300_000)}, "The file is larger than 1,000,000 bytes."),
    ],
)
def test_a_mistake_changes_nothing_and_is_shown(ops: User, sent: dict[str, object], message: str) -> None:
    racks.replace(ops, racks.parse_csv("kept,R"))
    answer = signed_in(ops).post("/racks/all", sent)
    assert answer.status_code == 422
    assert message in unescape(answer.text)
    assert "<b>," not in answer.text
    assert there() == {"kept": ("R", 0)}


def test_nodes_are_placed_individually(ops: User) -> None:
    client = signed_in(ops)
    racks.replace(ops, racks.parse_csv("dgx-01,A1,1,7"))
    client.post("/racks/one", {"node": " dgx-02 ", "rack": "A1", "slot": "2"})
    assert there() == {"dgx-01": ("A1", 1), "dgx-02": ("A1", 2)}
    assert RackPlace.objects.get(node="dgx-02").order == 7, "its rack stands where it stood"
    client.post("/racks/one", {"node": "dgx-02", "rack": "B1", "slot": ""})
    assert there()["dgx-02"] == ("B1", 0)
    client.post("/racks/one", {"node": "dgx-02"})
    assert there() == {"dgx-01": ("A1", 1)}
    for sent in ({"node": "gone"}, {}):
        assert client.post("/racks/one", sent).status_code == 302
    for sent in ({"node": "dgx-03", "rack": "A1", "slot": "top"}, {"node": "?", "rack": "A1"}):
        refused = client.post("/racks/one", sent)
        assert refused.status_code == 422
        assert f'name="node" value="{sent["node"]}"' in refused.text
        assert 'name="rack" value="A1"' in refused.text
    assert there() == {"dgx-01": ("A1", 1)}


def test_others_read_and_change_nothing(ops: User) -> None:
    racks.replace(ops, racks.parse_csv("kept,R"))
    mira = person("mira")
    html = text(mira)
    assert "kept" in html
    assert "<form" not in html[html.index("<main") : html.index("</main>")]
    for address in ("/racks/all", "/racks/one"):
        assert signed_in(mira).post(address, {"node": "kept", "text": "a,R"}).status_code == 403
        assert signed_in(ops, enforce_csrf_checks=True).post(address, {"text": "a,R"}).status_code == 403
    assert there() == {"kept": ("R", 0)}


def test_without_racks(ops: User) -> None:
    assert "No nodes are placed in racks yet." in text(person("mira"))
    assert "Sysadmins place nodes in racks." in text(person("noor"))
    assert "Place all nodes by CSV" in text(ops)
