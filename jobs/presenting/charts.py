"""What the charts of a job's page draw: which series, and how. Pure; jobs.gathering has the curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.presenting.header import Life
from jobs.presenting.size import is_elastic, ranks_and_nodes

if TYPE_CHECKING:
    from jobs.models import Job


LAUNCHER = -1  # the stream of the first node's launcher
PLAIN = "plain"
MOST_FIGURES = 24
# What a launcher tells of its node's use by the job: title, unit and colour; the first stands beside the loss.
USE = {
    "gpu_percent": ("GPUs", "%, the mean of its node’s", 3),
    "cpu_cores": ("CPU", "cores in use", 7),
    "memory_gib": ("Memory", "GiB in use", 6),
    "gpu_memory_gib": ("GPU memory", "GiB in use, its node’s together", 4),
    "gpu_watts": ("GPU power", "W, its node’s together", 5),
}
ALWAYS = {"cpu_cores", "memory_gib"}  # every launcher tells these; GPUs only where there are some

# Colours are the metric's own on every page: loss 1, validation 2, throughput 3, gradient 6.
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
    "unit": "unhidden part, sampled",
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
MB = 2**20 / 1e6
"""In a MiB."""
ACCURACY: dict[str, Any] = {
    "id": "accuracy",
    "title": "Accuracy",
    "unit": "share of the validation set",
    "width": "half",
    "height": 120,
    "series": [{"name": "validation_accuracy", "label": "validation", "color": 2, "digits": 3}],
}


def _spread(name: str, color: int, digits: int) -> list[dict[str, Any]]:
    """The half of the clients in the middle, as a band; the federation tells it so."""
    label = "clients, 25–75 %"
    return [
        {"name": f"{name}_q25", "label": label, "color": color, "digits": digits, "kind": "low"},
        {"name": f"{name}_q75", "label": "", "color": color, "digits": digits, "kind": "high"},
    ]


CLIENT_ACCURACY: dict[str, Any] = {
    "id": "accuracy",
    "title": "Accuracy",
    "unit": "the global model, and clients between",
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
    "unit": "of clients as they train, and of the global model",
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
    "title": "Seconds a round",
    "unit": "one on the other",
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
    "title": "Bytes a round",
    "unit": "MB, all clients",
    "suffix": "MB",
    "width": "half",
    "height": 120,
    "zero": True,
    "series": [
        {"name": "mib_down", "drawn": "mb_down", "times": MB, "label": "down", "color": 3},
        {"name": "mib_up", "drawn": "mb_up", "times": MB, "label": "up", "color": 2},
    ],
}


def figures(job: Job, life: Life, names: list[str]) -> list[dict[str, Any]]:
    """The charts of this kind of job, in order; `names`: the series that it has told so far."""
    if job.kind == "distributed":
        return _of_trainer(job, names)
    if job.kind == "federated":
        return _of_federation(names)
    return _of_attached(life, names) if job.is_attached else _of_script(names)


def empty(job: Job, life: Life) -> str:
    """What stands where there is nothing to draw, and when to expect something."""
    if not life.latest.is_alive:
        return "This job ended without reporting any."
    if life.latest.state == "pending":
        return "No values yet: it waits in the queue."
    if not job.of_kind.trains:
        return "No values yet. The script reports them with vigil_report.log(step, loss=…)."
    return f"No values yet. The trainer reports about every second once {job.of_kind.counts} 1 is done."


def _of_trainer(job: Job, names: list[str]) -> list[dict[str, Any]]:
    run = job.spec.get("run") or {}
    samples = run.get("recipe") == "vision"
    speed = {
        "id": "speed",
        "title": "Throughput",
        "unit": "samples a second" if samples else "tokens a second",
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
    # What is sent without a choice of its own hardly ever changes.
    sent = [SENT] if run.get("communication", PLAIN) != PLAIN else []
    small = [*([ACCURACY] if samples else []), speed, *measured, *sent, norm, STEP_TIME]
    widths = ["half"] * len(small) if len(small) % 2 == 0 else ["third"] * 3 + ["half"] * (len(small) - 3)
    alone = ranks_and_nodes(job.spec)[0] == 1 and not is_elastic(job.spec)  # then there is nothing to compare
    loss = [{**LOSS, "width": "full"}] if alone else [LOSS, RANKS]
    return [*loss, *({**figure, "width": width} for figure, width in zip(small, widths, strict=True))]


def _of_federation(names: list[str]) -> list[dict[str, Any]]:
    """By round. Whether anything tells how accurate its model is, only its first values show."""
    lead = [CLIENT_ACCURACY] if "accuracy" in names or "loss" not in names else []
    lead.append(CLIENT_LOSS if lead else {**CLIENT_LOSS, "width": "full"})
    return [{**figure, "xunit": "round"} for figure in (*lead, ROUND_SECONDS, ROUND_BYTES)]


def _of_attached(life: Life, names: list[str]) -> list[dict[str, Any]]:
    """What it has reported so far. An empty chart only where that is to be expected: somebody posts for its command."""
    drawn = _of_report(names)
    return drawn or ([LOSS] if life.latest.is_alive and life.job.spec.get("command") else [])


def _of_script(names: list[str]) -> list[dict[str, Any]]:
    """What the script has reported so far, the loss in front; and what its launcher tells of its node's use."""
    drawn = _of_report([name for name in names if name not in USE])
    lead = [figure for figure in drawn if figure["id"] == "loss"]
    beside, *more = [_use(name, is_tall=i == 0 and bool(lead)) for i, name in enumerate(_used(names))]
    return [*lead, beside, *drawn[len(lead) :], *more] if lead else [*drawn, beside, *more]


def _of_report(names: list[str]) -> list[dict[str, Any]]:
    names = sorted((name for name in names if name != "validation_loss"), key=lambda name: name != "loss")
    names = names[:MOST_FIGURES]
    lead = [{**LOSS, "width": "two-thirds"}] if "loss" in names else []
    small = []
    for i, name in enumerate(name for name in names if name != "loss"):
        series = [{"name": name, "label": "value", "color": i % 8 + 1}]
        small.append({"id": name, "title": name.replace("_", " "), "width": "third", "height": 120, "series": series})
    return [*lead, *small]


def _used(names: list[str]) -> list[str]:
    return [name for name in USE if name in ALWAYS or name in names]


def _use(name: str, *, is_tall: bool) -> dict[str, Any]:
    title, unit, color = USE[name]
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
