"""Test a site's catalogue entries: tried before acceptance, used by the next diagnosis, removed without a trace."""

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
from diagnosis.trial.checks import EntryTrial
from diagnosis.trial.subprocess_trial import try_entry
from jobs.errors import Conflict, SpecError
from jobs.models import SiteEntry
from jobs.postmortem import site_catalogue
from portal.models import AuditEntry, User
from tests.lab import sysadmin
from vigil_cli.main import main

OURS: dict[str, Any] = {
    "name": "storage.ours_down",
    "role": "root",
    "cause": "storage.io",
    "source": "our own mounter 2.4, mount.c",
    "pattern": r"ourfs: volume \S+ went away after \d+ ms",
    "example": "[rank3]: ourfs: volume scratch-07 went away after 512 ms",
    "look_alike": "ourfs: volume scratch-07 came back after 512 ms",
    "advice": "Call the storage team.",
}


def of(**changes: Any) -> dict[str, Any]:
    return {**OURS, **changes}


def messages_of(trial: EntryTrial, level: str = "error") -> dict[str, str]:
    return {finding.field: finding.text for finding in trial.findings if finding.level == level}


@pytest.mark.lengthy
class TestTrial:
    """In a process of its own, whatever the pattern is."""

    def test_one_that_is_fit(self) -> None:
        trial = try_entry(OURS)
        assert trial.is_fit, trial.findings
        assert trial.seconds is not None
        assert trial.seconds < 0.5
        assert trial.megabytes > 5
        assert not trial.findings

    def test_a_slow_one_is_stopped_and_told_its_time(self) -> None:
        """Of the five megabytes it would take half a minute."""
        trial = try_entry(of(pattern=r".{2,1000}.{2,1000}went away after"))
        assert not trial.is_fit
        assert trial.seconds is not None
        assert 0.5 < trial.seconds < 5
        assert trial.megabytes < 5
        assert f"It took {trial.seconds:.1f} s for {trial.megabytes:.1f} MB" in messages_of(trial)["pattern"]

    def test_one_that_would_slow_the_sieve(self) -> None:
        trial = try_entry(of(pattern=r"^\d{1,2}\D", example="7 went", look_alike="seven went"))
        refusal = messages_of(trial)["pattern"]
        # Slow by itself already, where the machine is.
        assert "It would slow down the reading of every log" in refusal or "It took" in refusal

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
    def test_what_is_refused(self, changes: dict[str, Any], field: str, words: str) -> None:
        trial = try_entry(of(**changes))
        assert not trial.is_fit
        assert words in messages_of(trial)[field]

    def test_one_that_finds_what_healthy_runs_print(self) -> None:
        trial = try_entry(of(pattern=r"went away|lm loss: \d"))
        assert "lines of healthy runs" in messages_of(trial)["pattern"]

    def test_what_is_worth_knowing(self) -> None:
        trial = try_entry(of(pattern=r"went away|step-7\d+/rank3\d"))
        assert "lines of healthy runs" in messages_of(trial, "warn")["pattern"]
        shipped = next(entry for entry in shipped_catalogue() if entry.role == "root" and not entry.is_for_tracebacks)
        trial = try_entry(of(name=shipped.name, pattern=f"{OURS['pattern']}|{shipped.pattern}"))
        assert "Replaces the built-in entry" in messages_of(trial, "warn")["name"]

    def test_of_a_traceback_class_and_message_count(self) -> None:
        raised = of(
            pattern="volume", exception=r"(?:\w+\.)?VolumeGone", during=["data"],
            example="ourfs.VolumeGone: volume 7", look_alike="ourfs.VolumeSlow: volume 7",
        )  # fmt: skip
        assert try_entry(raised).is_fit
        assert "example" in messages_of(try_entry({**raised, "pattern": "cask"}))
        assert "pattern" in messages_of(try_entry({**raised, "exception": r".{2,1000}.{2,1000}VolumeGone"}))


class TestTogether:
    """Beside what ships with Vigil."""

    def verdict(self, log: str, *entries: dict[str, Any]) -> Any:
        return offline.diagnose_text(log, "0.3.log", extended_catalogue(tuple(parse_entry(one) for one in entries)))

    def test_what_nobody_knew_has_a_cause(self) -> None:
        log = "step 1 loss 2.0\nourfs: volume scratch-07 went away after 512 ms\n"
        assert self.verdict(log).cause != "storage.io"
        verdict = self.verdict(log, OURS)
        assert (verdict.cause, verdict.entry, verdict.advice) == ("storage.io", OURS["name"], "Call the storage team.")

    def test_of_two_equally_specific_the_sites_counts(self) -> None:
        line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        assert self.verdict(line).cause == "memory.gpu_oom"
        ours = of(
            pattern="CUDA out of memory", cause="program.config", example=line.strip(), look_alike="CUDA is there"
        )
        assert self.verdict(line, ours).cause == "program.config"
        assert self.verdict(line, {**ours, "is_generic": True}).cause == "memory.gpu_oom"

    def test_one_of_a_shipped_name_takes_its_place(self) -> None:
        name = shipped_catalogue().entries[0].name
        known = extended_catalogue((parse_entry(of(name=name)),))
        assert len(known.entries) == len(shipped_catalogue().entries)
        (mine,) = (entry for entry in known if entry.name == name)
        assert mine.is_site
        assert mine.pattern == OURS["pattern"]

    def test_without_any_it_is_what_ships(self) -> None:
        assert extended_catalogue(()) is shipped_catalogue()

    def test_groups_of_one_name_get_along(self) -> None:
        """What has no words of its own stands in the sieve as it is."""
        entries = [of(name=f"x.{n}", pattern=rf"^(?P<rank>\d+) gone {n}|^!{n} (?P<node>\w+)") for n in range(2)]
        assert self.verdict("7 gone 1\n", *entries).entry == "x.1"


def test_as_text_and_back() -> None:
    entries = [
        parse_entry(OURS),
        parse_entry(
            of(name="x.y", pattern=r"it's \"\d+\"", during=["data"], is_generic=True, scope="kernel", advice="a\nb")
        ),
    ]
    text = to_toml(entries)
    assert rf"pattern = '{OURS['pattern']}'" in text
    assert read_entries(text) == entries


@pytest.mark.parametrize("text", ["entry = 5", "entry = [5]", "[[entry]]\nname = 5", "x = 1", "[["])
def test_a_file_that_is_none_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(text)
    made = CliRunner().invoke(main, ["catalogue", "check", str(path)])
    assert made.exit_code == 1
    assert "ours.toml" in made.output
    assert "Traceback" not in made.output


def test_diagnose_with_a_file_of_entries(tmp_path: Path) -> None:
    path, log = tmp_path / "ours.toml", tmp_path / "0.3.log"
    path.write_text(to_toml([parse_entry(OURS)]))
    log.write_text(OURS["example"] + "\n")
    made = CliRunner().invoke(main, ["diagnose", "--json", "--catalogue", str(path), str(log)])
    assert json.loads(made.output)["entry"] == OURS["name"]
    path.write_text(to_toml([parse_entry(of(pattern="(?=x)"))]))
    made = CliRunner().invoke(main, ["diagnose", "--catalogue", str(path), str(log)])
    assert made.exit_code == 1
    assert "The entries cannot be used" in made.output
    path.write_text(to_toml([parse_entry(OURS), parse_entry(OURS)]))
    made = CliRunner().invoke(main, ["diagnose", "--catalogue", str(path), str(log)])
    assert made.exit_code == 1
    assert f"The entries cannot be used: {OURS['name']}: two entries have this name" in made.output


def test_check_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        to_toml([parse_entry(OURS), parse_entry(of(name="x.y", look_alike=OURS["example"])), parse_entry(OURS)])
    )
    made = CliRunner().invoke(main, ["catalogue", "check", str(path)])
    assert made.exit_code == 1
    assert re.search(r"storage.ours_down passed: \d+\.\d\d s for [5-9] MB\n", made.output)
    assert "x.y failed\n  ✗ look_alike: It matches this line too." in made.output
    assert "storage.ours_down failed" in made.output
    assert "✗ name: An earlier entry of the file has the same name." in made.output


@pytest.mark.django_db
class TestKept:
    """In the database, by sysadmins."""

    @pytest.fixture
    def ops(self) -> User:
        return sysadmin("ops")

    def test_added_changed_disabled_removed(self, ops: User) -> None:
        before = site_catalogue.current_catalogue()
        assert before is shipped_catalogue()
        row = site_catalogue.add(ops, OURS)
        known = site_catalogue.current_catalogue()
        assert known is site_catalogue.current_catalogue()
        assert as_site_entry(parse_entry(OURS)) in known.entries
        with pytest.raises(Conflict, match="The site has an entry"):
            site_catalogue.add(ops, OURS)
        site_catalogue.change(ops, row, of(name="storage.theirs", advice="Wait."))
        assert {entry.name for entry in site_catalogue.current_catalogue() if entry.is_site} == {"storage.theirs"}
        site_catalogue.enable(ops, row, False)
        assert site_catalogue.current_catalogue() is shipped_catalogue()
        site_catalogue.remove(ops, row)
        assert not SiteEntry.objects.exists()
        actions = list(AuditEntry.objects.order_by("pk").values_list("action", flat=True))
        assert actions == ["catalogue.add", "catalogue.change", "catalogue.disable", "catalogue.remove"]

    @pytest.mark.parametrize("meanwhile", ["changed", "removed"])
    def test_what_another_changes_during_the_trial_stays(
        self, ops: User, monkeypatch: pytest.MonkeyPatch, meanwhile: str
    ) -> None:
        row = site_catalogue.add(ops, OURS)

        def tried(raw: dict[str, Any], others: Any) -> EntryTrial:
            other = SiteEntry.objects.get()
            site_catalogue.enable(ops, other, False) if meanwhile == "changed" else site_catalogue.remove(ops, other)
            return EntryTrial()

        monkeypatch.setattr(site_catalogue, "try_entry", tried)
        with pytest.raises(Conflict, match="meanwhile"):
            site_catalogue.change(ops, row, of(advice="Wait."))
        assert not SiteEntry.objects.filter(advice="Wait.").exists()
        assert not SiteEntry.objects.filter(is_enabled=True).exists()

    def test_what_is_not_fit_changes_nothing(self, ops: User) -> None:
        with pytest.raises(SpecError, match="RE2 rejects it"):
            site_catalogue.add(ops, of(pattern="(?=x)"))
        assert not SiteEntry.objects.exists()

    def test_rows_that_no_longer_hold_are_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        SiteEntry.objects.create(**of(name="a.cause_that_is_gone", cause="storage.tape"))
        SiteEntry.objects.create(**OURS)
        assert [entry.name for entry in site_catalogue.enabled_entries()] == [OURS["name"]]
        SiteEntry.objects.create(**of(name="a.broken", pattern="(?=x)|"))
        assert site_catalogue.current_catalogue() is shipped_catalogue()
        assert "cannot be compiled together" in caplog.text


def test_an_entry_of_a_site_is_no_key_of_a_file() -> None:
    assert not Entry(**OURS).is_site
