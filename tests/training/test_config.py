"""Test run configurations: every invalid setting is named by its field, with the fix."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training import run_file
from training.config import choices, layout_checks, run_config
from training.config.base import ConfigError
from training.config.choices import ChoiceError
from training.config.run_config import RunConfig
from training.config.shape import Misfit

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_defaults_are_written_out_and_read_back() -> None:
    found = run_config.parse({})
    assert found.recipe == "language"
    assert found.options["language"]["preset"] == "tiny"
    assert found.options["language"]["layers"] is None
    assert "layers" not in found.model_dump()["language"], "TOML has no word for nothing"
    assert run_config.parse(found.model_dump()) == found
    assert "options" not in found.model_dump()
    assert found.model_dump()["language"]["dropout"] == 0.0


@pytest.mark.parametrize("name", ["language.toml", "vision.toml"])
def test_the_examples_are_runnable_job_specs(name: str) -> None:
    found = run_file.load(EXAMPLES / name)
    assert found.on_cpu
    assert list(layout_checks.check(found.config, 2)) == []
    assert list(layout_checks.check(found.config, 1)) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stepps": 3}, 'run.stepps: is not a setting of [run]. Did you mean "steps"?'),
        ({"recipe": "lang"}, 'run.recipe: "lang" does not exist. Did you mean "language"?'),
        ({"parallelism": "fsdp9"}, 'run.parallelism: "fsdp9" does not exist. Did you mean "fsdp"?'),
        ({"language": {"layer": 3}}, 'run.language.layer: is not an option of language. Did you mean "layers"?'),
        ({"language": {"layers": "3"}}, "run.language.layers: must be a whole number, not '3'."),
        ({"language": {"layers": True}}, "run.language.layers: must be a whole number, not True."),
        ({"language": {"dropout": 1.5}}, "run.language.dropout: is 1.5. The largest allowed is 0.9."),
        ({"language": {"layers": 0}}, "run.language.layers: is 0. The smallest allowed is 1."),
        ({"language": {"dropout": float("nan")}}, "run.language.dropout: must be a number, not nan."),
        ({"language": 3}, "run.language: must be a table, [run.language]."),
        ({"language": {}, "options": {"language": {}}}, "run.language: is given here and under run.options. Keep one"),
        ({"vision": {"hidden": 3}}, "run.vision: is a table of options that this run does not use (recipe language,"),
        ({"steps": 0}, "run.steps: Input should be greater than or equal to 1"),
        ({"steps": "10"}, "run.steps: Input should be a valid integer"),
        ({"learning_rate": float("nan")}, "run.learning_rate: Input should be a finite number"),
        ({"options": 3, "language": {}}, "run.options: Input should be a valid dictionary"),
        ({"options": {"{braces}": {}}}, "run.{braces}: is a table of options that this run does not use"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config.parse(table)
    assert message in str(caught.value)


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        run_config.parse({"language": {"layers": 0, "widht": 3}, "warmup_steps": 3})
    assert [problem.field for problem in caught.value.problems] == ["run.language.layers", "run.language.widht"]


@pytest.mark.parametrize(
    ("table", "world", "message"),
    [
        (
            {"global_batch": 500, "micro_batch": 4},
            16,
            "500 does not divide over 16 ranks × micro batch 4. Nearest that do: 448 or 512.",
        ),
        ({"global_batch": 32}, 3, "32 does not divide over 3 ranks. Nearest that do: 30 or 33."),
        ({"global_batch": 3}, 4, "3 does not divide over 4 ranks. The nearest that does: 4."),
        ({"global_batch": 4, "micro_batch": 3}, 1, "3 does not divide a rank's 4 samples. Nearest that do: 2 or 4."),
        ({"global_batch": 12, "micro_batch": 4}, 2, "4 does not divide a rank's 6 samples. Nearest that do: 3 or 6."),
        ({"steps": 20, "warmup_steps": 20}, 1, "20 is not less than steps = 20"),
        ({"communication": "powersgd", "parallelism": "fsdp"}, 2, '"powersgd" is for parallelism = "ddp", where each'),
        ({"communication": "diloco", "parallelism": "zero1"}, 2, '"diloco" is for parallelism = "ddp", where each'),
        ({"communication": "bf16", "mesh": {"cp": 2}}, 4, '"bf16" is for replicas of whole models, not with mesh.cp.'),
        ({"communication": "topk", "dtype": "fp16"}, 2, 'is "fp16", and topk combines gradients of several steps'),
        ({"language": {"head_width": 9}}, 1, "head_width 9 is odd, but rotary positions rotate pairs of halves."),
        ({"language": {"rope_low_freq_factor": 2}}, 1, "rope_low_freq_factor belongs to scaled positions, which need"),
        ({"language": {"rope_factor": 8, "rope_high_freq_factor": 1}}, 1, "rope_high_freq_factor 1 must be more than"),
        ({"language": {"max_context": 64}}, 1, "max_context 64 is less than the context, 96. Leave it out."),
        (
            {"communication": "local_sgd", "keep_best": 1},
            2,
            "100 is not a multiple of local_sgd.every, 8, but keep_best",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_ranks_gets_the_nearest_that_does(
    table: dict[str, Any], world: int, message: str
) -> None:
    (problem,) = layout_checks.check(run_config.parse(table), world)
    assert problem.message.startswith(message)


def test_a_micro_batch_that_does_not_fit_is_named_itself() -> None:
    """If the batch divides evenly over the ranks, another batch size is no remedy."""
    (problem,) = layout_checks.check(run_config.parse({"global_batch": 12, "micro_batch": 4}), 2)
    assert problem.field == "micro_batch"
    assert not list(layout_checks.check(run_config.parse({"global_batch": 12, "micro_batch": 3}), 2))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 2), (100, 20), (5000, 20)])
def test_a_short_run_gets_a_short_warmup(steps: int, warmup: int) -> None:
    assert run_config.parse({"steps": steps}).warmup_steps == warmup
    assert not list(layout_checks.check(run_config.parse({"steps": steps}), 1))


def test_bookkeeping_does_not_change_the_hash() -> None:
    item = run_config.parse({"checkpoint_every": 5, "flush_seconds": 2.0})
    assert item.hash() == run_config.parse({}).hash()
    assert run_config.parse({"seed": 1}).hash() != item.hash()
    assert run_config.parse({"language": {"shards_folder": "/scratch"}}).hash() == item.hash()
    assert run_config.parse({"language": {"source": "/data"}}).hash() != item.hash()


def test_the_schema_offers_the_choices() -> None:
    properties = RunConfig.model_json_schema()["properties"]
    assert "vision" in properties["recipe"]["enum"]
    assert "ddp" in properties["parallelism"]["enum"]
    assert properties["clip"]["description"]


def test_files_that_are_no_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for text, message in (("a = ", "is not TOML"), ("name = 'x'", "run: is missing"), (b"\xff", "can't be read")):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError, match=message):
            run_file.load(file)
    with pytest.raises(ConfigError, match="can't be read"):
        run_file.load(tmp_path / "none.toml")


def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> choices.Choice:
    import training.recipes

    (tmp_path / "mine.py").write_text(f'"""Mine."""\nimport does_not_exist\ndef build(data, *, {arguments}): ...\n')
    monkeypatch.setattr(training.recipes, "__path__", [*training.recipes.__path__, str(tmp_path)])
    return choices.get("recipes", "mine")


def test_options_are_read_and_nothing_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _module(
        tmp_path,
        monkeypatch,
        'a: int = 1, b: float | None = None, c: Literal["x", "y"] = "x", d: Annotated[float, "0..", "D."] = -0.5',
    )
    assert recipe.description == "Mine."
    assert [option.type for option in recipe.options] == ["int", "float", "str", "float"]
    assert recipe.options[3].description == "D."
    assert recipe.problems({"b": None, "c": "y", "d": 2}) == []
    assert recipe.problems({"c": "z"}) == [("c", "is 'z'. Choose x or y.")]
    assert recipe.problems({"d": -1}) == [("d", "is -1. The smallest allowed is 0.")]
    assert recipe.with_defaults({"d": 2})["d"] == 2.0
    assert "mine" in choices.names("recipes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a=1", "needs a type and a default"),
        ("a: int", "needs a type and a default"),
        ("a: int = f()", "must be a literal"),
        ("a: list[int] = ()", "is int, float, bool, str"),
    ],
)
def test_options_that_break_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    with pytest.raises(ChoiceError, match=message):
        _module(tmp_path, monkeypatch, arguments)


def test_configuration_and_manifests_need_no_torch() -> None:
    code = "import sys, training.planning.checking, training.config.choices, training.manifest, training.__main__\n"
    code += "training.config.run_config.parse({})\n"
    code += "for name in training.config.choices.names('comm'):\n"
    code += "    run = training.config.run_config.parse({'communication': name})\n"
    code += "    assert not list(training.config.layout_checks.check(run, 2))\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_wrong_run_costs_no_import_of_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = -1")
    command = [sys.executable, "-X", "importtime", "-m", "training", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run.steps: " in done.stderr
    assert "| torch" not in done.stderr


def test_options_of_the_data_and_of_the_model_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _module(tmp_path, monkeypatch, "a: int = 1): ...\ndef prepare(cache, identity=None, *, b: int = 2")
    assert [option.name for option in recipe.options] == ["a", "b"]
    with pytest.raises(choices.ChoiceError, match="a: an option of two functions. Let one of them have it"):
        _module(tmp_path, monkeypatch, "a: int = 1): ...\ndef prepare(cache, *, a: int = 2")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("stdlib", ""),
        ("/data/my texts", ""),
        ("~/texts/a.jsonl", ""),
        ("texts", """is 'texts'. Write "stdlib" or an absolute path."""),
        ("", """is ''. Write "stdlib" or an absolute path."""),
        ("/a\nb", "Write"),
        ("/" + "a" * 5000, "Write"),
        (3, "must be a string, not 3."),
    ],
)
def test_only_the_shape_of_a_path_is_judged(source: object, message: str) -> None:
    found = choices.get("recipes", "language").problems({"source": source})
    assert [name for name, _ in found] == ["source"] * bool(message)
    assert all(message in text for _, text in found)
    paths = {option.name: option.words for option in choices.get("recipes", "language").options if option.is_path}
    assert list(paths.values()) == [("stdlib",), ("auto", "bytes"), ("auto",), ("none",)]


def test_problems_are_reported_alike_on_every_rank() -> None:
    with pytest.raises(ConfigError) as refused:
        run_config.parse({"steps": 0, "seed": "x"})
    sent = pickle.loads(pickle.dumps(refused.value))
    assert sent.problems == refused.value.problems
    assert str(sent) == str(refused.value)
    misfit = pickle.loads(pickle.dumps(Misfit("mesh.tp", "does not fit")))
    assert (misfit.field, str(misfit)) == ("mesh.tp", "does not fit")


def test_a_run_file_has_as_many_nodes_as_it_may_get(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[launch]\nnodes = 2\nmax_nodes = 4\nranks_per_node = 3\n[run]\n")
    assert (run_file.load(path).nodes, run_file.load(path).ranks_per_node) == (4, 3)
    path.write_text('[resources]\nnodes = "1:8"\ngpus_per_node = 8\n[run]\n')
    assert (run_file.load(path).nodes, run_file.load(path).ranks_per_node) == (8, 8)
