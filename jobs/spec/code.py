"""Describe a user's own code in a specification: a program, or the parts of a federation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from jobs.spec import values
from jobs.spec.table import SpecTable


class Code(SpecTable):
    """A user's files: a directory that is packed and uploaded, or a commit that is fetched when the job runs."""

    KIND: ClassVar[str]
    """The kind of job that it is for."""
    TABLE: ClassVar[str]
    """Its name in a specification."""

    directory: str = Field(
        default="", max_length=4096, title="Directory", description="Packed and sent by `vigil submit`."
    )
    git: Annotated[str, AfterValidator(values.git)] = Field(
        default="", title="Git URL", description="https:// or ssh://"
    )
    ref: Annotated[str, AfterValidator(values.ref)] = Field(
        default="", title="Git ref", description="A branch, a tag or a commit."
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.git and self.directory:
            raise ValueError("directory and git are both given. Keep one of them.")
        if not self.git and not self.directory:
            raise ValueError('No source for the program is given. Set directory = "." or git = "https://…" and a ref.')
        if self.git and not self.ref:
            raise ValueError('git needs a ref: ref = "main", a tag or a commit.')
        return self


class Script(Code):
    """A user's program, one process per rank, with torchrun's environment."""

    KIND: ClassVar[str] = "script"
    TABLE: ClassVar[str] = "script"

    entry: Annotated[str, AfterValidator(values.entry)] = Field(
        default="train.py",
        max_length=500,
        title="Program",
        description="The file to run, inside the directory: a Python file, or one with a #! line.",
    )
    args: list[str] = Field(default_factory=list, max_length=1000, title="Arguments")
    env: Annotated[dict[str, str], AfterValidator(values.environment)] = Field(
        default_factory=dict, max_length=200, title="Environment", description="Environment variables for the program."
    )
    python: Annotated[str, AfterValidator(values.python)] = Field(
        default="",
        max_length=4096,
        title="Python",
        description="Interpreter or virtual environment; empty: the portal's own.",
    )


class ClientCode(Code):
    """A user's parts of a federation: clients, algorithm, aggregation, selection or split."""

    KIND: ClassVar[str] = "federated"
    TABLE: ClassVar[str] = "client"

    entry: Annotated[str, AfterValidator(values.entry)] = Field(
        default="client.py",
        max_length=500,
        title="Client",
        description="The file with model() and data(client), inside the directory. Its options are in [run.client].",
    )
    algorithm: Annotated[str, AfterValidator(values.entry)] = Field(
        default="algorithm.py",
        max_length=500,
        title="Algorithm",
        description="The file with aggregate(), inside the directory. Its options are in [run.custom].",
    )
    aggregation: Annotated[str, AfterValidator(values.entry)] = Field(
        default="aggregation.py",
        max_length=500,
        title="Aggregation",
        description="The file with combine(), inside the directory. Its options are in [run.custom_aggregation].",
    )
    selection: Annotated[str, AfterValidator(values.entry)] = Field(
        default="selection.py",
        max_length=500,
        title="Selection",
        description="The file with select(), inside the directory. Its options are in [run.custom_selection].",
    )
    split: Annotated[str, AfterValidator(values.entry)] = Field(
        default="split.py",
        max_length=500,
        title="Split",
        description="The file with divide(), inside the directory. Its options are in [run.custom_split].",
    )
