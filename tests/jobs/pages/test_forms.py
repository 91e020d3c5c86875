"""Test the submit form and the spec's text in sync, errors at their lines, and logs as HTML."""

import pytest

from jobs.errors import Problem, SpecError
from jobs.presenting import ansi
from jobs.presenting.edit_form import EditForm
from jobs.presenting.submit_form.fields import FormField
from jobs.presenting.submit_form.sections import locate_problem, sections
from jobs.presenting.submit_form.spec_text import merge_form
from jobs.presenting.submit_form.toml_lines import line_of, locate
from jobs.spec import JobSpec, read_toml
from training.config import choices

TEXT = """\
name = "probe"  # of memory
kind = "distributed"

[resources]
ranks_per_node = 2

[run]
recipe = "language"
global_batch = 64 # odd
"""


def fields(text: str, problems: list[Problem] | None = None) -> dict[str, FormField]:
    found = sections(read_toml(text), problems or [], ["default", "nightjar"])
    return {field.path: field for section in found for field in (*section.fields, *section.more)}


def test_the_form_comes_from_the_schema_with_its_defaults() -> None:
    form = fields(TEXT)
    assert form["run.steps"].value == form["run.steps"].default == "200"
    assert form["run.global_batch"].value == "64"
    assert form["run.recipe"].choices == ("language", "tabular", "vision")
    assert form["project"].choices == ("default", "nightjar")
    assert form["resources.gpus_per_node"].title == "GPUs per node"
    assert form["run.learning_rate"].kind == "decimal"
    assert "run.language.layers" in form, "the chosen recipe's own options"
    assert "run.vision.hidden" not in form
    assert {"plain", "diloco"} <= {*form["run.communication"].choices}
    assert not any(path.startswith("script.") for path in form)


def test_what_each_choice_means_and_costs_stands_below_it() -> None:
    form = fields(TEXT)
    assert form["run.determinism"].hint.endswith("float32 products may be rounded to TF32")
    assert "a third more arithmetic" in form["run.recompute"].hint
    assert form["run.micro_batch"].hint == "Samples per rank and forward pass", "of others the first part"


def test_what_most_runs_set_of_a_recipe_comes_first() -> None:
    (language,) = (section for section in sections(read_toml(TEXT)) if section.title == "Language recipe")
    first = [field.path.rpartition(".")[2] for field in language.fields]
    rest = [field.path.rpartition(".")[2] for field in language.more]
    assert first == ["preset", "context", "source", "tokenizer", "from_weights", "lora_rank"]
    assert sorted([*first, *rest]) == sorted(choices.get("recipes", "language").with_defaults({}))
    vision = sections(read_toml(merge_form(TEXT, {"run.recipe": "vision"})))
    assert vision[3].fields[0].path == "run.vision.channels", "as written, where none is named"


def test_each_communication_has_its_fields() -> None:
    text = merge_form(TEXT, {"run.communication": "diloco"})
    form = fields(text)
    assert form["run.diloco.every"].value == "100"
    assert "run.powersgd.rank" not in form
    text = merge_form(text, {"run.diloco.every": "5"})
    assert read_toml(text)["run"]["diloco"] == {"every": 5}
    text = merge_form(text, {"run.communication": "powersgd"})
    assert "diloco" not in text, "nothing stays behind that would only be refused"


def test_a_choice_is_described_in_a_line_and_followed_by_its_options() -> None:
    text = 'name = "x"\nkind = "federated"\n[run]\nalgorithm = "fedprox"\npace = "deadline"\n'
    form, run = fields(text), next(item for item in sections(read_toml(text)) if item.title == "Run")
    assert form["run.algorithm"].hint.startswith("FedProx: ")
    assert "arXiv" not in form["run.algorithm"].hint
    assert form["run.selection"].hint == "Uniform: clients are selected with equal probability"
    order = [field.path for field in run.fields]
    for chooser, option in (("run.algorithm", "run.fedprox.mu"), ("run.pace", "run.deadline.quorum")):
        assert order.index(chooser) < order.index(option) < order.index(chooser) + 8
    for wild in ('transport = "pigeons"', "filters = 5", 'pace = ["rounds"]', "algorithm = {}"):
        assert "run.rounds" in fields(f'name = "x"\nkind = "federated"\n[run]\n{wild}\n')
    assert "run.pace" in {field.path for field in sections(read_toml('kind = "federated"\n'))[2].more}


def test_an_attack_is_followed_by_its_attackers() -> None:
    text = 'name = "x"\nkind = "federated"\n[run]\nattack = "scaling"\nclient_lr_schedule = "cosine"\n'
    run = next(item for item in sections(read_toml(text)) if item.title == "Run")
    order = [field.path for field in run.fields]
    place = order.index("run.attack")
    assert order[place + 1 : place + 3] == ["run.attackers", "run.attacker_share"]
    assert order[place + 3].startswith("run.scaling.")
    assert fields(text)["run.client_lr_schedule"].title == "Client LR schedule"
    alone = next(item for item in sections(read_toml('kind = "federated"\n')) if item.title == "Run")
    assert {"run.attackers", "run.attacker_share"} <= {field.path for field in alone.more}


@pytest.mark.parametrize("lines", ['parallelism = "fsdp"', "mesh = { tp = 2, pp = 2 }", 'communication = "diloco"', ""])
def test_a_choice_that_nobody_made_is_not_written(lines: str) -> None:
    """A browser sends what a choice shows, which is its first where none is as it stands."""
    text = TEXT.replace("[run]", f"[run]\n{lines}")
    form = fields(text)
    for path, drawn in form.items():
        if drawn.kind == "choice":
            assert drawn.value in drawn.choices, path
    assert merge_form(text, {path: drawn.value for path, drawn in form.items()}) == text


def test_the_mesh_brings_its_fields_in_whole_numbers() -> None:
    assert "auto" in fields(TEXT)["run.parallelism"].choices
    assert "run.pipeline.schedule" not in fields(TEXT)
    text = merge_form(TEXT, {"run.mesh": "pp = 2\ntp=2"})
    assert read_toml(text)["run"]["mesh"] == {"pp": 2, "tp": 2}
    form = fields(text)
    assert form["run.pipeline.schedule"].value == "1F1B"
    assert form["run.tensor.loss_parallel"].value == "true"
    assert form["run.mesh"].value == "pp=2\ntp=2"
    assert "run.fsdp.offload" not in form
    assert read_toml(merge_form(TEXT, {"run.mesh": "pp=two"}))["run"]["mesh"] == {"pp": "two"}, "for the spec to refuse"


def test_a_script_job_has_its_fields() -> None:
    form = fields('name = "eval"\nkind = "script"\n[script]\nargs = ["--fast", "two words"]\nenv = { A = "1" }\n')
    assert form["script.args"].kind == "lines"
    assert form["script.args"].value == "--fast\ntwo words"
    assert form["script.env"].value == "A=1"
    assert not any(path.startswith("run.") for path in form)


def test_what_the_form_changes_leaves_the_rest_of_the_text_alone() -> None:
    text = merge_form(TEXT, {"run.global_batch": "32", "name": "probe", "run.steps": "200", "tags": "a, b"})
    assert "global_batch = 32 # odd" in text
    assert "# of memory" in text
    assert "steps" not in text, "a default that nobody touched is not written"
    assert 'tags = ["a", "b"]' in text
    assert read_toml(text)["tags"] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "raw", "value"),
    [
        ("run.steps", "1,000", 1000),
        ("run.steps", "many", "many"),
        ("run.learning_rate", "3e-3", 0.003),
        ("run.learning_rate", "1", 1.0),
        ("run.clip", "nothing", "nothing"),
        ("run.language.layers", "6", 6),
        ("resources.nodes", "2", 2),
        ("resources.nodes", "2:4", "2:4"),
        ("resources.time_limit", "02:00:00", "02:00:00"),
        ("notes", "one\r\ntwo", "one\ntwo"),
    ],
)
def test_boxes_become_values_of_their_type(path: str, raw: str, value: object) -> None:
    data = read_toml(merge_form(TEXT, {path: raw}))
    for key in path.split("."):
        data = data[key]
    assert data == value
    assert type(data) is type(value)


def test_an_emptied_box_takes_its_key_out() -> None:
    text = merge_form(TEXT.replace("[run]", "[run]\nmicro_batch = 4"), {"run.micro_batch": ""})
    assert "micro_batch" not in text


def test_another_kind_or_recipe_drops_the_tables_of_the_previous_one() -> None:
    script = merge_form(TEXT, {"kind": "script"})
    assert "[run]" not in script
    assert '[script]\nentry = "train.py"' in script
    back = merge_form(script, {"kind": "distributed"})
    assert "[script]" not in back
    JobSpec.parse_toml(back)
    vision = merge_form(TEXT + "\n[run.language]\nlayers = 2\n", {"run.recipe": "vision"})
    assert "[run.language]" not in vision
    JobSpec.parse_toml(vision)


def test_filters_keep_the_tables_of_those_that_stay() -> None:
    text = 'name = "x"\nkind = "federated"\n[run]\nfilters = ["topk", "int8"]\n'
    text += "[run.topk]\ndensity = 0.2\n[run.int8]\nblock = 64\n"
    run = read_toml(merge_form(text, {"run.filters": "topk\nfp16"}))["run"]
    assert run == {"filters": ["topk", "fp16"], "topk": {"density": 0.2}}


CLIENT = 'name = "x"\nkind = "federated"\n[run.client]\nhidden = 64\nname = "a" # mine\n[client]\ndirectory = "."\n'


def section(text: str, title: str) -> list[str]:
    (found,) = (item for item in sections(read_toml(text)) if item.title == title)
    assert found.takes_code
    return [drawn.path for drawn in found.shown]


class TestCustomClients:
    def test_have_a_section_with_their_options(self) -> None:
        where = ["client.git", "client.ref", "client.directory"]
        reports = ["run.client.hidden", "run.client.name"]
        assert section(CLIENT, "Your clients") == [*where, "client.entry", *reports]
        text = merge_form(CLIENT, {"run.algorithm": "own"})
        assert section(text, "Your clients") == [*where, "client.entry", "client.algorithm", *reports]
        text = merge_form(text, {"run.recipe": "tabular"})
        assert section(text, "Your algorithm") == [*where, "client.algorithm"]

    def test_bring_their_recipe_and_split_unwritten(self) -> None:
        form = fields(CLIENT)
        assert (form["run.recipe"].value, form["run.split"].value) == ("client", "column")
        assert merge_form(CLIENT, {path: drawn.value for path, drawn in form.items()}) == CLIENT

    def test_receive_numbers_as_numbers(self) -> None:
        run = read_toml(merge_form(CLIENT, {"run.client.hidden": "128", "run.client.name": "7"}))["run"]
        assert run["client"] == {"hidden": 128, "name": "7"}
        assert "hidden" not in merge_form(CLIENT, {"run.client.hidden": ""})

    def test_are_no_choice_of_other_kinds(self) -> None:
        assert "client" in fields('name = "x"\nkind = "federated"\n')["run.recipe"].choices
        assert "client" not in fields(TEXT)["run.recipe"].choices

    def test_come_and_go_with_what_uses_them(self) -> None:
        text = merge_form('name = "x"\nkind = "federated"\n', {"run.recipe": "client"})
        assert JobSpec.parse_toml(text).client is not None
        text = merge_form(text, {"run.algorithm": "own"})
        text = merge_form(text, {"run.recipe": "tabular"})
        assert JobSpec.parse_toml(text).entries == {"client.algorithm": "algorithm.py"}
        for gone in (merge_form(text, {"run.algorithm": "fedprox"}), merge_form(text, {"kind": "distributed"})):
            assert "client" not in read_toml(gone)
            JobSpec.parse_toml(gone)

    @pytest.mark.parametrize("algorithm", ["fedprox", "own"])
    def test_keep_their_recipe_with_another_algorithm(self, algorithm: str) -> None:
        spec = JobSpec.parse_toml(merge_form(CLIENT, {"run.algorithm": algorithm}))
        assert (spec.run.recipe, spec.run.algorithm) == ("client", algorithm)


def test_a_broken_text_is_never_rewritten() -> None:
    with pytest.raises(SpecError):
        merge_form("name = ", {"name": "x"})


def test_problems_stand_at_their_fields_with_what_would_do() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse_toml(TEXT.replace("ranks_per_node = 2", "ranks_per_node = 3"))
    field = fields(TEXT, caught.value.problems)["run.global_batch"]
    assert field.nearest == ("63", "66")
    assert field.lead == "64 does not divide over 3 ranks. Nearest that do: "


def test_an_error_in_an_option_of_a_recipe_is_shown_at_its_field() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse_toml(TEXT + "[run.language]\nlayers = 0\n")
    problem = locate_problem(caught.value.problems[0])
    assert problem.field == "run.language.layers"


def test_lines_are_found_for_keys_tables_and_broken_text() -> None:
    places = locate('a = 1\n[run]\n"steps" = 2\nnotes = """\nfake = 3\n"""\n[run.language]\nlayers = 4\n')
    assert places == {"a": 1, "run": 2, "run.steps": 3, "run.notes": 4, "run.language": 7, "run.language.layers": 8}
    assert line_of(places, "run.steps") == 3
    assert line_of(places, "run.missing") == 2, "where it would go"
    assert line_of(places, "tags[2]") is None
    assert line_of(places, "", "Line 14: a text needs quotes.") == 14


def test_edits_keep_to_the_specs_rules() -> None:
    assert EditForm({"name": "fine", "tags": "a, b  c"}).is_valid()
    form = EditForm({"name": "has spaces", "tags": ""})
    assert not form.is_valid()
    assert "is not a valid name" in str(form.errors)
    assert not EditForm({"name": "fine", "tags": "<b>"}).is_valid()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "plain"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("\x1b[31mred\x1b[0m and <b>", '<span class="a-red">red</span> and &lt;b&gt;'),
        (
            "\x1b[1;32mok\x1b[22m still\x1b[39m no",
            '<span class="a-bold a-green">ok</span><span class="a-green"> still</span> no',
        ),
        ("\x1b[38;5;196mdeep\x1b[0m", "deep"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("10%\r50%\r100%", "100%"),
        ("a\x00b\x07c", "abc"),
        ("\x1b[999999999999mx", "x"),
        ('"><img src=x onerror=1>', "&quot;&gt;&lt;img src=x onerror=1&gt;"),
    ],
)
def test_terminal_colours_become_spans_and_nothing_else_becomes_html(text: str, html: str) -> None:
    assert ansi.spans(text) == html


def test_what_was_searched_for_is_marked() -> None:
    assert ansi.spans("Loss 2 <loss>", "loss") == "<mark>Loss</mark> 2 &lt;<mark>loss</mark>&gt;"
    assert ansi.plain("\x1b[31ma\x1b[0m\rb") == "b"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("RuntimeError: no", "error"),
        ("WARNING: slow", "warn"),
        ("step 3 loss 2.0 error 0.1", ""),
        ("Traceback (most", "error"),
    ],
)
def test_levels(text: str, level: str) -> None:
    assert ansi.level(text) == level
