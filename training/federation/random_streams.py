"""What is drawn of a run's seed: each thing by a number of its own, so that none of them follows another.

derive_seed(seed, draws.SPEED, …) (training.runtime.seeds). Numbers are never used again for something else: a run that
is resumed goes on with the very draws that it began with.
"""

SPLIT = 1
"""Which client has which samples."""
SHUFFLE = 2
"""In which order a client goes through them."""
DROPOUT = 3
"""What torch draws while a chunk is computed: dropout, sketches."""
SELECTION = 4
"""Who takes part in a round."""
SPEED = 5
"""How fast clients are."""
JITTER = 6
"""How much that varies from round to round."""
HOURS = 7
"""When clients come (selection = "availability")."""
VIEW = 8
"""How clients see their samples (split = "shift")."""
ROOT = 9
"""Which samples the server trains on itself, and how (aggregation = "fltrust")."""
SERVER = 10
"""What an algorithm draws on the server's side."""
TAIL = 11
"""Which samples are left out where some classes shall be rare (class_imbalance)."""
ATTACK = 12
"""Which clients attack, and what they draw (attack)."""
FILTER = 20
"""Rounding and hashes of filters."""
