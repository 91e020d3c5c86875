"""Describe federations: clients and rounds, the split of the data, and two federations compared."""
