"""Small federations on text, in the process of the test or as real ranks."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import tomlkit

from tests.training import ranks
from tests.training.federated.in_process import ready, train
from tests.training.weights import origins
from training import manifest
from training.federated.rounds import Rounds
from training.federation import config_checks
from training.federation.config import parse
from training.weights.export import CheckpointModel

WORDS = {
    "birds": "wren robin finch owl heron",
    "tools": "saw plane chisel rasp awl",
    "winds": "mistral sirocco bora foehn zephyr",
    "stones": "basalt gneiss chert slate marble",
}


def write_texts(folder: Path) -> Path:
    """Write four packages, each with a different vocabulary."""
    draw = random.Random(3)
    for name, words in WORDS.items():
        (folder / name).mkdir(parents=True)
        for number in range(12):
            text = " ".join(draw.choices(words.split(), k=40))
            (folder / name / f"{number}.txt").write_text(text)
    return folder


def write_weights(folder: Path) -> Path:
    """Write a Llama folder with 32,000 parameters, whose networks have weights large enough to matter."""
    origins.write(folder)
    found = {name: value * (4 if ".mlp." in name else 1) for name, value in origins.tensors().items()}
    origins.write_file(folder / "model.safetensors", found)
    return folder


def table(texts: Path, **more: Any) -> dict[str, Any]:
    """Return [run]: four clients by package; options of the recipe by `language`."""
    language = {"context": 16, "source": str(texts), "validation_percent": 20.0, **more.pop("language", {})}
    if language.get("from_weights") is None:
        language = {"layers": 2, "heads": 2, "head_width": 8, "hidden": 32, **language}
    run = {"recipe": "language", "rounds": 3, "clients": 4, "split": "column", "batch": 8, "local_steps": 4}
    return {**run, "learning_rate": 0.3, "checkpoint_every": 0, **more, "language": language}


def rounds_of(folder: Path, run: dict[str, Any]) -> Rounds:
    """Return a federation ready for its first round; fail on what the portal would refuse."""
    assert not [str(problem) for problem in config_checks.problems(parse(run), 1)]
    return ready(folder, run)


def mean_losses(rounds: Rounds, count: int) -> list[float]:
    """Return the mean losses of so many more rounds."""
    return [report.loss for report in train(rounds, count)]


class Federation(ranks.Run):
    """A federation of real ranks."""

    def write(self, **changes: Any) -> None:
        self.config.update(changes)
        document = {"name": "test", "kind": "federated", "launch": {"gpus_per_node": 0}, "run": self.config}
        (self.folder / "portal" / "run.toml").write_text(tomlkit.dumps(document))


def stored(checkpoint: Path) -> dict[str, str]:
    """Return a checkpoint's model by name, in hexadecimal."""
    model = CheckpointModel(checkpoint, manifest.verify(checkpoint))
    return {entry.name: model.read(entry.name).numpy().tobytes().hex() for entry in model.entries}


def cache() -> Path:
    """Return the folder of the shards."""
    return Path(os.environ["VIGIL_CACHE"])
