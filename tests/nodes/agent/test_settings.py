"""What the agent is told by its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodes.agent.settings import WrongSetting, read_settings

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
    ("said", "mounts"),
    [("", None), ("none", ()), ("/data, /scratch/,,/data", ("/data", "/scratch")), ("/", ("/",))],
)
def test_mounts(said: str, mounts: tuple[str, ...] | None) -> None:
    assert read_settings({**ENOUGH, "VIGIL_AGENT_MOUNTS": said}, posts=True).mounts == mounts


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"VIGIL_AGENT_URL": ""}, "VIGIL_AGENT_URL is not set"),
        ({"VIGIL_AGENT_URL": "vigil.lab"}, "http:// or https://"),
        ({"VIGIL_AGENT_URL": "ftp://vigil.lab"}, "http:// or https://"),
        ({"VIGIL_AGENT_URL": "http://vigil.lab:99999"}, "http:// or https://"),
        ({"VIGIL_AGENT_URL": "http://user:secret@vigil.lab"}, "http:// or https://"),
        ({"VIGIL_AGENT_TOKEN_FILE": ""}, "vigil agent enroll"),
        ({"VIGIL_AGENT_TOKEN_FILE": "token"}, "whole path"),
        ({"VIGIL_AGENT_NODE": "a node"}, "as the scheduler spells it"),
        ({"VIGIL_AGENT_NODE": "n" * 256}, "as the scheduler spells it"),
        ({"VIGIL_AGENT_STATE": "state"}, "whole path"),
        ({"VIGIL_AGENT_KMSG": "kmsg"}, "whole path"),
        ({"VIGIL_AGENT_MOUNTS": "data"}, "whole path"),
        ({"VIGIL_AGENT_MOUNTS": ",".join(f"/m{n}" for n in range(17))}, "at most 16"),
    ],
)
def test_a_wrong_one_says_what_to_write(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(WrongSetting, match=sentence):
        read_settings({**ENOUGH, **changes}, posts=True)
