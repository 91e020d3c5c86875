"""The error for unusable data."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be trained on: the option at fault, if any, and what to do. Can be sent between ranks."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message, option)
        self.message, self.option = message, option

    def __str__(self) -> str:
        return f"{self.option}: {self.message}" if self.option else self.message

    def within(self, table: str) -> DataError:
        """Return this error with its option's full path, for example run.language.source."""
        return DataError(self.message, f"{table}.{self.option}") if self.option else self
