"""Names and docstrings come no further from plain English than they are; the aim is written beside each limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.language import measure, sentences
from tests.language.measure import Language, Place

DJANGO = {"Meta", "Command", "Config"}
"""Names that Django looks for."""


@pytest.fixture(scope="module")
def language() -> Language:
    return measure.measure()


def test_names_use_the_nouns_of_the_field(language: Language) -> None:
    worst = measure.worst_files(language.odd_names)
    assert language.dialect_per_1000 <= 5.6, worst  # aim: 5


def test_docstrings_have_a_subject_or_a_verb(language: Language) -> None:
    worst = measure.worst_files(language.fragments)
    assert language.fragments_percent <= 3, worst


def test_classes_have_names_of_their_own(language: Language) -> None:
    repeated = {name: places for name, places in language.repeated_classes.items() if name not in DJANGO}
    assert len(repeated) <= 48, sorted(repeated)  # aim: 20, each with a reason


STORED = {
    "jobs/presenting/headline.py": "an ending of decisions that version 0.1 stored",
}
FORBIDDEN = (
    r"nothing says why", r"[Yy]our move\b", r"time to start has not come", r"others let expect", r"are waited for",
    r"past Vigil", r"somebody's process", r"[Hh]oldings of GPUs", r"[Rr]eadings of the scheduler",
    r"[Dd]rains and undrains", r"for guessing", r"\b(was|were|is|are|been|be) told of\b", r"has told nothing",
    r"the portal's counts", r"[Ss]tarted anew", r"\bread anew\b", r"has written nothing yet", r"Choose two federated",
    r"Extra inputs are not", r"what you are told", r"must expect in that time", r"Takes jobs:",
    r"memory was too small", r"was not a number \(rank", r"its programs pay for", r"one program pays for",
    r"Nothing that it told", r"leave the house", r"lost from the bus",
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
