"""Number the independent random streams that are derived from a run's seed.

Use them as derive_seed(seed, random_streams.SPEED, …) (training.runtime.seeds). A number is never reused for something
else: a resumed run continues with the random numbers that it began with.
"""

SPLIT = 1
"""How samples are divided among the clients."""
SHUFFLE = 2
"""The order in which a client iterates over them."""
DROPOUT = 3
"""Random numbers of torch while a chunk is computed: dropout, sketches."""
SELECTION = 4
"""Which clients take part in a round."""
SPEED = 5
"""How fast clients are."""
JITTER = 6
"""How much their speed varies from round to round."""
HOURS = 7
"""When clients become available (selection = "availability")."""
VIEW = 8
"""How clients see their samples (split = "shift")."""
ROOT = 9
"""Which samples the server trains on, and in which order (aggregation = "fltrust")."""
SERVER = 10
"""Random numbers of an algorithm's server side."""
TAIL = 11
"""Which samples are left out to make some classes rare (class_imbalance)."""
ATTACK = 12
"""Which clients attack, and their random numbers (attack)."""
FILTER = 20
"""Rounding and hashes of filters."""
