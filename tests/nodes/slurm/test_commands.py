"""Slurm's commands: what slurmctld refuses is final, one that cannot be reached is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.commands import SlurmCommands
from nodes.schedulers.slurm.rights import with_remedy


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


@pytest.mark.parametrize(
    "last",
    [
        "scontrol: fatal: Could not establish a configuration source",
        "scontrol: fatal: Unable to process configuration file",
    ],
)
def test_without_slurm_conf_the_error_names_its_place(tmp_path: Path, last: str) -> None:
    error = failure(tmp_path, f"scontrol: error: DNS SRV lookup failed\n{last}")
    assert error.permanent
    assert str(error).startswith(f"scontrol finds no slurm.conf ({last}). Copy this cluster's to /etc/slurm")


@pytest.mark.parametrize("message", ["Invalid user id", "Access/permission denied"])
def test_a_missing_right_names_the_command_that_grants_it(tmp_path: Path, message: str) -> None:
    error = with_remedy(failure(tmp_path, f"slurm_update error: {message}"), "vigil", "change nodes")
    assert error.permanent
    assert message in str(error)
    assert "Slurm does not let vigil change nodes" in str(error)
    assert "sacctmgr modify user vigil set AdminLevel=Admin" in str(error)


def test_other_refusals_keep_their_words(tmp_path: Path) -> None:
    for message in ("slurm_update error: Invalid node name specified", "Unable to contact slurm controller"):
        error = failure(tmp_path, message)
        assert with_remedy(error, "vigil", "change nodes") is error
