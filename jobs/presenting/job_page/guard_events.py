"""Describe the warnings of a running trainer: what its guards found, and checkpoints that could not be saved.

An event comes from the job's own directory, so its content is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from vigil_core import formatting, untrusted

GuardEvent = tuple[datetime, str]
"""Time and description."""
NOT_SAVED = "checkpoint.skipped"


def describe_event(kind: str, data: Mapping[str, Any], unit: str = "step") -> str:
    """Return an event of one of KINDS as text. `unit` is the job's unit of progress."""
    return _OF_SAVES[kind](data, unit) if kind in _OF_SAVES else _WORDS[kind](data)


def _skipped(data: Mapping[str, Any]) -> str:
    norm, mean = untrusted.number(data.get("norm")), untrusted.number(data.get("mean"))
    usual = f": gradient norm {formatting.measure(norm)}, usually {formatting.measure(mean)}" if norm and mean else ""
    samples = data.get("samples")
    first = samples.get("first_place") if isinstance(samples, dict) else None
    batch = f" (samples from place {formatting.count(first)})" if type(first) is int else ""
    return f"step {_step(data)} skipped{usual}{batch}"


def _straggler(data: Mapping[str, Any]) -> str:
    factor = untrusted.number(data.get("factor"))
    times = f"{factor:.1f} times" if factor is not None else "longer than"
    part = {"data": "waiting for data", "compute": "computing", "host": "between steps"}.get(str(data.get("part")), "")
    spent = f", most of it {part}" if part else ""
    return f"rank {_step(data, 'rank')}{_node(data)} delays the others: {times} its usual step time{spent}"


def _nonfinite(data: Mapping[str, Any]) -> str:
    where = f", first in {untrusted.line(data['where'])} on rank {_step(data, 'rank')}" if data.get("where") else ""
    return f"step {_step(data)} was not finite{where}"


def _corruption(data: Mapping[str, Any]) -> str:
    ranks = data.get("ranks")
    named = ", ".join(str(rank) for rank in ranks[:8] if type(rank) is int) if isinstance(ranks, list) else ""
    if data.get("check") == "redo":
        culprit = f"rank {named}" if named else "an unknown rank"
        again = f"step {_step(data)} was not finite, but finite when repeated: hardware fault on"
        return f"{again} {culprit}{_node(data)}"
    found = f"failed on rank {named}" if named else "found ranks that differ, but not which is wrong"
    return f"the {untrusted.line(data.get('check'))} check at step {_step(data)} {found}{_node(data)}"


def _level(data: Mapping[str, Any]) -> str:
    norm, mean = untrusted.number(data.get("norm")), untrusted.number(data.get("mean"))
    change = f": usually {formatting.measure(mean)}, now {formatting.measure(norm)}" if norm and mean else ""
    return f"the gradient norm's level changed at step {_step(data)}{change}"


def _divergence(data: Mapping[str, Any]) -> str:
    return f"diverged at step {_step(data)}: {untrusted.line(data.get('what'))}"


def _gpu_lost(data: Mapping[str, Any]) -> str:
    names = ", ".join(untrusted.line(data[name]) for name in ("uuid", "bus") if data.get(name))
    name = untrusted.line(data.get("gpu"))
    which = (f"GPU {name}" if name else "a GPU") + _node(data)
    return f"{which} is lost{f' ({names})' if names else ''}, according to its driver"


def _gpu_silent(data: Mapping[str, Any]) -> str:
    return f"the GPUs{_node(data)} report nothing: the NVIDIA driver does not respond"


def _gpu_answers(data: Mapping[str, Any]) -> str:
    seconds = untrusted.duration(data.get("seconds"))
    after = f" after {formatting.duration(seconds)}" if seconds is not None else ""
    return f"the GPUs{_node(data)} respond again{after}"


def _not_saved(data: Mapping[str, Any], unit: str) -> str:
    return f"not saved at {unit} {_step(data)}: {untrusted.line(data.get('reason'))}"


def _unpinned(data: Mapping[str, Any]) -> str:
    return untrusted.line(data.get("reason"))


def _damaged(data: Mapping[str, Any], unit: str) -> str:
    return f"the checkpoint of {unit} {_step(data)} is damaged: {untrusted.line(data.get('reason'))}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "guard.skipped": _skipped,
    "straggler": _straggler,
    "guard.nonfinite": _nonfinite,
    "guard.corruption": _corruption,
    "guard.divergence": _divergence,
    "guard.level": _level,
    "gpu.lost": _gpu_lost,
    "gpu.silent": _gpu_silent,
    "gpu.answers": _gpu_answers,
    "checkpoint.unpinned": _unpinned,
}
_OF_SAVES: dict[str, Callable[[Mapping[str, Any], str], str]] = {NOT_SAVED: _not_saved, "checkpoint.damaged": _damaged}
KINDS = frozenset({*_WORDS, *_OF_SAVES})


def _step(data: Mapping[str, Any], name: str = "step") -> str:
    value = data.get(name)
    return formatting.count(value) if type(value) is int else formatting.MISSING


def _node(data: Mapping[str, Any]) -> str:
    return f" on {untrusted.line(data['node'])}" if data.get("node") else ""
