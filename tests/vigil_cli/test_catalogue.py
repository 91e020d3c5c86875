"""Test `vigil catalogue` with scripted answers of a portal. `check` is tested with the trial."""

import json
import tomllib

import httpx
import pytest

from tests.vigil_cli.commands import portal, problem, vigil  # noqa: F401
from vigil_cli import catalogue

ENTRY = {
    "name": "storage.ours_down",
    "role": "root",
    "cause": "storage.io",
    "source": "our own mounter",
    "pattern": r"ourfs: volume \S+ went away",
    "example": "ourfs: volume a went away",
    "look_alike": "ourfs: volume a came back",
}
WHY = 'a "b" \\ \x7f 💔'
SENT = {**ENTRY, "scope": "program"}
SHOWN = {
    **ENTRY, "unless": "", "exception": "", "frame": "", "during": [], "scope": "program", "is_generic": False,
    "advice": "", "frameworks": [], "is_enabled": True, "made_by": "ops", "made_at": "2026-01-31T12:00:00Z",
    "changed_by": "ops", "changed_at": "2026-01-31T12:00:00Z",
}  # fmt: skip
GOING = {
    "id": 5, "state": "going", "outcome": "", "done": 1, "of": 2, "read": 1, "named": 0, "seconds": 0.1, "changes": [],
}  # fmt: skip
CHANGE = {
    "incident": 3, "job": 7, "name": "wren", "attempt": 1, "incarnation": None, "before": "unknown",
    "after": "storage.io", "confidence": 0.96, "says": "x", "by_person": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(catalogue, "POLL_S", 0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text("[[entry]]\n" + "".join(f"{name} = '{value}'\n" for name, value in ENTRY.items()))
    return path


def test_list(portal, tmp_path):  # noqa: F811
    portal.answers["GET", "catalogue/entries"] = {"items": [SHOWN], "next": None}
    assert vigil("catalogue", "list").stdout.splitlines()[1].split()[:4] == [ENTRY["name"], "root", "storage.io", "yes"]
    path = tmp_path / "again.toml"
    path.write_text(vigil("catalogue", "list", "--toml").stdout)
    (entry,) = catalogue.entries_in(str(path))
    assert entry.pattern == ENTRY["pattern"]
    off = {**SHOWN, "name": "storage.off", "is_enabled": False}
    portal.answers["GET", "catalogue/entries"] = {"items": [SHOWN, off], "next": None}
    assert "storage.off" in vigil("catalogue", "list").stdout
    assert "storage.off" not in vigil("catalogue", "list", "--toml").stdout, "`add` would let it count"
    assert "storage.off" in vigil("catalogue", "list", "--toml", "--all").stdout
    portal.answers["GET", "catalogue/entries"] = {"items": [], "next": None}
    assert "vigil catalogue add" in vigil("catalogue", "list").stdout


def test_add_and_replace(portal, file):  # noqa: F811
    portal.answers["POST", "catalogue/entries"] = SHOWN
    assert vigil("catalogue", "add", str(file)).stdout == "Added: storage.ours_down\n"
    assert json.loads(portal.asked[0].content) == SENT
    portal.answers["GET", "catalogue/entries"] = {"items": [SHOWN], "next": None}
    portal.answers["PUT", "catalogue/entries/storage.ours_down"] = SHOWN
    assert vigil("catalogue", "add", "--replace", str(file)).stdout == "Replaced: storage.ours_down\n"


def test_a_refused_entry_is_named(portal, file):  # noqa: F811
    portal.answers["POST", "catalogue/entries"] = problem(422, "no", ("pattern", "It took 0.9 s."))
    output = vigil("catalogue", "add", str(file), status=1).stderr
    assert "storage.ours_down was refused" in output
    assert "pattern: It took 0.9 s." in output


def test_replay_until_it_is_done(portal, file):  # noqa: F811
    portal.answers["POST", "catalogue/replays"] = GOING
    portal.answers["GET", "catalogue/replays/5"] = [GOING, {**GOING, "state": "done", "done": 2, "changes": [CHANGE]}]
    result = vigil("catalogue", "replay", str(file), "-n", "2")
    assert json.loads(portal.asked[0].content) == {**SENT, "most": 2}
    assert "1 of 2 incidents" in result.stderr
    assert "1 verdict would change of 1 incidents read again" in result.stdout
    assert "unknown  storage.io" in result.stdout


def test_of_several_entries_the_named_one_is_replayed(portal, file):  # noqa: F811
    file.write_text(file.read_text() + file.read_text().replace("ours_down", "theirs"))
    assert "--name: storage.ours_down, storage.theirs" in vigil("catalogue", "replay", str(file), status=1).stderr
    portal.answers["POST", "catalogue/replays"] = {**GOING, "state": "done"}
    vigil("catalogue", "replay", str(file), "--name", "storage.theirs")
    assert json.loads(portal.asked[0].content)["name"] == "storage.theirs"


def test_switched_and_removed(portal):  # noqa: F811
    portal.answers["PATCH", "catalogue/entries/x.y"] = SHOWN
    portal.answers["DELETE", "catalogue/entries/x.y"] = httpx.Response(204)
    assert vigil("catalogue", "disable", "x.y").stdout == "Disabled: x.y\n"
    assert vigil("catalogue", "enable", "x.y").stdout == "Enabled: x.y\n"
    assert [json.loads(item.content) for item in portal.asked] == [{"is_enabled": False}, {"is_enabled": True}]
    assert vigil("catalogue", "remove", "x.y").stdout == "Removed: x.y\n"
    assert json.loads(vigil("catalogue", "disable", "x.y", "--json").stdout)["name"] == SHOWN["name"]
    assert json.loads(vigil("catalogue", "enable", "x.y", "--json").stdout)["name"] == SHOWN["name"]
    assert json.loads(vigil("catalogue", "remove", "x.y", "--json").stdout) == {"name": "x.y", "removed": True}
    assert "Choose one of --toml and --json." in vigil("catalogue", "list", "--toml", "--json", status=2).stderr


def test_examples_as_lines_and_as_a_folder(portal, tmp_path):  # noqa: F811
    cases = [
        {"id": "incident-1", "label": "storage.io", "said": "unknown", "why": WHY, "log": "one\n"},
        {
            "id": "../x",
            "label": "gpu.ecc",
            "said": "gpu.ecc",
            "why": "",
            "logs": {"0.0.log": "a\n", "../../0.1.log": "b\n"},
        },
    ]
    text = "".join(json.dumps(case) + "\n" for case in cases)
    portal.answers["GET", "catalogue/examples"] = httpx.Response(200, text=text)
    assert vigil("catalogue", "examples").stdout == text
    vigil("catalogue", "examples", "--folder", str(tmp_path / "cases"))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()) == [
        "cases/___x/0.0.log", "cases/___x/_.._0.1.log", "cases/___x/case.toml",
        "cases/incident-1/0.0.log", "cases/incident-1/case.toml",
    ]  # fmt: skip
    payload = json.loads(vigil("diagnose", "--evaluate", "--json", str(tmp_path / "cases")).stdout)
    assert payload["cases"] == 2
    assert tomllib.loads((tmp_path / "cases/incident-1/case.toml").read_text(encoding="utf-8"))["why"] == WHY


def test_what_is_no_file_of_entries(portal, tmp_path):  # noqa: F811
    path = tmp_path / "x.toml"
    for content in (b"", b"\xff", b"[[entry]]\nname = 'x'"):
        path.write_bytes(content)
        assert "x.toml" in vigil("catalogue", "add", str(path), status=1).stderr
    assert "does not exist" in vigil("catalogue", "add", str(tmp_path / "none"), status=2).stderr
    assert not portal.asked
