"""Inspect the ranks of a run: digests of the full tensors after a checkpoint is read, and at the end."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def install() -> None:
    """Leave digests.<restored|ended>.<rank>.json in the attempt's folder: by name, the sha256 of the full tensor."""
    from training.trainer import Trainer

    begin, finish = Trainer._begin, Trainer._finish

    def begun(trainer: Trainer, start: Any) -> None:
        _write(trainer, "restored")
        begin(trainer, start)

    def finished(trainer: Trainer, stopping: bool) -> bool:
        _write(trainer, "ended")
        return finish(trainer, stopping)

    Trainer._begin, Trainer._finish = begun, finished  # type: ignore[method-assign]


def digests(attempt_dir: Path, when: str) -> dict[str, str]:
    """Return the digests of all ranks: names differ between pipeline stages, and equal names must agree."""
    found: dict[str, str] = {}
    for path in sorted(attempt_dir.glob(f"digests.{when}.*.json")):
        for name, digest in json.loads(path.read_text()).items():
            assert found.setdefault(name, digest) == digest, f"ranks differ in {name}"
    return found


def _write(trainer: Any, when: str) -> None:
    report = {name: _digest(tensor) for name, tensor in _leaves(trainer.assembly.state())}
    path = Path(os.environ["VIGIL_ATTEMPT_DIR"]) / f"digests.{when}.{os.environ['RANK']}.json"
    path.write_text(json.dumps(report))


def _leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _digest(tensor: Any) -> str:
    from training.engine.composing import whole_of

    return hashlib.sha256(whole_of(tensor.detach()).cpu().contiguous().numpy().tobytes()).hexdigest()
