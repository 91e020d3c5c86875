"""The agent reads versions from files and programs, and waits for none of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nodes.agent.software import COMMANDS, SoftwareProbe, adapters, nccl_version
from tests.waiting import until


def install(folder: Path, name: str, output: str, code: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    path.chmod(0o755)


def end(probe: SoftwareProbe) -> None:
    """Leave no process of its first program behind."""
    probe.close()
    until(lambda: probe._commands[0][1].poll() is not None)


@pytest.mark.parametrize(
    ("program", "output", "software", "version"),
    [
        ("slurmd", "slurm 24.11.5", "slurm", "24.11.5"),
        ("slurmd", "slurm-wlm 22.05.11", "slurm", "22.05.11"),
        ("slurmd", "slurm 26.05.0-0rc1", "slurm", "26.05.0-0rc1"),
        ("nv-fabricmanager", "Fabric Manager version is : 550.90.07", "fabric_manager", "550.90.07"),
        ("nvidia-ctk", "NVIDIA Container Toolkit CLI version 1.17.8", "container_toolkit", "1.17.8"),
    ],
)  # fmt: skip
def test_a_program_names_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, output: str, software: str, version: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(tmp_path, program, output)
    commands = [item for item in COMMANDS if item.command[0] == program]
    probe = SoftwareProbe(commands=commands, libraries=(), sys=tmp_path)
    probe.wait(20)
    assert probe.facts() == {software: version, "adapters": []}


def test_a_program_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(tmp_path, "slurmd", "")
    (tmp_path / "slurmd").write_text("#!/bin/sh\nexec sleep 600\n")
    probe = SoftwareProbe(commands=COMMANDS[:1], libraries=(), sys=tmp_path)
    began = time.monotonic()
    for _ in range(20):
        probe.poll()
    assert time.monotonic() - began < 5
    assert probe.facts() == {"adapters": []}
    end(probe)


def test_upgrades_count_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, version in ((first, "24.11.5"), (second, "25.05.2")):
        folder.mkdir()
        install(folder, "slurmd", f"slurm {version}")
    monkeypatch.setenv("PATH", f"{first}:{second}:/usr/bin:/bin")
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.26.2")
    probe = SoftwareProbe(every=0.01, commands=COMMANDS[:1], libraries=[str(tmp_path)], sys=tmp_path)
    probe.wait(20)
    assert probe.facts() == {"slurm": "24.11.5", "nccl": "2.26.2", "adapters": []}
    (first / "slurmd").unlink()
    (tmp_path / "libnccl.so.2").unlink()
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.27.3")
    until(lambda: probe.poll() or probe.facts() == {"slurm": "25.05.2", "nccl": "2.27.3", "adapters": []})
    (second / "slurmd").unlink()
    (tmp_path / "libnccl.so.2").unlink()
    until(lambda: probe.poll() or probe.facts() == {"adapters": []})
    end(probe)


def test_the_file_of_nccl_names_its_version(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2.26.2").write_bytes(b"")
    assert nccl_version([str(tmp_path)]) == ""
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.26.2")
    assert nccl_version(["/nowhere", str(tmp_path)]) == "2.26.2"


def test_adapters_have_board_and_firmware(tmp_path: Path) -> None:
    for number in range(40):
        folder = tmp_path / "class/infiniband" / f"mlx5_{number:02}"
        folder.mkdir(parents=True)
        (folder / "fw_ver").write_text("28.43.2026\n")
        (folder / "board_id").write_text("MT_0000000838\n")
    found = adapters(tmp_path)
    assert found[0] == {"name": "mlx5_00", "board": "MT_0000000838", "firmware": "28.43.2026"}
    assert len(found) == 32
    assert adapters(tmp_path / "nowhere") == []
