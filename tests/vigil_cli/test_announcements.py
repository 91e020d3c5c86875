"""`vigil` prints announcements that come with a response, once and on stderr."""

import json

import httpx

from tests.vigil_cli.commands import nowhere, portal, vigil  # noqa: F401

READING = {"read_at": "2026-01-31T12:00:00Z", "error": "", "failing_since": None}


def answer(header: str, **body: object) -> httpx.Response:
    return httpx.Response(200, json=body, headers={"Vigil-Announcements": header})


def test_prints_each_once_and_keeps_stdout_parseable(portal):  # noqa: F811
    page = {"items": [], "reading": READING}
    portal.answers["GET", "drains"] = [
        answer("warning;Maintenance%2C 50 %25,info;hello", **page, next="x"), answer("info;hello", **page, next=None),
    ]  # fmt: skip
    result = vigil("drains", "--json")
    assert json.loads(result.stdout)["items"] == []
    assert result.stderr.splitlines() == [
        "vigil: announcement (warning): Maintenance, 50 %", "vigil: announcement: hello",
    ]  # fmt: skip


def test_a_hostile_header_prints_no_control_characters(portal):  # noqa: F811
    portal.answers["GET", "drains"] = answer(
        "info;%1B[31mred%0A,,;;," + "x" * 5000, items=[], reading=READING, next=None
    )
    lines = vigil("drains").stderr.splitlines()
    assert lines == ["vigil: announcement: [31mred"]
