"""The parts of a federation that users may define in files of their own, named in the table [client].

The portal reads none of these files: any option is accepted, and what they define is checked on the ranks
(training.federated.custom).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CustomPart:
    """The field of [run] that chooses such a part, and the file that defines it."""

    field: str
    """The field of [run] that chooses it."""
    choice: str
    """The value of that field as it is stored; also the name of the table of [run] with the options of the file."""
    key: str
    """The field of [client] that names the file."""
    file: str
    """The name of the file if [client] does not name it."""
    functions: str
    """What the file must define, for messages."""

    @property
    def written(self) -> str:
        """The value as people write it: "custom…" for what is stored as "own…", which is also accepted."""
        return self.choice.replace("own", "custom", 1) if self.choice.startswith("own") else self.choice

    @property
    def line(self) -> str:
        """The line of [run] that chooses it."""
        return f'{self.field} = "{self.written}"'


CLIENT = CustomPart("recipe", "client", "entry", "client.py", "model() and data(client)")
ALGORITHM = CustomPart("algorithm", "own", "algorithm", "algorithm.py", "aggregate(server)")
AGGREGATION = CustomPart("aggregation", "own_aggregation", "aggregation", "aggregation.py", "combine(rows, weights)")
SELECTION = CustomPart("selection", "own_selection", "selection", "selection.py", "select(round)")
SPLIT = CustomPart("split", "own_split", "split", "split.py", "divide(labels, clients, rng)")
PARTS = (CLIENT, ALGORITHM, AGGREGATION, SELECTION, SPLIT)


def chosen(run: Mapping[str, object]) -> tuple[CustomPart, ...]:
    """Return the parts that [run] takes from the user's files."""
    return tuple(part for part in PARTS if run.get(part.field) in (part.choice, part.written))


def with_stored_names(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return [run] with the stored names of custom parts, as values and as tables.

    Checkpoints and runs of earlier releases have these names, and the hash of a configuration depends on them.
    """
    renamed = dict(run)
    for part in PARTS:
        if renamed.get(part.field) == part.written:
            renamed[part.field] = part.choice
        if part.written != part.choice and isinstance(options := renamed.get(part.written), Mapping):
            del renamed[part.written]
            stored = renamed.get(part.choice, {})  # a form adds options under the stored name
            renamed[part.choice] = {**options, **stored} if isinstance(stored, Mapping) else stored
    return renamed
