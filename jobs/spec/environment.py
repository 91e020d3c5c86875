"""Describe a job's Python environment, of site, project and job; the nearest one wins."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from jobs.errors import Problem, SpecError
from jobs.spec import values
from jobs.spec.error_messages import problems_of
from jobs.spec.table import SpecTable
from jobs.spec.toml import read_toml

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}\Z")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}\Z")
_IMAGE = re.compile(r"(?:/|[a-z]+://)?[A-Za-z0-9_][A-Za-z0-9_./:@#+-]{0,499}\Z")
_PATH = re.compile(r"/[^\x00-\x1f\x7f,:]*\Z")
_APPTAINER = ("docker://", "oras://", "library://", "shub://")


def _conda(value: str) -> str:
    if value and not (_NAME.match(value) or (_PATH.match(value) and value.isprintable())):
        raise ValueError(
            f'"{value[:80]}" is not a conda environment. Write its name, or its folder: "/shared/envs/mine".'
        )
    return value


def _modules(value: list[str]) -> list[str]:
    for name in value:
        if not _MODULE.match(name):
            raise ValueError(f'"{name[:80]}" is not a module. Write its name as module avail shows it, like cuda/12.4.')
    return value


def _container(value: str) -> str:
    if value and not _IMAGE.match(value):
        raise ValueError(
            f'"{value[:80]}" is not an image. Write one like nvcr.io/nvidia/pytorch:24.10-py3, or a path to a .sif.'
        )
    return value


def _mounts(value: list[str]) -> list[str]:
    for mount in value:
        source, _, rest = mount.partition(":")
        target, _, mode = rest.partition(":")
        good = _PATH.match(source) and (not rest or _PATH.match(target)) and mode in {"", "ro", "rw"}
        if not good or mount.endswith(":") or not mount.isprintable():
            raise ValueError(f'"{mount[:80]}" is not a mount. Write "/data", "/data:/mnt/data" or "/data:/data:ro".')
    return value


class Environment(SpecTable):
    """A Python environment. A value that is not set is inherited from the project or the site; "" sets none."""

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
        default=None,
        max_length=500,
        title="Container",
        description="Name of an image, or path of a .sqsh or .sif file.",
    )
    engine: Literal["pyxis", "apptainer"] | None = Field(
        default=None, title="Container engine", description="pyxis or apptainer; empty: chosen by the image."
    )
    mounts: Annotated[list[str], AfterValidator(_mounts)] | None = Field(
        default=None,
        max_length=50,
        title="Mounts",
        description="Folders to mount into the container, such as /data:/data:ro.",
    )
    env: Annotated[dict[str, str], AfterValidator(values.environment)] | None = Field(
        default=None, max_length=200, title="Variables", description="Environment variables for every rank."
    )

    @model_validator(mode="after")
    def _check_interpreter(self) -> Self:
        if self.conda and (self.container or self.python):
            other = "container" if self.container else "python"
            raise ValueError(f"conda and {other} are both given. Keep one of them.")
        return self

    @classmethod
    def parse_toml(cls, text: str) -> Environment:
        """Parse a separate table, as a site's file and a project have it. Raises SpecError if it is invalid."""
        data = read_toml(text)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(Problem(p.field, p.message) for p in problems_of(error, cls, data)) from None

    def merged_over(self, base: Environment) -> Environment:
        """Return this environment merged over another: values that it sets replace those of `base`.

        Python, conda and container are one choice: a container here takes no Python from `base`. Mounts and variables
        add up; the nearest list of modules counts alone.
        """
        merged = base.model_dump()
        changes = {name: value for name, value in self.model_dump().items() if value is not None}
        if changes.keys() & {"python", "conda", "container"}:
            merged |= {"python": None, "conda": None, "container": None}
        if "mounts" in changes:
            changes["mounts"] = list(dict.fromkeys([*(base.mounts or ()), *changes["mounts"]]))
        if "env" in changes:
            changes["env"] = {**(base.env or {}), **changes["env"]}
        return Environment.model_construct(**merged | changes)

    @property
    def runs_in(self) -> str:
        """Return pyxis, apptainer, or "" outside any container."""
        if not self.container:
            return ""
        is_file = self.container.endswith(".sif") or self.container.startswith(_APPTAINER)
        return self.engine or ("apptainer" if is_file else "pyxis")

    @property
    def image(self) -> str:
        """Return the image as its engine expects it: pyxis has a # after the registry, apptainer a scheme."""
        image = self.container or ""
        if not image or image.startswith("/") or "://" in image:
            return image
        if self.runs_in == "apptainer":
            return image if PurePosixPath(image).suffix == ".sif" else f"docker://{image.replace('#', '/', 1)}"
        registry, slash, name = image.partition("/")
        is_registry = slash and "#" not in image and ("." in registry or ":" in registry)
        return f"{registry}#{name}" if is_registry else image
