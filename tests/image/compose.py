"""Read docker/compose.yaml as a container engine would: what each service consists of and depends on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.stack import REPOSITORY

DOCKER = REPOSITORY / "docker"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Service:
    """A service of the compose file, with short forms expanded."""

    name: str
    image: str
    target: str | None
    """The stage of our Dockerfile; None for an image of another project."""
    command: list[str] | None
    environment: dict[str, str]
    secrets: list[str]
    volumes: list[tuple[str, str, bool]]
    """Source, place, read-only; a source without a slash is a volume's name."""
    tmpfs: list[str]
    read_only: bool
    without_capabilities: bool
    shm_size: str
    ports: list[str]
    healthcheck: list[str] | None
    after: dict[str, str]
    """By service, its condition."""


def read(environment: Mapping[str, str] | None = None) -> dict[str, Service]:
    """Return every service, in an order in which they can be started."""
    text = (DOCKER / "compose.yaml").read_text()
    filled = _VARIABLE.sub(lambda found: (environment or {}).get(found[1]) or found[2] or "", text)
    services = {name: _service(name, message) for name, message in yaml.safe_load(filled)["services"].items()}
    return {name: services[name] for name in _ordered(services)}


def images() -> set[str]:
    """Return the images that the compose file pulls."""
    return {service.image for service in read().values() if service.target is None}


def _service(name: str, definition: dict[str, Any]) -> Service:
    supported = {
        "image", "build", "restart", "environment", "secrets", "volumes", "command", "depends_on", "healthcheck",
        "ports", "shm_size", "read_only", "tmpfs", "cap_drop", "security_opt",
    }  # fmt: skip
    assert not definition.keys() - supported, (
        f"{name}: {definition.keys() - supported} would be left out here; tests/image/compose.py"
    )
    check = definition.get("healthcheck", {}).get("test")
    assert check is None or check[0] == "CMD", f"{name}: a health check is written as a list that begins with CMD"
    return Service(
        name=name,
        image=definition["image"],
        target=definition["build"]["target"] if "build" in definition else None,
        command=definition.get("command"),
        # An engine fills in variables after it has parsed the file: an empty one is an empty text, not null.
        environment={
            key: "" if value is None else str(value) for key, value in definition.get("environment", {}).items()
        },
        secrets=definition.get("secrets", []),
        volumes=[_volume(line) for line in definition.get("volumes", [])],
        tmpfs=definition.get("tmpfs", []),
        read_only=definition.get("read_only", False),
        without_capabilities=definition.get("cap_drop") == ["ALL"],
        shm_size=definition.get("shm_size", "64m"),
        ports=definition.get("ports", []),
        healthcheck=check and check[1:],
        after={other: wanted["condition"] for other, wanted in definition.get("depends_on", {}).items()},
    )


def _volume(line: str) -> tuple[str, str, bool]:
    source, place, *options = line.split(":")
    return source, place, options == ["ro"]


def _ordered(services: Mapping[str, Service]) -> list[str]:
    order: list[str] = []
    while left := [name for name in services if name not in order]:
        order += [name for name in left if not services[name].after.keys() - set(order)] or left
    return order


def secrets(folder: Path) -> dict[str, Path]:
    """Return the site's secret files by name, from a copy of docker/ in which secrets.sh was run."""
    return {path.name: path for path in (folder / "secrets").iterdir()}
