"""Test that an invalid setting is named, with the values that are valid."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from vigil_cli.main import main
from vigil_core.environment import choice, share, whole


def test_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole("VIGIL_SPOOL_DAYS", 14, 0, 100) == 14
    monkeypatch.setenv("VIGIL_SPOOL_DAYS", " 7 ")
    assert whole("VIGIL_SPOOL_DAYS", 14, 0, 100) == 7
    for text in ("x", "-1", "101", "7.5", "1e2"):
        monkeypatch.setenv("VIGIL_SPOOL_DAYS", text)
        with pytest.raises(SystemExit, match=f"^VIGIL_SPOOL_DAYS={text} is not a whole number from 0 to 100.$"):
            whole("VIGIL_SPOOL_DAYS", 14, 0, 100)


def test_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share("VIGIL_FEDERATED_LEAST_SHARE") == 0
    monkeypatch.setenv("VIGIL_FEDERATED_LEAST_SHARE", "0.6")
    assert share("VIGIL_FEDERATED_LEAST_SHARE") == 0.6
    for text in ("half", "1.1", "-0.5", "nan", "60 %"):
        monkeypatch.setenv("VIGIL_FEDERATED_LEAST_SHARE", text)
        with pytest.raises(SystemExit, match="VIGIL_FEDERATED_LEAST_SHARE=.* is not a number from 0 to 1."):
            share("VIGIL_FEDERATED_LEAST_SHARE")


def test_a_choice_of_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice("VIGIL_QUEUE_VISIBLE", "everyone", "own") == "everyone"
    monkeypatch.setenv("VIGIL_QUEUE_VISIBLE", "own")
    assert choice("VIGIL_QUEUE_VISIBLE", "everyone", "own") == "own"
    monkeypatch.setenv("VIGIL_QUEUE_VISIBLE", "everybody")
    with pytest.raises(SystemExit, match="VIGIL_QUEUE_VISIBLE=everybody is not valid: use everyone or own."):
        choice("VIGIL_QUEUE_VISIBLE", "everyone", "own")


def test_a_backup_names_a_wrong_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIGIL_PORT", "abc")
    result = CliRunner().invoke(main, ["backup", "/nowhere/vigil.tar.gz"])
    assert result.exit_code == 1
    assert "VIGIL_PORT=abc is not a whole number from 1 to 65535." in result.output
