"""What the agent is told, by its environment alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

STATE = "/var/lib/vigil-agent"
KMSG = "/dev/kmsg"
MOST_MOUNTS = 16
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")


class WrongSetting(Exception):
    """A setting that will not do; the message says what to write."""


@dataclass(frozen=True)
class Settings:
    """`url` and `token_file` are empty where nothing is to be posted."""

    node: str
    state: Path
    kmsg: Path
    mounts: tuple[str, ...] | None
    """Those to probe; None: every network file system that is mounted."""
    url: str = ""
    token_file: Path = Path()


def read_settings(environment: Mapping[str, str] | None = None, *, posts: bool) -> Settings:
    """`posts`: whether it reports to a portal, and so must know where that is. Raises WrongSetting."""
    said = os.environ if environment is None else environment
    return Settings(
        node=_node(said.get("VIGIL_AGENT_NODE", "")),
        state=_path("VIGIL_AGENT_STATE", said.get("VIGIL_AGENT_STATE") or STATE),
        kmsg=_path("VIGIL_AGENT_KMSG", said.get("VIGIL_AGENT_KMSG") or KMSG),
        mounts=_mounts(said.get("VIGIL_AGENT_MOUNTS", "")),
        url=_url(said.get("VIGIL_AGENT_URL", "")) if posts else "",
        token_file=_token_file(said.get("VIGIL_AGENT_TOKEN_FILE", "")) if posts else Path(),
    )


def warnings(settings: Settings) -> list[str]:
    """What works and should not stay as it is."""
    found = []
    parts = urlsplit(settings.url)
    if parts.scheme == "http" and parts.hostname not in {"localhost", "::1"} and not _is_loopback(parts.hostname or ""):
        found.append("VIGIL_AGENT_URL is http://, so the token can be read on the way. Use https://.")
    with suppress(OSError):
        if settings.token_file.stat().st_mode & 0o077:
            found.append(f"VIGIL_AGENT_TOKEN_FILE: others may open {settings.token_file}. Give it mode 0600.")
    return found


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") and host.replace(".", "").isdigit()


def _node(said: str) -> str:
    name = said.strip() or os.uname().nodename.split(".")[0]
    if not _NODE.fullmatch(name):
        raise WrongSetting(f"VIGIL_AGENT_NODE is {name!r}. Set it to the node's name as the scheduler spells it.")
    return name


def _path(name: str, said: str) -> Path:
    if not said.startswith("/") or "\0" in said:
        raise WrongSetting(f"{name} is {said!r}. Set it to a whole path, from / on.")
    return Path(said)


def _mounts(said: str) -> tuple[str, ...] | None:
    if not said.strip():
        return None
    if said.strip() == "none":
        return ()
    names = [part.strip().rstrip("/") or "/" for part in said.split(",") if part.strip()]
    if len(names) > MOST_MOUNTS:
        raise WrongSetting(f"VIGIL_AGENT_MOUNTS names {len(names)} mounts. Name at most {MOST_MOUNTS}.")
    return tuple(dict.fromkeys(str(_path("VIGIL_AGENT_MOUNTS", name)) for name in names))


def _url(said: str) -> str:
    if not said.strip():
        raise WrongSetting(
            "VIGIL_AGENT_URL is not set. Set it to the portal's address, such as https://vigil.lab.example."
        )
    url = said.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        known = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or 1)
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment or parts.username or not (url.isascii() and url.isprintable()):
        raise WrongSetting(
            f"VIGIL_AGENT_URL is {url!r}. Set it to the portal's address: http:// or https://, and a host."
        )
    return url


def _token_file(said: str) -> Path:
    if not said.strip():
        raise WrongSetting(
            "VIGIL_AGENT_TOKEN_FILE is not set. Write what `vigil agent enroll NODE` printed into a file of mode 0600,"
            " and name the file here."
        )
    return _path("VIGIL_AGENT_TOKEN_FILE", said.strip())
