"""Test combinations of a sweep without a job, because their draw leaves a client without data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.test import Client

from jobs.errors import SpecError
from jobs.spec import SweepSpec
from jobs.spec.sweep import RefusedPoint
from jobs.submitting import sweeps
from jobs.submitting.dryrun import sweep_run
from portal.models import User
from tests.jobs.pages import reading
from tests.jobs.submitting.sweeping import TEXT, make
from vigil_cli.tables import sweeps as sweep_tables
from vigil_core.formatting import NBSP

pytestmark = pytest.mark.django_db


def test_an_unlucky_draw_refuses_its_job_and_not_the_sweep(oskar: User, client: Client) -> None:
    text = 'name = "tails"\nkind = "federated"\n[run]\nsplit = "longtail"\n[run.longtail]\nimbalance = 10000.0\n'
    text += '[sweep.over]\n"run.clients" = [1490, 20, 10]\n'
    sweep = make(oskar, text)
    jobs = list(sweep.jobs.order_by("sweep_index"))
    assert [(job.name, job.sweep_values) for job in jobs] == [
        ("tails-0", {"run.clients": 20}),
        ("tails-1", {"run.clients": 10}),
    ]
    ((values, why),) = sweep.refused
    assert values == {"run.clients": 1490}
    assert why.startswith('run.split: "longtail" leaves')
    client.force_login(oskar)
    html = reading.text(client.get(f"/sweeps/{sweep.pk}"))
    assert "1 combination has no job." in html
    assert '<td class="num">1490</td><td class="muted">run.split: &quot;longtail&quot; leaves' in html
    (found,) = [
        item for item in sweep_run(oskar, SweepSpec.parse_toml(text)) if item.level == "warn" and item.title == "Sweep"
    ]
    assert "1 of 3 combinations has no job. With run.clients = 1490: run.split:" in found.text.replace(NBSP, " ")
    assert "without a sample" in found.text
    with pytest.raises(SpecError, match="without a sample"):
        SweepSpec.parse_toml(text.replace("1490, 20, 10", "1490, 1491"))


def test_hundreds_of_combinations_without_a_job_are_summed_up(oskar: User, client: Client) -> None:
    """The dry run and the command line name the first few; the page lists them below the jobs, in columns."""
    refused = tuple(
        RefusedPoint(
            values={"run.seed": n, "run.clients": 20}, message=f"run.split: leaves {n + 1} of 20 clients empty."
        )
        for n in range(300)
    )
    spec = replace(SweepSpec.parse_toml(TEXT), refused=refused)
    (found,) = [item for item in sweep_run(oskar, spec) if item.level == "warn" and item.title == "Sweep"]
    text = found.text.replace(NBSP, " ")
    assert text.startswith(
        "300 of 306 combinations have no job. With run.seed = 0, run.clients = 20: run.split: leaves"
    )
    assert text.count("With run.seed") == 1, "the others differ in numbers alone"
    assert text.endswith("The sweep's page lists all 300.")
    sweep, _ = sweeps.submit(oskar, spec, spec_toml=TEXT)
    client.force_login(oskar)
    html = reading.text(client.get(f"/sweeps/{sweep.pk}"))
    assert '<a class="muted" href="#refused">300 combinations have no job.</a>' in html
    section = html[html.index('id="refused"') :]
    assert html.index('<table id="jobs">') < html.index('id="refused"'), "the jobs come first"
    assert (section.count("of 20 clients empty"), "<details open>" in section) == (200, False)
    assert f"The first 200 of 300. All of them: <code>vigil sweep {sweep.pk} --json</code>" in section
    detail = client.get(f"/api/v1/sweeps/{sweep.pk}").json()
    lines = sweep_tables.sweep({**detail, "items": []})
    assert lines[1].replace(NBSP, " ") == "300 combinations without a job:"
    assert lines[2] == "  run.seed = 0, run.clients = 20: run.split: leaves 1 of 20 clients empty."
    assert lines[12] == f"  and 290 more: vigil sweep {sweep.pk} --json"
