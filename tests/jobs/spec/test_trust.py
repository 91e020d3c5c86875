"""Test what each field of a specification can do: none is forgotten, and an unclassified one counts as code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from jobs.spec import JobSpec
from jobs.spec.sweep import SweepTable
from jobs.spec.trust import HARMLESS, POWERS, Power, misuses, power_of
from training.config import choices
from training.config.base import BaseRunConfig

CODE = {
    "python": "/any/program", "conda": "/envs/mine", "modules": ["mine"], "container": "/images/mine.sif",
    "engine": "apptainer", "mounts": ["/srv"], "env": {"CXX": "/any/program"},
}  # fmt: skip


def fields(model: type[BaseModel], table: str = "") -> Iterator[str]:
    """Return every key of a specification, as dotted paths."""
    for name, about in model.model_fields.items():
        inner = [item for item in (about.annotation, *get_args(about.annotation)) if _is_table(item)]
        if inner:
            for item in inner:
                yield from fields(item, f"{table}{name}.")
        elif not (issubclass(model, BaseRunConfig) and name == "options"):
            yield f"{table}{name}"


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def options() -> Iterator[str]:
    """Return every option of every recipe, parallelism and communication module."""
    for kind in choices.ENTRY_FUNCTIONS:
        for name, choice in choices.describe(kind).items():
            yield from (f"run.{name}.{option.name}" for option in choice.options)


def test_every_key_is_classified_and_no_other() -> None:
    there = {*fields(JobSpec), *fields(SweepTable, "sweep."), *options()}
    unclassified = {field for field in there - POWERS.keys() if power_of(field) is Power.CODE}
    assert not unclassified, "classify in jobs.spec.trust what this can do to the user who runs the job"
    assert not POWERS.keys() - there, "no longer a key of a specification"


def test_options_with_numbers_or_fixed_words_need_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = {field for field in options() if field not in POWERS}
    assert {"run.median.f", "run.deadline.late", "run.topk.feedback"} <= closed
    monkeypatch.setattr("jobs.spec.trust.POWERS", {})
    assert {field for field in options() if power_of(field) is not Power.DATA} == POWERS.keys() & set(options())


@pytest.mark.parametrize("kind", choices.CHOICE_FIELDS)
def test_no_two_choices_of_a_kind_of_job_share_a_table(kind: str) -> None:
    names = [name for folder in choices.CHOICE_FIELDS[kind].values() for name in choices.names(folder)]
    assert [name for name in names if names.count(name) > 1 and any(_options(kind, name))] == []


def _options(kind: str, name: str) -> Iterator[choices.Option]:
    for folder in choices.CHOICE_FIELDS[kind].values():
        if name in choices.names(folder):
            yield from choices.get(folder, name).options


def test_every_option_that_is_a_path_is_marked_as_a_path() -> None:
    for kind in choices.ENTRY_FUNCTIONS:
        for name, choice in choices.describe(kind).items():
            paths = {f"run.{name}.{option.name}" for option in choice.options if option.is_path}
            assert all(POWERS[path] in {Power.READS, Power.WRITES} for path in paths)


def test_a_key_that_nobody_classified_is_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.spec.trust.POWERS", {})
    spec = spec_of(resources={"partition": "gpu"}, run={"language": {"text_field": "body"}})
    fields = {problem.field for problem in misuses(spec, ())}
    assert fields == {"name", "resources.partition", "run.language.text_field"}


def spec_of(**parts: Any) -> JobSpec:
    return JobSpec.parse({"name": "gpt", **parts})


@pytest.mark.parametrize("key", CODE)
def test_whatever_chooses_code_is_reported_by_its_field(key: str) -> None:
    (problem,) = misuses(spec_of(environment={key: CODE[key]}), ())
    assert problem.field == f"environment.{key}"
    assert "what code runs" in problem.message
    assert "VIGIL_LOCAL_USER" in problem.message


def test_options_of_custom_code_are_not_judged_but_the_code_is() -> None:
    spec = spec_of(
        kind="federated",
        client={"directory": ".", "algorithm": "mine.py"},
        run={"recipe": "client", "algorithm": "own", "client": {"hidden": 64, "folder": "/etc"}, "own": {"q": 2.0}},
    )
    assert [problem.field for problem in misuses(spec, ())] == ["client.directory", "client.algorithm"]


@pytest.mark.parametrize(
    "name",
    ["PYTHONPATH", "LD_LIBRARY_PATH", "CXX", "TORCHINDUCTOR_CACHE_DIR", "NCCL_NET_PLUGIN", "HF_HOME", "HOME", "PATH"],
)
def test_a_variable_that_could_load_code_is_named(name: str) -> None:
    (problem,) = misuses(spec_of(environment={"env": {"OMP_NUM_THREADS": "2", name: "/tmp/x"}}), ())
    assert problem.message.startswith(f"{name} can choose what code runs")


def test_harmless_variables_and_words_pass() -> None:
    env = dict.fromkeys(HARMLESS, "1")
    language = {"source": "stdlib", "tokenizer": "bytes", "from_weights": "none", "shards_folder": "auto"}
    spec = spec_of(environment={"env": env, "python": "", "modules": []}, run={"language": language})
    assert not list(misuses(spec, ()))


class TestPaths:
    def test_only_below_the_roots(self, tmp_path: Path) -> None:
        root, secret = tmp_path / "data", tmp_path / "home"
        for folder in (root, secret):
            folder.mkdir()
        (root / "out").symlink_to(secret)
        (root / "texts").mkdir()
        (root / "in").symlink_to(root / "texts")
        for path, is_refused in (
            (root / "texts", False),
            (root / "in", False),
            (root / "not there yet", False),
            (secret, True),
            (root / "out", True),
            (root / "out" / "deeper", True),
            (f"{root}/../home", True),
            (f"{root}-other", True),
            ("~/texts", True),
        ):
            for option in ("source", "tokenizer", "from_weights"):
                found = list(misuses(spec_of(run={"language": {option: str(path)}}), (str(root),)))
                assert [problem.field for problem in found] == [f"run.language.{option}"] * is_refused, path
                assert not found or f"Name one below {root}" in found[0].message

    def test_without_roots_none(self, tmp_path: Path) -> None:
        (problem,) = misuses(spec_of(run={"language": {"source": str(tmp_path)}}), ())
        assert "VIGIL_DATA_ROOTS names the folders" in problem.message

    def test_nothing_is_written_anywhere(self, tmp_path: Path) -> None:
        spec = spec_of(run={"options": {"language": {"shards_folder": str(tmp_path)}}})
        (problem,) = misuses(spec, (str(tmp_path),))
        assert problem.field == "run.language.shards_folder"
