"""Test specs: what is accepted, and the messages about what is not."""

from __future__ import annotations

import contextlib
import json
import time
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec import JobSpec, limit_of, read_toml, seconds_of, set_values, write_toml
from tests.examples import examples

SCRIPT = {"name": "mine", "kind": "script", "script": {"directory": ".", "entry": "train.py"}}


def problems(data: dict[str, Any] | str) -> dict[str, str]:
    """Return the problems of a spec that is refused: messages by field."""
    with pytest.raises(SpecError) as error:
        JobSpec.parse_toml(data) if isinstance(data, str) else JobSpec.parse(data)
    return {problem.field: problem.message for problem in error.value.problems}


def test_a_name_is_enough() -> None:
    spec = JobSpec.parse({"name": "gpt"})
    assert spec.kind == "distributed"
    assert spec.run is not None
    assert (spec.run.recipe, spec.world_size, spec.resources.time_limit_seconds) == ("language", 1, 3600)


def test_what_was_stored_can_be_read_again() -> None:
    spec = JobSpec.parse_toml(
        'name = "gpt"\n[resources]\nranks_per_node = 2\n[run]\nsteps = 50\n[run.language]\nlayers = 2'
    )
    again = JobSpec.parse(json.loads(json.dumps(spec.model_dump(mode="json"))))
    assert again == spec
    script = JobSpec.parse(SCRIPT)
    assert JobSpec.parse(script.model_dump(mode="json")) == script


@pytest.mark.parametrize("defaults", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        {"name": "gpt", "run": {"recipe": "vision", "steps": 70}, "tags": ["a", "b"], "notes": "two\nlines \"quoted\""},
        {**SCRIPT, "script": {"git": "https://x.org/x.git", "ref": "main", "args": ["--lr", "1"], "env": {"A": "b"}}},
        {"name": "big", "resources": {"nodes": "2:4", "gpus_per_node": 8, "memory_gib": 4.5}, "run": {"steps": 64}},
        {"name": "cut", "run": {"parallelism": "fsdp"}},
        {"name": "far", "run": {"communication": "diloco", "steps": 60, "warmup_steps": 20}},
    ],
)  # fmt: skip
def test_the_text_means_the_same_spec(data: dict[str, Any], defaults: bool) -> None:
    spec = JobSpec.parse(data)
    assert JobSpec.parse_toml(write_toml(spec, defaults=defaults)) == spec


def test_the_short_text_leaves_defaults_out() -> None:
    text = write_toml(JobSpec.parse({"name": "gpt", "run": {"steps": 70}}))
    assert "steps = 70" in text
    assert "learning_rate" not in text
    assert "layers" not in text


def test_every_problem_is_reported_at_once_with_its_field_and_fix() -> None:
    found = problems(
        {
            "name": "../x",
            "kindd": "script",
            "resources": {"nodes": "4:2", "time_limit": "12 hours", "ranks": 3},
            "run": {"global_batch": "x", "mesh": {"tp": "two"}, "stepz": 3},
        }
    )
    assert "is not a valid name" in found["name"]
    assert 'Did you mean "kind"?' in found["kindd"]
    assert "first number" in found["resources.nodes"]
    assert found["resources.time_limit"] == '"12 hours" is not a time limit. Write 12:00:00.'
    assert 'Unknown field "ranks"' in found["resources.ranks"]
    assert found["run.global_batch"] == '"x" is not a whole number. Write it like global_batch = 16.'
    assert found["run.mesh.tp"] == '"two" is not a whole number. Write it like tp = 2.'
    assert 'Did you mean "steps"?' in found["run.stepz"]


def test_a_key_in_the_wrong_table_is_sent_to_the_right_table() -> None:
    assert problems({"name": "x", "steps": 3})["steps"] == 'Unknown field "steps". It belongs under [run].'
    assert "[resources]" in problems({"name": "x", "run": {"time_limit": "1:00:00"}})["run.time_limit"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nodes", 0, "at least 1"),
        ("nodes", True, "whole number"),
        ("nodes", 1.5, "whole number"),
        ("gpus_per_node", -1, "too small"),
        ("ranks_per_node", "2", "whole number"),
        ("memory_gib", 0, "more than 0"),
        ("memory_gib", float("nan"), "finite"),
        ("time_limit", "00:00:20", "Write at least 00:01:00"),
        ("time_limit", "90", "Write 01:30:00"),
        ("time_limit", 90, "text"),
        ("time_limit", "1:60:00", "HH:MM:SS"),
    ],
)
def test_resources(name: str, value: object, message: str) -> None:
    assert message in problems({"name": "x", "resources": {name: value}})[f"resources.{name}"]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"entry": "../../etc/passwd"}, "script.entry", "inside the directory"),
        ({"entry": "/etc/passwd"}, "script.entry", "inside the directory"),
        ({"directory": "", "git": "file:///etc", "ref": "main"}, "script.git", "https:// or ssh://"),
        ({"directory": "", "git": "https://me:s3cret@x.org/y", "ref": "main"}, "script.git", "contains a password"),
        ({"directory": "", "git": "https://ghp_s3cret@x.org/y", "ref": "main"}, "script.git", "credential helper"),
        ({"directory": "", "git": "ssh://me:s3cret@x.org/y", "ref": "main"}, "script.git", "contains a password"),
        ({"directory": "", "git": "https://x.org/y", "ref": "--upload-pack=sh"}, "script.ref", "is not a valid ref"),
        ({"directory": "", "git": "https://x.org/y"}, "script", "needs a ref"),
        ({"directory": ""}, "script", "No source for the program is given"),
        ({"git": "https://x.org/y", "ref": "main"}, "script", "Keep one of them"),
        ({"python": "bin/python"}, "script.python", "absolute path"),
        ({"env": {"RANK": "1"}}, "script.env", "set by Vigil"),
        ({"env": {"LD_PRELOAD": "x.so"}}, "script.env", "set by Vigil"),
        ({"env": {"a b": "1"}}, "script.env", "is not a valid variable name"),
        ({"args": [1]}, "script.args[0]", "not a text"),
    ],
)
def test_scripts(change: dict[str, Any], field: str, message: str) -> None:
    assert message in problems({**SCRIPT, "script": {**SCRIPT["script"], **change}})[field]  # type: ignore[dict-item]


def test_parts_belong_to_their_kind() -> None:
    assert "script" in problems({"name": "x", "kind": "script"})
    assert "kind = script" in problems({"name": "x", "script": {"directory": "."}})["script"]
    assert "configures Vigil's trainer" in problems({**SCRIPT, "run": {}})["run"]


CLIENT: dict[str, Any] = {"name": "x", "kind": "federated", "client": {"directory": "."}}


def test_custom_clients_bring_their_recipe_and_split() -> None:
    spec = JobSpec.parse({**CLIENT, "run": {"client": {"hidden": 64}}})
    assert (spec.run.recipe, spec.run.split, spec.run.options_of("client")["hidden"]) == ("client", "column", 64)
    assert (spec.code, spec.entries) == (spec.client, {"client.entry": "client.py"})
    text = write_toml(spec)
    assert JobSpec.parse_toml(text) == spec
    assert text.endswith('[client]\ndirectory = "."\nentry = "client.py"\n')


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"client": {"directory": ".", "entry": "../c.py"}}, "client.entry", "inside the directory"),
        ({"client": {"git": "https://x.org/y"}}, "client", "needs a ref"),
        ({"client": {"directory": ".", "args": []}}, "client.args", 'Unknown field "args"'),
        ({"run": {"recipe": "tabular"}}, "client", "It is not used"),
        ({"run": {"client": {"a b": 1}}}, "run.client.a b", "name of an argument"),
        ({"client": None, "run": {"recipe": "client"}}, "client", "Missing"),
        ({"kind": "distributed", "run": None}, "client", "kind = federated"),
        ({"kind": "distributed", "client": None, "run": {"recipe": "client"}}, "run.recipe", "not for kind"),
        (
            {"client": {"git": "file:///etc", "ref": "v1"}, "run": {"clients": 5000, "client": {"x": 1}}},
            "client.git",
            "//",
        ),
        ({"run": {"recipe": "clint", "client": {"x": 1}}}, "run.recipe", 'Did you mean "client"'),
    ],
)
def test_what_custom_clients_cannot_be_is_reported_alone(change: dict[str, Any], field: str, message: str) -> None:
    report = problems({**CLIENT, **change})
    assert [*report] == [field]
    assert message in report[field]


@pytest.mark.parametrize(("kind", "table"), [("script", "script"), ("federated", "client"), ("distributed", "script")])
def test_a_key_of_code_is_sent_to_the_table_of_its_kind(kind: str, table: str) -> None:
    assert f"belongs under [{table}]" in problems({"name": "x", "kind": kind, "entry": "a.py"})["entry"]


def test_a_federations_table_is_another_than_the_trainers() -> None:
    federated = {"name": "x", "kind": "federated"}
    assert JobSpec.parse({**federated, "run": {"rounds": 5}}).run.length == 5
    assert 'Unknown field "steps"' in problems({**federated, "run": {"steps": 5}})["run.steps"]
    assert (
        'Unknown field "rounds"' in problems({"name": "x", "kind": "distributed", "run": {"rounds": 5}})["run.rounds"]
    )
    assert 'Did you mean "fedavg"?' in problems({**federated, "run": {"algorithm": "fedavgg"}})["run.algorithm"]
    report = problems({**federated, "run": {"epochs": 1, "local_steps": 2, "dirichlet": {}}})
    assert report["run.local_steps"] == "is given as well as epochs. Keep one of them."
    assert 'write split = "dirichlet"' in problems({**federated, "run": {"dirichlet": {}}})["run.dirichlet"]


def test_options_of_the_same_name_are_those_of_the_kind_of_job() -> None:
    """topk is a communication of the trainer, and a filter of a federation."""
    federated = {"name": "x", "kind": "federated"}
    filtered = {"filters": ["topk"], "topk": {"density": 0.2, "feedback": False}}
    assert JobSpec.parse({**federated, "run": filtered}).run.options_of("topk") == filtered["topk"]
    report = problems({**federated, "run": {**filtered, "topk": {"density": 2}, "rounds": 0}})
    assert report.keys() == {"run.topk.density", "run.rounds"}
    report = problems({"name": "x", "run": {"communication": "topk", "topk": {"feedback": False}}})
    assert "is not an option of topk" in report["run.topk.feedback"]
    report = problems({**federated, "run": {"topk": {"density": 0.2}}})
    assert 'add "topk" to filters' in report["run.topk"]


@pytest.mark.parametrize(
    ("run", "field", "message"),
    [
        ({"filters": ["int8", "topk"]}, "run.filters", 'Write filters = ["topk", "int8"].'),
        ({"filters": ["topk", "topk"]}, "run.filters", 'names "topk" twice'),
        ({"clients": 10, "per_round": 11}, "run.per_round", "11 are more than all 10 clients"),
        ({"clients": 1500}, "run.clients", "there are 1,497 samples. Write at most 1497."),
        ({"clients": 1490, "split": "longtail", "longtail": {"imbalance": 1e4}}, "run.split", "without a sample"),
        ({"tabular": {"model": "linear"}}, "run.tabular.model", 'Write "logistic" or "mlp"'),
    ],
)
def test_what_a_federation_cannot_work_with_is_refused_by_field(run: dict[str, Any], field: str, message: str) -> None:
    assert message in problems({"name": "x", "kind": "federated", "run": run})[field]


def test_the_trainers_checks_come_with_the_world_size() -> None:
    found = problems({"name": "x", "resources": {"ranks_per_node": 16}, "run": {"global_batch": 500}})
    assert found["run.global_batch"].endswith("Nearest that do: 496 or 512.")
    elastic = {"nodes": "1:3", "ranks_per_node": 2}
    assert "6 ranks" in problems({"name": "x", "resources": elastic, "run": {"global_batch": 32}})["run.global_batch"]


def test_an_elastic_batch_must_divide_over_all_nodes_and_a_mesh_fit_the_fewest() -> None:
    """Fewer nodes may have uneven shares (21 samples over 6 ranks), but two ranks of a layer need two ranks."""
    elastic = {"nodes": "2:7", "ranks_per_node": 3}
    JobSpec.parse({"name": "x", "resources": elastic, "run": {"global_batch": 21}})
    JobSpec.parse({"name": "x", "resources": elastic, "run": {"global_batch": 21, "parallelism": "auto"}})
    halves = {"global_batch": 24, "mesh": {"tp": 2}}
    found = problems({"name": "x", "resources": {"nodes": "1:2", "ranks_per_node": 1}, "run": halves})
    assert "1 rank" in found["run.mesh.tp"]


def test_a_huge_text_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("parsed"))
    assert "larger than 64 KB" in problems("a" * 10_000_000)[""]


@pytest.mark.parametrize(
    "text", ["a = [", "a = " + "[" * 5000, "a = " + "9" * 5000, "\ud800", 'name = "x"\nname = "y"']
)
def test_what_is_no_toml_is_reported(text: str) -> None:
    assert problems(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "script"\nname = mira  # me\n', 'Line 2: a text needs quotes. Write name = "mira".'),
        ("steps = 10k", 'Line 1: this is not a number, and text needs quotes. Write steps = "10k".'),
        ('a = 1\nname = "mira\nb = 2\n', "Line 2: its text is not closed."),
        ('a = 1\nnotes = """\nx\n[run]\nsteps = 3\n', "Line 2: its text is not closed."),
        ('name = "a"\n\nname = "b"\n', "Line 3: name is given twice, first in line 1."),
        ("[run]\nsteps = 1\n[script]\n[run]\n", "Line 4: [run] is given twice, first in line 1."),
        ("name = \r\n[run]\r\n", "Line 1: the value is missing."),
        ("steps 200", "Line 1: there is no =. Write steps = 200."),
        ("steps: 200", "Line 1: there is no =. Write steps = 200."),
        ('a = 1\ntags = ["a",\n "b"\nname = "x"\n', "Line 2: the list is not closed"),
        ("steps = 1,000", "Line 1: numbers are written without commas. Write steps = 1000."),
        ("x = True", "Line 1: write x = true."),
        ("x = None", "Line 1: TOML has no null value."),
        ("[run\nx = 1", "Line 1: a table's name is written in brackets"),
        ('{"name": "x"}', "Line 1: this looks like JSON."),
        ("name = “x”", "Line 1: the quotes are typographic."),
        ("x\0 = 1", "Line 1: it contains invisible characters (U+0000). Remove them."),
    ],
)
def test_what_breaks_a_text_is_reported_by_its_line_with_the_fix(text: str, message: str) -> None:
    (problem,) = problems(text).values()
    assert problem.startswith(message)
    line = text.replace("\r\n", "\n").split("\n")[int(problem.split()[1].rstrip(":")) - 1]
    assert problem.endswith(f" It reads: {line.replace(chr(0), '').strip()}")


@settings(max_examples=examples(300), deadline=None)
@given(st.text(st.sampled_from("ab1 =\"'[]{}#,:.\\\n\r\t“\0-_"), max_size=40))
def test_any_text_is_read_or_refused_with_the_reason(text: str) -> None:
    with contextlib.suppress(SpecError):
        read_toml(text)


@pytest.mark.parametrize("text", ["a = " + " x" * 30_000, "a" * 60_000, "a " * 30_000, '"' * 60_000, "a = [" * 12_000])
def test_a_long_broken_line_is_reported_at_once_and_in_short(text: str) -> None:
    began = time.process_time()
    assert all(len(problem) < 500 for problem in problems(text).values())
    assert time.process_time() - began < 2


def test_time_limits() -> None:
    assert [seconds_of(limit) for limit in ("00:10:00", "12:00:00", "2-00:00:01")] == [600, 43_200, 172_801]
    assert [limit_of(seconds) for seconds in (600, 43_200, 172_801)] == ["00:10:00", "12:00:00", "2-00:00:01"]


def test_values_are_set_and_comments_stay() -> None:
    text = 'name = "x"  # mine\n[run]\nsteps = 50 # few\n'
    changed = set_values(text, {"run.steps": 40, "resources.ranks_per_node": 2})
    assert "# mine" in changed
    assert "steps = 40 # few" in changed
    assert JobSpec.parse_toml(changed).world_size == 2
    with pytest.raises(SpecError):
        set_values(text, {"name.x": 1})


def test_the_schema_is_enough_for_a_form() -> None:
    schema = JobSpec.model_json_schema()
    resources = schema["$defs"]["Resources"]["properties"]
    assert resources["time_limit"]["title"] == "Time limit"
    assert all("title" in field for field in resources.values())
    assert resources["ranks_per_node"]["default"] == 1
    assert "language" in schema["$defs"]["RunConfig"]["properties"]["recipe"]["enum"]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"name": "x", "notes": "a\0b"}, "notes"),
        ({"name": "x", "project": "a\0"}, "project"),
        ({"name": "x", "kind": "script", "script": {"directory": ".", "args": ["ok", "\0"]}}, "script.args.1"),
        ({"name": "x", "run": {"recipe": "la\0nguage"}}, "run.recipe"),
    ],
)
def test_nul_is_refused_by_field(data: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(data)
    assert [(problem.field, problem.message) for problem in caught.value.problems] == [
        (field, "contains a NUL character. Remove it.")
    ]


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        ({"name": "\ud800"}, "name", "contains a lone surrogate, which is not a character. Remove it."),
        ({"name": "x", "tags": ["a\udfffb"]}, "tags.0", "contains a lone surrogate, which is not a character."),
        ({"name": "x", "run": {"recipe": "\udc00"}}, "run.recipe", "contains a lone surrogate"),
        ({"name": "x", "run": {"\ud800": 1}}, "run", "contains a name with a lone surrogate. Remove it."),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_field(data: dict[str, Any], field: str, words: str) -> None:
    """JSON can write one, and no UTF-8 can."""
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(data)
    assert [problem.field for problem in caught.value.problems] == [field]
    assert caught.value.problems[0].message.startswith(words)
