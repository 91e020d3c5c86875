"""Test the preview of a federation's data split: in the form, over REST and on the command line."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from jobs.presenting.federations.outline import draw
from jobs.spec import write_toml
from portal.models import User
from tests.jobs.federation.federations import spec_of
from tests.jobs.pages.reading import text
from tests.lab import bearer, signed_in
from training.federation.outline import NAMED, DataOutline
from vigil_cli import main as commands
from vigil_cli import outline as pictured

pytestmark = pytest.mark.django_db
SKEWED = {"recipe": "tabular", "dirichlet": {"alpha": 0.3}}
MANY = {
    "recipe": "tabular", "clients": 10_000, "split": "iid", "dirichlet": None,
    "tabular": {"source": "synthetic", "samples": 40_000},
}  # fmt: skip
UNSHIPPED = {"recipe": "language", "split": "column", "clients": 12, "dirichlet": None}


def form(mira: User, **run: Any) -> str:
    """Return the page that the button Check shows."""
    posted = {"side": "toml", "do": "check", "toml": write_toml(spec_of(**run))}
    answer = signed_in(mira).post("/submit", posted)
    assert answer.status_code == 200, text(answer)
    return text(answer)


def checked(mira: User, **run: Any) -> dict[str, Any]:
    answer = bearer(mira).post(
        "/api/v1/jobs/check", {"spec_toml": write_toml(spec_of(**run))}, content_type="application/json"
    )
    assert answer.status_code == 200, answer.content
    return dict(answer.json())


def test_the_form_draws_a_bar_for_each_of_a_few_clients(mira: User) -> None:
    html = form(mira, **SKEWED).split('id="h-split"')[1]
    assert "Training samples by client; colours are labels" in html
    rows = re.findall(
        r'<td class="nowrap">client (\d+) ?</td><td><svg class="stack" role="img" aria-label="([^"]+)"', html
    )
    assert [int(number) for number, _ in rows] == list(range(10))
    split = checked(mira, **SKEWED)["split"]
    result = dict(re.findall(r"(\d+) (\d+)", rows[3][1]))
    assert {int(label): int(count) for label, count in result.items()} == {
        label: count for label, count in enumerate(split["items"][3]["split"]) if count
    }
    assert "2 others</span>" in html, "ten labels in nine colours"


def test_over_rest_it_is_data(mira: User) -> None:
    split = checked(mira, **SKEWED)["split"]
    assert (split["clients"], split["labels"], split["rest"]) == (10, [str(digit) for digit in range(10)], None)
    assert split["samples"] == sum(item["samples"] for item in split["items"]) == 1497
    assert all(item["samples"] == sum(item["split"]) for item in split["items"])
    assert split["spreads"]["commonest_share"]["median"] > 0.3
    assert split["spreads"]["samples"]["max"] == max(item["samples"] for item in split["items"])


def test_ten_thousand_clients_are_summarised_within_a_second(mira: User) -> None:
    checked(mira, **SKEWED)  # imports, once
    began = time.process_time()
    split = checked(mira, **MANY)["split"]
    assert time.process_time() - began < 1.0
    assert (split["clients"], len(split["items"])) == (10_000, NAMED)
    assert split["rest"]["clients"] == 9_000
    assert split["rest"]["samples"] + sum(item["samples"] for item in split["items"]) == split["samples"]
    began = time.process_time()
    html = form(mira, **MANY).split('id="h-split"')[1]
    assert time.process_time() - began < 1.0
    assert "100 of 10,000 clients, the smallest first" in html
    assert len(html) < 40_000
    assert "client 0" not in html


def test_what_is_not_there_yet_is_a_single_sentence(mira: User) -> None:
    found = checked(mira, **UNSHIPPED)
    (message,) = [finding["text"] for finding in found["findings"] if finding["title"] == "Split"]
    assert (
        message
        == '"column" over 12\N{NO-BREAK SPACE}clients: once the data are read, the job\'s page shows how many samples'
        " each client has."
    )
    assert found["split"] is None
    assert "h-split" not in form(mira, **UNSHIPPED)


@pytest.mark.parametrize("clients", [17, 100, 101])
def test_a_band_holds_every_sample_of_those_it_shows(clients: int) -> None:
    counts = np.random.RandomState(7).randint(0, 50, size=(clients, 12))
    names = tuple(f"<owner {number}>" for number in range(clients))
    band = draw(DataOutline(tuple("abcdefghijkl"), counts, names), "said").band
    assert band is not None
    tall = np.zeros(band.columns)
    for _, path in band.paths:
        for column, height in re.findall(r"M(\d+) \d+h1v(\d+)h-1z", path):
            tall[int(column)] += int(height)
    sizes = counts.sum(axis=1)
    shown = sizes if clients <= 100 else np.sort(sizes)[np.linspace(0, clients - 1, 100).astype(int)]
    assert tall == pytest.approx(1000 * shown / sizes.max(), abs=1)
    assert band.first == ("client 0 (<owner 0>)" if clients <= 100 else "the smallest")


def test_the_command_line_draws_it(mira: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    class Portal:
        def post(self, path: str, **sent: Any) -> dict[str, Any]:
            assert path == "jobs/check"
            return found

    monkeypatch.setattr(commands, "find_portal", Portal)
    spec = tmp_path / "spec.toml"
    spec.write_text(write_toml(spec_of(**SKEWED)))
    found |= checked(mira, **SKEWED)
    lines = CliRunner().invoke(commands.main, ["submit", str(spec), "--dry-run"]).output.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("CLIENT"))
    assert len(lines[at + 1 :]) == 10
    first = found["split"]["items"][0]
    assert lines[at + 1].split()[:2] == ["0", str(first["samples"])]
    assert lines[at + 1].endswith("%")
    found |= checked(mira, **MANY)
    lines = CliRunner().invoke(commands.main, ["submit", str(spec), "--check"]).output.splitlines()
    assert len(lines) < 20 + pictured.LINES
    assert " ".join(lines[-1].split()).startswith("… and 9,980 more clients. All clients: 3–4 samples each")


def test_names_and_labels_of_any_length_keep_a_line_a_line() -> None:
    items = [{"number": 0, "name": "x" * 80, "samples": 3, "split": [0, 3]}]
    spread = {"min": 3, "median": 3, "max": 3}
    split = {"clients": 1, "labels": ["a", "y" * 100], "items": items, "spreads": {"samples": spread}}
    assert max(map(len, pictured.lines(split))) < 120
