"""Test the `vigil` command: where it finds the portal, what it prints, its exit codes."""

# ruff: noqa: F811 (fixtures that are imported)
import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.jobs.submissions import ENTRIES, text_of
from tests.repositories import git, write
from tests.vigil_cli.commands import JOB, nowhere, portal, problem, vigil  # noqa: F401
from vigil_cli import portal as client
from vigil_cli import watch

DONE = {**JOB, "state": "completed", "over": True, "progress": {**JOB["progress"], "step": 200, "fraction": 1.0}}


# Finding the portal


def test_an_unreadable_file_of_the_portal_s_user_does_not_hide_ours(tmp_path, monkeypatch):
    """`vigil` on a login node may be next to the portal's home, which only its user can read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config" / "vigil").mkdir(parents=True)
    (tmp_path / "config" / "vigil" / "cli.toml").write_text('url = "http://ours"\ntoken = "mine"\n')
    read = Path.read_text

    def refused(path, *options):
        if path.is_relative_to(tmp_path / "home"):
            raise PermissionError(13, "Permission denied")
        return read(path, *options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert client.find_portal().url == "http://ours"
    (tmp_path / "config" / "vigil" / "cli.toml").unlink()
    with pytest.raises(client.CliError, match="belongs to somebody else"):
        client.find_portal()


def test_without_a_portal_it_explains_how_to_get_one():
    assert "VIGIL_URL" in vigil("jobs", status=1).stderr


def test_where_it_searches_for_the_portal(tmp_path, monkeypatch):
    def write(path: Path, url: str) -> None:
        path.parent.mkdir(parents=True)
        path.write_text(f'url = "{url}"\ntoken = "t"\n')

    write(tmp_path / "config" / "vigil" / "cli.toml", "http://config")
    assert client.find_portal().url == "http://config"
    write(tmp_path / "home" / "cli.toml", "http://home/")
    assert client.find_portal().url == "http://home"
    monkeypatch.setenv("VIGIL_URL", "http://config")
    assert client.find_portal().url == "http://config", "the token of that portal, not the first one's"
    monkeypatch.setenv("VIGIL_URL", "http://elsewhere")
    with pytest.raises(client.CliError, match="No token for http://elsewhere"):
        client.find_portal()
    monkeypatch.setenv("VIGIL_TOKEN", "mine")
    assert client.find_portal() == client.Portal("http://elsewhere", "mine")
    assert "mine" not in repr(client.find_portal())


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cli.toml").write_text("url = ")
    assert "cli.toml" in vigil("jobs", status=1).stderr


# Submitting


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "wren"\n[run]\nsteps = 200  # enough\n')
    return path


def test_submit_sends_the_text_with_a_key(portal, spec):
    portal.answers["POST", "jobs"] = JOB
    assert vigil("submit", str(spec)).stdout == "Submitted #7 wren: http://portal/jobs/7\n"
    assert json.loads(portal.asked[0].content) == {"spec_toml": spec.read_text()}
    assert len(portal.asked[0].headers["Idempotency-Key"]) == 36
    assert json.loads(vigil("submit", str(spec), "--json", "--key", "mine").stdout) == JOB
    assert portal.asked[1].headers["Idempotency-Key"] == "mine"


def test_submit_retries_with_the_same_key_when_the_portal_was_away(portal, spec):
    portal.answers["POST", "jobs"] = [httpx.ReadError("gone"), problem(503, "busy"), JOB]
    vigil("submit", str(spec))
    assert len({request.headers["Idempotency-Key"] for request in portal.asked}) == 1
    assert len(portal.asked) == 3


def test_set_changes_values_and_keeps_the_rest(portal, spec):
    portal.answers["POST", "jobs"] = JOB
    changes = ("run.steps=400", "run.recipe=vision", 'tags=["a"]', "resources.time_limit=00:10:00")
    vigil("submit", str(spec), *(part for change in changes for part in ("--set", change)), "--name", "other")
    text = json.loads(portal.asked[0].content)["spec_toml"]
    assert "steps = 400  # enough" in text
    for line in ('name = "other"', 'recipe = "vision"', 'tags = ["a"]', 'time_limit = "00:10:00"'):
        assert line in text


def test_each_wrong_field_has_a_line(portal, spec):
    errors = (("run.stepps", "Unknown. Did you mean steps?"), ("", "This is not TOML."))
    portal.answers["POST", "jobs"] = problem(422, "wrong", *errors)
    answer = vigil("submit", str(spec), status=1)
    assert answer.stderr == "vigil: run.stepps: Unknown. Did you mean steps?\nvigil: This is not TOML.\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit"], ["submit", "/nowhere.toml"], ["submit", "SPEC", "--set", "steps"], ["jobs", "--limit", "0"],
        ["job", "seven"], ["job", "0"], ["metrics", "7", "--csv", "--json"], ["fly"], ["node"],
        ["metrics", "7", "--csv", "--series", "a", "--series", "b"],
    ],
)  # fmt: skip
def test_wrong_usage_is_2(portal, spec, arguments):
    vigil(*(str(spec) if a == "SPEC" else a for a in arguments), status=2)
    assert not portal.asked


@pytest.mark.parametrize(("table", "entry"), ENTRIES.items())
def test_submit_packs_the_folder_of_the_spec(portal, tmp_path, table, entry):
    code = write(tmp_path / "code", {entry: "1", "lib/a.py": "2"})
    portal.answers["POST", "jobs"] = JOB
    spec = write(code, {"job.toml": text_of(table)}) / "job.toml"
    vigil("submit", str(spec))
    assert portal.asked[0].headers["Content-Type"].startswith("multipart/form-data")
    assert b"code.tar.gz" in portal.asked[0].content
    git(code, "init", "-q")
    git(code, "add", "lib")
    assert f"git add {entry}" in vigil("submit", str(spec), status=1).stderr
    git(code, "add", entry)
    assert b"code.tar.gz" in vigil_sends(portal, spec)


def test_submit_names_each_file_that_would_not_be_sent(portal, tmp_path):
    code = write(tmp_path, {"client.py": "1", "algorithm.py": "2", "lib.py": "3"})
    sweep = f'{text_of("client")}[run]\nrecipe = "client"\n[sweep.over]\n"run.algorithm" = ["fedavg", "own"]\n'
    spec = write(code, {"job.toml": sweep}) / "job.toml"
    git(code, "init", "-q")
    git(code, "add", "lib.py")
    output = vigil("submit", str(spec), status=1).stderr
    assert "git does not track algorithm.py client.py, so they would not be sent" in output
    assert not portal.asked


def test_code_from_git_is_not_packed(portal, tmp_path):
    portal.answers["POST", "jobs"] = JOB
    spec = write(tmp_path, {"job.toml": text_of("client", git="https://x.org/y", ref="v1")}) / "job.toml"
    assert b"code.tar.gz" not in vigil_sends(portal, spec)


def vigil_sends(portal, spec):
    vigil("submit", str(spec))
    return portal.asked[-1].content


def test_check_fails_only_on_errors(portal, spec):
    findings = [{"level": "warn", "title": "Long", "text": "12 hours."}]
    portal.answers["POST", "jobs/check"] = {"findings": findings}
    assert "12 hours." in vigil("submit", str(spec), "--check").stdout
    portal.answers["POST", "jobs/check"] = {"findings": [{**findings[0], "level": "error"}]}
    vigil("submit", str(spec), "--check", status=1)


def test_watch_prints_json_lines_and_the_job_last(portal, spec, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    portal.answers["POST", "jobs"] = JOB
    portal.answers["GET", "jobs/7"] = [
        JOB,
        JOB,
        httpx.ConnectError("restarting"),
        httpx.ConnectError("restarting"),
        DONE,
    ]
    answer = vigil("submit", str(spec), "--watch", "--json")
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [line.get("type") for line in lines] == ["progress", "progress", None]
    assert lines[-1] == DONE
    assert (lines[0]["step"], lines[0]["latest"]) == (50, {"loss": 2.25})
    assert "loss 2.250" in answer.stderr
    assert "\r" not in answer.stderr, "nothing is redrawn where nobody looks"


def test_watch_fails_with_the_job(portal, spec):
    portal.answers["POST", "jobs"] = JOB
    portal.answers["GET", "jobs/7"] = {**DONE, "state": "out_of_memory", "reason": "rank 3"}
    assert "out of memory" in vigil("submit", str(spec), "--watch", status=1).stderr


def test_watch_stops_when_the_job_is_gone(portal, spec):
    portal.answers["POST", "jobs"] = JOB
    portal.answers["GET", "jobs/7"] = problem(404, "There is no job 7 that you can see.")
    assert "no job 7" in vigil("submit", str(spec), "--watch", status=1).stderr


def test_on_a_terminal_one_line_is_redrawn():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = watch.Screen(Terminal())
    screen.show(JOB)
    screen.show(JOB)
    screen.show(DONE)
    text = screen.out.getvalue()
    assert text.count("\r\x1b[2K") == 2
    assert "████░░░░░░░░░░░░ running" in text
    assert "1 min 15 s left" in text
    assert "\n" not in text


# Reading


def test_jobs(portal):
    portal.answers["GET", "jobs"] = [
        {"items": [JOB], "next": "c"},
        {"items": [{**JOB, "id": 6, "latest": {}}], "next": None},
    ]
    lines = vigil("jobs", "--state", "alive", "--state", "failed", "-q", "wren").stdout.splitlines()
    assert len(lines) == 3
    assert "50/200" in lines[1]
    assert "2.250" in lines[1]
    params = portal.asked[0].url.params
    assert params.get_list("state") == ["alive", "failed"]
    assert portal.asked[1].url.params["cursor"] == "c"
    portal.answers["GET", "jobs"] = {"items": [], "next": None}
    assert "vigil submit" in vigil("jobs").stdout
    assert vigil("jobs", "--state", "bad").stdout.startswith("No matching jobs.")
    assert json.loads(vigil("jobs", "--json").stdout) == {"items": []}


def test_job_and_tokens(portal):
    portal.answers["GET", "jobs/7"] = JOB
    assert "default, submitted by mira" in vigil("job", "7").stdout
    portal.answers["GET", "tokens"] = {"items": []}
    assert "/me/" in vigil("tokens").stdout


def test_kill(portal):
    portal.answers["POST", "jobs/7/kill"] = JOB
    assert "No last checkpoint" in vigil("kill", "7").stdout
    assert "No last checkpoint" in vigil("cancel", "7", "--now").stdout
    attempt = {**JOB["attempt"], "kill_requested_at": "2026-01-31T12:00:00Z"}
    portal.answers["POST", "jobs/7/cancel"] = {**JOB, "attempt": attempt}
    assert "is now killed" in vigil("cancel", "7").stdout


def test_cancel_and_resume(portal):
    portal.answers["POST", "jobs/7/cancel"] = JOB
    assert "#7" in vigil("cancel", "7").stdout
    portal.answers["POST", "jobs/7/cancel"] = problem(409, "Not cancelled. #7 has already ended: failed.")
    assert vigil("cancel", "7", status=1).stderr == "vigil: Not cancelled. #7 has already ended: failed.\n"
    portal.answers["POST", "jobs/7/resume"] = {"number": 2}
    assert vigil("resume", "7", "--step", "100").stdout == "Resumed #7 as attempt 2.\n"
    assert json.loads(portal.asked[-1].content) == {"step": 100}


def test_environment(portal):
    report = dict.fromkeys(("node", "os", "executable", "torch", "torch_for", "driver", "cuda", "git", "ref"), "")
    report |= dict.fromkeys(("commit", "digest", "vigil", "vigil_commit", "config_hash", "cpu"), "")
    report |= {"attempt": 2, "captured_at": None, "python": "3.11.7", "kernel": "Linux 6.8", "machine": "x86_64"}
    report |= {"cpus": 16, "memory_gib": None, "gpus": [{"name": "H100"}] * 2, "dirty": False, "variables": ["A"]}
    report |= {"packages": {"numpy": "2.4"}, "packages_left_out": 0, "since": 1}
    report["changes"] = [{"what": "driver", "before": "570", "after": "575"}, {"what": "x", "before": "1", "after": ""}]
    portal.answers["GET", "jobs/7"] = {**JOB, "attempt": {"number": 2}}
    portal.answers["GET", "jobs/7/attempts/2/environment"] = report
    lines = vigil("environment", "7").stdout.splitlines()
    assert lines == vigil("environment", "7", "--attempt", "2").stdout.splitlines()
    assert "cpu        16 × x86_64" in lines
    assert "gpus       2 × H100" in lines
    assert lines[-5:] == ["Changed since attempt 1:", "  driver  570 → 575", "  x  1 → none", "", "numpy==2.4"]
    assert json.loads(vigil("environment", "7", "--json").stdout) == report


def test_spec_gives_back_what_was_submitted(portal, tmp_path):
    text = 'name = "wren"  # ours\n'
    portal.answers["GET", "jobs/7/spec"] = {"spec": {}, "spec_toml": text, "parent": None}
    assert vigil("spec", "7").stdout == text
    assert "pinned" not in portal.asked[-1].url.params
    assert vigil("spec", "7", "--pinned").stdout == text
    assert portal.asked[-1].url.params["pinned"] == "true"
    again = tmp_path / "again.toml"
    again.write_text(vigil("spec", "7").stdout)
    portal.answers["POST", "jobs"] = JOB
    vigil("submit", str(again))
    assert json.loads(portal.asked[-1].content) == {"spec_toml": text}


def log_page(lines: list[str], start: int, size: int, attempt: int = 1) -> dict:
    end = start + sum(len(line) + 1 for line in lines)
    items = [{"offset": start, "text": line} for line in lines]
    more = str(end) if end < size else None
    return {"items": items, "start": start, "end": end, "size": size, "attempt": attempt, "next": more}


def test_logs_and_following_them_over_a_restart(portal, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    again = {**JOB, "attempt": {**JOB["attempt"], "number": 2}}
    portal.answers["GET", "jobs/7"] = [JOB, again, {**again, "over": True}]
    portal.answers["GET", "jobs/7/logs"] = [
        log_page(["a"], 0, 2),
        log_page(["b"], 2, 4),
        problem(404, "Attempt 2 has not started: there is no log yet."),
        log_page(["c", "d"], 0, 4, attempt=2),
    ]
    assert vigil("logs", "7", "-f").stdout == "a\nb\nc\nd\n"
    assert [r.url.params.get("after") for r in portal.asked if r.url.path.endswith("logs")] == [None, "2", "0", "0"]
    portal.answers["GET", "jobs/7/logs"] = log_page(["a"], 0, 2)
    assert json.loads(vigil("logs", "7", "--json").stdout) == {"offset": 0, "text": "a"}
    portal.answers["GET", "jobs/7/logs"] = problem(404, "Rank 3 has not written a log in attempt 1 yet.")
    assert "Rank 3" in vigil("logs", "7", "--rank", "3", status=1).stderr


def test_metrics(portal):
    portal.answers["GET", "jobs/7/series/names"] = {"items": ["loss"]}
    thinned = {"name": "loss", "step": [1, 1001], "mean": [3.0, 2.5], "gaps": [], "count": 2000, "last_step": 2000}
    end = {"name": "loss", "step": [2000], "value": [2.25], "gaps": [], "count": 1, "last_step": 2000}
    portal.answers["GET", "jobs/7/series"] = [{"items": [thinned]}, {"items": [end]}]
    portal.answers["GET", "jobs/7"] = {**JOB, "kind": "federated"}
    head, line = vigil("metrics", "7").stdout.splitlines()
    assert head.split() == ["SERIES", "NEWEST", "ROUNDS", "POINTS"]
    assert line.split() == ["loss", "2.250", "1–2,000", "2,000"]
    assert (portal.asked[-2].url.params["from"], portal.asked[-2].url.params["to"]) == ("2000", "2000")
    portal.answers["GET", "jobs/7/series"] = {"items": [thinned]}
    assert json.loads(vigil("metrics", "7", "--json").stdout)["items"][0]["step"] == [1, 1001]
    text = "attempt,incarnation,rank,step,time,value\n1,0,0,1,1000.0,3.0\n"
    portal.answers["GET", "jobs/7/series.csv"] = httpx.Response(200, text=text)
    assert vigil("metrics", "7", "--csv", "--series", "loss").stdout == text


def test_metrics_of_each_life(portal):
    portal.answers["GET", "jobs/7/series/names"] = {"items": ["loss"]}
    first = {"name": "loss", "attempt": 1, "incarnation": 0, "gaps": [], "count": 3, "last_step": 3, "step": [1, 2, 3]}
    second = {**first, "incarnation": 1, "count": 2, "last_step": 9, "step": [3, 9]}
    ends = [{**first, "step": [3], "value": [2.5]}, {**second, "step": [3], "value": [2.0]}]
    last = {**second, "step": [9], "value": [None], "gaps": [[9, 9, "NaN"]]}
    portal.answers["GET", "jobs/7/series"] = [{"items": [first, second]}, {"items": ends}, {"items": [last]}]
    portal.answers["GET", "jobs/7"] = JOB
    lines = vigil("metrics", "7", "--all").stdout.splitlines()
    assert lines[1].split() == ["loss", "2.500", "1–3", "3", "1", "0"]
    assert lines[2].split() == ["loss", "NaN", "3–9", "2", "1", "1"]


def test_metrics_that_are_not_there(portal):
    portal.answers["GET", "jobs/7/series/names"] = {"items": ["loss", "step_seconds"]}
    output = vigil("metrics", "7", "--series", "los", status=1).stderr
    assert output == "vigil: #7 has no series los. Did you mean loss? It has loss, step_seconds.\n"
    for way in ([], ["--csv"], ["--json"]):
        assert "It has loss, step_seconds." in vigil("metrics", "7", "--series", "nope", *way, status=1).stderr
    empty = {"name": "loss", "step": [], "value": [], "gaps": [], "count": 0, "last_step": None}
    portal.answers["GET", "jobs/7/series"] = {"items": [empty]}
    assert "Rank 9 of #7" in vigil("metrics", "7", "--rank", "9", status=1).stderr
    portal.answers["GET", "jobs/7/series/names"] = {"items": []}
    portal.answers["GET", "jobs/7"] = JOB
    assert vigil("metrics", "7").stdout == "No metrics yet.\n"


# Start-up


def test_help_comes_at_once_and_imports_nothing_heavy():
    def spent() -> float:
        """CPU seconds of children: a busy machine changes nothing."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        before = spent()
        subprocess.run([sys.executable, "-m", "vigil_cli.main", "--help"], check=True, capture_output=True)
        times.append(spent() - before)
    assert min(times) < 0.2
    code = "import sys, vigil_cli.main; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"django", "celery", "channels", "torch", "pydantic", "httpx", "numpy"} & set(loaded)
