"""A sweep's page: values by state and metric, sorted, the best told; and the ways to it."""

import pytest

from jobs.models import Attempt, Sweep
from jobs.spec import SweepSpec
from jobs.submitting import sweeps
from tests import lab
from tests.jobs.pages import reading

TOML = 'name = "rates"\n[run]\nsteps = 20\n[sweep.over]\n"run.learning_rate" = [1e-3, 2e-3]\n"run.seed" = [1, 2]\n'

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira():
    return lab.person("mira", lab.a_project())


@pytest.fixture
def sweep(mira):
    made, _ = sweeps.submit(mira, SweepSpec.parse_toml(TOML), spec_toml=TOML)
    for index, loss in enumerate((2.5, 2.1, 2.9)):
        rows = Attempt.objects.filter(job__sweep=made, job__sweep_index=index)
        rows.update(state="running", latest={"loss": loss, "learning_rate": 1.0}, step=10 + index)
    return made


def order(text: str) -> list[int]:
    """The jobs in the order in which the table has them, by their place in the sweep."""
    return sorted(range(4), key=lambda n: text.index(f">rates-{n}<"))


def test_the_best_is_told_and_the_table_sorts(mira, sweep):
    client = lab.signed_in(mira)
    text = client.get(f"/sweeps/{sweep.pk}").content.decode()
    assert "Ahead by the lowest loss:" in text
    assert "with learning_rate 0.001, seed 2, 2.100" in text
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


def test_of_seeds_alone_none_is_best(mira):
    toml = 'name = "seeds"\n[run]\nsteps = 20\n[sweep.over]\n"run.seed" = [1, 2]\n'
    made, _ = sweeps.submit(mira, SweepSpec.parse_toml(toml), spec_toml=toml)
    for index, loss in enumerate((2.5, 2.1)):
        Attempt.objects.filter(job__sweep=made, job__sweep_index=index).update(state="running", latest={"loss": loss})
    text = reading.text(lab.signed_in(mira).get(f"/sweeps/{made.pk}"))
    assert "No difference but chance: loss 2.100 to 2.500 over 2 seeds." in text
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
