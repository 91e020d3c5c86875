"""Test the log pages: which log, which part of it, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import Client

from jobs.models import Job
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.lab import a_job, a_project, person, signed_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def logged(mira: User, project: Project, settings: Any, tmp_path: Path) -> Job:
    """A running job with logs of two ranks in its run directory."""
    settings.VIGIL_RUNS = tmp_path
    job = a_job(mira, project, state="running", directory="default/1-abcdef", attempt={"directory": "attempt-1"})
    folder = tmp_path / "default/1-abcdef/job/attempt-1/logs"
    folder.mkdir(parents=True)
    (folder / "0.0.log").write_text("".join(f"step {i} loss {9 - i / 300:.3f}\n" for i in range(2500)))
    (folder / "0.1.log").write_text("\x1b[31mRuntimeError: <b>shapes</b>\x1b[0m\n")
    return job


def test_logs_show_the_newest_lines_of_rank_0(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs"))
    assert "step 2499 loss" in html
    assert html.count("<li id=") == 400, "older ones on scroll"
    assert "Older lines" in html
    assert '<option value="1">Rank 1</option>' in html


def test_logs_of_another_rank_are_escaped_and_coloured(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs?rank=1"))
    assert '<span class="a-red">RuntimeError: &lt;b&gt;shapes&lt;/b&gt;</span>' in html
    assert 'data-level="error"' in html


def test_logs_are_searched_on_the_server(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs?q=STEP 12"))
    assert "111 lines contain “STEP 12”" in html
    assert "<mark>step 12</mark>" in html


def test_a_search_without_a_hit_explains_how_to_widen_it(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs?rank=1&q=<nowhere>"))
    assert "No line of rank 1 matches “&lt;nowhere&gt;”" in html
    assert 'href="?rank=1">show the whole log</a>' in html
    assert 'id="log"' not in html, "no empty box"
    assert 'name="rank"' in html, "another rank can still be chosen"


def test_a_log_can_be_downloaded(client: Client, logged: Job) -> None:
    html = text(client.get(f"/jobs/{logged.pk}/logs?rank=1&q=shapes"))
    address = f"/jobs/{logged.pk}/logs/download?attempt=1&amp;rank=1"
    assert f'href="{address}"' in html
    answer: Any = client.get(address.replace("&amp;", "&"))
    assert answer.getvalue() == b"\x1b[31mRuntimeError: <b>shapes</b>\x1b[0m\n", "as it was written"
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Disposition"] == f'attachment; filename="job-{logged.pk}.1-rank-1.log"'


def test_a_long_log_comes_in_pieces(client: Client, logged: Job) -> None:
    log = Path(settings.VIGIL_RUNS) / "default/1-abcdef/job/attempt-1/logs/0.0.log"
    log.write_bytes(b"0123456789" * 100_000)
    answer: Any = client.get(f"/jobs/{logged.pk}/logs/download")
    pieces = iter(answer.streaming_content)
    first = next(pieces)
    assert 0 < len(first) < 1_000_000
    with log.open("ab") as file:
        file.write(b"written meanwhile")
    assert first + b"".join(pieces) == b"0123456789" * 100_000


def test_nobody_keeps_the_logs_of_others(client: Client, logged: Job) -> None:
    elsewhere = signed_in(person("oskar", a_project("elsewhere")))
    assert elsewhere.get(f"/jobs/{logged.pk}/logs/download").status_code == 404
    assert Client().get(f"/jobs/{logged.pk}/logs/download").status_code == 302
    assert client.post(f"/jobs/{logged.pk}/logs/download").status_code == 405


@pytest.mark.parametrize(
    "query", ["rank=../../etc/passwd", "rank=0.0.log", "rank=7", "rank=-3", "attempt=99", "incarnation=5", "rank=batch"]
)
def test_a_download_leads_nowhere_else(client: Client, logged: Job, query: str) -> None:
    assert client.get(f"/jobs/{logged.pk}/logs/download?{query}").status_code == 404


def test_a_link_in_place_of_a_log_is_not_downloaded(client: Client, logged: Job, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush")
    log = tmp_path / "default/1-abcdef/job/attempt-1/logs/0.1.log"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    assert client.get(f"/jobs/{logged.pk}/logs/download?rank=1").status_code == 404


def test_lines_come_in_parts_with_cursors(client: Client, logged: Job) -> None:
    newest = client.get(f"/jobs/{logged.pk}/logs/lines?limit=10")
    start, end = newest.headers["X-Log-Start"], newest.headers["X-Log-End"]
    assert newest.text.count("<li") == 10
    older = client.get(f"/jobs/{logged.pk}/logs/lines?limit=10&before={start}")
    assert "step 2489 loss" in older.text
    assert older.headers["X-Log-End"] == start
    assert client.get(f"/jobs/{logged.pk}/logs/lines?after={end}").text.strip() == ""
    log = Path(settings.VIGIL_RUNS) / "default/1-abcdef/job/attempt-1/logs/0.0.log"
    with log.open("a") as file:
        file.write("one more\nhalf a li")
    following = client.get(f"/jobs/{logged.pk}/logs/lines?after={end}")
    assert "one more" in following.text
    assert "half a li" not in following.text, "a line that is still being written waits"


@pytest.mark.parametrize("query", ["rank=../../etc/passwd", "rank=1e9", "attempt=99", "rank=9999999999999"])
def test_log_requests_lead_nowhere_else(client: Client, logged: Job, query: str) -> None:
    assert client.get(f"/jobs/{logged.pk}/logs?{query}").status_code == 404


def test_a_rank_without_a_log_is_explained(client: Client, logged: Job) -> None:
    assert "Rank 7 has not written a log" in text(client.get(f"/jobs/{logged.pk}/logs?rank=7"))
    assert client.get(f"/jobs/{logged.pk}/logs/lines?rank=7").status_code == 204
    tail = text(client.get(f"/jobs/{logged.pk}/logs/lines?tail=3"))
    assert tail.count("<li") == 3
