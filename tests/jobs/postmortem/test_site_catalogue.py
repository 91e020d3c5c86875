"""Test a site's catalogue entries: tried before acceptance, used by the next diagnosis, removed completely."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from diagnosis import offline
from diagnosis.signatures.catalogue import as_site_entry, extended_catalogue, shipped_catalogue
from diagnosis.signatures.entry import Entry, parse_entry, read_entries
from diagnosis.signatures.toml_export import to_toml
from diagnosis.trial.checks import EntryTrial, run_trial
from diagnosis.trial.subprocess_trial import try_entry
from jobs.errors import Conflict, SpecError
from jobs.models import SiteEntry
from jobs.postmortem import site_catalogue
from portal.models import AuditEntry, User
from tests.lab import sysadmin
from vigil_cli.main import main

VALID_ENTRY: dict[str, Any] = {
    "name": "storage.ours_down",
    "role": "root",
    "cause": "storage.io",
    "source": "our own mounter 2.4, mount.c",
    "pattern": r"ourfs: volume \S+ went away after \d+ ms",
    "example": "[rank3]: ourfs: volume scratch-07 went away after 512 ms",
    "look_alike": "ourfs: volume scratch-07 came back after 512 ms",
    "advice": "Call the storage team.",
}


def entry_with(**changes: Any) -> dict[str, Any]:
    return {**VALID_ENTRY, **changes}


def messages_of(trial: EntryTrial, level: str = "error") -> dict[str, str]:
    return {finding.field: finding.text for finding in trial.findings if finding.level == level}


@pytest.mark.lengthy
class TestSubprocess:
    """Test that a trial runs in a separate process, which ends in time whatever the pattern is."""

    def test_a_valid_entry_passes(self) -> None:
        trial = try_entry(VALID_ENTRY)
        assert trial.is_fit, trial.findings
        assert trial.seconds is not None
        assert trial.seconds < 0.5
        assert trial.megabytes > 5
        assert not trial.findings

    def test_a_slow_pattern_is_stopped(self) -> None:
        """Test that the trial reports the time: for all five megabytes the pattern would need half a minute."""
        trial = try_entry(entry_with(pattern=r".{2,1000}.{2,1000}went away after"))
        assert not trial.is_fit
        assert trial.seconds is not None
        assert 0.5 < trial.seconds < 5
        assert trial.megabytes < 5
        assert f"It took {trial.seconds:.1f} s for {trial.megabytes:.1f} MB" in messages_of(trial)["pattern"]

    def test_a_pattern_that_re2_rejects(self) -> None:
        assert "RE2 rejects it" in messages_of(try_entry(entry_with(pattern=r"(went) \1")))["pattern"]


class TestTrial:
    """Test what a trial checks, here in the process of the test: starting one for each takes half a second."""

    def test_a_pattern_that_would_slow_the_prefilter(self) -> None:
        trial = run_trial(entry_with(pattern=r"^\d{1,2}\D", example="7 went", look_alike="seven went"))
        message = messages_of(trial)["pattern"]
        # On a slow machine the pattern is too slow by itself.
        assert "It would slow down the reading of every log" in message or "It took" in message

    @pytest.mark.parametrize(
        ("changes", "field", "words"),
        [
            ({"pattern": r"(?=went) away"}, "pattern", "RE2 rejects it"),
            ({"pattern": r"(went) \1"}, "pattern", "RE2 rejects it"),
            ({"pattern": r"(?:(?:went){1000}){1000}"}, "pattern", "RE2 rejects it"),
            ({"pattern": r"(?:.{900} away ){30}\pL{900}"}, "pattern", "RE2 rejects it within 8 MiB"),
            ({"pattern": "(" * 51 + "went" + ")" * 51}, "pattern", "More than 50 groups"),
            ({"pattern": "w*"}, "pattern", "It matches an empty line"),
            ({"pattern": "a" * 1001}, "pattern", "Longer than 1,000 characters"),
            ({"pattern": "ourfs: nothing"}, "example", "does not match this line"),
            ({"pattern": "ourfs: volume"}, "look_alike", "matches this line too"),
            ({"unless": "(?<x"}, "unless", "RE2 rejects it"),
            ({"example": "ourfs: volume a went away after 5 ms password=hunter2hunter2"}, "example", "password"),
            ({"example": "two\nlines"}, "example", "one line"),
            ({"look_alike": " "}, "look_alike", "needs a similar line"),
            ({"advice": "\0"}, "advice", "cannot be printed"),
            ({"cause": "storage.ours"}, "cause", "Causes are gpu.ecc,"),
            ({"cause": "unknown"}, "cause", "A root needs a cause."),
            ({"role": "cause"}, "role", "Role must be one of root, echo"),
            ({"scope": "here"}, "scope", "Scope must be one of"),
            ({"source": ""}, "source", "Source is missing."),
            ({"pattern": ""}, "pattern", "Needs a pattern"),
            ({"name": "<b>"}, "name", "lower-case letters"),
            ({"during": ["lunch"]}, "during", "Choose from arguments,"),
            ({"during": 7}, "during", "list of words"),
            ({"is_generic": "no"}, "is_generic", "true or false"),
            ({"is_site": True}, "pattern", "not a field of an entry"),
        ],
    )
    def test_rejected_entries(self, changes: dict[str, Any], field: str, words: str) -> None:
        trial = run_trial(entry_with(**changes))
        assert not trial.is_fit
        assert words in messages_of(trial)[field]

    def test_a_pattern_that_matches_output_of_healthy_runs(self) -> None:
        trial = run_trial(entry_with(pattern=r"went away|lm loss: \d"))
        assert "lines of healthy runs" in messages_of(trial)["pattern"]

    def test_warnings(self) -> None:
        trial = run_trial(entry_with(pattern=r"went away|step-7\d+/rank3\d"))
        assert "lines of healthy runs" in messages_of(trial, "warn")["pattern"]
        shipped = next(entry for entry in shipped_catalogue() if entry.role == "root" and not entry.is_for_tracebacks)
        trial = run_trial(entry_with(name=shipped.name, pattern=f"{VALID_ENTRY['pattern']}|{shipped.pattern}"))
        assert "Replaces the built-in entry" in messages_of(trial, "warn")["name"]

    def test_entries_for_tracebacks_need_class_and_message(self) -> None:
        raised = entry_with(
            pattern="volume", exception=r"(?:\w+\.)?VolumeGone", during=["data"],
            example="ourfs.VolumeGone: volume 7", look_alike="ourfs.VolumeSlow: volume 7",
        )  # fmt: skip
        assert run_trial(raised).is_fit
        assert "example" in messages_of(run_trial({**raised, "pattern": "cask"}))
        assert "pattern" in messages_of(run_trial({**raised, "exception": r".{2,1000}.{2,1000}VolumeGone"}))


class TestCombined:
    """Test entries alongside the built-in catalogue."""

    def verdict(self, log: str, *entries: dict[str, Any]) -> Any:
        return offline.diagnose_text(log, "0.3.log", extended_catalogue(tuple(parse_entry(entry) for entry in entries)))

    def test_a_new_failure_gets_a_cause(self) -> None:
        log = "step 1 loss 2.0\nourfs: volume scratch-07 went away after 512 ms\n"
        assert self.verdict(log).cause != "storage.io"
        verdict = self.verdict(log, VALID_ENTRY)
        assert (verdict.cause, verdict.entry, verdict.advice) == (
            "storage.io",
            VALID_ENTRY["name"],
            "Call the storage team.",
        )

    def test_a_site_entry_outranks_an_equally_specific_entry(self) -> None:
        line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        assert self.verdict(line).cause == "memory.gpu_oom"
        site_entry = entry_with(
            pattern="CUDA out of memory", cause="program.config", example=line.strip(), look_alike="CUDA is there"
        )
        assert self.verdict(line, site_entry).cause == "program.config"
        assert self.verdict(line, {**site_entry, "is_generic": True}).cause == "memory.gpu_oom"

    def test_an_entry_replaces_the_built_in_entry_of_its_name(self) -> None:
        name = shipped_catalogue().entries[0].name
        catalogue = extended_catalogue((parse_entry(entry_with(name=name)),))
        assert len(catalogue.entries) == len(shipped_catalogue().entries)
        (replaced,) = (entry for entry in catalogue if entry.name == name)
        assert replaced.is_site
        assert replaced.pattern == VALID_ENTRY["pattern"]

    def test_without_site_entries_the_built_in_catalogue_is_used(self) -> None:
        assert extended_catalogue(()) is shipped_catalogue()

    def test_two_patterns_may_name_their_groups_alike(self) -> None:
        """Patterns without fixed words go into the prefilter unchanged."""
        entries = [entry_with(name=f"x.{n}", pattern=rf"^(?P<rank>\d+) gone {n}|^!{n} (?P<node>\w+)") for n in range(2)]
        assert self.verdict("7 gone 1\n", *entries).entry == "x.1"


def test_entries_survive_export_to_toml() -> None:
    entries = [
        parse_entry(VALID_ENTRY),
        parse_entry(
            entry_with(
                name="x.y", pattern=r"it's \"\d+\"", during=["data"], is_generic=True, scope="kernel", advice="a\nb"
            )
        ),
    ]
    text = to_toml(entries)
    assert rf"pattern = '{VALID_ENTRY['pattern']}'" in text
    assert read_entries(text) == entries


@pytest.mark.parametrize("text", ["entry = 5", "entry = [5]", "[[entry]]\nname = 5", "x = 1", "[["])
def test_an_invalid_file_is_reported_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(text)
    result = CliRunner().invoke(main, ["catalogue", "check", str(path)])
    assert result.exit_code == 1
    assert "ours.toml" in result.output
    assert "Traceback" not in result.output


def test_diagnose_with_a_file_of_entries(tmp_path: Path) -> None:
    path, log = tmp_path / "ours.toml", tmp_path / "0.3.log"
    path.write_text(to_toml([parse_entry(VALID_ENTRY)]))
    log.write_text(VALID_ENTRY["example"] + "\n")
    result = CliRunner().invoke(main, ["diagnose", "--json", "--catalogue", str(path), str(log)])
    assert json.loads(result.output)["entry"] == VALID_ENTRY["name"]
    path.write_text(to_toml([parse_entry(entry_with(pattern="(?=x)"))]))
    result = CliRunner().invoke(main, ["diagnose", "--catalogue", str(path), str(log)])
    assert result.exit_code == 1
    assert "The entries cannot be used" in result.output
    path.write_text(to_toml([parse_entry(VALID_ENTRY), parse_entry(VALID_ENTRY)]))
    result = CliRunner().invoke(main, ["diagnose", "--catalogue", str(path), str(log)])
    assert result.exit_code == 1
    assert f"The entries cannot be used: {VALID_ENTRY['name']}: two entries have this name" in result.output


def test_the_check_command(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        to_toml(
            [
                parse_entry(VALID_ENTRY),
                parse_entry(entry_with(name="x.y", look_alike=VALID_ENTRY["example"])),
                parse_entry(VALID_ENTRY),
            ]
        )
    )
    result = CliRunner().invoke(main, ["catalogue", "check", str(path)])
    assert result.exit_code == 1
    assert re.search(r"storage.ours_down passed: \d+\.\d\d s for [5-9] MB\n", result.output)
    assert "x.y failed\n  ✗ look_alike: It matches this line too." in result.output
    assert "storage.ours_down failed" in result.output
    assert "✗ name: An earlier entry of the file has the same name." in result.output


@pytest.mark.django_db
class TestStoredEntries:
    """Test entries in the database, which sysadmins edit."""

    @pytest.fixture
    def ops(self) -> User:
        return sysadmin("ops")

    def test_add_change_disable_remove(self, ops: User) -> None:
        before = site_catalogue.current_catalogue()
        assert before is shipped_catalogue()
        row = site_catalogue.add(ops, VALID_ENTRY)
        catalogue = site_catalogue.current_catalogue()
        assert catalogue is site_catalogue.current_catalogue()
        assert as_site_entry(parse_entry(VALID_ENTRY)) in catalogue.entries
        with pytest.raises(Conflict, match="The site has an entry"):
            site_catalogue.add(ops, VALID_ENTRY)
        site_catalogue.change(ops, row, entry_with(name="storage.theirs", advice="Wait."))
        assert {entry.name for entry in site_catalogue.current_catalogue() if entry.is_site} == {"storage.theirs"}
        site_catalogue.enable(ops, row, False)
        assert site_catalogue.current_catalogue() is shipped_catalogue()
        site_catalogue.remove(ops, row)
        assert not SiteEntry.objects.exists()
        actions = list(AuditEntry.objects.order_by("pk").values_list("action", flat=True))
        assert actions == ["catalogue.add", "catalogue.change", "catalogue.disable", "catalogue.remove"]

    @pytest.mark.parametrize("meanwhile", ["changed", "removed"])
    def test_a_change_by_somebody_else_during_the_trial_is_not_overwritten(
        self, ops: User, monkeypatch: pytest.MonkeyPatch, meanwhile: str
    ) -> None:
        row = site_catalogue.add(ops, VALID_ENTRY)

        def change_meanwhile(raw: dict[str, Any], others: Any) -> EntryTrial:
            other = SiteEntry.objects.get()
            site_catalogue.enable(ops, other, False) if meanwhile == "changed" else site_catalogue.remove(ops, other)
            return EntryTrial()

        monkeypatch.setattr(site_catalogue, "try_entry", change_meanwhile)
        with pytest.raises(Conflict, match="meanwhile"):
            site_catalogue.change(ops, row, entry_with(advice="Wait."))
        assert not SiteEntry.objects.filter(advice="Wait.").exists()
        assert not SiteEntry.objects.filter(is_enabled=True).exists()

    def test_a_rejected_entry_changes_nothing(self, ops: User) -> None:
        with pytest.raises(SpecError, match="RE2 rejects it"):
            site_catalogue.add(ops, entry_with(pattern="(?=x)"))
        assert not SiteEntry.objects.exists()

    def test_rows_that_are_no_longer_valid_are_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        SiteEntry.objects.create(**entry_with(name="a.cause_that_is_gone", cause="storage.tape"))
        SiteEntry.objects.create(**VALID_ENTRY)
        assert [entry.name for entry in site_catalogue.enabled_entries()] == [VALID_ENTRY["name"]]
        SiteEntry.objects.create(**entry_with(name="a.broken", pattern="(?=x)|"))
        assert site_catalogue.current_catalogue() is shipped_catalogue()
        assert "cannot be compiled together" in caplog.text


def test_files_cannot_claim_to_be_site_entries() -> None:
    assert not Entry(**VALID_ENTRY).is_site
