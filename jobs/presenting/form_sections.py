"""The submit form, generated from the spec's JSON schema and kept in step with its text; and the form to edit a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import tomlkit
from django import forms
from django.conf import settings
from tomlkit.exceptions import TOMLKitError

from jobs.errors import Problem, SpecError
from jobs.presenting.form_fields import NEAREST, Field, Section
from jobs.spec import RUNS, JobSpec, read_toml
from training.config import choices
from training.config.asked import Asked
from training.config.run_config import RunConfig

# What most people set; the rest of a section waits behind "More".
FIRST = (
    *("name", "project", "kind", "tags"),
    *("resources.nodes", "resources.gpus_per_node", "resources.ranks_per_node", "resources.time_limit"),
    *("restart.max_restarts", "restart.in_place"),
    *("run.recipe", "run.parallelism", "run.steps", "run.global_batch", "run.micro_batch"),
    *("run.algorithm", "run.rounds", "run.clients", "run.per_round", "run.split", "run.epochs", "run.batch"),
    *("run.learning_rate", "run.seed", "run.validate_every", "run.checkpoint_every"),
    *("script.git", "script.ref", "script.directory", "script.entry", "script.args", "script.env", "script.python"),
)
# What means something to Slurm alone: a fieldset of its own, where there is one.
SLURM = (
    "partition", "qos", "reservation", "gpu_type", "constraint", "exclusive", "require_nodes", "exclude_nodes",
)  # fmt: skip
MOST_KNOWN = 200  # names that a box offers …
NAMED = 4  # … and up to which they stand below it
OPTIONS_FIRST = 6  # of a recipe's own options, where it does not say itself which
_WORDS = {"tags", "after", "environment.modules"}
_HOSTS = {"resources.require_nodes", "resources.exclude_nodes"}
_HOST = re.compile(r"(?:[^\s,\[]|\[[^\]]*\]?)+")  # commas within brackets belong to the name
_NUMBER = re.compile(r"-?\d[\d_,]*\Z")
_SPELLED = {"fp8": "FP8", "kv": "KV", "lora": "LoRA", "mib": "(MiB)", "mtbf": "MTBF", "rope": "RoPE"}


def sections(
    data: Mapping[str, Any],
    problems: Iterable[Problem] = (),
    projects: Iterable[str] = (),
    *,
    known: Callable[[str], list[str]] | None = None,
) -> list[Section]:
    """The whole form for a spec as plain values, which may be wrong in any way.

    `known`: what there is to name, by the name of a field of [resources].
    """
    wrong = {problem.field: problem.message for problem in map(placed, problems)}
    schema = _schema()
    properties = schema["properties"]
    what = Section("What")
    for name in ("name", "project", "kind", "tags", "notes", "after"):
        drawn = _field(name, properties[name], data.get(name), wrong)
        if name == "project":
            drawn = _choose(drawn, [*projects])
        (what.fields if name in FIRST else what.more).append(replace(drawn, required=name == "name"))
    parts = ["resources", "script" if data.get("kind") == "script" else "run", "restart"]
    found = [what, *(_section(part, schema, data, wrong) for part in parts)]
    if "run" in parts:
        run, model = _table(data, "run"), _run_model(data)
        for chooses, folder in choices.CHOSEN[model.KIND].items():
            if chooses != "recipe":
                default = model.model_fields[chooses].get_default(call_default_factory=True)
                for one in _named(run.get(chooses, default)):
                    found[2].more += _options(folder, one, run, wrong)
        if model is RunConfig:
            for owner in _along_axes(run):
                found[2].more += _options("parallel", owner, run, wrong)
        recipe = str(run.get("recipe", model.model_fields["recipe"].default))
        if options := _options("recipes", recipe, run, wrong):
            found.insert(3, Section(f"{recipe.capitalize()} recipe", *_foremost(recipe, options)))
    if fields := [f for f in found[1].more if f.path.partition(".")[2] in SLURM]:
        found[1].more = [f for f in found[1].more if f not in fields]
        if slurm := [f for f in fields if settings.VIGIL_SCHEDULER == "slurm" or f.changed or f.problem]:
            found.insert(2, Section("Slurm", more=[_offering(f, known) for f in slurm]))
    return [*found, _section("environment", schema, data, wrong)]


def placed(problem: Problem) -> Problem:
    """The trainer tells of its options as "language.layers must be …" at `run`: put that at its field."""
    if problem.field == "run" and (match := re.match(r"(\w+\.\w+) (.+)", problem.message, re.S)):
        table, _, _ = match[1].partition(".")
        if any(table in choices.names(kind) for kind in choices.ENTRY):
            return Problem(f"run.{match[1]}", match[2][:1].upper() + match[2][1:])
    return Problem(re.sub(r"\[\d+\].*$", "", problem.field), problem.message)


def merged(text: str, posted: Mapping[str, str]) -> str:
    """The text with what the form changed; comments, order and the rest stay. SpecError if it is no TOML."""
    data = read_toml(text)
    changes: dict[str, Any] = {}
    for section in sections(data, projects=[posted.get("project", "")]):
        for drawn in section.all:
            raw = posted.get(drawn.path)
            if raw is not None and _same(raw) != _same(drawn.value):
                changes[drawn.path] = _typed(drawn, raw)
    return _written(text, changes) if changes else text


def _same(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _written(text: str, changes: dict[str, Any]) -> str:
    try:
        document = tomlkit.parse(text)
    except TOMLKitError:  # its parser is stricter than tomllib in places; the checker will have said what is wrong
        return text
    for path, value in changes.items():
        *tables, key = path.split(".")
        place: Any = document
        for name in tables:
            if not isinstance(place.get(name), dict):
                place[name] = tomlkit.table()
            place = place[name]
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
        _tidy(document, path, value)
    return tomlkit.dumps(document)


def _tidy(document: tomlkit.TOMLDocument, path: str, value: Any) -> None:
    """Another kind or recipe has other tables: those of the one before would only be refused."""
    if path == "kind":
        document.pop("run", None)  # of another kind its fields have other names
        if value != "script":
            document.pop("script", None)
        if value == "script" and "script" not in document:
            document["script"] = tomlkit.table()
            document["script"]["entry"] = "train.py"
    run = document.get("run")
    kind = _kind_of_choice(path)
    if kind and isinstance(run, dict):
        for name in choices.names(kind):
            if name not in _named(value):
                run.pop(name, None)


def _kind_of_choice(path: str) -> str:
    """The folder that a field names a module of; "" for any other field."""
    table, _, name = path.partition(".")
    of = {field: folder for chosen in choices.CHOSEN.values() for field, folder in chosen.items()}
    return of.get(name, "") if table == "run" else ""


def _typed(drawn: Field, raw: str) -> Any:
    """The text of a box as the value it means; what cannot be read stays text, for the spec to refuse."""
    raw = _same(raw)
    if drawn.kind == "words":
        words = [word for word in re.split(r"[\s,]+", raw) if word]
        return (
            [_numeric(word.lstrip("#"), whole=True) for word in words] or None
            if drawn.path == "after"
            else words or None
        )
    if drawn.kind == "hosts":
        return _HOST.findall(raw) or None
    if drawn.kind == "lines":
        return raw.split("\n") if raw else None
    if drawn.kind == "pairs":
        pairs = (line.partition("=") for line in raw.split("\n") if line.strip())
        table = tomlkit.inline_table()
        counts = drawn.path == "run.mesh"
        for name, _, value in pairs:
            table[name.strip()] = _numeric(value.strip(), whole=True) if counts else value.strip()
        return table if table else None
    if drawn.kind == "area":
        return tomlkit.string(raw, multiline="\n" in raw) if raw else None
    if raw == "":
        return None if not drawn.required else ""
    if drawn.kind in {"number", "decimal"} or drawn.path == "resources.nodes":
        return _numeric(raw, whole=drawn.kind != "decimal")
    if drawn.kind == "choice" and {*drawn.choices} <= {"", "true", "false"}:
        return raw == "true"
    return raw


def _numeric(raw: str, *, whole: bool) -> int | float | str:
    if _NUMBER.match(raw):
        number = int(raw.replace(",", "").replace("_", ""))
        return number if whole or abs(number) > 2**53 else float(number)
    try:
        return raw if whole else float(raw)
    except ValueError:
        return raw


# Drawing

_MODELS = {
    "resources": "Resources", "restart": "Restart", "script": "Script",
    "environment": "Environment",
}  # fmt: skip
_TITLES = {
    "resources": "Resources", "restart": "If it fails", "run": "Run", "script": "Your program",
    "environment": "Environment",
}  # fmt: skip


@cache
def _schema() -> dict[str, Any]:
    return JobSpec.model_json_schema()


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name)
    return table if isinstance(table, Mapping) else {}


def _section(part: str, schema: dict[str, Any], data: Mapping[str, Any], wrong: dict[str, str]) -> Section:
    section, values = Section(_TITLES[part]), _table(data, part)
    model = _run_model(data).__name__ if part == "run" else _MODELS[part]
    for name, described in schema["$defs"][model]["properties"].items():
        path = f"{part}.{name}"
        if path == "run.options" or "const" in described:
            continue
        drawn = _field(path, described, values.get(name), wrong)
        if (kind := _kind_of_choice(path)) and drawn.kind != "lines":
            drawn = _choose(drawn, described.get("enum") or choices.names(kind))
        (section.fields if path in FIRST else section.more).append(drawn)
    section.fields.sort(key=lambda field: [*FIRST].index(field.path))
    return section


def _run_model(data: Mapping[str, Any]) -> type[Asked]:
    """What [run] is of this kind of job."""
    return RUNS.get(str(data.get("kind")), RunConfig)


def _named(value: object) -> list[object]:
    """The one choice, or those in a list."""
    return value if isinstance(value, list) else [value]


def _along_axes(run: Mapping[str, Any]) -> list[str]:
    """The parallelisms that the mesh brings in, beside the one that was chosen for the batch's own axes."""
    axes = {name: choice.constants.get("AXES", ()) for name, choice in choices.describe("parallel").items()}
    chosen = axes.get(str(run.get("parallelism", "")), ("dp",))
    several = {axis for axis, size in _table(run, "mesh").items() if size != 1 and axis not in ("dp", "shard")}
    return [name for name, own in axes.items() if several & {*own} and own != chosen]  # type: ignore[misc]


def _options(kind: str, name: object, run: Mapping[str, Any], wrong: dict[str, str]) -> list[Field]:
    """The own options of the recipe, parallelism or communication of that name; none if there is no such."""
    if not isinstance(name, str) or name not in choices.names(kind):
        return []
    values = _table(run, name)
    return [_option(name, option, values.get(option.name), wrong) for option in choices.get(kind, name).options]


def _foremost(recipe: str, options: list[Field]) -> tuple[list[Field], list[Field]]:
    """The options that most runs set, in the order of the recipe's FIRST, and the rest."""
    named = choices.get("recipes", recipe).constants.get("FIRST")
    if not isinstance(named, tuple):
        return options[:OPTIONS_FIRST], options[OPTIONS_FIRST:]
    paths = [f"run.{recipe}.{name}" for name in named]
    first = [option for path in paths for option in options if option.path == path]
    return first, [option for option in options if option.path not in paths]


def _option(table: str, option: choices.Option, value: object, wrong: dict[str, str]) -> Field:
    path = f"run.{table}.{option.name}"
    allowed = ("true", "false") if option.type == "bool" else tuple(str(v) for v in option.values)
    kind = "choice" if allowed else {"int": "number", "float": "decimal"}.get(option.type, "text")
    default = _shown(option.default)
    allowed = ("", *allowed) if allowed and option.default is None else allowed  # "": left unsaid
    return Field(
        path=path,
        title=_title(option.name),
        kind=kind,
        value=default if value is None else _shown(value),
        default=default,
        hint=_brief(option.description, kind),
        choices=allowed,
        **_trouble(wrong.get(path, "")),
    )


def _field(path: str, described: dict[str, Any], value: object, wrong: dict[str, str]) -> Field:
    default, kind = _shown(described.get("default")), _kind(path, described)
    return Field(
        path=path,
        title=_title(described.get("title", path.rpartition(".")[2])),
        kind=kind,
        value=default if value is None else _shown(value, "\n" if kind == "lines" else " "),
        default=default,
        hint=_brief(described.get("description", ""), kind),
        choices=_choices(described),
        **_trouble(wrong.get(path, "")),
    )


def _trouble(message: str) -> dict[str, Any]:
    """The message, and the values that it says would do."""
    nearest = NEAREST.search(message)
    values = tuple(v.replace(",", "") for v in nearest.groups() if v) if nearest else ()
    return {"problem": message, "nearest": values}


def _kind(path: str, described: dict[str, Any]) -> str:
    if path == "notes":
        return "area"
    if _choices(described):
        return "choice"
    variants = [v for v in described.get("anyOf", [described]) if v.get("type") != "null"]
    kinds = {variant.get("type") for variant in variants}
    if kinds == {"array"}:
        return "words" if path in _WORDS else "hosts" if path in _HOSTS else "lines"
    if kinds == {"object"}:
        return "pairs"
    if kinds == {"integer"}:
        return "number"
    return "decimal" if kinds == {"number"} else "text"


def _choices(described: dict[str, Any]) -> tuple[str, ...]:
    """What a field can be at all; "" where it may be left unsaid."""
    if described.get("type") == "boolean":
        return ("false", "true")
    if "enum" in described:
        return tuple(map(str, described["enum"]))
    for variant in described.get("anyOf", ()):
        if "enum" in variant:
            return ("", *map(str, variant["enum"]))
    return ()


def _offering(drawn: Field, known: Callable[[str], list[str]] | None) -> Field:
    """Offers what there is to choose; a few are named, for nobody looks for a list in a box of text."""
    names = known(drawn.path.partition(".")[2])[:MOST_KNOWN] if known is not None else []
    said = f"{drawn.hint}. Here: {', '.join(names)}" if 0 < len(names) <= NAMED else drawn.hint
    return replace(drawn, known=tuple(names), hint=said)


def _choose(drawn: Field, names: list[str]) -> Field:
    """A choice among these; what was written stays visible even if it is none of them."""
    offered = names if drawn.value in names or not drawn.value else [*names, drawn.value]
    return replace(drawn, kind="choice", choices=tuple(offered))


def _title(name: str) -> str:
    """ "Global Batch" and "global_batch" are "Global batch" here, and "lora_rank" is "LoRA rank"."""
    if not ("_" in name or name.islower() or name.istitle()):
        return name
    text = " ".join(_SPELLED.get(word, word) for word in name.lower().replace("_", " ").split())
    return text[:1].upper() + text[1:]


def _brief(description: str, kind: str) -> str:
    """What stands below a box, without a full stop: up to the first semicolon; of a choice what each of them means."""
    return (description if kind == "choice" else description.partition(";")[0]).rstrip(".")


def _shown(value: object, between: str = " ") -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={text}" for name, text in value.items())
    if isinstance(value, list):
        return between.join(map(str, value))
    return str(value)


class EditForm(forms.Form):
    """Name, tags and notes of a job, by the spec's own rules."""

    name = forms.CharField(max_length=64)
    tags = forms.CharField(required=False, max_length=4000)
    notes = forms.CharField(required=False, max_length=20_000, strip=True)

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        data["tags"] = (
            list(dict.fromkeys(re.split(r"[\s,]+", data.get("tags", "").strip()))) if data.get("tags") else []
        )
        try:
            JobSpec.parse(
                {
                    "name": data.get("name", ""),
                    "kind": "distributed",
                    "tags": data["tags"],
                    "notes": data.get("notes", ""),
                }
            )
        except SpecError as error:
            raise forms.ValidationError([problem.message for problem in error.problems]) from error
        return data
