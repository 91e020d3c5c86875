"""Test rack positions of nodes: any text becomes positions or is refused by line, and only sysadmins set them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.cluster import racks
from nodes.cluster.racks import RackPosition, WrongPlaces
from nodes.models import RackPlace
from portal.models import AuditEntry, User
from tests.lab import bearer, person, send, signed_in, sysadmin

RACKS = "/api/v1/racks"


def wrong(text: str) -> list[str]:
    with pytest.raises(WrongPlaces) as caught:
        racks.parse_csv(text)
    return str(caught.value).splitlines()


def test_what_a_spreadsheet_saves_is_read() -> None:
    both = [RackPosition("dgx-01", "A 1", 3, 2), RackPosition("dgx-02", "A 1")]
    for text in (
        "node,rack,slot,order\ndgx-01,A 1,3,2\ndgx-02,A 1\n",
        "\ufeffNode;Rack;Slot;Order\r\ndgx-01;A 1;3;2\r\n\r\ndgx-02;A 1;;\r\n",
        'dgx-01\t"A 1"\t3\t2\ndgx-02\tA 1',
        " dgx-01 , A 1 , 3 , 2 \n,,\n dgx-02,A 1",
    ):
        assert racks.parse_csv(text) == both, text


def test_every_mistake_is_named_by_its_line() -> None:
    text = "node,rack,slot\ndgx-01,A1,1\n\n-bad,A1\ndgx-02,\ndgx-03,A1,high\ndgx-01,B1\ndgx-04,A1,1,2,3\n,A1\n"
    assert wrong(text) == [
        "Line 4: '-bad' is not a valid node name.",
        "Line 5: the rack is missing.",
        "Line 6: 'high' is not a valid slot. Write a whole number from -99999 to 99999.",
        "Line 7: dgx-01 is also on line 2. List each node once.",
        "Line 8: it has 5 columns. Write node, rack, slot, order; the last two may be left out.",
        "Line 9: the node is missing.",
    ]
    assert wrong("a,R,1,1\nb,R,2,2") == [
        "Line 2: R has order 1 on line 1. All lines of a rack must have the same order."
    ]
    assert wrong("a,R\nb,R\0") == ["Line 2: it contains a NUL character, so this is not a text file."]
    assert wrong("a," + "R" * 65) == ["Line 1: a rack's name has at most 64 printable characters."]
    assert wrong("a,R,999999") == ["Line 1: '999999' is not a valid slot. Write a whole number from -99999 to 99999."]
    assert len(wrong("\n".join(["?,R"] * 100))) == racks.MAX_REPORTED_MISTAKES
    many = "\n".join(f"n{i},R" for i in range(racks.MOST + 1))
    assert wrong(many) == ["Line 10001: there are more than 10,000 lines. Remove some."]
    assert len(racks.parse_csv(many[: many.rindex("\n")])) == racks.MOST


cells = st.text(st.characters(exclude_characters="\0"), max_size=12)
lines = st.lists(st.lists(cells, max_size=6).map(",".join), max_size=8).map("\n".join)


@given(st.one_of(st.text(max_size=200), lines))
def test_any_text_is_taken_or_refused_by_lines(text: str) -> None:
    places, mistakes = taken(text)
    last = max(text.count("\n") + text.count("\r"), len(text.splitlines())) + 1
    assert all(1 <= mistake.line <= last for mistake in mistakes)
    agreed = [*racks._agreed(places)]
    assert racks.parse_csv(racks.as_csv(agreed)) == agreed


def taken(text: str) -> tuple[list[RackPosition], list[racks.Mistake]]:
    """A text that is not empty gives places or mistakes, never neither."""
    try:
        return racks.parse_csv(text), []
    except WrongPlaces as error:
        return [], error.mistakes or [racks.Mistake(0, "refused without a word")]


names = st.from_regex(racks.NODE, fullmatch=True).filter(lambda name: name.lower() != "node")
rack_names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
places_of_racks = st.lists(
    st.builds(RackPosition, names, rack_names, st.integers(-99_999, 99_999)), unique_by=lambda place: place.node
)


@given(places_of_racks)
def test_what_is_written_is_read_again(places: list[RackPosition]) -> None:
    assert racks.parse_csv(racks.as_csv(places)) == places


def test_racks_sort_as_people_count() -> None:
    assert sorted(["R10", "r2", "R1", "A", "2", "10"], key=racks.natural_sort_key) == [
        "2",
        "10",
        "A",
        "R1",
        "r2",
        "R10",
    ]


@pytest.fixture
def ops(db: None) -> User:
    return sysadmin("ops")


def there() -> list[tuple[str, str, int, int]]:
    return list(RackPlace.objects.values_list("node", "rack", "slot", "order"))


def test_replacing_changes_what_differs_and_is_noted_once(ops: User) -> None:
    first = racks.parse_csv("a,R1,1,5\nb,R1,2\nc,R2,1,4")
    assert racks.replace(ops, first) == 3
    assert there() == [("c", "R2", 1, 4), ("a", "R1", 1, 5), ("b", "R1", 2, 5)], "a rack's order is all its nodes'"
    rack_place = RackPlace.objects.get(node="a").pk
    assert racks.replace(ops, first) == 0
    assert racks.replace(ops, racks.parse_csv("a,R1,1,5\nb,R3,1")) == 2
    assert RackPlace.objects.get(node="a").pk == rack_place
    assert there() == [("b", "R3", 1, 0), ("a", "R1", 1, 5)]
    reports = list(AuditEntry.objects.order_by("id").values_list("action", "thing", "detail"))
    assert reports == [
        ("racks", "3 places", "3 new, 0 moved, 0 gone"),
        ("racks", "2 places", "0 new, 1 moved, 1 gone"),
    ]


def test_racks_over_rest(ops: User) -> None:
    client = bearer(ops, scope="admin")
    put = {"items": [{"node": "dgx-02", "rack": "A1", "slot": 2}, {"node": "dgx-01", "rack": "A1", "slot": 1}]}
    assert send(client, "put", RACKS, put).json() == {"places": 2, "changed": 2}
    items = client.get(RACKS).json()["items"]
    assert [(item["node"], item["rack"], item["slot"]) for item in items] == [("dgx-01", "A1", 1), ("dgx-02", "A1", 2)]
    csv = client.get(RACKS, headers={"accept": "text/csv"})
    assert csv.text == "node,rack,slot,order\ndgx-01,A1,1,0\ndgx-02,A1,2,0\n"
    answer = client.put(RACKS, "dgx-03,B1\ndgx-04,B1,2", content_type="text/csv")
    assert answer.json() == {"places": 2, "changed": 4}
    assert [entry[0] for entry in there()] == ["dgx-03", "dgx-04"]
    assert send(client, "put", RACKS, {"items": []}).json() == {"places": 0, "changed": 2}


@pytest.mark.parametrize(
    ("body", "kind", "status", "field"),
    [
        ("a,R\n?,R", "text/csv", 422, "line 2"),
        (b"\xff\xfe", "text/csv", 400, None),
        ("{", "application/json", 400, None),
        ('{"items": [{"node": "a"}]}', "application/json", 422, None),
        ('{"items": [{"node": "a", "rack": "R", "u": 1}]}', "application/json", 422, None),
        ('{"items": [{"node": "a", "rack": "R", "slot": 1e9}]}', "application/json", 422, None),
        ('{"items": [{"node": "a", "rack": "R", "slot": 123456}]}', "application/json", 422, "line 1"),
        ("a,R", "text/plain", 415, None),
        ("a,R\n" * 300_000, "text/csv", 413, None),
    ],
)
def test_what_is_wrong_changes_nothing(ops: User, body: str | bytes, kind: str, status: int, field: str | None) -> None:
    racks.replace(ops, racks.parse_csv("kept,R"))
    answer = bearer(ops, scope="admin").put(RACKS, body, content_type=kind)
    assert answer.status_code == status, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == ([field] if field else [])
    assert [item[0] for item in there()] == ["kept"]


def test_only_sysadmins_change_racks(ops: User) -> None:
    body = {"items": [{"node": "a", "rack": "R"}]}
    mira = person("mira")
    assert send(bearer(mira, scope="admin"), "put", RACKS, body).status_code == 403
    assert send(bearer(ops), "put", RACKS, body).status_code == 403, "a token of scope write"
    assert send(signed_in(ops, enforce_csrf_checks=True), "put", RACKS, body).status_code == 403
    assert bearer(mira, scope="read").get(RACKS).json() == {"items": [], "next": None}
    assert there() == []
