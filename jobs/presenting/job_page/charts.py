"""Define which series the charts of a job's page show, and how.

Pure: jobs.gathering reads the curves.
"""

from __future__ import annotations

from typing import Any

from jobs.presenting.size import ATTACHED, is_elastic, ranks_and_nodes
from vigil_core.kinds import JobKind

LAUNCHER = -1  # the stream of the first node's launcher
PLAIN_COMMUNICATION = "plain"
MAX_FIGURES = 24
# Launcher metrics of a node's use by the job: title, unit and colour; the first is drawn next to the loss.
USAGE = {
    "gpu_percent": ("GPUs", "%, mean over the node’s GPUs", 3),
    "cpu_cores": ("CPU", "cores in use", 7),
    "memory_gib": ("Memory", "GiB in use", 6),
    "gpu_memory_gib": ("GPU memory", "GiB in use, all GPUs of the node", 4),
    "gpu_watts": ("GPU power", "W, all GPUs of the node", 5),
}
ALWAYS_REPORTED = {"cpu_cores", "memory_gib"}  # reported by every launcher; GPU metrics only where there are GPUs

# A metric has the same colour on every page: loss 1, validation 2, throughput 3, gradient 6.
LOSS_SERIES = [
    {"name": "loss", "label": "training", "color": 1, "digits": 3},
    {"name": "validation_loss", "label": "validation", "color": 2, "digits": 3, "kind": "dots"},
]
LOSS = {
    "id": "loss",
    "title": "Loss",
    "width": "two-thirds",
    "height": 220,
    "scale": True,
    "smooth": True,
    "series": LOSS_SERIES,
}
RANKS = {
    "id": "ranks",
    "title": "Loss across ranks",
    "width": "third",
    "height": 220,
    "band": "loss",
    "series": [{"name": "loss", "label": "median", "color": 1, "digits": 2}],
}
STEP_TIME = {
    "id": "step_seconds",
    "title": "Step time",
    "unit": "seconds",
    "width": "third",
    "height": 120,
    "zero": True,
    "series": [
        {"name": "step_seconds", "label": "step", "color": 1},
        {"name": "data_seconds", "label": "data wait", "color": 2},
    ],
}

MFU: dict[str, Any] = {
    "id": "mfu",
    "title": "MFU",
    "unit": "of the GPUs’ bf16 peak",
    "width": "third",
    "height": 120,
    "zero": True,
    "series": [{"name": "mfu", "label": "MFU", "color": 3, "digits": 3}],
}
COMMUNICATION: dict[str, Any] = {
    "id": "communication_share",
    "title": "Communication",
    "unit": "not overlapped, sampled",
    "width": "third",
    "height": 120,
    "zero": True,
    "series": [{"name": "communication_share", "label": "share", "color": 2, "digits": 3, "kind": "dots"}],
}
SENT: dict[str, Any] = {
    "id": "communicated_mib",
    "title": "Sent",
    "unit": "MiB by rank 0",
    "width": "third",
    "height": 120,
    "zero": True,
    "series": [{"name": "communicated_mib", "label": "sent", "color": 4, "digits": 3}],
}
MB_PER_MIB = 2**20 / 1e6
"""Bytes per MiB."""
ACCURACY: dict[str, Any] = {
    "id": "accuracy",
    "title": "Accuracy",
    "unit": "share of the validation set",
    "width": "half",
    "height": 120,
    "series": [{"name": "validation_accuracy", "label": "validation", "color": 2, "digits": 3}],
}


def _spread(name: str, color: int, digits: int) -> list[dict[str, Any]]:
    """Return the band of the middle half of the clients (25 to 75 %), which the federation reports as two series."""
    label = "clients, 25–75 %"
    return [
        {"name": f"{name}_q25", "label": label, "color": color, "digits": digits, "kind": "low"},
        {"name": f"{name}_q75", "label": "", "color": color, "digits": digits, "kind": "high"},
    ]


CLIENT_ACCURACY: dict[str, Any] = {
    "id": "accuracy",
    "title": "Accuracy",
    "unit": "the global model, and the range of clients",
    "width": "half",
    "height": 160,
    "series": [
        *_spread("client_accuracy", 1, 2),
        {"name": "accuracy", "label": "global", "color": 1, "digits": 3},
        {"name": "client_accuracy_min", "label": "worst client", "color": 2, "digits": 3},
    ],
}
CLIENT_LOSS: dict[str, Any] = {
    "id": "loss",
    "title": "Loss",
    "unit": "clients in training, and the global model",
    "width": "half",
    "height": 160,
    "scale": True,
    "series": [
        *_spread("client_loss", 1, 2),
        {"name": "loss", "label": "training", "color": 1, "digits": 3},
        {"name": "validation_loss", "label": "validation", "color": 2, "digits": 3, "kind": "dots"},
    ],
}
ROUND_SECONDS: dict[str, Any] = {
    "id": "seconds",
    "title": "Seconds per round",
    "unit": "stacked",
    "suffix": "s",
    "width": "half",
    "height": 120,
    "zero": True,
    "stacked": True,
    "series": [
        {"name": "compute_seconds", "label": "compute", "color": 1},
        {"name": "wait_seconds", "label": "wait", "color": 5},
        {"name": "transfer_seconds", "label": "transfer", "color": 4},
    ],
}
ROUND_BYTES: dict[str, Any] = {
    "id": "bytes",
    "title": "Bytes per round",
    "unit": "MB, all clients",
    "suffix": "MB",
    "width": "half",
    "height": 120,
    "zero": True,
    "series": [
        {"name": "mib_down", "scaled_name": "mb_down", "times": MB_PER_MIB, "label": "down", "color": 3},
        {"name": "mib_up", "scaled_name": "mb_up", "times": MB_PER_MIB, "label": "up", "color": 2},
    ],
}


def figures(kind: JobKind, spec: dict[str, Any], names: list[str], *, is_alive: bool) -> list[dict[str, Any]]:
    """Return the charts for this kind of job, in order. `names` are the series that it has reported so far."""
    if kind.name == "distributed":
        return _trainer_figures(spec, names)
    if kind.name == "federated":
        return _federation_figures(names)
    return _attached_figures(spec, names, is_alive=is_alive) if kind.name == ATTACHED else _script_figures(names)


def empty_text(kind: JobKind, *, state: str, is_alive: bool) -> str:
    """Return the text shown instead of empty charts, saying when to expect values."""
    if not is_alive:
        return "This job ended without reporting any values."
    if state == "pending":
        return "No values yet: the job is in the queue."
    if not kind.trains:
        return "No values yet. The script reports them with vigil_report.log(step, loss=…)."
    return f"No values yet. The trainer reports about every second once {kind.unit} 1 is done."


def _trainer_figures(spec: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    run = spec.get("run") or {}
    samples = run.get("recipe") == "vision"
    speed = {
        "id": "speed",
        "title": "Throughput",
        "unit": "samples per second" if samples else "tokens per second",
        "width": "third",
        "height": 120,
        "series": [
            {
                "name": "samples_per_second" if samples else "tokens_per_second",
                "label": "samples/s" if samples else "tokens/s",
                "color": 3,
            }
        ],
    }
    clip = run.get("clip")
    norm = {
        "id": "gradient_norm",
        "title": "Gradient norm",
        "width": "third",
        "height": 120,
        "series": [{"name": "gradient_norm", "label": "norm", "color": 6}],
        "limits": [{"label": "clip", "value": clip}] if clip else [],
    }
    measured = [figure for figure in (MFU, COMMUNICATION) if figure["id"] in names]
    # Defaults hardly ever change.
    sent = [SENT] if run.get("communication", PLAIN_COMMUNICATION) != PLAIN_COMMUNICATION else []
    small = [*([ACCURACY] if samples else []), speed, *measured, *sent, norm, STEP_TIME]
    widths = ["half"] * len(small) if len(small) % 2 == 0 else ["third"] * 3 + ["half"] * (len(small) - 3)
    alone = ranks_and_nodes(spec)[0] == 1 and not is_elastic(spec)  # nothing to compare
    loss = [{**LOSS, "width": "full"}] if alone else [LOSS, RANKS]
    return [*loss, *({**figure, "width": width} for figure, width in zip(small, widths, strict=True))]


def _federation_figures(names: list[str]) -> list[dict[str, Any]]:
    """Return charts by round. Whether the model's accuracy is evaluated is only known once values arrive."""
    lead = [CLIENT_ACCURACY] if "accuracy" in names or "loss" not in names else []
    lead.append(CLIENT_LOSS if lead else {**CLIENT_LOSS, "width": "full"})
    return [{**figure, "xunit": "round"} for figure in (*lead, ROUND_SECONDS, ROUND_BYTES)]


def _attached_figures(spec: dict[str, Any], names: list[str], *, is_alive: bool) -> list[dict[str, Any]]:
    """Return charts of the reported series.

    An empty loss chart only if values are expected (`vigil attach -- command`).
    """
    drawn = _reported_figures(names)
    return drawn or ([LOSS] if is_alive and spec.get("command") else [])


def _script_figures(names: list[str]) -> list[dict[str, Any]]:
    """Return charts of the series that the script reported, loss first, and of its node's resource use."""
    drawn = _reported_figures([name for name in names if name not in USAGE])
    lead = [figure for figure in drawn if figure["id"] == "loss"]
    first, *more = [_usage_figure(name, is_tall=i == 0 and bool(lead)) for i, name in enumerate(_usage_names(names))]
    return [*lead, first, *drawn[len(lead) :], *more] if lead else [*drawn, first, *more]


def _reported_figures(names: list[str]) -> list[dict[str, Any]]:
    names = sorted((name for name in names if name != "validation_loss"), key=lambda name: name != "loss")
    names = names[:MAX_FIGURES]
    lead = [{**LOSS, "width": "two-thirds"}] if "loss" in names else []
    small = []
    for i, name in enumerate(name for name in names if name != "loss"):
        series = [{"name": name, "label": "value", "color": i % 8 + 1}]
        small.append({"id": name, "title": name.replace("_", " "), "width": "third", "height": 120, "series": series})
    return [*lead, *small]


def _usage_names(names: list[str]) -> list[str]:
    return [name for name in USAGE if name in ALWAYS_REPORTED or name in names]


def _usage_figure(name: str, *, is_tall: bool) -> dict[str, Any]:
    title, unit, color = USAGE[name]
    return {
        "id": name,
        "title": title,
        "unit": unit,
        "rank": LAUNCHER,
        "xunit": "second",
        "zero": True,
        "empty": "No data yet. The launcher reports every few seconds.",
        "width": "third",
        "height": 220 if is_tall else 120,
        "series": [{"name": name, "label": "in use", "color": color}],
    }
