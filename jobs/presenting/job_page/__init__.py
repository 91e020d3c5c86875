"""Describe a job on its page: the sentence, the facts in its head, its attempts, charts and tabs."""
