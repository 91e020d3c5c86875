"""Test that every entry of the catalogue matches its example, and not text that only resembles it."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from diagnosis.logs.prefixes import parse_prefix
from diagnosis.logs.tracebacks import StackFrame, Traceback
from diagnosis.scanner import scan
from diagnosis.signatures.catalogue import SHIPPED, Catalogue, read_shipped_file, shipped_catalogue
from diagnosis.signatures.entry import Entry
from diagnosis.signatures.prefilter import prefilter_of
from diagnosis.signatures.required_words import required_words
from diagnosis.signs.log_signs import matches_traceback

FILES = sorted(SHIPPED.glob("*.toml"))
ENTRIES = [pytest.param(entry, id=f"{path.stem}:{entry.name}") for path in FILES for entry in read_shipped_file(path)]
FRAME_OF = {
    "import": StackFrame("/home/mira/train.py", "<module>", "import apex"),
    "rendezvous": StackFrame("/env/site-packages/torch/distributed/distributed_c10d.py", "init_process_group"),
    "hub": StackFrame("/env/site-packages/huggingface_hub/file_download.py", "hf_hub_download"),
    "arguments": StackFrame("/home/mira/train.py", "parse_args"),
    "checkpoint.save": StackFrame("/home/mira/train.py", "save_checkpoint"),
    "checkpoint.load": StackFrame("/home/mira/train.py", "load_checkpoint"),
    "collective": StackFrame("/home/mira/train.py", "all_reduce"),
    "data": StackFrame("/home/mira/data.py", "__getitem__"),
    "compile": StackFrame("/env/site-packages/torch/_inductor/graph.py", "run"),
    "model": StackFrame("/home/mira/train.py", "build_model"),
    "step": StackFrame("/home/mira/train.py", "training_step"),
    "launch": StackFrame("/usr/lib/python3.11/subprocess.py", "Popen"),
}


def _finds(entry: Entry, line: str) -> bool:
    catalogue = Catalogue([entry])
    if not entry.is_for_tracebacks:
        return entry in catalogue.entries_matching(line[parse_prefix(line).length :].encode())
    kind, _, message = line[parse_prefix(line).length :].partition(": ")
    frames = [FRAME_OF[entry.during[0]]] if entry.during else []
    if entry.frame:
        frames = []
    link = Traceback(1, 1, kind, message, frames)
    return matches_traceback(replace(entry, frame=""), link, entry.during, catalogue)


@pytest.mark.parametrize("entry", ENTRIES)
def test_its_example_is_found_and_its_look_alike_is_not(entry: Entry) -> None:
    assert entry.example, "it has no example"
    assert entry.look_alike, "it has no look-alike"
    assert _finds(entry, entry.example), entry.pattern
    assert not _finds(entry, entry.look_alike), entry.pattern


def test_every_file_is_toml_with_entries() -> None:
    for path in FILES:
        assert tomllib.loads(path.read_text())["entry"], path.name
    assert len(shipped_catalogue().entries) == len(ENTRIES)


def test_lines_that_differ_only_in_digits_are_distinguished_where_digits_matter() -> None:
    flood = b"NVRM: Xid (PCI:0000:ab:00): 13, pid=7, name=python, Graphics Exception\n" * 5_000
    scanned = scan(
        prefilter_of(shipped_catalogue()),
        "log",
        [flood + b"NVRM: Xid (PCI:0000:ab:00): 79, pid=7, name=python, GPU has fallen\n"],
    )
    (lost,) = (hits for hits in scanned.entry_hits.values() if hits.entry.cause == "gpu.off_bus")
    assert [hit.line for hit in lost.hits] == [5_001]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"CUDA out of memory\. Tried", {("CUDA out of memory. Trie", False)}),
        (r"(?i)Stale file handle|ESTALE\b", {("stale file handle", True), ("estale", True)}),
        (r"zab?cdefghij", {("cdefghij", False)}),
        (r"xyzzyfo+bar", {("xyzzyfo", False)}),
        (r"(?:frobnicated )?qux", None),
        (r"(?:frobnicated |wibbled! )+qux", {("frobnicated ", False), ("wibbled! ", False)}),
        (r"a(?i:Frobnicate)d", {("frobnicate", True)}),
        (r"frobnicated|\d+", None),
        (r"iteration of the training", None),
    ],
)
def test_words_that_a_pattern_cannot_do_without(pattern: str, words: set[tuple[str, bool]] | None) -> None:
    assert required_words(pattern) == words


def test_the_sieve_stops_at_every_example() -> None:
    sieve = prefilter_of(shipped_catalogue())
    missed = [
        entry.name
        for entry in shipped_catalogue()
        if not entry.is_for_tracebacks and not sieve.search(entry.example.encode())
    ]
    assert not missed
