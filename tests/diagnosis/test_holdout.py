"""Test that holdout logs are valid, broad and not in the regression set. No test asserts their score."""

from __future__ import annotations

from pathlib import Path

from diagnosis.causes import CAUSES
from diagnosis.evaluate import read_cases

LOGS = Path(__file__).resolve().parents[1] / "logs"
HOLDOUT = LOGS.with_name("logs_holdout")


def log_texts(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.glob("*/*") if path.name != "case.toml"}


def test_holdout_cases_are_many_and_of_every_family() -> None:
    several = list(read_cases(HOLDOUT))
    assert len(several) >= 40
    assert {case.cause.partition(".")[0] for case in several} >= {
        code.partition(".")[0] for code in CAUSES if not code.startswith("federated.")
    }


def test_no_holdout_log_is_also_in_the_regression_set() -> None:
    assert not log_texts(HOLDOUT) & log_texts(LOGS)
