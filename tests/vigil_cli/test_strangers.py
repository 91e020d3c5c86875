"""Test hostile input of `vigil`: text with terminal control sequences, and answers that come from no portal."""

import io
import sys

import httpx
import pytest

from tests.vigil_cli.commands import JOB, nowhere, portal, problem, vigil  # noqa: F401
from tests.vigil_cli.test_telemetry import AGENT, GPU, TELEMETRY
from vigil_cli import terminal, watch

DOING = "\x1b]0;mine\x07\x1b]52;c;bWluZQ==\x07\x9b2J\rover\u202egnp\0"
SHOWN = r"\x1b]0;mine\x07\x1b]52;c;bWluZQ==\x07\x9b2J\rover\u202egnp\x00"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_others_wrote_does_nothing_to_a_terminal(portal):  # noqa: F811
    portal.answers["GET", "jobs/7"] = {**JOB, "notes": f"one\n{DOING}", "reason": DOING}
    output = vigil("job", "7").stdout
    assert output.count(SHOWN) == 2
    assert "one\n" in output, "lines stay lines"
    portal.answers["GET", "jobs/7"] = problem(422, "no", ("notes", f"{DOING} cannot be"))
    assert SHOWN in vigil("job", "7", status=1).stderr
    portal.answers["GET", "jobs/7"] = problem(404, f"no {DOING}")
    assert SHOWN in vigil("job", "7", status=1).stderr
    out = io.StringIO()
    watch.Screen(out).show({**JOB, "reason": DOING, "state": "pending"})
    assert SHOWN in out.getvalue()


def test_text_from_machines_does_nothing_to_a_terminal(portal):  # noqa: F811
    gpu = {**GPU, "model": DOING, "holders": [{**GPU["holders"][0], "name": DOING}]}
    portal.answers["GET", "gpus"] = {"items": [gpu], "next": None}
    assert vigil("gpus").stdout.count(SHOWN) == 2
    portal.answers["GET", "agents"] = {"items": [{**AGENT, "version": DOING, "enrolled_by": DOING}], "next": None}
    assert vigil("agents").stdout.count(SHOWN) == 2
    payload = {**TELEMETRY, "host": {f"load_1{DOING}": 1.0}, "gpus": [{**GPU, "index": DOING}]}
    portal.answers["GET", "nodes/dgx-01/telemetry"] = payload
    assert vigil("telemetry", "dgx-01").stdout.count(SHOWN) == 2
    assert SHOWN in vigil("telemetry", "dgx-01", "--gpu", "9", status=1).stderr.replace("\n", "")


def test_a_spec_arrives_whole_in_a_file_and_plain_on_a_terminal(portal, monkeypatch):  # noqa: F811
    portal.answers["GET", "jobs/7/spec"] = {"spec_toml": "notes = '\u202e'\r\n"}
    assert vigil("spec", "7").stdout_bytes.decode() == "notes = '\u202e'\r\n"
    monkeypatch.setattr(sys, "stdout", Terminal())
    terminal.echo_whole("notes = '\u202e'\r\n", end="")
    assert sys.stdout.getvalue() == "notes = '\\u202e'\n"


def test_a_log_keeps_its_colours_on_a_terminal_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    terminal.echo_log(f"\x1b[31mred {DOING}")
    terminal.echo_log("plain")
    shown = SHOWN.replace(r"\rover", "\nover")
    assert sys.stdout.getvalue() == f"\x1b[31mred {shown}\x1b[0m\nplain\n"


FOREIGN = {
    "brackets alone": {"content": b"[" * 100_000},
    "no object": {"content": b"[1]"},
    "no gzip": {"content": b"x", "headers": {"Content-Encoding": "gzip"}},
}


@pytest.mark.parametrize("command", [("jobs",), ("pin", "7", "step-4")], ids=" ".join)
@pytest.mark.parametrize("answer", FOREIGN.values(), ids=FOREIGN)
def test_another_server_is_reported_in_a_sentence(portal, command, answer):  # noqa: F811
    def made(*_: object) -> httpx.Response:
        stream = httpx.ByteStream(answer["content"])
        return httpx.Response(200, headers=answer.get("headers"), stream=stream)

    portal.answers = {("GET", "jobs"): made(), ("PATCH", "jobs/7/checkpoints/step-4"): made()}
    assert "is not a Vigil portal" in vigil(*command, status=1).stderr


@pytest.mark.parametrize("command", [("jobs",), ("job", "7"), ("cancel", "7"), ("nodes",)], ids=" ".join)
@pytest.mark.parametrize("answer", [{}, {"items": [{"id": 7}]}], ids=["nothing", "little"])
def test_an_answer_that_lacks_something_is_reported_in_a_sentence(portal, command, answer):  # noqa: F811
    addresses = [("GET", "jobs"), ("GET", "jobs/7"), ("POST", "jobs/7/cancel"), ("GET", "nodes")]
    portal.answers = dict.fromkeys(addresses, answer)
    assert "is of another release" in vigil(*command, status=1).stderr


def test_a_token_is_sent_nowhere_that_an_answer_names(portal):  # noqa: F811
    elsewhere = httpx.Response(302, headers={"Location": "http://elsewhere/"})
    portal.answers = {
        ("GET", "jobs"): elsewhere,
        ("GET", "jobs/7/series/names"): {"items": ["loss"]},
        ("GET", "jobs/7/series.csv"): elsewhere,
        ("PATCH", "jobs/7/checkpoints/step-4"): httpx.Response(304),
    }
    for command in (("jobs",), ("metrics", "7", "--csv"), ("pin", "7", "4")):
        assert "redirects to" in vigil(*command, status=1).stderr
    assert {request.url.host for request in portal.asked} == {"portal"}


@pytest.mark.parametrize("errors", [5, ["x"], [{"field": "a"}], {"a": 1}])
def test_a_refusal_of_another_form_is_reported_all_the_same(portal, errors):  # noqa: F811
    portal.answers["GET", "jobs/7"] = httpx.Response(422, json={"detail": "no", "errors": errors})
    assert "The portal answered 422" in vigil("job", "7", status=1).stderr


def test_a_spec_without_end_is_not_read():
    assert "far too long" in vigil("submit", "/dev/zero", status=1).stderr
