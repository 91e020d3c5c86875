"""Arrange the fields of the spec into the sections of the submit form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.conf import settings

from jobs.errors import Problem
from jobs.presenting.submit_form import schema_fields
from jobs.presenting.submit_form.fields import FormField, FormSection
from jobs.spec import RUNS
from jobs.spec.code import ClientCode, Script
from nodes.schedulers import choose
from training.config import choices
from training.config.base import BaseRunConfig
from training.config.run_config import RunConfig
from training.federation import custom
from training.federation.config import FederationConfig, with_custom_recipe, with_recipe_split
from vigil_core import formatting

# Fields that most people set; the rest of a section is under "More".
FIRST = (
    *("name", "project", "kind", "tags"),
    *("resources.nodes", "resources.gpus_per_node", "resources.ranks_per_node", "resources.time_limit"),
    *("restart.max_restarts", "restart.in_place"),
    *("run.recipe", "run.parallelism", "run.steps", "run.global_batch", "run.micro_batch"),
    *("run.algorithm", "run.rounds", "run.clients", "run.per_round", "run.split", "run.epochs", "run.batch"),
    *("run.learning_rate", "run.seed", "run.validate_every", "run.checkpoint_every"),
    *("script.git", "script.ref", "script.directory", "script.entry", "script.args", "script.env", "script.python"),
    *("client.git", "client.ref", "client.directory"),
    *(f"client.{part.key}" for part in custom.PARTS),
)
# Fields that only apply to Slurm.
SLURM = (
    "partition", "qos", "reservation", "gpu_type", "constraint", "licenses", "exclusive", "require_nodes",
    "exclude_nodes",
)  # fmt: skip
CODE = frozenset({Script.TABLE, ClientCode.TABLE})
DEPENDENT_FIELDS = {"run.attack": ("run.attackers", "run.attacker_share")}
"""Fields that only apply to one option, and are shown with it."""
OPTIONS_FIRST = 6  # a recipe's options, if the recipe does not say which


def sections(
    data: Mapping[str, Any],
    problems: Iterable[Problem] = (),
    projects: Iterable[str] = (),
    *,
    suggest: Callable[[str], list[str]] | None = None,
) -> list[FormSection]:
    """Return the whole form for a spec given as plain values, which may be invalid in any way.

    `suggest` returns existing names for a field of [resources], such as partitions.
    """
    data = _with_code_defaults(data)
    wrong = {problem.field: problem.message for problem in map(locate_problem, problems)}
    schema = schema_fields.schema()
    what = _job_section(schema, data, wrong, projects)
    tables = ("resources", "script" if data.get("kind") == "script" else "run", "restart", "environment")
    resources, program, restart, environment = (_section(part, schema, data, wrong) for part in tables)
    recipe = [] if data.get("kind") == "script" else _add_options(program, data, wrong)
    slurm, clients = _slurm(resources, suggest), _clients(schema, data, wrong)
    return [what, resources, *slurm, program, *recipe, *clients, restart, environment]


def locate_problem(problem: Problem) -> Problem:
    """Return the problem at the field that it is about: the trainer reports its options at `run`, by name in the
    message.
    """
    if problem.field == "run" and (match := re.match(r"(\w+\.\w+) (.+)", problem.message, re.S)):
        table, _, _ = match[1].partition(".")
        if any(table in choices.names(kind) for kind in choices.ENTRY_FUNCTIONS):
            return Problem(f"run.{match[1]}", match[2][:1].upper() + match[2][1:])
    return Problem(re.sub(r"\[\d+\].*$", "", problem.field), problem.message)


_MODELS = {
    "resources": "Resources", "restart": "Restart", "script": "Script", "client": "ClientCode",
    "environment": "Environment",
}  # fmt: skip
_TITLES = {
    "resources": "Resources", "restart": "If it fails", "run": "Run", "script": "Your program",
    "client": "Your clients", "environment": "Environment",
}  # fmt: skip


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name)
    return table if isinstance(table, Mapping) else {}


def _section(part: str, schema: dict[str, Any], data: Mapping[str, Any], wrong: dict[str, str]) -> FormSection:
    section, values = FormSection(_TITLES[part], takes_code=part in CODE), _table(data, part)
    model = _run_model(data).__name__ if part == "run" else _MODELS[part]
    for name, described in schema["$defs"][model]["properties"].items():
        path = f"{part}.{name}"
        if path == "run.options" or "const" in described:
            continue
        drawn = schema_fields.field(path, described, values.get(name), wrong)
        if (kind := schema_fields.folder_of(path)) and drawn.kind != "lines":
            drawn = schema_fields.as_choice(drawn, described.get("enum") or choices.names(kind), folder=kind)
        (section.fields if path in FIRST else section.more).append(drawn)
    section.fields.sort(key=lambda field: [*FIRST].index(field.path))
    return section


def _job_section(
    schema: dict[str, Any], data: Mapping[str, Any], wrong: dict[str, str], projects: Iterable[str]
) -> FormSection:
    section = FormSection("What")
    for name in ("name", "project", "kind", "tags", "notes", "after"):
        drawn = schema_fields.field(name, schema["properties"][name], data.get(name), wrong)
        if name == "project":
            drawn = schema_fields.as_choice(drawn, [*projects])
        (section.fields if name in FIRST else section.more).append(replace(drawn, required=name == "name"))
    return section


def _add_options(section: FormSection, data: Mapping[str, Any], wrong: dict[str, str]) -> list[FormSection]:
    """Add the options of the chosen modules to the section; the recipe's options become a section of their own."""
    run, model = _table(data, "run"), _run_model(data)
    for chooses, folder in choices.CHOICE_FIELDS[model.KIND].items():
        if chooses == "recipe":
            continue
        usual = schema_fields.chosen_names(model.model_fields[chooses].get_default(call_default_factory=True))
        chosen = schema_fields.chosen_names(run.get(chooses, usual))
        options = [
            field for name in chosen if not _is_open(folder, name) for field in _options(folder, name, run, wrong)
        ]
        if chosen == usual:
            section.more += options
        else:
            _bring_forward(section, f"run.{chooses}", options)
    if model is RunConfig:
        for owner in _mesh_parallelisms(run):
            section.more += _options("parallel", owner, run, wrong)
    recipe = str(run.get("recipe", model.model_fields["recipe"].default))
    options = [] if _is_open("recipes", recipe) else _options("recipes", recipe, run, wrong)
    return [FormSection(f"{recipe.capitalize()} recipe", *_foremost(recipe, options))] if options else []


def _bring_forward(section: FormSection, path: str, options: list[FormField]) -> None:
    """Show a changed choice and its options before the fold."""
    chooser = next((field for field in (*section.fields, *section.more) if field.path == path), None)
    if chooser is None:  # there is no other option
        section.more += options
        return
    if chooser in section.more:
        section.more.remove(chooser)
        section.fields.append(chooser)
    dependents = [field for field in section.more if field.path in DEPENDENT_FIELDS.get(path, ())]
    section.more = [field for field in section.more if field not in dependents]
    options = [*dependents, *options]
    place = section.fields.index(chooser) + 1
    section.fields[place:place] = options


def _clients(schema: dict[str, Any], data: Mapping[str, Any], wrong: dict[str, str]) -> list[FormSection]:
    """Return the section for a federation's custom code: where it is, and its options."""
    run = _table(data, "run")
    chosen = custom.chosen(run)
    if data.get("kind") != FederationConfig.KIND or not ("client" in data or chosen):
        return []
    section = _section("client", schema, data, wrong)
    if chosen and custom.CLIENT not in chosen:
        section.title = f"Your {formatting.listed([part.field for part in chosen])}"
    unused = {f"client.{part.key}" for part in custom.PARTS if part not in chosen}
    section.fields = [field for field in section.fields if field.path not in unused]
    for part in chosen:
        section.more += _options(choices.CHOICE_FIELDS[FederationConfig.KIND][part.field], part.choice, run, wrong)
    return [section]


def _slurm(resources: FormSection, suggest: Callable[[str], list[str]] | None) -> list[FormSection]:
    """Move the fields that only Slurm understands out of [resources] into a section, shown only if they matter."""
    fields = [field for field in resources.more if field.path.partition(".")[2] in SLURM]
    resources.more = [field for field in resources.more if field not in fields]
    shown = [
        f
        for f in fields
        if choose.capabilities_of(settings.VIGIL_SCHEDULER).has_slurm_options or f.changed or f.problem
    ]
    more = [schema_fields.with_suggestions(field, suggest) for field in shown]
    return [FormSection("Slurm", more=more)] if more else []


def _with_code_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec with the defaults that custom client code implies: its recipe and data split."""
    run = data.get("run", {})
    if data.get("kind") != FederationConfig.KIND or not isinstance(run, Mapping):
        return data
    return {**data, "run": with_recipe_split(with_custom_recipe(run) if "client" in data else run)}


def _run_model(data: Mapping[str, Any]) -> type[BaseRunConfig]:
    """Return the model of the [run] table for this kind of job."""
    return RUNS.get(str(data.get("kind")), RunConfig)


def _mesh_parallelisms(run: Mapping[str, Any]) -> list[str]:
    """Return the parallelisms that the mesh adds to the chosen one."""
    axes = {name: choice.constants.get("AXES", ()) for name, choice in choices.describe("parallel").items()}
    chosen = axes.get(str(run.get("parallelism", "")), ("dp",))
    several = {axis for axis, size in _table(run, "mesh").items() if size != 1 and axis not in ("dp", "shard")}
    return [name for name, choice_axes in axes.items() if several & {*choice_axes} and choice_axes != chosen]  # type: ignore[misc]


def _options(kind: str, name: object, run: Mapping[str, Any], wrong: dict[str, str]) -> list[FormField]:
    """Return the options of this recipe, parallelism or communication; empty if there is no such module."""
    if not isinstance(name, str) or name not in choices.names(kind):
        return []
    values, choice = _table(run, name), choices.get(kind, name)
    declared = {option.name for option in choice.options}
    undeclared = [
        schema_fields.undeclared_option(key, value)
        for key, value in values.items()
        if choice.is_open and key not in declared
    ]
    return [
        schema_fields.option_field(name, option, values.get(option.name), wrong)
        for option in (*choice.options, *undeclared)
    ]


def _is_open(kind: str, name: object) -> bool:
    return isinstance(name, str) and name in choices.names(kind) and choices.get(kind, name).is_open


def _foremost(recipe: str, options: list[FormField]) -> tuple[list[FormField], list[FormField]]:
    """Split a recipe's options into common ones, in the order of its FIRST constant, and the rest."""
    names = choices.get("recipes", recipe).constants.get("FIRST")
    if not isinstance(names, tuple):
        return options[:OPTIONS_FIRST], options[OPTIONS_FIRST:]
    paths = [f"run.{recipe}.{name}" for name in names]
    first = [option for path in paths for option in options if option.path == path]
    return first, [option for option in options if option.path not in paths]
