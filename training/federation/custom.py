"""The parts of a federation that users may define in files of their own, named in the table [client].

The portal reads none of these files: any option is accepted, and what they define is checked on the ranks
(training.federated.custom).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CustomPart:
    """The field of [run] that chooses such a part, and the file that defines it."""

    field: str
    """The field of [run] that chooses it."""
    choice: str
    """The value of that field; also the name of the table of [run] with the options of the file."""
    key: str
    """The field of [client] that names the file."""
    file: str
    """The name of the file if [client] does not name it."""
    functions: str
    """What the file must define, for messages."""

    @property
    def line(self) -> str:
        """The line of [run] that chooses it."""
        return f'{self.field} = "{self.choice}"'


CLIENT = CustomPart("recipe", "client", "entry", "client.py", "model() and data(client)")
ALGORITHM = CustomPart("algorithm", "own", "algorithm", "algorithm.py", "aggregate(server)")
AGGREGATION = CustomPart("aggregation", "own_aggregation", "aggregation", "aggregation.py", "combine(rows, weights)")
SELECTION = CustomPart("selection", "own_selection", "selection", "selection.py", "select(round)")
SPLIT = CustomPart("split", "own_split", "split", "split.py", "divide(labels, clients, draw)")
PARTS = (CLIENT, ALGORITHM, AGGREGATION, SELECTION, SPLIT)


def chosen(run: Mapping[str, object]) -> tuple[CustomPart, ...]:
    """Return the parts that [run] takes from the user's files."""
    return tuple(part for part in PARTS if run.get(part.field) == part.choice)
