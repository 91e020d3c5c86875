"""Test errors in the files of a custom rule, selection or split, for each of them."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.training.federated.custom_files import ready
from tests.training.federated.in_process import train
from training.config.base import ConfigError

DIGITS: dict[str, Any] = {"recipe": "tabular", "clients": 10, "learning_rate": 0.3, "tabular": {"hidden": 16}}


@pytest.mark.parametrize(
    ("key", "function"), [("aggregation", "combine"), ("selection", "select"), ("split", "divide")]
)
class TestFile:
    def test_lacks_its_function(self, tmp_path: Path, key: str, function: str) -> None:
        with pytest.raises(ConfigError, match=rf"client\.{key}: {key}\.py has no function {function}\(\)"):
            ready(tmp_path, files={f"{key}.py": "x = 1\n"}, **DIGITS, **{key: f"own_{key}"})

    def test_is_not_there(self, tmp_path: Path, key: str, function: str) -> None:
        with pytest.raises(ConfigError, match=rf"client\.{key}: {key}\.py is not in the directory"):
            ready(tmp_path, **DIGITS, **{key: f"own_{key}"})

    def test_knows_no_such_option(self, tmp_path: Path, key: str, function: str) -> None:
        text = f"def {function}(*arguments, share=0.5):\n    return None\n"
        with pytest.raises(ConfigError, match=rf"run\.own_{key}\.shaer: {key}\.py has no such option\. Did you mean"):
            ready(tmp_path, files={f"{key}.py": text}, **DIGITS, **{key: f"own_{key}"}, **{f"own_{key}": {"shaer": 1}})

    def test_raises_with_the_line_of_the_file(self, tmp_path: Path, key: str, function: str) -> None:
        text = f"def {function}(*arguments):\n    return 1 / 0\n"
        with pytest.raises(ZeroDivisionError) as raised:
            train(ready(tmp_path, files={f"{key}.py": text}, **DIGITS, **{key: f"own_{key}"}))
        last = traceback.extract_tb(raised.value.__traceback__)[-1]
        assert (Path(last.filename).name, last.lineno, last.name) == (f"{key}.py", 2, function)

    def test_an_exit_is_an_error(self, tmp_path: Path, key: str, function: str) -> None:
        text = f"import sys\n\n\ndef {function}(*arguments):\n    sys.exit(0)\n"
        with pytest.raises(RuntimeError, match=rf"{function}\(\) of {key}\.py ended the process \(exit code 0\)"):
            train(ready(tmp_path, files={f"{key}.py": text}, **DIGITS, **{key: f"own_{key}"}))
