"""REST: what agents measure on nodes and GPUs, and how a job uses its GPUs."""
