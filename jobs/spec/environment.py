"""What a job's Python is and what is set around it: of the site, of a project, of a job; the nearer wins."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from jobs.errors import Problem, SpecError
from jobs.spec import values
from jobs.spec.part import Part
from jobs.spec.toml import read_toml
from jobs.spec.wording import problems_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}\Z")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}\Z")
_IMAGE = re.compile(r"(?:/|[a-z]+://)?[A-Za-z0-9_][A-Za-z0-9_./:@#+-]{0,499}\Z")
_PATH = re.compile(r"/[^\x00-\x1f\x7f,:]*\Z")
_APPTAINER = ("docker://", "oras://", "library://", "shub://")


def _conda(value: str) -> str:
    if value and not (_NAME.match(value) or (_PATH.match(value) and value.isprintable())):
        raise ValueError(
            f'"{value[:80]}" is no environment of conda. Write its name, or its folder: "/shared/envs/mine".'
        )
    return value


def _modules(value: list[str]) -> list[str]:
    for name in value:
        if not _MODULE.match(name):
            raise ValueError(f'"{name[:80]}" is no module. Write its name as module avail shows it, like cuda/12.4.')
    return value


def _container(value: str) -> str:
    if value and not _IMAGE.match(value):
        raise ValueError(
            f'"{value[:80]}" is no image. Write one like nvcr.io/nvidia/pytorch:24.10-py3, or the path of a .sif file.'
        )
    return value


def _mounts(value: list[str]) -> list[str]:
    for mount in value:
        source, _, rest = mount.partition(":")
        target, _, mode = rest.partition(":")
        good = _PATH.match(source) and (not rest or _PATH.match(target)) and mode in {"", "ro", "rw"}
        if not good or mount.endswith(":") or not mount.isprintable():
            raise ValueError(f'"{mount[:80]}" is no mount. Write "/data", "/data:/mnt/data" or "/data:/data:ro".')
    return value


class Environment(Part):
    """What is not said here is as the project or the site has it; "" says: none."""

    python: Annotated[str, AfterValidator(values.python)] | None = Field(
        default=None,
        max_length=4096,
        title="Python",
        description="Interpreter or virtual environment for Vigil’s own part; empty: the site’s.",
    )
    conda: Annotated[str, AfterValidator(_conda)] | None = Field(
        default=None, max_length=4096, title="Conda", description="Name or folder of a conda environment."
    )
    modules: Annotated[list[str], AfterValidator(_modules)] | None = Field(
        default=None, max_length=50, title="Modules", description="Loaded in this order, such as cuda/12.4."
    )
    container: Annotated[str, AfterValidator(_container)] | None = Field(
        default=None, max_length=500, title="Container", description="An image’s name, or the path of a .sqsh or .sif."
    )
    engine: Literal["pyxis", "apptainer"] | None = Field(
        default=None, title="Container engine", description="pyxis or apptainer; empty: by the image."
    )
    mounts: Annotated[list[str], AfterValidator(_mounts)] | None = Field(
        default=None, max_length=50, title="Mounts", description="Into the container, such as /data:/data:ro."
    )
    env: Annotated[dict[str, str], AfterValidator(values.environment)] | None = Field(
        default=None, max_length=200, title="Variables", description="That every rank sees."
    )

    @model_validator(mode="after")
    def _one_python(self) -> Self:
        if self.conda and (self.container or self.python):
            other = "container" if self.container else "python"
            raise ValueError(f"conda and {other} are both given. Keep one of them.")
        return self

    @classmethod
    def parse_toml(cls, text: str) -> Environment:
        """A table of its own, as a site's file and a project have it; SpecError if it does not hold."""
        data = read_toml(text)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(Problem(p.field, p.message) for p in problems_of(error, cls, data)) from None

    def over(self, beneath: Environment) -> Environment:
        """Lays this one over another: what it says counts, and else what is beneath it.

        Where the interpreter comes from is one thing: a container here takes no Python from beneath. Mounts add up,
        variables, too; modules are as the nearest says.
        """
        found = beneath.model_dump()
        mine = {name: value for name, value in self.model_dump().items() if value is not None}
        if mine.keys() & {"python", "conda", "container"}:
            found |= {"python": None, "conda": None, "container": None}
        if "mounts" in mine:
            mine["mounts"] = list(dict.fromkeys([*(beneath.mounts or ()), *mine["mounts"]]))
        if "env" in mine:
            mine["env"] = {**(beneath.env or {}), **mine["env"]}
        return Environment.model_construct(**found | mine)

    @property
    def runs_in(self) -> str:
        """pyxis, apptainer, or "" outside any container."""
        if not self.container:
            return ""
        is_file = self.container.endswith(".sif") or self.container.startswith(_APPTAINER)
        return self.engine or ("apptainer" if is_file else "pyxis")

    @property
    def image(self) -> str:
        """The image as its engine wants it: pyxis has a # after the registry, apptainer says where it comes from."""
        image = self.container or ""
        if not image or image.startswith("/") or "://" in image:
            return image
        if self.runs_in == "apptainer":
            return image if PurePosixPath(image).suffix == ".sif" else f"docker://{image.replace('#', '/', 1)}"
        registry, slash, name = image.partition("/")
        is_registry = slash and "#" not in image and ("." in registry or ":" in registry)
        return f"{registry}#{name}" if is_registry else image
