"""Read the agent's settings from its environment."""

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
MAX_MOUNTS = 16
IPMITOOL, REDFISH = "ipmitool", "redfish"
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")


class InvalidSetting(Exception):
    """A setting is missing or invalid; the message says what to write."""


@dataclass(frozen=True)
class RedfishSettings:
    """How to read the node's BMC: its address, a file with user:password, and whom its certificate is trusted from."""

    url: str
    credentials_file: Path
    ca_file: Path | None = None
    """None: the system's authorities."""


@dataclass(frozen=True)
class AgentSettings:
    """The agent's settings. `url` and `token_file` are empty if nothing is to be posted."""

    node: str
    state: Path
    kmsg: Path
    mounts: tuple[str, ...] | None
    """The mounts to probe; None: every network file system."""
    url: str = ""
    token_file: Path = Path()
    inlet: str | None = None
    """The BMC's sensor of the inlet temperature; "": the one that looks like it; None: the BMC is not read."""
    redfish: RedfishSettings | None = None
    """Set: the inlet is read by Redfish; else with ipmitool."""
    takes_faults: bool = False
    """Whether the portal's game days may inject faults on this node."""


def read_settings(environment: Mapping[str, str] | None = None, *, posts: bool) -> AgentSettings:
    """Read and check the settings. Raises InvalidSetting.

    `posts`: whether the agent reports to a portal, and so needs its address and a token.
    """
    values = os.environ if environment is None else environment
    return AgentSettings(
        node=_node(values.get("VIGIL_AGENT_NODE", "")),
        state=_path("VIGIL_AGENT_STATE", values.get("VIGIL_AGENT_STATE") or STATE),
        kmsg=_path("VIGIL_AGENT_KMSG", values.get("VIGIL_AGENT_KMSG") or KMSG),
        mounts=_mounts(values.get("VIGIL_AGENT_MOUNTS", "")),
        url=_url(values.get("VIGIL_AGENT_URL", "")) if posts else "",
        token_file=_token_file(values.get("VIGIL_AGENT_TOKEN_FILE", "")) if posts else Path(),
        inlet=_inlet(values.get("VIGIL_AGENT_INLET", "")),
        redfish=_redfish(values),
        takes_faults=_takes_faults(values.get("VIGIL_AGENT_GAMEDAY", "")),
    )


def warnings(settings: AgentSettings) -> list[str]:
    """Return warnings about settings that work but should be changed."""
    found = []
    parts = urlsplit(settings.url)
    if parts.scheme == "http" and parts.hostname not in {"localhost", "::1"} and not _is_loopback(parts.hostname or ""):
        found.append("VIGIL_AGENT_URL is http://, so the token is sent unencrypted. Use https://.")
    if settings.takes_faults:
        found.append("VIGIL_AGENT_GAMEDAY=yes: game days of the portal may inject faults on this node.")
    with suppress(OSError):
        if settings.token_file.stat().st_mode & 0o077:
            found.append(f"VIGIL_AGENT_TOKEN_FILE: others can read {settings.token_file}. Give it mode 0600.")
    return found


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") and host.replace(".", "").isdigit()


def _node(text: str) -> str:
    name = text.strip() or os.uname().nodename.split(".")[0]
    if not _NODE.fullmatch(name):
        raise InvalidSetting(f"VIGIL_AGENT_NODE is {name!r}. Set it to the node's name as the scheduler spells it.")
    return name


def _path(name: str, text: str) -> Path:
    if not text.startswith("/") or "\0" in text:
        raise InvalidSetting(f"{name} is {text!r}. Set it to an absolute path.")
    return Path(text)


def _mounts(text: str) -> tuple[str, ...] | None:
    if not text.strip():
        return None
    if text.strip() == "none":
        return ()
    names = [part.strip().rstrip("/") or "/" for part in text.split(",") if part.strip()]
    if len(names) > MAX_MOUNTS:
        raise InvalidSetting(f"VIGIL_AGENT_MOUNTS names {len(names)} mounts. Name at most {MAX_MOUNTS}.")
    return tuple(dict.fromkeys(str(_path("VIGIL_AGENT_MOUNTS", name)) for name in names))


def _inlet(text: str) -> str | None:
    tool, _, sensor = text.strip().partition(":")
    if not tool:
        return None
    if tool not in (IPMITOOL, REDFISH) or not sensor.isprintable() or len(sensor) > 64:
        raise InvalidSetting(
            f"VIGIL_AGENT_INLET is {text!r:.80}. Set it to ipmitool or redfish, or to ipmitool:SENSOR or redfish:SENSOR"
            " with a sensor's name as the BMC has it; leave it empty to not read the BMC."
        )
    return sensor.strip()


def _redfish(values: Mapping[str, str]) -> RedfishSettings | None:
    if values.get("VIGIL_AGENT_INLET", "").strip().partition(":")[0] != REDFISH:
        return None
    credentials, authority = (
        values.get(f"VIGIL_AGENT_REDFISH_{name}", "").strip() for name in ("CREDENTIALS_FILE", "CA_FILE")
    )
    if not credentials:
        raise InvalidSetting(
            "VIGIL_AGENT_REDFISH_CREDENTIALS_FILE is not set. Write user:password of a read-only account of the BMC"
            " into a file of mode 0600, and name the file here."
        )
    return RedfishSettings(
        _bmc_url(values.get("VIGIL_AGENT_REDFISH_URL", "")),
        _path("VIGIL_AGENT_REDFISH_CREDENTIALS_FILE", credentials),
        _path("VIGIL_AGENT_REDFISH_CA_FILE", authority) if authority else None,
    )


def _bmc_url(text: str) -> str:
    """Return the BMC's address; only https://, as the credentials travel with each request."""
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme == "https" and parts.hostname and (parts.port or 1)
    except ValueError:
        is_address = False
    has_more = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    if not is_address or has_more or not (url.isascii() and url.isprintable()):
        # Not the value: whoever wrote a password into it should not find it in a log.
        raise InvalidSetting("VIGIL_AGENT_REDFISH_URL must be the BMC's address, https:// and a host.")
    return url


def _takes_faults(text: str) -> bool:
    if text.strip() not in {"", "no", "yes"}:
        raise InvalidSetting(
            f"VIGIL_AGENT_GAMEDAY is {text!r:.80}. Set it to yes if game days of the portal may inject faults on this"
            " node, else to no."
        )
    return text.strip() == "yes"


def _url(text: str) -> str:
    if not text.strip():
        raise InvalidSetting(
            "VIGIL_AGENT_URL is not set. Set it to the portal's address, such as https://vigil.lab.example."
        )
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or 1)
    except ValueError:
        is_valid = False
    if not is_valid or parts.query or parts.fragment or parts.username or not (url.isascii() and url.isprintable()):
        raise InvalidSetting(
            f"VIGIL_AGENT_URL is {url!r}. Set it to the portal's address: http:// or https://, and a host."
        )
    return url


def _token_file(text: str) -> Path:
    if not text.strip():
        raise InvalidSetting(
            "VIGIL_AGENT_TOKEN_FILE is not set. Write what `vigil agent enroll NODE` printed into a file of mode 0600,"
            " and name the file here."
        )
    return _path("VIGIL_AGENT_TOKEN_FILE", text.strip())
