"""REST: what a job's runs report and leave behind: metrics, rounds, profiles, logs, checkpoints, environment."""
