"""Describe a failed attempt: headline, timeline, evidence, cost, and all of it as one document."""
