"""A mount of the host names its file system, and a killed test of the disk leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from training.burnin import host_tests


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    lines: list[Mapping[str, Any]] = []
    monkeypatch.setattr(host_tests, "emit", lines.append)
    return lines


def test_a_mount_names_its_file_system(emitted: list[Mapping[str, Any]], tmp_path: Path) -> None:
    link = tmp_path / "data"
    link.symlink_to("/proc")
    for folder in ("/proc", str(link), "/proc/sys"):
        host_tests.test_mount(folder)
    assert [(line["outcome"], line["fstype"], line["source"]) for line in emitted] == [("passed", "proc", "proc")] * 3


def test_reads_what_the_kernel_escapes_in_the_source_of_a_mount() -> None:
    lines = [
        "36 35 98:0 / /mnt/other rw - ext4 /dev/sda1 rw",
        r"370 36 0:50 /a /mnt/data\040sets rw,noatime shared:7 master:1 - nfs4 filer:/export/data\040sets rw,vers=4.2",
    ]
    assert host_tests.mount_of("370", lines) == ("nfs4", "filer:/export/data sets")
    assert host_tests.mount_of("7", [*lines, "", "370 -"]) == ("", "")


def test_a_killed_test_of_the_disk_leaves_nothing_behind(
    emitted: list[Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(host_tests.os, "fsync", lambda _: names.extend(os.listdir(tmp_path)))
    host_tests.test_disk(str(tmp_path), until=time.monotonic())
    assert names == [], "a file with a name outlives the process"
    assert [line["outcome"] for line in emitted] == ["passed", "passed"]
