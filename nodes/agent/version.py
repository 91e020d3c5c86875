"""Which agent this is, as it tells the portal: the bundle has no metadata to ask."""

VERSION = "0.1.0"
