"""Test the benchmark of federations at toy size: its parts work together, and ours equals a loop written by hand."""

import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import federated_gallery, federated_rivals
from bench.federated_gallery import Course, Panel
from bench.federated_rivals import Work

ROOT = Path(__file__).parents[2]
TINY = """
from bench.federated import ROWS, Sizes, measure
measure(ROWS, Sizes(clients=(50,), rounds=1, turns=2, client_counts=(10, 20), stateful_clients=20, numbers=70_000,
                    updates=5, pairs=1, ledger_rounds=2), rivals=False)
"""
GALLERY = """
import sys
from pathlib import Path
from bench.federated_gallery import write
write(Path(sys.argv[1]), rounds=2, only=("fedavg", "fednewton"))
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_row_is_measured_and_a_loop_by_hand_does_the_same():
    text = run(TINY)
    payload = json.loads(text.splitlines()[-1])
    assert payload["bars"]["50, loop, same"], text
    assert {"alone", "crowd", "state", "sum", "ledger"} <= set(payload)
    assert payload["sum"]["difference"] < 1e-6
    assert 0 < payload["ledger"]["report_seconds"] < payload["ledger"]["round_seconds"]


@pytest.mark.slow
def test_the_gallery_shows_each_algorithm_where_it_belongs(tmp_path: Path):
    run(GALLERY, str(tmp_path))
    page = (tmp_path / "federated-gallery.md").read_text()
    digits, convex = page.split("## ")[1:3]
    assert "| fedavg |" in digits
    assert "| fednewton |" in convex
    ElementTree.parse(tmp_path / "federated-gallery.svg")


def test_a_loop_by_hand_takes_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    draw = np.random.RandomState(0)
    rows = draw.standard_normal((30, 4)).astype(np.float32)
    targets = (rows[:, 0] > 0).astype(np.int64)
    weights = {"hidden.weight": (3, 4), "hidden.bias": (3,), "head.weight": (2, 3), "head.bias": (2,)}
    Work.write(
        tmp_path / "work.npz", rows=rows, targets=targets, owners=np.arange(30) % 5, held_out_rows=rows,
        held_out_targets=targets, batch=np.array(4), learning_rate=np.array(0.5),
        **{f"weight:{name}": draw.standard_normal(shape).astype(np.float32) for name, shape in weights.items()},
    )  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n20\n"))
    federated_rivals.loop(str(tmp_path / "work.npz"))
    ready, first, later = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines()]
    assert ready == {"ready": True}
    assert (len(first["seconds"]), len(later["seconds"])) == (1, 20)
    assert later["loss"] < first["loss"]


def test_a_round_with_a_single_arrival_counts_as_its_part():
    assert Course("fedasync", 1, accuracies=[0.1, 0.5, 0.95]).enough == pytest.approx(0.2)
    assert Course("fedavg", 10, accuracies=[0.1, 0.5]).enough is None


def test_more_lines_than_colours_differ_in_a_well_formed_image():
    lines = {f"a & {index}": [(0.0, 1.0), (1.0, 10.0**-index), (2.0, float("nan"))] for index in range(20)}
    drawn = federated_gallery.draw("Title", "about", [Panel("f − f*", "rounds", lines, is_log=True)])
    ElementTree.fromstring(drawn)
    styles = {line.split("style=")[1].split("><")[0] for line in drawn.splitlines() if "<title>" in line}
    assert len(styles) == 20
    assert "nan" not in drawn
