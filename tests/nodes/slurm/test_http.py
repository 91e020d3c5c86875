"""Test talking to slurmrestd on failure: discovery, retries, unexpected answers, upgrades, and keeping secrets."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm import http as slurm_http
from nodes.schedulers.slurm.http import SlurmError, SlurmHttp, SlurmUnreachable, TokenRejected
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from tests.nodes.slurm.simulated_rest import TOKEN, VERSIONS, FixedToken, SimulatedRest, body, load
from tests.nodes.slurm.test_request import submission_of

NEWEST = VERSIONS[-1]


class Failing:
    """Fails some times and then lets the recorded answer through."""

    def __init__(self, *failures: Callable[[httpx.Request], httpx.Response]) -> None:
        self.failures, self.calls = list(failures), 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        if self.failures:
            return self.failures.pop(0)(request)
        return load(NEWEST, "busy/slurm-nodes") if request.method != "POST" else httpx.Response(200, json={"job_id": 1})


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused", request=request)


def reset(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("Connection reset by peer", request=request)


def halfway(request: httpx.Request) -> httpx.Response:
    def pieces() -> Iterator[bytes]:
        yield b'{"nodes": ['
        raise httpx.RemoteProtocolError("peer closed connection", request=request)

    return httpx.Response(200, content=pieces())


def slow(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("", request=request)


def status(code: int) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(code, text="<html>Bad Gateway</html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize("failure", [refuse, reset, halfway, status(502), status(503), status(504)])
def test_what_does_no_harm_is_repeated(failure: Callable[[httpx.Request], httpx.Response]) -> None:
    played = SimulatedRest(NEWEST)
    played.answers["/nodes"] = failing = Failing(failure, failure)
    assert len(played.slurm.nodes()) == 8
    assert failing.calls == 3
    played.answers["/nodes"] = failing = Failing(failure, failure, failure)
    with pytest.raises(SlurmUnreachable) as refused:
        played.slurm.nodes()
    assert failing.calls == 3
    assert not refused.value.permanent
    played.answers["/job/7"] = failing = Failing(failure, status(200))
    with pytest.raises(SchedulerError, match="not Slurm's JSON"):
        played.slurm.cancel("7")
    assert failing.calls == 2


@pytest.mark.parametrize("failure", [refuse, reset, halfway, slow, status(502), status(503)])
def test_a_submission_is_never_repeated(failure: Callable[[httpx.Request], httpx.Response], tmp_path: Any) -> None:
    played = SimulatedRest(NEWEST)
    played.answers["job/submit"] = failing = Failing(failure)
    with pytest.raises(SlurmUnreachable) as refused:
        played.rest.submit(submission_of(tmp_path), "#!/bin/sh\n")
    assert failing.calls == 1
    assert refused.value.sent == (failure in (reset, halfway, slow))
    assert not refused.value.permanent


def busy(code: int, retry_after: str = "") -> Callable[[httpx.Request], httpx.Response]:
    headers = {"Content-Type": "application/json"} | ({"Retry-After": retry_after} if retry_after else {})
    return lambda request: httpx.Response(code, json={"errors": [{"error": "busy"}]}, headers=headers)


@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_obeyed(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short wait is waited for; during a long one no requests are sent, and afterwards they are again."""
    now, slept = 1000.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    played = SimulatedRest(NEWEST)
    played.answers["/nodes"] = failing = Failing(busy(code, "3"))
    assert len(played.slurm.nodes()) == 8
    assert (failing.calls, slept) == (2, [3.0])
    played.answers["/nodes"] = failing = Failing(busy(code, "60"))
    for _ in range(3):
        with pytest.raises(SlurmUnreachable, match="no requests for another") as refused:
            played.slurm.nodes()
        assert not refused.value.permanent
    assert failing.calls == 1
    now += 61
    assert len(played.slurm.nodes()) == 8
    played.answers["/nodes"] = Failing(busy(code, "99999999"))
    with pytest.raises(SlurmUnreachable, match="no requests for another 300 s"):
        played.slurm.nodes()


def test_a_submission_waits_for_a_busy_slurmrestd(tmp_path: Any) -> None:
    played = SimulatedRest(NEWEST)
    played.answers["job/submit"] = failing = Failing(busy(429, "7"))
    for _ in range(2):
        with pytest.raises(SlurmUnreachable, match="no requests for another") as refused:
            played.rest.submit(submission_of(tmp_path), "#!/bin/sh\n")
        assert not refused.value.sent, "it may be submitted again: nothing was carried out"
    assert failing.calls == 1


def test_no_repeats_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def late(request: httpx.Request) -> httpx.Response:
        nonlocal now
        now += 10.5
        raise httpx.ReadTimeout("", request=request)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    played = SimulatedRest(NEWEST)
    played.answers["/nodes"] = failing = Failing(late, late)
    with pytest.raises(SlurmUnreachable, match="did not respond in time"):
        played.slurm.nodes()
    assert failing.calls == 1


def test_an_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def trickle(request: httpx.Request) -> httpx.Response:
        def pieces() -> Iterator[bytes]:
            nonlocal now
            while True:
                now += 5
                yield b" "

        return httpx.Response(200, content=pieces())

    monkeypatch.setattr(time, "monotonic", lambda: now)
    played = SimulatedRest(NEWEST)
    played.answers["/nodes"] = Failing(trickle, trickle)
    with pytest.raises(SlurmUnreachable, match="did not respond in time"):
        played.slurm.nodes()
    assert now < 1040


def test_an_answer_may_be_long_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = body(NEWEST, "busy/slurm-jobs")
    jobs["jobs"] *= 40
    report = json.dumps(jobs).encode()
    assert len(report) > 5_000_000
    played = SimulatedRest(NEWEST)
    played.answers["/jobs"] = lambda _: httpx.Response(200, content=report)
    assert len(played.slurm.queue()) > 10
    monkeypatch.setattr(slurm_http, "MAX_RESPONSE_BYTES", 5_000_000)
    with pytest.raises(SchedulerError, match="more than 4 MiB"):
        played.rest.jobs()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(200, html="<h1>It works!</h1>"), "HTTP 200 with text/html that is not Slurm's JSON"),
        (httpx.Response(500, html="<h1>Oh no</h1>"), "HTTP 500 with text/html"),
        (httpx.Response(200, content=b'{"nodes": [{"name": "dg'), "not Slurm's JSON"),
        (httpx.Response(200, content=b""), "HTTP 200 with content that is not"),
        (httpx.Response(200, json=[1, 2]), "JSON that is not Slurm's"),
        (httpx.Response(200, content=b"null"), "JSON that is not Slurm's"),
        (httpx.Response(200, content=b"[" * 100_000), "not Slurm's JSON"),
        (httpx.Response(200, json={}), "Slurm's response has no nodes: it gave no reason"),
        (httpx.Response(200, json={"nodes": {}}), "has no nodes"),
        (httpx.Response(200, json={"nodes": None, "errors": [{"error": "Broken"}]}), "has no nodes: Broken"),
        (httpx.Response(301, headers={"Location": "https://elsewhere"}), "HTTP 301"),
        (httpx.Response(200, json={"nodes": [], "errors": [{"error": "x", "error_number": 1800}]}), "has no nodes: x"),
    ],
)
def test_answers_that_are_no_answers(answer: httpx.Response, message: str) -> None:
    played = SimulatedRest(NEWEST)
    played.answers["/nodes"] = answer
    with pytest.raises(SchedulerError, match=message) as refused:
        played.slurm.nodes()
    assert not refused.value.permanent
    assert len(played.requests_to("/nodes")) == 1


def test_a_name_in_latin_1_hides_nobody() -> None:
    """Slurm hands on whatever bytes a person has named a job with."""
    text = load(NEWEST, "busy/slurm-jobs").content.replace(b'"name":"gpus"', b'"name":"caf\xe9"')
    played = SimulatedRest(NEWEST)
    played.answers["/jobs"] = httpx.Response(200, content=text)
    assert "caf�" in {job.name for job in played.slurm.queue()}


@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_and_words_of_slurm(version: str) -> None:
    payload = {
        "submit-account": (2045, True), "submit-partition": (2000, True), "submit-qos": (2066, True),
        "submit-reservation": (2053, True),
    }  # fmt: skip
    for name, (number, permanent) in payload.items():
        played = SimulatedRest(version)
        played.answers["/job/9"] = load(version, f"refused/{name}")
        with pytest.raises(SlurmError, match=f"^Slurm error {number}: [A-Z].*") as refused:
            played.rest.http.delete("job/9")
        assert (refused.value.number, refused.value.permanent) == (number, permanent), name


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_jobs(version: str) -> None:
    played = SimulatedRest(version)
    played.answers[f"/slurm/{version}/job/987654"] = lambda request: load(
        version, "refused/cancel-unknown" if request.method == "DELETE" else "refused/slurm-job-unknown"
    )
    played.answers[f"/slurmdb/{version}/job/987654"] = load(version, "refused/slurmdb-job-unknown")
    assert list(played.rest.details("987654").records()) == []
    assert played.rest.runs("987654") == []
    assert played.slurm.status(["987654"]) == {}
    played.slurm.cancel("987654")
    played.slurm.signal("987654", "TERM")


@pytest.mark.parametrize("version", [VERSIONS[0], NEWEST])
def test_cancelling_a_job_that_has_ended_is_no_error(version: str) -> None:
    played = SimulatedRest(version)
    played.answers["/job/18"] = load(version, "ended/cancel-ended")
    played.slurm.cancel("18")


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in ("v0.0.40", "v0.0.41")])
def test_somebody_else_s_job_cannot_be_ended(version: str) -> None:
    """v0.0.42 refuses with HTTP 200 and no errors; v0.0.40 and 41 do not report it at all."""
    played = SimulatedRest(version)
    played.answers["/job/34"] = load(version, "refused/cancel-of-others")
    with pytest.raises(SlurmError, match="denied") as refused:
        played.slurm.cancel("34", user="bob")
    assert (refused.value.number, refused.value.permanent) == (2002, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_task_never_stands_for_its_whole_array(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old slurmrestd reads "17_3" as 17, and ending 17 ends all: there scancel has to do it."""
    monkeypatch.setenv("PATH", "/nowhere")
    played = SimulatedRest(version)
    played.answers["/job/17_3"] = load(NEWEST, "ended/cancel-ended")
    if version in {"v0.0.38", "v0.0.39"}:
        with pytest.raises(SchedulerError, match="only through scancel"):
            played.slurm.cancel("17_3")
        with pytest.raises(SchedulerError, match="is not the id of a Slurm job"):
            played.rest.cancel("17_3", user="alice")
    else:
        played.slurm.cancel("17_3")
    ended = [request.url.path for request in played.requests if request.method == "DELETE"]
    assert ended == ([] if version in {"v0.0.38", "v0.0.39"} else [f"/slurm/{version}/job/17_3"])


@pytest.mark.parametrize(
    "odd", ["17_", "17_[1-3]", "_3", "17_3_1", "", "17/../../../node/dgx01", "1 2", "１７", "17\n", "-1"]
)
def test_only_ids_are_ended(odd: str) -> None:
    played = SimulatedRest(NEWEST)
    with pytest.raises(SchedulerError, match="is not the id of a Slurm job"):
        played.slurm.cancel(odd)
    assert not [request for request in played.requests if request.method == "DELETE"]


@pytest.mark.parametrize("name", ["wrong-token", "expired-token", "no-jwt", "no-token"])
@pytest.mark.parametrize("version", VERSIONS)
def test_tokens_that_slurm_does_not_take(version: str, name: str) -> None:
    tokens = FixedToken()
    played = SimulatedRest(version, tokens=tokens)
    played.answers["/jobs"] = load(version, f"refused/{name}")
    with pytest.raises(SchedulerError, match="token of portal") as refused:
        played.rest.jobs()
    assert not refused.value.permanent
    assert tokens.forgotten == ["portal"]
    is_unexplained = version == "v0.0.38" and name != "no-token"  # it only says "Unspecified error"
    assert isinstance(refused.value, TokenRejected) != is_unexplained


@pytest.mark.parametrize("code", [401, 403, 511])
def test_a_refusal_before_anything_else(code: int) -> None:
    played = SimulatedRest(NEWEST)
    for path in ("/openapi/v3", "/openapi.json", "/openapi"):
        played.answers[path] = httpx.Response(code, text="Authentication failure")
    with pytest.raises(SchedulerError):
        played.slurm.nodes()
    assert len(played.requests) == (1 if code != 511 else 3)


@pytest.mark.parametrize("version", [VERSIONS[0], NEWEST])
def test_daemons_that_are_away(version: str) -> None:
    played = SimulatedRest(version)
    played.answers[f"/slurm/{version}/jobs"] = load(version, "away/slurmctld")
    played.answers[f"/slurmdb/{version}/jobs"] = load(version, "away/slurmdbd")
    with pytest.raises(SchedulerError, match="slurmctld may be down|Unable to contact slurm controller"):
        played.rest.jobs()
    with pytest.raises(SchedulerError, match="Unable to connect to database") as refused:
        played.rest.accounted(user="alice", since=0)
    assert not refused.value.permanent
    assert "no slurmrestd behind the proxy" not in str(refused.value)


def test_tokens_are_never_revealed(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    """No error, its causes or its traceback contains the token, and no library logs it."""
    caplog.set_level(logging.DEBUG)
    answers: list[Any] = [
        refuse, reset, halfway, slow, status(502), status(500), lambda _: httpx.Response(401, text=TOKEN[:0]),
        lambda _: httpx.Response(500, json={"errors": [{"error": "x", "error_number": 1007}]}),
    ]  # fmt: skip
    reports = []
    for answer in answers:
        played = SimulatedRest(NEWEST)
        played.answers["/nodes"] = played.answers["job/submit"] = answer
        for call in (
            played.slurm.nodes,
            lambda played=played: played.rest.submit(submission_of(tmp_path), "#!/bin/sh"),
        ):
            with pytest.raises(SchedulerError) as refused:
                call()
            reports += traceback.format_exception(refused.value)
            reports += [repr(refused.value), repr(refused.value.__context__), repr(vars(refused.value))]
        reports += [repr(played.slurm), repr(played.http), repr(played.rest), repr(played.http.api)]
    everything = "\n".join([*reports, *(record.getMessage() for record in caplog.records), caplog.text])
    assert "slurm.test" in everything
    assert TOKEN not in everything
    assert "X-SLURM-USER-TOKEN" not in everything.upper()


@pytest.mark.parametrize(
    "url",
    [
        "", "slurm", "ftp://slurm", "http://", "http://host:99999", "http://[::1", "unix:", "unix:relative",
        "https://portal:secret@slurm:6820", "http://slurm:6820/?a=1",
    ],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(SchedulerError, match="VIGIL_SLURM_URL") as refused:
        SlurmHttp(url, tokens=FixedToken(), user="portal")
    assert refused.value.permanent
    assert "secret" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # httpcore leaves the socket open
def test_nobody_there(tmp_path: Any) -> None:
    for url in ("http://127.0.0.1:9", f"unix:{tmp_path}/none.sock"):
        http = SlurmHttp(url, tokens=FixedToken(), user="portal", timeout_s=2)
        with pytest.raises(SlurmUnreachable, match="cannot be reached at .*Is it running") as refused:
            Slurm(SlurmRest(http), tokens=FixedToken(), user="portal").nodes()
        assert not refused.value.sent
        http.close()
