"""Test the site's check in the portal: its people, its command, and what a start refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from console.site import checks
from jobs.slurm_check import local_site
from jobs.slurm_check.checked_site import Submitter
from tests.lab import a_project, person


@pytest.mark.django_db
def test_people_come_from_the_portal(settings: Any) -> None:
    settings.VIGIL_SCHEDULER, settings.VIGIL_SLURM_USER = "slurm", "vigil"
    project = a_project("cats")
    project.slurm_account = "vision"
    project.save()
    person("ada", project, slurm_user="ada")
    person("bob", slurm_user="bob")
    person("eve", project)
    found = local_site.site()
    assert found.people == [Submitter("ada", "ada", "cats", "vision")]
    assert found.without_project == ["bob"]
    assert found.accounts_of_projects["cats"] == "vision"


@pytest.mark.django_db
def test_the_command_ends_with_1_and_json(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings.VIGIL_SCHEDULER = "local"
    with pytest.raises(SystemExit) as ended:
        call_command("check_slurm", "--no-jobs", "--json")
    payload = json.loads(capsys.readouterr().out)
    assert (ended.value.code, payload["ok"]) == (1, False)
    assert payload["findings"][0].keys() == {"level", "title", "detail", "remedy"}


def test_a_start_refuses_an_unknown_scheduler(settings: Any) -> None:
    assert checks.scheduler_is_supported(None) == []
    settings.VIGIL_SCHEDULER = "slrm"
    (found,) = checks.scheduler_is_supported(None)
    assert (found.id, found.is_serious()) == ("vigil.E006", True)
    assert "VIGIL_SCHEDULER=slrm is not supported. Set it to local or slurm." in found.msg


def test_a_start_names_what_slurm_needs(settings: Any, tmp_path: Path) -> None:
    assert checks.slurm_is_configured(None) == []
    settings.VIGIL_SCHEDULER = "slurm"
    (found,) = checks.slurm_is_configured(None)
    assert (found.id, found.is_serious()) == ("vigil.E005", True)
    assert "VIGIL_SLURM_URL is not set" in found.msg
    assert "VIGIL_SLURM_KEY_FILE" in found.msg
    settings.VIGIL_SLURM_URL, settings.VIGIL_SLURM_KEY_FILE = "http://127.0.0.1:6820", str(tmp_path / "key")
    (found,) = checks.slurm_is_configured(None)
    assert (found.id, found.is_serious()) == ("vigil.W006", False)
    (tmp_path / "key").write_bytes(b"0123456789abcdef0123456789abcdef")
    os.chmod(tmp_path / "key", 0o600)
    assert checks.slurm_is_configured(None) == []
