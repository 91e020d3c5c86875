"""Define what each field of a specification can do to the Unix user that the job runs as.

Most are data: numbers and words that Vigil's own trainer reads. Some name a path, which that user opens. Some choose or
load code, which that user runs. Where all jobs run as the portal's own user, the latter are not for everybody
(jobs.code_permission). A field without a row here counts as code, and a test walks the schema for such fields.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jobs.errors import Problem
from jobs.spec.model import JobSpec
from training.config import choices
from training.config.base import BaseRunConfig


class Power(Enum):
    """The power of a field: what it can do."""

    DATA = "is read as a number or a word, and does nothing else"
    READS = "names a path that is opened"
    WRITES = "names a folder that is written to"
    VARIABLES = "sets variables, of which all but HARMLESS can load code"
    CODE = "chooses or loads the code that is run"


_ROWS: Mapping[str, tuple[Power, str]] = {
    "": (Power.DATA, "name kind project tags notes after"),
    "resources": (
        Power.DATA,
        "nodes spares gpus_per_node ranks_per_node cpus_per_rank memory_gib time_limit gpu_type partition qos "
        "constraint reservation licenses begin exclusive require_nodes exclude_nodes",
    ),
    "restart": (Power.DATA, "max_restarts in_place on"),
    "environment": (Power.CODE, "python conda modules container engine mounts"),
    "script": (Power.CODE, "directory git ref entry args env python"),
    "client": (Power.CODE, "directory git ref entry algorithm aggregation selection split"),
    "run": (
        Power.DATA,
        "recipe parallelism communication mesh steps global_batch micro_batch seed learning_rate warmup_steps "
        "min_learning_rate_ratio weight_decay clip guards check_weights_every validate_every validation_batches "
        "checkpoint_every keep_checkpoints keep_every keep_best mtbf_hours determinism dtype fp8_scaling recompute "
        "compile flush_seconds flush_steps sample_seconds profile_at profile_steps "
        "rounds clients per_round epochs local_steps batch ridge algorithm aggregation selection split class_imbalance "
        "pace adapters transport filters attack attackers attacker_share finetune_steps "
        "client_lr_schedule client_momentum client_weight_decay",
    ),
    "run.language": (Power.DATA, "suffixes text_field lora_targets"),
    "sweep": (Power.DATA, "at_once over"),  # swept values are checked in each resulting specification
}
POWERS: Mapping[str, Power] = {
    **{f"{table}.{name}".strip("."): power for table, (power, names) in _ROWS.items() for name in names.split()},
    "environment.env": Power.VARIABLES,
    "run.language.source": Power.READS,
    "run.language.tokenizer": Power.READS,
    "run.language.from_weights": Power.READS,
    "run.language.shards_folder": Power.WRITES,
}
"""Fields by dotted path. Of the options of modules, [run.<name>], it has those that take any text; see `power_of`."""
HARMLESS = frozenset({
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "TOKENIZERS_PARALLELISM",
    "PYTHONHASHSEED", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES",
})  # fmt: skip
"""Variables that name no file, program or device (NCCL_DEBUG_FILE, for example, would write a file)."""
REMEDY = "Remove it, or ask a sysadmin: the project's environment, or VIGIL_LOCAL_USER with another Unix user for jobs."


def misuses(spec: JobSpec, roots: Sequence[str]) -> Iterator[Problem]:
    """Yield what is not for somebody whose jobs run as the portal's own Unix user and may only read `roots`."""
    for field, value in _effective_fields(spec):
        match power_of(field):
            case Power.CODE:
                yield Problem(field, f"Chooses what code runs, as the portal's own Unix user here. {REMEDY}")
            case Power.VARIABLES:
                if strange := sorted(value.keys() - HARMLESS):
                    text = f"{', '.join(strange[:5])} can choose what code runs, as the portal's own Unix user here."
                    yield Problem(field, f"{text} {REMEDY}")
            case Power.WRITES:
                text = "Would be written to as the portal's own Unix user. Leave it out: tokens are stored next to the"
                yield Problem(field, f"{text} runs, for all jobs.")
            case Power.READS if not _lies_in(value, roots):
                yield Problem(field, _outside(value, roots))


def _outside(path: str, roots: Sequence[str]) -> str:
    there = f"Name one below {choices.either(roots)}, or ask" if roots else "Use the data that come with Vigil, or ask"
    what = f"{path[:200]} would be read as the portal's own Unix user, and is not in a folder that jobs may read here."
    return f"{what} {there} a sysadmin: VIGIL_DATA_ROOTS names the folders."


def _lies_in(path: str, roots: Sequence[str]) -> bool:
    """Return whether a path leads below one of the roots, with links resolved.

    The trainer checks again as it opens it.
    """
    if not path.startswith("/") or ".." in Path(path).parts:
        return False
    real = os.path.realpath(path)
    return any(real == root or real.startswith(f"{root}/") for root in roots)


def _effective_fields(part: BaseModel, table: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field that has a power and uses it: it is neither empty nor the default."""
    for name, about in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _effective_fields(value, f"{table}{name}.")
        elif isinstance(part, BaseRunConfig) and name == "options":
            yield from _effective_options(value, choices.CHOICE_FIELDS[part.KIND].values())
        elif not _is_data(field := f"{table}{name}") and value and value != about.default:
            yield field, value


def _effective_options(tables: Mapping[str, Mapping[str, Any]], folders: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield options that have a power and use it.

    `folders`: the choices of this kind of job; other kinds may have modules of the same names. An option that no module
    declares goes to the user's own code, which is judged as a whole by where it comes from.
    """
    for table, given in tables.items():
        if powerful := {name: value for name, value in given.items() if value and not _is_data(f"run.{table}.{name}")}:
            options = {option.name: option for kind in folders for option in _of_module(kind, table)}
            for name, value in powerful.items():
                if name in options and value not in {options[name].default, *options[name].words}:
                    yield f"run.{table}.{name}", value


def power_of(field: str) -> Power:
    """Return what a field can do. An option of a module that takes numbers or a fixed set of words is data."""
    if field in POWERS:
        return POWERS[field]
    options = list(_options_named(field))
    return Power.DATA if options and all(map(_is_closed, options)) else Power.CODE


def _options_named(field: str) -> Iterator[choices.Option]:
    """Yield the option [run.<table>] <name> of each kind of module that has a table of this name."""
    match field.split("."):
        case ["run", table, name]:
            for kind in choices.ENTRY_FUNCTIONS:
                yield from (option for option in _of_module(kind, table) if option.name == name)


def _is_closed(option: choices.Option) -> bool:
    return not option.is_path and (option.type != "str" or bool(option.values))


def _is_data(field: str) -> bool:
    return power_of(field) is Power.DATA


def _of_module(kind: str, name: str) -> tuple[choices.Option, ...]:
    return choices.get(kind, name).options if name in choices.names(kind) else ()
