"""Test comparing two federations at equal rounds and at equal bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from jobs.models import Job
from portal.models import Project, User
from tests.jobs.federation.federations import a_federation, ingest, split
from tests.jobs.pages.reading import text
from tests.jobs.reporting import Spooled
from tests.lab import a_job, a_project, person

pytestmark = pytest.mark.django_db


def federation(
    mira: User, project: Project, name: str, *, rounds: int, gain: float, mib: float, what: str = "accuracy",
    state: str = "completed", **run: Any,
) -> Job:  # fmt: skip
    """Create a federation that gains and sends equally much in each round, with a separate learning rate."""
    learning_rate = {} if "seed" in run else {"learning_rate": round(gain + mib / 1000, 6)}
    job = a_federation(mira, project, name=name, state=state, run={"rounds": rounds, **learning_rate, **run})
    stream = Spooled()
    for number in range(1, rounds + 1):
        value = gain * number
        stream.log(number, **{what: value}, mib_up=mib, mib_down=mib, round_seconds=2.0)
    ingest(job, stream)
    return job


def test_who_is_ahead_depends_on_what_is_equal(client: Client, mira: User, project: Project) -> None:
    greedy = federation(mira, project, "greedy", rounds=20, gain=0.04, mib=10.0)
    thrifty = federation(mira, project, "thrifty", rounds=30, gain=0.03, mib=1.0)
    html = text(client.get(f"/jobs/compare?job={greedy.pk}&job={thrifty.pk}"))
    assert f"After 20 rounds, #{greedy.pk} greedy is ahead: accuracy 0.800 vs. 0.600." in html
    assert f"For the same 62.9 MB on the wire, #{thrifty.pk} thrifty is ahead: accuracy 0.900 vs. 0.120." in html
    equal_rounds, equal_bytes = html.split("At equal bytes</h2>")
    assert "419 MB" in equal_rounds
    assert '<td class="num">3</td><td class="num">0.120</td><td class="num">62.9 MB</td>' in equal_bytes
    assert '<td class="num">30</td><td class="num">0.900</td><td class="num">62.9 MB</td>' in equal_bytes
    assert html.count("<polyline class=") == 4


def test_a_run_that_went_on_for_long_presses_the_other_not_flat(client: Client, mira: User, project: Project) -> None:
    short = federation(mira, project, "short", rounds=10, gain=0.05, mib=1.0)
    long = federation(mira, project, "long", rounds=1000, gain=0.0005, mib=1.0)
    html = text(client.get(f"/jobs/compare?job={short.pk}&job={long.pk}"))
    assert "<span>round 40</span>" in html
    assert 'x1="250.0"' in html
    (ends, *_) = [points.split()[-1] for points in re.findall(r'<polyline class="s2" points="([^"]+)"', html)]
    assert ends.startswith("1000.0,")


def test_of_losses_the_lower_is_ahead(client: Client, mira: User, project: Project) -> None:
    first = federation(mira, project, "one", rounds=5, gain=0.1, mib=1.0, what="loss")
    second = federation(mira, project, "two", rounds=5, gain=0.2, mib=1.0, what="loss")
    assert f"#{first.pk} one is ahead: loss 0.500 vs. 1.000." in text(
        client.get(f"/jobs/compare?job={first.pk}&job={second.pk}")
    )


def test_of_different_data_none_is_ahead(client: Client, mira: User, project: Project) -> None:
    def lead(**run: Any) -> str:
        other = federation(mira, project, "other", rounds=5, gain=0.2, mib=1.0, what="loss", **run)
        return text(client.get(f"/jobs/compare?job={item.pk}&job={other.pk}"))

    item = federation(mira, project, "one", rounds=5, gain=0.1, mib=1.0, what="loss")
    html = lead(clients=20)
    assert "Trained on different data (clients 10 vs. 20): losses cannot be compared." in html
    assert "ahead" not in html
    others: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "language"}, "recipe tabular vs. language"),
        ({"tabular": {"source": "breast_cancer"}}, "tabular.source digits vs. breast_cancer"),
        ({"tabular": {"held_out": 3}}, "tabular.held_out 6 vs. 3"),
        ({"split": "iid", "dirichlet": None}, "split dirichlet vs. iid"),
        ({"dirichlet": {"alpha": 3.0}}, "dirichlet.alpha 0.3 vs. 3.0"),
    ]
    for run, message in others:
        assert f"different data ({message})" in lead(**run)
    assert "is ahead" in lead(tabular={"hidden": 8}), "its model is another"


def test_the_comparison_is_so_far_while_a_run_goes_on(client: Client, mira: User, project: Project) -> None:
    first = federation(mira, project, "one", rounds=5, gain=0.1, mib=1.0)
    second = federation(mira, project, "two", rounds=4, gain=0.2, mib=1.0, state="running")
    html = text(client.get(f"/jobs/compare?job={first.pk}&job={second.pk}"))
    assert f"After 4 rounds so far, #{second.pk} two is ahead: accuracy 0.800 vs. 0.400." in html


def test_a_difference_within_what_seeds_make_is_none(client: Client, mira: User, project: Project) -> None:
    """An accuracy of a half from 50 samples is sure to 0.14; a difference of two such, to two deviations, to 0.2."""

    def found(gain: float) -> str:
        second = federation(mira, project, "two", rounds=5, gain=gain, mib=1.0, learning_rate=0.2)
        report: dict[str, Any] = split([[25, 0]] * 10)[0]
        for job in (first, second):  # a fifth as many are held out
            ingest(job, Spooled(uid="ab" * 8).add_event("clients.split", **report))
        return text(client.get(f"/jobs/compare?job={first.pk}&job={second.pk}"))

    first = federation(mira, project, "one", rounds=5, gain=0.1, mib=1.0)
    html = found(0.13)
    assert "no difference: accuracy 0.500 vs. 0.650, within the variation between seeds, ± 0.198." in html
    assert "ahead" not in html
    assert "two is ahead: accuracy 0.750 vs. 0.500." in found(0.15)


def test_two_seeds_of_the_same_configuration_are_not_ranked(client: Client, mira: User, project: Project) -> None:
    """However far apart they are, the difference is due to the seed."""
    first = federation(mira, project, "one", rounds=5, gain=0.1, mib=1.0, seed=1)
    second = federation(mira, project, "two", rounds=5, gain=0.19, mib=1.0, seed=2)
    html = text(client.get(f"/jobs/compare?job={first.pk}&job={second.pk}"))
    assert "no difference: accuracy 0.500 vs. 0.950, the same setup with two seeds." in html
    assert "ahead" not in html


def test_losses_that_scatter_as_much_as_they_differ_are_not_ranked(
    client: Client, mira: User, project: Project
) -> None:
    def scattering(name: str, by: float) -> Job:
        job = a_federation(mira, project, name=name, state="completed", run={"rounds": 10, "batch": int(100 * by)})
        stream = Spooled()
        for number in range(1, 11):
            stream.log(number, loss=by + 0.02 * (-1) ** number, mib_up=1.0, mib_down=1.0)
        ingest(job, stream)
        return job

    item, near, far = scattering("one", 0.5), scattering("near", 0.52), scattering("far", 0.7)
    assert "no difference: loss 0.520 vs. 0.540" in text(client.get(f"/jobs/compare?job={item.pk}&job={near.pk}"))
    html = text(client.get(f"/jobs/compare?job={item.pk}&job={far.pk}"))
    assert f"#{item.pk} one is ahead: loss 0.520 vs. 0.720." in html


def test_a_long_run_is_compared_by_its_stretches(client: Client, mira: User, project: Project) -> None:
    long = federation(mira, project, "long", rounds=3000, gain=0.0001, mib=1.0)
    short = federation(mira, project, "short", rounds=100, gain=0.001, mib=1.0)
    html = text(client.get(f"/jobs/compare?job={long.pk}&job={short.pk}"))
    assert f"After 100 rounds, #{short.pk} short is ahead: accuracy 0.100 vs. 0.0" in html


def test_there_is_nothing_to_compare_without_two(client: Client, mira: User, project: Project) -> None:
    assert "You can see fewer than two federated jobs" in text(client.get("/jobs/compare"))
    item = federation(mira, project, "one", rounds=2, gain=0.1, mib=1.0)
    new = a_federation(mira, project, state="pending")
    assert "Select jobs to compare" in text(client.get(f"/jobs/compare?job={item.pk}"))
    assert "Select jobs to compare" in text(client.get(f"/jobs/compare?job={item.pk}&job={item.pk}"))
    assert "Nothing to compare yet" in text(client.get(f"/jobs/compare?job={item.pk}&job={new.pk}"))
    assert client.get("/jobs/compare?job=x&job=&job=9").status_code == 200
    assert f'/jobs/compare?job={item.pk}">Compare…' in text(client.get(f"/jobs/{item.pk}"))


def test_strangers_jobs_and_other_kinds_are_not_there(client: Client, mira: User, project: Project) -> None:
    elsewhere = a_project("elsewhere")
    hidden = a_federation(person("noor", elsewhere), elsewhere, name="secret")
    assert client.get(f"/jobs/compare?job={hidden.pk}").status_code == 404
    assert client.get(f"/jobs/compare?job={a_job(mira, project).pk}").status_code == 404
    assert "secret" not in text(client.get("/jobs/compare"))


def test_bytes_that_are_too_few_for_a_round_are_named(client: Client, mira: User, project: Project) -> None:
    small = federation(mira, project, "small", rounds=4, gain=0.1, mib=0.001)
    large = federation(mira, project, "large", rounds=4, gain=0.1, mib=100.0)
    html = text(client.get(f"/jobs/compare?job={small.pk}&job={large.pk}"))
    assert "After 4 rounds, no difference: accuracy 0.400." in html
    assert f"#{small.pk} small is ahead: #{large.pk} large had not been measured yet." in html
