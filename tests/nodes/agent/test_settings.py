"""Test the agent's settings from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodes.agent.settings import InvalidSetting, read_settings, warnings

ENOUGH = {"VIGIL_AGENT_URL": "https://vigil.lab.example/", "VIGIL_AGENT_TOKEN_FILE": "/etc/vigil/token"}


def test_two_are_enough() -> None:
    settings = read_settings(ENOUGH, posts=True)
    assert settings.url == "https://vigil.lab.example"
    assert settings.node
    assert (settings.state, settings.kmsg) == (Path("/var/lib/vigil-agent"), Path("/dev/kmsg"))
    assert settings.mounts is None


def test_who_posts_nothing_needs_none() -> None:
    assert read_settings({}, posts=False).url == ""


@pytest.mark.parametrize(
    ("value", "mounts"),
    [("", None), ("none", ()), ("/data, /scratch/,,/data", ("/data", "/scratch")), ("/", ("/",))],
)
def test_mounts(value: str, mounts: tuple[str, ...] | None) -> None:
    assert read_settings({**ENOUGH, "VIGIL_AGENT_MOUNTS": value}, posts=True).mounts == mounts


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"VIGIL_AGENT_URL": ""}, "VIGIL_AGENT_URL is not set"),
        ({"VIGIL_AGENT_URL": "vigil.lab"}, "http:// or https://"),
        ({"VIGIL_AGENT_URL": "ftp://vigil.lab"}, "http:// or https://"),
        ({"VIGIL_AGENT_URL": "http://vigil.lab:99999"}, "http:// or https://"),
        ({"VIGIL_AGENT_URL": "http://user:secret@vigil.lab"}, "http:// or https://"),
        ({"VIGIL_AGENT_TOKEN_FILE": ""}, "vigil agent enroll"),
        ({"VIGIL_AGENT_TOKEN_FILE": "token"}, "absolute path"),
        ({"VIGIL_AGENT_NODE": "a node"}, "as the scheduler spells it"),
        ({"VIGIL_AGENT_NODE": "n" * 256}, "as the scheduler spells it"),
        ({"VIGIL_AGENT_STATE": "state"}, "absolute path"),
        ({"VIGIL_AGENT_KMSG": "kmsg"}, "absolute path"),
        ({"VIGIL_AGENT_MOUNTS": "data"}, "absolute path"),
        ({"VIGIL_AGENT_MOUNTS": ",".join(f"/m{n}" for n in range(17))}, "at most 16"),
    ],
)
def test_an_invalid_setting_is_refused_with_what_to_write(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        read_settings({**ENOUGH, **changes}, posts=True)


@pytest.mark.parametrize(
    ("url", "count"),
    [
        ("https://vigil.lab", 0),
        ("http://127.0.0.1:8000", 0),
        ("http://localhost:8000", 0),
        ("http://[::1]:8000", 0),
        ("http://vigil.lab", 1),
        ("http://127.0.0.1.evil.example", 1),
    ],
)
def test_a_token_in_clear_is_warned_of(url: str, count: int) -> None:
    assert len(warnings(read_settings({**ENOUGH, "VIGIL_AGENT_URL": url}, posts=True))) == count


def test_a_token_that_others_may_read_is_warned_of(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("vga_x")
    settings = read_settings({**ENOUGH, "VIGIL_AGENT_TOKEN_FILE": str(token)}, posts=True)
    token.chmod(0o644)
    assert ["mode 0600" in sentence for sentence in warnings(settings)] == [True]
    token.chmod(0o600)
    assert warnings(settings) == []
