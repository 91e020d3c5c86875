"""Decide what follows an attempt's end: a stop, or another attempt, from where and without which nodes."""
