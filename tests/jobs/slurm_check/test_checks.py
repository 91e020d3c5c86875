"""Test `vigil check slurm` without a Slurm: how each answer is judged, and that no check hides another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.slurm_check import all_checks, conf, rights, run_root, settings, slurmrestd, trial, trial_report
from jobs.slurm_check.checked_site import CheckedSite, Submitter, conf_of
from jobs.slurm_check.finding import CheckFinding, from_exception
from nodes.schedulers.base import JobStatus, SchedulerError
from nodes.schedulers.cluster import PartitionInfo
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens, TokenSource

KEY = b"0123456789abcdef0123456789abcdef"
PATHS = (
    "slurm/{v}/job/submit", "slurm/{v}/job/{{job_id}}", "slurm/{v}/jobs", "slurm/{v}/nodes", "slurm/{v}/partitions",
    "slurmdb/{v}/associations",
)  # fmt: skip


class Fake:
    """A simulated slurmrestd. `answers` are by the end of a path."""

    def __init__(self, version: str = "v0.0.42") -> None:
        paths = {f"/{path.format(v=version)}": {"get": {}} for path in PATHS}
        self.answers: dict[str, httpx.Response | Callable[[httpx.Request], httpx.Response]] = {
            "/openapi/v3": httpx.Response(200, json={"paths": paths}),
            "/diag": self.diag(),
            "/partitions": httpx.Response(200, json={"partitions": [{"name": "gpu"}]}),
            "/nodes": httpx.Response(200, json={"nodes": []}),
            "/qos": httpx.Response(200, json={"qos": []}),
            "/associations": httpx.Response(200, json={"associations": [{"account": "vision", "user": "ada"}]}),
            "/user/vigil": self.level("Administrator"),
        }

    @staticmethod
    def diag(apart_s: float = 0.0) -> httpx.Response:
        meta = {"slurm": {"release": "24.11.5"}}
        return httpx.Response(200, json={"meta": meta, "statistics": {"req_time": int(time.time() + apart_s)}})

    @staticmethod
    def level(word: str) -> httpx.Response:
        return httpx.Response(200, json={"users": [{"name": "vigil", "administrator_level": [word]}]})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        for end, answer in self.answers.items():
            if request.url.path.endswith(end):
                return answer if isinstance(answer, httpx.Response) else answer(request)
        return httpx.Response(404, json={"errors": [{"error_number": 9999, "error": "not played"}]})


class FakeSite(CheckedSite):
    fake: Fake

    def rest_with(self, tokens: TokenSource) -> SlurmRest:
        transport = httpx.MockTransport(self.fake)
        return SlurmRest(SlurmHttp(self.url, tokens=tokens, user=self.user, transport=transport))


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    key = tmp_path / "jwt.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs").chmod(0o2710)
    fake_site = FakeSite(
        home=tmp_path, runs=tmp_path / "runs", url="http://127.0.0.1:6820", key_file=str(key), user="vigil",
        scontrol="no-such-scontrol",
    )  # fmt: skip
    fake_site.fake = Fake()
    tokens = KeyFileTokens(key)
    fake_site.open = lambda: Slurm(fake_site.rest_with(tokens), tokens=tokens, user="vigil")
    return fake_site


def levels(found: list[CheckFinding]) -> dict[str, str]:
    return {item.title: item.level for item in found}


def test_every_check_speaks_for_itself(site: FakeSite) -> None:
    """Something unforeseen in one of them leaves the others as they are."""
    site.fake.answers["/nodes"] = httpx.Response(
        200, json={"nodes": [{"name": "a", "gres": "gpu:h100:2", "state": ["IDLE"]}]}
    )
    site.__dict__["partitions"] = property()  # an unexpected answer
    found = list(all_checks.run_checks(site, None, print))
    assert levels(found)["Partitions"] == "error"
    assert "the check itself failed" in next(item.detail for item in found if item.title == "Partitions")
    assert levels(found)["The clocks agree"] == "ok"
    assert next(item.detail for item in found if item.title == "Nodes") == "1 with 2 × h100"
    assert all(item.remedy for item in found if item.level != "ok")


def test_a_refusal_names_its_mend(site: FakeSite) -> None:
    for path in ("/nodes", "/partitions"):
        denied = {"errors": [{"error_number": 2002, "error": "Access/permission denied"}]}
        site.fake.answers[path] = httpx.Response(500, json=denied)
    found = {check.title: check.remedy for check in all_checks.run_checks(site, None, print) if check.level == "error"}
    assert found["Nodes"].endswith("sacctmgr modify user vigil set AdminLevel=Admin")
    assert found["Partitions"].startswith("Fix slurmdbd first")


def test_what_needs_something_else_is_left_out_by_name(site: FakeSite) -> None:
    site.key_file = ""
    found = list(all_checks.run_checks(site, None, print))
    assert levels(found)["Source of tokens"] == "error"
    assert {item.detail for item in found if item.level == "skip"} >= {
        "not checked: it needs settings",
        "not checked: it needs token",
    }
    assert levels(found)["VIGIL_RUNS"] == "ok"


def test_no_finding_shows_a_token_or_the_key(site: FakeSite) -> None:
    text = str(list(all_checks.run_checks(site, None, print)))
    assert "eyJ" not in text
    assert KEY.decode() not in text


@pytest.mark.parametrize(("apart_s", "level"), [(0, "ok"), (-20, "ok"), (90, "warn"), (-90, "warn"), (3600, "error")])
def test_clocks(site: FakeSite, apart_s: float, level: str) -> None:
    site.fake.answers["/diag"] = Fake.diag(apart_s)
    (found,) = slurmrestd.clocks(site)
    assert found.level == level


def test_a_forged_token_is_judged_by_what_slurm_does(site: FakeSite) -> None:
    (found,) = slurmrestd.refuses_forged_token(site)
    assert (found.level, found.detail) == ("error", "accepted: authentication is off")
    reports: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        reports.append(request.headers["X-SLURM-USER-TOKEN"])
        return httpx.Response(511, json={"errors": [{"error_number": 1007, "error": "Protocol authentication error"}]})

    site.fake.answers["/diag"] = refuse
    (found,) = slurmrestd.refuses_forged_token(site)
    assert found.level == "ok"
    real = site.tokens.token_for("vigil")
    assert all(token.count(".") == 2 and token.rpartition(".")[2] != real.rpartition(".")[2] for token in reports)


def test_plain_http_over_a_network_is_mentioned(site: FakeSite) -> None:
    site.url = "http://slurm.lab:6820"
    assert levels(list(slurmrestd.reach(site)))["Connection to slurmrestd"] == "warn"


@pytest.mark.parametrize(
    ("version", "lacking"), [("v0.0.38", "cannot drain or reserve nodes"), ("v0.0.42", "cannot reserve nodes")]
)
def test_slurm_needs_scontrol(site: FakeSite, version: str, lacking: str) -> None:
    site.fake = Fake(version)
    (found,) = slurmrestd.supports(site)
    assert found.level == "warn"
    assert f"which {lacking}" in found.detail
    assert "scontrol is not installed" in found.detail
    assert ("23.11" in found.remedy) == (version == "v0.0.38")


@pytest.mark.parametrize(("word", "drains"), [("Administrator", "ok"), ("Operator", "warn"), ("None", "warn")])
def test_who_may_drain(site: FakeSite, word: str, drains: str) -> None:
    site.fake.answers["/user/vigil"] = Fake.level(word)
    site.fake.answers["/jobs"] = httpx.Response(200, json={"jobs": []})
    found = levels(list(rights.level(site)))
    assert found["vigil may drain nodes"] == drains
    assert found["vigil sees everybody's jobs"] == ("skip" if word == "None" else "ok")


def test_a_speaker_whom_the_accounts_do_not_know_is_a_failure(site: FakeSite) -> None:
    site.fake.answers["/user/vigil"] = httpx.Response(200, json={"users": []})
    site.fake.answers["/jobs"] = httpx.Response(200, json={"jobs": []})
    found = {item.title: item for item in rights.level(site)}["vigil may drain nodes"]
    assert (found.level, found.detail) == ("error", "Slurm's accounting has no user vigil")
    assert found.remedy.startswith("sacctmgr add user vigil account=root AdminLevel=Admin")


def test_people_and_their_accounts(site: FakeSite) -> None:
    site.people = [
        Submitter("ada", "ada", "cats", "vision"),
        Submitter("ada", "ada", "dogs", "speech"),
        Submitter("root", "root", "cats"),
    ]
    details = {person.detail for person in rights.people(site) if person.level == "error"}
    assert "may not compute for speech, the account of project dogs" in details
    assert "has no association: Slurm refuses their jobs" in details
    assert "this machine has no such Unix user, so no run directory can be shared with them" in details
    site.people = None
    assert [person.level for person in rights.people(site)] == ["skip"]
    site.people = []
    assert [person.level for person in rights.people(site)] == ["warn"]


CONF = """Configuration data as of 2026-11-21T13:39:43
AccountingStorageTRES   = cpu,mem,gres/gpu
AccountingStoreFlags    = job_comment
AuthAltTypes            = auth/jwt
GresTypes               = gpu
JobCompType             = jobcomp/none
JobRequeue              = 1
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptMode             = OFF
PreemptType             = (null)
ProctrackType           = proctrack/cgroup
SlurmctldParameters     = (null)
"""


@pytest.mark.parametrize(
    ("line", "title", "level"),
    [
        ("", "", "ok"),
        ("AuthAltTypes = (null)", "AuthAltTypes", "error"),
        ("JobRequeue = 0", "JobRequeue", "warn"),
        ("MinJobAge = 60 sec", "MinJobAge", "warn"),
        ("AccountingStorageTRES = cpu,mem", "AccountingStorageTRES", "warn"),
        ("AccountingStoreFlags = (null)", "AccountingStoreFlags", "warn"),
        ("ProctrackType = proctrack/linuxproc", "ProctrackType", "warn"),
        ("KillWait = 5 sec", "KillWait", "warn"),
        ("PreemptType = preempt/qos\nPreemptMode = CANCEL", "Preemption", "warn"),
        ("PreemptType = preempt/qos\nPreemptMode = GANG,REQUEUE", "", "ok"),
        ("SlurmctldParameters = rl_enable", "SlurmctldParameters", "warn"),
        ("JobCompType = jobcomp/script", "", "ok"),
    ],
)
def test_slurm_conf(site: FakeSite, line: str, title: str, level: str) -> None:
    """The settings come from a node's report, as this machine has no scontrol."""
    site.conf_on_node = conf_of(f"{CONF}{line}\n")
    found = list(conf.check(site))
    assert len(found) == len(conf.FACTS)
    assert {item.title: item.level for item in found if item.level != "ok"} == ({title: level} if title else {})


def test_slurm_conf_that_nobody_reports(site: FakeSite) -> None:
    (found,) = conf.check(site)
    assert found.level == "skip"


def test_the_key_by_its_mode(site: FakeSite) -> None:
    assert settings.key_mode(site) is None
    Path(site.key_file).chmod(0o640)
    assert settings.key_mode(site) is None
    Path(site.key_file).chmod(0o644)
    found = settings.key_mode(site)
    assert found is not None
    assert "mode 0644" in found.detail
    assert levels(list(settings.key(site))) == {"The key": "error"}
    site.key_file = "/nonexistent"
    found = settings.key_mode(site)
    assert found is not None
    assert found.level == "warn"


@pytest.mark.parametrize(
    ("mode", "level"), [(0o2710, "ok"), (0o2711, "error"), (0o700, "error"), (0o710, "warn"), (0o2770, "warn")]
)
def test_the_run_root_s_mode(site: FakeSite, mode: int, level: str) -> None:
    site.runs.chmod(mode)
    (found,) = run_root.mode(site)
    assert found.level == level


def test_a_run_root_on_a_shared_disk(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_root, "file_system", lambda path: "lustre")
    assert levels(list(run_root.exists(site))) == {"VIGIL_RUNS": "ok", "VIGIL_RUNS: file system": "ok"}
    assert levels(list(run_root.code(site))) == {"Vigil's own folder": "ok"}


GOOD = {
    "user": "ada", "node": "dgx01", "python": "3.11.7", "token": ["token", "url"], "gpus": "0", "old": False,
    "lacks": [],
    "torch": {"version": "2.13", "cuda": "12.8", "seen": 1, "computes": True, "names": ["H100"], "seconds": 2},
    "report": {"status": 401, "kind": "application/problem+json"}, "scontrol": {"path": "/bin/scontrol", "code": 0,
    "config": "MinJobAge = 300 sec"},
}  # fmt: skip


def judged(site: CheckedSite, content: object) -> dict[str, str]:
    root = site.runs / "p" / "0-aaaaaa"
    (root / "job").mkdir(parents=True, exist_ok=True)
    (root / "job" / "check.json").write_text(content if isinstance(content, str) else json.dumps(content))
    status = JobStatus(scheduler_id="1", state="completed", exit_code=0)
    found = list(trial_report.read(site, root, "gpu", status, gpus=1, user="ada"))
    assert all(line.isprintable() for item in found for line in (item.title, item.detail, item.remedy))
    return {item.title.removeprefix("Partition gpu").removeprefix(": ") or "job": item.level for item in found}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, {}),
        ({"user": "nobody"}, {"job": "error"}),
        ({"token": "PermissionError: no"}, {"run directory": "error"}),
        ({"torch": {"error": "ImportError: no"}}, {"torch": "error", "GPU": "warn"}),
        ({"lacks": ["psutil"]}, {"torch": "error"}),
        ({"old": True}, {"torch": "error"}),
        ({"gpus": ""}, {"GPU": "error"}),
        ({"torch": {"version": "2.13+cpu", "cuda": "", "seen": 0}}, {"GPU": "warn"}),
        ({"report": {"error": "URLError: refused"}}, {"reports": "error"}),
        ({"report": {"status": 200, "kind": "text/html"}}, {"reports": "error"}),
        ({"scontrol": {}}, {"scontrol": "warn"}),
        ({"user": ["a\nb"] * 999, "node": {"\x1b[2J": 1}, "torch": 3, "report": [], "scontrol": "x", "gpus": 7,
          "token": None, "python": None, "lacks": 5, "old": "yes"},
         {"job": "error", "run directory": "error", "torch": "error", "GPU": "warn", "reports": "error",
          "scontrol": "warn"}),
    ],
)  # fmt: skip
def test_what_a_job_saw(site: FakeSite, change: dict[str, Any], wrong: dict[str, str]) -> None:
    found = judged(site, {**GOOD, **change})
    assert {title: level for title, level in found.items() if level != "ok"} == wrong


@pytest.mark.parametrize("content", ["", "[1, 2]", "[" * 100_000, "x" * (2 << 20)])
def test_a_job_that_wrote_nonsense(site: FakeSite, content: str) -> None:
    assert judged(site, content) == {"job": "error"}


def test_where_jobs_post_nothing_nobody_waits_for_it(site: FakeSite) -> None:
    site.reports = "tail"
    assert "reports" not in judged(site, GOOD)


def test_what_waits_is_busy_or_never_starts() -> None:
    busy = trial._too_long(JobStatus(scheduler_id="1", state="pending", reason="Resources"), 120, "P")
    assert (busy.level, busy.detail.partition(":")[0]) == ("warn", "busy, not broken")
    never = trial._too_long(JobStatus(scheduler_id="1", state="pending", reason="InvalidAccount"), 120, "P")
    assert (never.level, "does not know its account" in never.detail) == ("error", True)


def test_who_a_trial_runs_as(site: FakeSite) -> None:
    ada, portals = Submitter("ada", "ada", "cats", "vision"), Submitter("vic", "vigil", "cats", "vision")
    site.people = [portals, ada]

    def first(user: str = "", **partition: Any) -> str:
        found = next(trial._candidates(site, PartitionInfo(name="gpu", **partition), user), None)
        return found.slurm_user if found else ""

    assert first() == "ada", "others before our own, so that sharing is tried"
    assert first(denied_accounts=("vision",)) == ""
    assert first(allowed_accounts=("speech",)) == ""
    site.fake.answers["/associations"] = httpx.Response(200, json={"associations": []})
    del site.accounts
    assert first() == "", "whom the accounts do not know"


def test_our_errors_become_a_detail_and_a_remedy() -> None:
    found = from_exception("x", SchedulerError("It is away: no answer. Start it, and wait."))
    assert (found.detail, found.remedy) == ("It is away: no answer.", "Start it, and wait.")
    assert from_exception("x", OSError()).remedy
