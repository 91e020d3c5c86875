"""Test what runs an entry: a shebang, the name's extension or the executable bit, and nothing else."""

from __future__ import annotations

import pytest

from tests.training.launching import Run
from tests.waiting import PATIENCE_S
from training.interpreter import ITSELF, PYTHON, NotAProgram, interpreter_of


@pytest.mark.parametrize(
    ("name", "head", "is_executable", "interpreter"),
    [
        ("train.py", b"import torch\n", False, PYTHON),
        ("train.py", b"#!/usr/bin/env python3\r\nimport torch\r\n", False, PYTHON),
        ("train.py", b"#!/bin/bash\n", True, PYTHON),  # the name says more
        ("train.PY", b"\xef\xbb\xbfimport torch\n", False, PYTHON),
        ("app.pyz", b"#!/opt/python3.11\nPK", True, PYTHON),
        ("train", b"#!/usr/bin/env -S python3 -X dev\n", False, PYTHON),
        ("train", b"#!/opt/venv/bin/python3.12\n", False, PYTHON),
        ("run.sh", b"#!/bin/bash\nset -e\n", False, ("/bin/bash",)),
        ("run.sh", b"#! /bin/bash -e -u  \nset -e\n", True, ("/bin/bash", "-e -u")),
        ("run.sh", b"#!/usr/bin/env bash", False, ("/usr/bin/env", "bash")),
        ("run.sh", b"export A=1\n", True, ("/bin/sh",)),
        ("train", b"\x7fELF\x02\x01", True, ITSELF),
    ],
)
def test_what_runs_a_file(name: str, head: bytes, is_executable: bool, interpreter: tuple[str, ...]) -> None:
    assert interpreter_of(name, head, is_executable=is_executable) == interpreter


@pytest.mark.parametrize(
    ("name", "head", "words"),
    [
        ("run.sh", b"export MASTER_PORT=29500\n", "#!/bin/bash"),
        ("train", b"import torch\n", "ends in .py"),
        ("run.sh", b"", "nothing says what runs it"),
        ("run.sh", b"#!/bin/bash\r\nset -e\r\n", "Windows line endings"),
        ("run.sh", b"\xef\xbb\xbf#!/bin/bash\n", "byte order mark"),
        ("run.sh", b"#!bash\n", "not an absolute path"),
        ("run.sh", b"#!\n", "not an absolute path"),
        ("train", b"\x7fELF\x02\x01", "chmod +x"),
    ],
)
def test_a_file_that_nothing_runs_is_refused_with_what_to_write(name: str, head: bytes, words: str) -> None:
    with pytest.raises(NotAProgram, match=name) as refused:
        interpreter_of(name, head, is_executable=False)
    assert words in str(refused.value)


def prepare(run: Run, name: str, text: str, *, mode: int = 0o640) -> None:
    folder = run.path / "job" / "code"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, newline="")
    (folder / name).chmod(mode)


@pytest.mark.slow
def test_a_shell_script_runs_in_its_shell_and_finds_python(run: Run) -> None:
    prepare(run, "run.sh", '#!/bin/bash\necho "rank $RANK, $1"\nexec python -c "import vigil_report; print(1 + 1)"\n')
    assert run.script("", script='entry = "run.sh"\nargs = ["--small"]\n').wait(PATIENCE_S) == 0
    assert (run.attempt() / "logs" / "0.0.log").read_text() == "rank 0, --small\n2\n"


@pytest.mark.slow
def test_an_entry_from_git_that_nothing_runs_ends_with_what_to_write(run: Run) -> None:
    prepare(run, "run.sh", "#!/bin/bash\r\npython train.py\r\n")
    assert run.script("", script='entry = "run.sh"\n').wait(PATIENCE_S) == 2
    assert "Windows line endings" in run.result()["error"]
    assert run.result()["error"].startswith("script.entry: ")


@pytest.mark.slow
def test_an_interpreter_that_the_node_does_not_have_is_named(run: Run) -> None:
    prepare(run, "run.sh", "#!/opt/nowhere/zsh\n")
    assert run.script("", script='entry = "run.sh"\n').wait(PATIENCE_S) == 2
    assert run.result()["error"] == "script.entry = 'run.sh' begins with #!/opt/nowhere/zsh, which is not on this node"
