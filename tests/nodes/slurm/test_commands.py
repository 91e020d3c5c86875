"""Slurm's commands: what slurmctld refuses is final, one that cannot be reached is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.commands import SlurmCommands


class NoToken:
    def token_for(self, user: str) -> str:
        return ""


def failure(tmp_path: Path, message: str) -> SchedulerError:
    """Return the error that follows when scontrol prints this and fails."""
    command = tmp_path / "scontrol"
    command.write_text(f"#!/bin/sh\ncat >&2 <<'end'\n{message}\nend\nexit 1\n")
    command.chmod(0o755)
    with pytest.raises(SchedulerError) as caught:
        SlurmCommands(NoToken(), str(command)).call("scontrol", "create", user="vigil", why="This Slurm can")
    return caught.value


@pytest.mark.parametrize(
    "message",
    [
        "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)",
        "Error creating the reservation: Unable to contact slurm controller (connect failure)",
        "scontrol: error: slurm_receive_msg: Socket timed out on send/recv operation",
        "slurm_update error: Zero Bytes were transmitted or received",
        "slurm_update error: Slurm backup controller in standby mode",
        "scontrol: error: Unable to establish controller machine: Connection refused",
    ],
)
def test_an_unreachable_slurmctld_is_tried_again(tmp_path: Path, message: str) -> None:
    error = failure(tmp_path, message)
    assert not error.permanent
    assert message in str(error)


@pytest.mark.parametrize(
    "message",
    [
        "Error creating the reservation: Requested nodes are busy",
        "slurm_update error: Invalid node name specified",
        "slurm_update error: Access/permission denied",
    ],
)
def test_a_refusal_is_final(tmp_path: Path, message: str) -> None:
    assert failure(tmp_path, message).permanent
