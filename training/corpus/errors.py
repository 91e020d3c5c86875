"""What is wrong with somebody's data, in one sentence."""

from __future__ import annotations


class DataError(ValueError):
    """Data that can't be trained on: the option at fault, if one is, and what to do. Travels between ranks."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message, option)
        self.message, self.option = message, option

    def __str__(self) -> str:
        return f"{self.option}: {self.message}" if self.option else self.message

    def within(self, table: str) -> DataError:
        """This error with its option's whole path, e.g. run.language.source."""
        return DataError(self.message, f"{table}.{self.option}") if self.option else self
