"""Test a sweep's page: values by state and metric, sorted, with the best; and links to it."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs.gathering.sweep_page import sweep_page
from jobs.models import Attempt, Sweep
from jobs.spec import SweepSpec
from jobs.submitting import sweeps
from tests import lab
from tests.jobs.pages import reading
from vigil_cli.tables import sweeps as sweep_tables

TOML = 'name = "rates"\n[run]\nsteps = 20\n[sweep.over]\n"run.learning_rate" = [1e-3, 2e-3]\n"run.seed" = [1, 2]\n'

pytestmark = pytest.mark.django_db


@pytest.fixture
def sweep(mira):
    created, _ = sweeps.submit(mira, SweepSpec.parse_toml(TOML), spec_toml=TOML)
    for index, loss in enumerate((2.5, 2.1, 2.9)):
        rows = Attempt.objects.filter(job__sweep=created, job__sweep_index=index)
        rows.update(state="running", latest={"loss": loss, "learning_rate": 1.0}, step=10 + index)
    return created


def order(text: str) -> list[int]:
    """The jobs in the order in which the table has them, by their place in the sweep."""
    return sorted(range(4), key=lambda n: text.index(f">rates-{n}<"))


def measured(toml: str, mira, losses, **fields) -> Sweep:
    created, _ = sweeps.submit(mira, SweepSpec.parse_toml(toml), spec_toml=toml)
    for index, loss in enumerate(losses):
        rows = Attempt.objects.filter(job__sweep=created, job__sweep_index=index)
        rows.update(latest={"loss": loss}, **{"state": "running", **fields})
    return created


def standing_text(mira, sweep: Sweep) -> str:
    """The sentence on its page, which REST and the command line have, too."""
    client = lab.signed_in(mira)
    answer = client.get(f"/api/v1/sweeps/{sweep.pk}").json()
    text = answer["standing"]["text"]
    assert text in sweep_tables.sweep({**answer, "items": []})
    text = text.replace("\xa0", " ")
    assert text in reading.text(client.get(f"/sweeps/{sweep.pk}"))
    return text


def test_a_sweep_without_seeds_names_the_best_job(mira):
    toml = 'name = "rates"\n[sweep.over]\n"run.learning_rate" = [1e-3, 2e-3]\n'
    created = measured(toml, mira, (2.5, 2.1))
    assert standing_text(mira, created) == "Ahead by the lowest loss: rates-1 with learning_rate 0.002, 2.100."
    assert lab.signed_in(mira).get(f"/sweeps/{created.pk}").content.decode().count("<tr id=") == 2
    assert lab.signed_in(mira).get(f"/api/v1/sweeps/{created.pk}").json()["standing"]["settings"] == []


SEEDS = TOML.replace("[1, 2]", "[1, 2, 3]")


def test_a_sweep_with_seeds_names_the_best_mean_with_its_spread(mira):
    """The winner of all jobs, 1.9, is a lucky seed of the worse setting."""
    created = measured(SEEDS, mira, (2.02, 2.0, 2.01, 2.9, 1.9, 2.9), state="completed", ended_at=timezone.now())
    Attempt.objects.update(decided_at=timezone.now())
    text = standing_text(mira, created)
    assert text == (
        "No significant difference in the lowest mean loss: learning_rate 0.001, 2.010 ± 0.010 over 3 seeds;"
        " learning_rate 0.002, 2.567 ± 0.577 over 3 seeds."
    )
    client = lab.signed_in(mira)
    assert "data-best" not in client.get(f"/sweeps/{created.pk}").content.decode()
    Attempt.objects.filter(job__sweep_index=4).update(latest={"loss": 2.8})
    text = standing_text(mira, created)
    assert text.startswith(
        "Best by the lowest mean loss: learning_rate 0.001, 2.010 ± 0.010 over 3 seeds; next learning"
    )
    page = client.get(f"/sweeps/{created.pk}").content.decode()
    assert page.count(">best mean</span>") == 3
    standing = client.get(f"/api/v1/sweeps/{created.pk}").json()["standing"]
    assert standing["best"] == [job.pk for job in created.jobs.order_by("sweep_index")[:3]]
    first = standing["settings"][0]
    assert (first["values"], first["seeds"], first["spread"]) == ({"run.learning_rate": 0.001}, 3, pytest.approx(0.01))


def test_seeds_that_diverged_or_are_not_measured_are_counted(mira):
    created = measured(SEEDS, mira, (2.02, "NaN", 2.0, 2.9, 2.8))
    assert "learning_rate 0.001, 2.010 ± 0.014 over 2 of 3 seeds" in standing_text(mira, created)
    Attempt.objects.filter(job__sweep_index=4).update(latest={})
    assert standing_text(mira, created).startswith("Only learning_rate 0.001 has been measured with two seeds: loss")
    Attempt.objects.filter(job__sweep_index=0).update(latest={})
    text = standing_text(mira, created)
    assert text == "No setting has been measured with two seeds yet, so none is ahead."


def test_the_table_sorts(mira, sweep):
    client = lab.signed_in(mira)
    text = client.get(f"/sweeps/{sweep.pk}").content.decode()
    assert "data-best" not in text
    assert order(text) == [0, 1, 2, 3]
    for sort, wanted in (
        ("m0", [1, 0, 2, 3]),
        ("-m0", [2, 0, 1, 3]),
        ("-v1", [1, 3, 0, 2]),
        ("nonsense", [0, 1, 2, 3]),
    ):
        assert order(client.get(f"/sweeps/{sweep.pk}", {"sort": sort}).content.decode()) == wanted, sort
    part = client.get(f"/sweeps/{sweep.pk}", headers={"HX-Target": "sweep"}).content.decode()
    assert part.lstrip().startswith('<div id="sweep"')


def test_attempts_of_all_drawn_jobs_are_read_by_one_query(mira, sweep):
    with CaptureQueriesContext(connection) as captured:
        sweep_page(sweep, "", show_all=False)
    assert sum('"jobs_attempt"."number" ASC' in query["sql"] for query in captured) == 1


def test_of_seeds_alone_none_is_best(mira):
    toml = 'name = "seeds"\n[run]\nsteps = 20\n[sweep.over]\n"run.seed" = [1, 2]\n'
    created, _ = sweeps.submit(mira, SweepSpec.parse_toml(toml), spec_toml=toml)
    for index, loss in enumerate((2.5, 2.1)):
        Attempt.objects.filter(job__sweep=created, job__sweep_index=index).update(
            state="running", latest={"loss": loss}
        )
    text = reading.text(lab.signed_in(mira).get(f"/sweeps/{created.pk}"))
    assert "No significant difference: loss 2.100 to 2.500 over 2 seeds." in text
    assert "Ahead" not in text
    assert "data-best" not in text


def test_cancel_by_button_and_who_may(mira, sweep):
    other = lab.signed_in(lab.person("tomas", lab.a_project()))
    assert "Cancel all" not in other.get(f"/sweeps/{sweep.pk}").content.decode()
    other.post(f"/sweeps/{sweep.pk}/cancel")
    assert not Attempt.objects.exclude(cancel_asked_at=None).exists()
    stranger = lab.signed_in(lab.person("eve", lab.a_project("other")))
    assert stranger.get(f"/sweeps/{sweep.pk}").status_code == 404
    assert stranger.post(f"/sweeps/{sweep.pk}/cancel").status_code == 404
    client = lab.signed_in(mira)
    assert "Cancel all" in client.get(f"/sweeps/{sweep.pk}").content.decode()
    assert client.post(f"/sweeps/{sweep.pk}/cancel").status_code == 302
    assert Attempt.objects.exclude(cancel_asked_at=None).count() == 4


def test_lists_and_jobs_lead_to_it(mira, sweep):
    client = lab.signed_in(mira)
    assert f'href="/sweeps/{sweep.pk}"' in client.get("/jobs").content.decode()
    assert f'href="/sweeps/{sweep.pk}"' in client.get(f"/jobs/{sweep.jobs.get(sweep_index=0).pk}").content.decode()
    lab.a_job(mira, lab.a_project(), name="another")
    only = client.get("/jobs", {"sweep": sweep.pk}).content.decode()
    assert "rates-3" in only
    assert "another" not in only


def test_submitted_as_toml_by_the_form(mira):
    client = lab.signed_in(mira)
    wrong = client.post("/submit", {"toml": TOML.replace("[1, 2]", "[1, -2]"), "side": "toml", "do": "submit"})
    assert wrong.status_code == 422
    assert "sweep.over.run.seed" in wrong.content.decode()
    answer = client.post("/submit", {"toml": TOML, "side": "toml", "do": "submit", "key": "k"})
    assert answer.status_code == 302
    assert answer.headers["Location"] == f"/sweeps/{Sweep.objects.get().pk}"
    assert Sweep.objects.get().jobs.count() == 4


def test_the_form_keeps_the_sweep_and_checks_it(mira):
    client = lab.signed_in(mira)
    answer = client.post("/submit/sync", {"toml": TOML, "side": "form", "run.steps": "30"}).content.decode()
    assert "run.learning_rate" in answer
    assert "4" in answer
