"""REST: what projects use: GPU-hours and disk."""
