"""Test that what the documents name exists: files and folders, modules, make targets, and link targets."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from jobs.spec import JobSpec
from vigil_cli.main import main as vigil

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path.relative_to(REPOSITORY).as_posix()
    for path in (
        *(REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted(REPOSITORY.glob("docs/**/*.md")),
    )
]
FEDERATED = ("docs/reference/federated.md", "docs/how-to/federated-code.md")
ELSEWHERE = re.compile(
    r"portal/\w+\.(toml|json|sh)|docker/secrets/|jobs/check|\.ci/fully-tested|nodes\.(lost|joined)|portal\.health"
)
"""What looks like ours and is not in the repository: files of a run directory or a site, an address, events, a kind of
notice."""
WITHOUT_REFERENCES = ("tests/test_docs.py", "tests/additions/failures.py", "tests/additions/site.py")
"""Files in which a document's path is no reference: they have documents that are added to a copy of the tree."""


@cache
def _tracked() -> frozenset[str]:
    """The files of the repository, with those not added yet, and its folders with a slash at the end."""
    requests = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(requests, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return frozenset(files) | {f"{folder}/" for file in files for folder in Path(file).parents if folder.name}


def _text(document: str) -> str:
    return (REPOSITORY / document).read_text(encoding="utf-8")


def _quoted(document: str) -> set[str]:
    """Yield the texts between backticks; `cli/{main,drain}.py` counts as the two names that it abbreviates."""
    names: set[str] = set()
    for quoted in re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```", "", _text(document))):
        parts = re.split(r"\{([^}]*)\}", quoted)
        choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
        names |= {"".join(words) for words in product(*choices)}
    return {name for name in names if not ELSEWHERE.fullmatch(name)}


def _is_there(path: str) -> bool:
    return path in _tracked() or f"{path.rstrip('/')}/" in _tracked()


def _is_a_module(name: str) -> bool:
    """A module or package of ours, or what one of them defines."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end])
        if file := next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in _tracked()), None):
            defined = rf"(?m)^\s*(async )?(def|class) {parts[-1]}\b|^{parts[-1]}\b"
            return end == len(parts) or re.search(defined, _text(file)) is not None
    return False


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_folders_that_it_names_are_there(document: str) -> None:
    rooms = {path.split("/")[0] for path in _tracked() if "/" in path}
    named = {name for name in _quoted(document) if re.fullmatch(r"[\w.-]+/[\w./-]*", name)}
    assert {name for name in named if name.split("/")[0] in rooms and not _is_there(name)} == set()


def test_files_that_contributors_are_pointed_to_exist() -> None:
    """Told in short, inside the table of the package that they are in: `views/`, `trainer.py`."""
    named = {name for name in _quoted("CONTRIBUTING.md") if re.fullmatch(r"[\w./-]+(/|\.py)", name)}
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in _tracked())} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_targets_that_it_names_are_there(document: str) -> None:
    named = {name.split("(")[0] for name in _quoted(document)}
    ours = {name for name in named if re.fullmatch(r"(portal|jobs|nodes|training|tests|bench)(\.\w+)+", name)}
    assert {name for name in ours if not _is_a_module(name)} == set()
    started = set(re.findall(r"python3? -m ((?:portal|training|tests|bench)[\w.]*)", _text(document)))
    assert {name for name in started if not _is_a_module(name)} == set()
    targets = set(re.findall(r"(?m)^([a-z-]+):", _text("Makefile")))
    assert set(re.findall(r"(?m)(?:^ *|`)make ([a-z-]+)", _text(document))) <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_places_that_its_links_lead_to_are_there(document: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _text(document)):
        file, _, heading = link.partition("#")
        if ":" in file:
            continue
        path = (REPOSITORY / document).parent / file if file else REPOSITORY / document
        assert path.exists(), link
        if heading:
            titles = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_lines_have_at_most_120_characters(document: str) -> None:
    lines = enumerate(_text(document).splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120] == []


def test_commands_of_tutorials_exist() -> None:
    """Look up each `vigil COMMAND` of a tutorial, and each example file that it names."""
    for tutorial in sorted(REPOSITORY.glob("docs/tutorials/*.md")):
        text = tutorial.read_text(encoding="utf-8")
        commands = set(re.findall(r"(?m)^(?:\.venv/bin/)?vigil ([a-z-]+)", text))
        assert commands <= set(vigil.commands), tutorial.name
        assert all(_is_there(path) for path in re.findall(r"examples/[\w./-]+\w", text)), tutorial.name


@pytest.mark.parametrize("table", ["RunConfig", "FederationConfig", "Resources", "Environment", "Script", "ClientCode"])
def test_keys_of_the_job_specification_are_documented(table: str) -> None:
    page = _text("docs/reference/jobspec.md")
    keys = set(JobSpec.model_json_schema()["$defs"][table]["properties"]) - {"options"}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_index_and_role_pages_lead_to_every_tutorial() -> None:
    tutorials = {path.name for path in REPOSITORY.glob("docs/tutorials/*.md")}
    roles = "".join(path.read_text(encoding="utf-8") for path in REPOSITORY.glob("docs/roles/*.md"))
    assert {name for name in tutorials if f"(tutorials/{name})" not in _text("docs/README.md")} == set()
    assert {name for name in tutorials if f"tutorials/{name})" not in roles} == set()


def test_documents_that_the_code_refers_to_are_there() -> None:
    """A decision by its number alone, `docs/decisions/0018`."""
    for file in sorted(
        file for file in _tracked() if file.endswith((".py", ".sh", ".html", ".js", ".css", "Makefile"))
    ):
        for path in re.findall(r"\bdocs/[\w./-]*\w", _text(file)) if file not in WITHOUT_REFERENCES else []:
            assert any(there.startswith(path) for there in _tracked()), f"{file}: {path}"


def _blocks(language: str) -> list[str]:
    return [block for name in FEDERATED for block in re.findall(rf"(?ms)^```{language}\n(.*?)^```", _text(name))]


@pytest.mark.parametrize("text", _blocks("toml"), ids=lambda text: text.split('"')[1])
def test_a_federation_in_the_documents_can_be_submitted(text: str) -> None:
    assert JobSpec.parse_toml(text).kind == "federated"


@pytest.mark.parametrize("text", _blocks("python"), ids=lambda text: text.splitlines()[0])
def test_code_in_the_documents_imports_what_it_uses(text: str) -> None:
    exec(compile(text, "docs", "exec"), {})  # noqa: S102
    used = set(re.findall(r"\b(np|nn|torch)\.", text))
    assert used <= set(re.findall(r"(?m)^(?:from \w+ )?import (?:\w+ as )?(\w+)$", text))
