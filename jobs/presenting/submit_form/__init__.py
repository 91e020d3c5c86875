"""Build the form that submits a job: its fields, their sections, and the TOML text that it edits."""
