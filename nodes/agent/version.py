"""Define the agent's version, which it reports to the portal: the bundle has no metadata."""

VERSION = "0.2.0"
