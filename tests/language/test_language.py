"""Names, docstrings and the sentences that people see are in plain English (CONTRIBUTING, Language)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.language import measure, sentences
from tests.language.measure import Language, Place

REPEATED = {
    "Meta": "Django looks for it in models and forms",
    "Command": "Django looks for it in management commands",
    "State": "choices within a model: Attempt.State, Checkpoint.State",
    "Kind": "choices within a model: Chunk.Kind, Channel.Kind",
    "Problem": "a field's problem in a job specification and in a run's config, and the exception behind a REST error",
    "Action": "choices within a model, and what a person may do with a post-mortem",
    "Incarnation": "the demo simulates the launcher's",
    "Attempt": "the model, and what a launcher on a node knows of it",
    "Client": "the model, and the base class that a site's client.py derives from",
    "Heartbeat": "the model, and what a rank writes",
    "Stream": "the model, and what vigil_report writes; vigil_report imports nothing of ours",
    "RankExit": "an exit as the launcher sees it, and as a diagnosis reads it; diagnosis imports no trainer",
    "ProfileRequest": "the body of a REST call, and the file that a rank reads",
    "Retention": "the REST schema, and the trainer's rule",
    "TrialFinding": "the REST schema, and what a trial returns",
    "Listing": "a job's row of the job list, and a list that a scheduler returns",
    "Scheduler": "the workload manager, and the scheduler of Celery's beat, as Celery calls it",
    "PortalUnreachable": "agents and launchers do not import each other",
    "Linear": "the layer in each of two models, as torch calls it",
    "Block": "a line of an explanation, and the transformer's block as papers call it",
}
"""Class names that are defined in several places, with the reason; any other class has a name of its own."""


@pytest.fixture(scope="module")
def language() -> Language:
    return measure.measure()


def test_names_use_the_nouns_of_the_field(language: Language) -> None:
    worst = "\n".join(map(str, language.odd_names[:20]))
    assert language.dialect_per_1000 <= 5, f"{measure.worst_files(language.odd_names)}\n{worst}"


def test_the_names_of_tests_are_plain_english() -> None:
    tests = measure.measure(["tests"])
    assert tests.dialect_per_1000 <= 5, measure.worst_files(tests.odd_names)
    assert tests.fragments_percent <= 3, "\n".join(map(str, tests.fragments))


def test_docstrings_have_a_subject_or_a_verb(language: Language) -> None:
    worst = "\n".join(map(str, language.fragments[:20]))
    assert language.fragments_percent <= 3, f"{measure.worst_files(language.fragments)}\n{worst}"


def test_classes_have_names_of_their_own(language: Language) -> None:
    repeated = {name: list(map(str, places)) for name, places in language.repeated_classes.items()}
    assert {name: places for name, places in repeated.items() if name not in REPEATED} == {}
    assert len(REPEATED) <= 20
    assert REPEATED.keys() <= repeated.keys(), "take a name that is defined only once off the list"


STORED = {
    "jobs/presenting/postmortems/headline.py": "an ending of decisions that version 0.1 stored",
}
FORBIDDEN = (
    r"nothing says why", r"[Yy]our move\b", r"time to start has not come", r"others let expect", r"are waited for",
    r"past Vigil", r"somebody's process", r"[Hh]oldings of GPUs", r"[Rr]eadings of the scheduler",
    r"[Dd]rains and undrains", r"for guessing", r"\b(was|were|is|are|been|be) told of\b", r"has told nothing",
    r"the portal's counts", r"has written nothing yet", r"Choose two federated",
    r"Extra inputs are not", r"what you are told", r"must expect in that time", r"Takes jobs:",
    r"memory was too small", r"was not a number \(rank", r"its programs pay for", r"one program pays for",
    r"Nothing that it told", r"leave the house", r"lost from the bus", r"\banew\b", r"died of it",
    r"never starts as it is", r"this asks for", r"train apart", r"Who it belongs", r"one each \d", r"keeps most",
    r"(GPUs|[Rr]anks|CPUs|Memory) a (node|rank)\b", r"silenced in training", r"no longer told", r"Done again",
)  # fmt: skip
"""Phrases that people did not understand, as patterns; what to write instead is in CONTRIBUTING, Language."""


def test_nothing_that_people_read_has_a_phrase_that_they_did_not_understand() -> None:
    phrase = re.compile("|".join(FORBIDDEN))
    pages = (path for path in measure.ROOT.glob("docs/**/*.md") if path.parent.name != "decisions")
    documents = [measure.ROOT / "README.md", measure.ROOT / "ARCHITECTURE.md", *pages]
    read = [*sentences.sentences(), *(place for path in documents for place in sentences.of_markdown(path))]
    found = [place for place in read if phrase.search(place.text) and place.file not in STORED]
    assert not found, "\n".join(map(str, found[:20]))


def test_sentences_are_found_wherever_people_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    texts = {
        "jobs/page.py": '"""Not this docstring."""\nimport re\nP = re.compile("no such pattern")\n'
        'S = f"Job {1} has ended."\nQ = "SELECT this FROM that"\nW = "word"\n',
        "templates/page.html": '<p title="A tip to see">The <b>job</b> of {{ job.owner }}{# not this one #}</p>'
        "<script>var not = 'this one'</script>",
        "static/js/page.js": "// not this one\nshow('Connection is lost')\n",
        "diagnosis/catalogue/own.toml": '[[entry]]\npattern = "not this one"\nadvice = "Restart the node."\n',
        "docs/runbooks/checkpoint.corrupt.md": "# What to do\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert set(sentences.sentences([tmp_path])) == {
        Place("jobs/page.py", 4, "Job {…} has ended."),
        Place("templates/page.html", 1, "A tip to see"),
        Place("templates/page.html", 1, "The job of {…}{…}"),
        Place("static/js/page.js", 2, "Connection is lost"),
        Place("diagnosis/catalogue/own.toml", 1, "Restart the node."),
        Place("docs/runbooks/checkpoint.corrupt.md", 1, "# What to do"),
    }
