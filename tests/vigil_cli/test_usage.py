"""Test typing errors on the command line, and invalid tokens."""

from collections.abc import Iterator

import click
import httpx
import pytest
from click.testing import CliRunner

from vigil_cli import portal as client
from vigil_cli.main import main
from vigil_cli.params import FOREIGN_COMMANDS


@pytest.fixture(autouse=True)
def portal(monkeypatch):
    """A portal that knows no token."""
    monkeypatch.setenv("VIGIL_URL", "http://portal")
    monkeypatch.setenv("VIGIL_TOKEN", "vgl_old")
    transport = httpx.MockTransport(lambda request: httpx.Response(401, json={"detail": "Send `Authorization: …`."}))
    monkeypatch.setattr(client.Portal, "http", httpx.Client(base_url="http://portal/api/v1/", transport=transport))


def error_of(*arguments: str, status: int) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == status, result.output + repr(result.exception)
    return result.output


@pytest.mark.parametrize("command", [("nodes",), ("telemetry", "dgx-01", "--csv"), ("catalogue", "examples")])
def test_an_unknown_token(command):
    report = error_of(*command, status=1)
    assert report.startswith("vigil: http://portal rejected the token: it is wrong, expired or revoked.")
    assert report.endswith("Create one on http://portal/me/ and put it in VIGIL_TOKEN.\n")


@pytest.mark.parametrize("token", ["vgl_é", "vgl_a\nb"])
def test_a_token_with_impossible_characters(monkeypatch, token):
    monkeypatch.setenv("VIGIL_TOKEN", token)
    assert "VIGIL_TOKEN contains characters that no token has." in error_of("nodes", status=1)


def test_a_job_by_its_number():
    for number in ("7", "#7"):
        assert "rejected the token" in error_of("job", number, status=1), "the portal was queried"
    for number in ("x", "0", "#", "-1.5"):
        assert "is not a job number. `vigil jobs` lists them." in error_of("job", "--", number, status=2)


def test_a_command_that_there_is_not():
    assert "No such command: metric. Did you mean `vigil metrics`?" in error_of("metric", "7", status=2)
    assert "No such command: fly. `vigil --help` lists them." in error_of("fly", status=2)
    assert "Did you mean `vigil catalogue list`?" in error_of("catalogue", "lst", status=2)
    assert "No such command: fly. `vigil catalogue --help` lists them." in error_of("catalogue", "fly", status=2)
    for group, typed, meant in (("health", "rule", "rules"), ("drains", "retrn", "return")):
        assert f"Did you mean `vigil {group} {meant}`?" in error_of(group, typed, status=2)
    assert "No such option" in error_of("--fly", status=2)


def test_a_command_as_other_tools_call_it():
    assert "No such command: ls. Did you mean `vigil jobs`?" in error_of("ls", status=2)
    assert set(FOREIGN_COMMANDS.values()) <= set(main.commands)
    assert not set(FOREIGN_COMMANDS) & set(main.commands)


def test_an_option_of_a_group_before_its_command():
    assert "Put --json after `vigil drains return`." in error_of("drains", "--json", "return", "a", status=2)
    assert "Put --all after `vigil announcements list`." in error_of("announcements", "--all", "list", status=2)
    assert "`vigil health rules` has no option --node." in error_of("health", "--node", "a", "rules", status=2)


def test_help_and_version():
    assert error_of("--version", status=0).startswith("vigil ")
    commands = error_of("--help", status=0).split("Commands:")[1]
    assert "metrics " in commands
    assert "..." not in commands, "each is described in one whole line"
    assert "[distributed|federated|script|attached]" in error_of("jobs", "--help", status=0)


def _commands(group: click.Group, path: str = "vigil") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")


def test_every_option_has_a_description():
    options = [(path, option) for path, command in _commands(main) for option in command.params]
    assert [
        f"{path} {option.opts[0]}" for path, option in options if isinstance(option, click.Option) and not option.help
    ] == []


def test_every_group_that_lists_has_the_command_list():
    groups = [group for _, group in _commands(main) if isinstance(group, click.Group) and group.invoke_without_command]
    assert len(groups) == 5
    assert all("list" in group.commands for group in groups)


def test_an_unreadable_file_is_a_failure_and_a_missing_file_wrong_usage(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xff")
    error_of("submit", str(tmp_path / "job.toml"), status=1)
    error_of("catalogue", "add", str(tmp_path / "job.toml"), status=1)
    for command in (("submit",), ("catalogue", "add"), ("catalogue", "check"), ("health", "try")):
        assert "does not exist" in error_of(*command, str(tmp_path / "nowhere"), status=2)
