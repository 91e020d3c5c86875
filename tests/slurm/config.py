"""Configure a private Slurm cluster whose nodes are all on this machine."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.release import Release

NODE_CPUS, NODE_MIB = 128, 2_000_000  # what the nodes report of themselves, whatever this machine has
GPU, SLICE = "h100", "1g.10gb"
REST_USER = "www-data"  # slurmrestd refuses to be root or Slurm's own user
COMMANDS = (
    "sacct", "sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sdiag", "sinfo", "sprio", "squeue", "sreport",
    "srun", "sshare", "sstat",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The layout of a cluster: its files, its ports, and how many nodes it simulates."""

    folder: Path
    port: int  # the first of a range that nobody else uses
    nodes: int = 4
    gpus: int = 8  # a node; each needs a character device, of which there are 64
    slices: int = 0  # further GPUs of another type, on the last node alone
    gpus_of_last: tuple[int, ...] = ()  # of the last nodes, if they have fewer GPUs than the others
    min_job_age_s: int = 60  # for so long Slurm itself remembers a job that has ended; then only its accounting does
    # A requeued job waits for as long as its credential lived, and a second more. Slurm takes 5 and more.
    cred_expire_s: int = 5
    # A silent node is down after this and twice the time for a message: 30 s with these. A round of pings takes as long
    # as its slowest answer, 7 s with a silent node, and only then has anybody answered. Where two thirds of this are
    # not longer than a round, 24.11 takes healthy nodes for down as well.
    slurmd_timeout_s: int = 20
    message_timeout_s: int = 5

    @property
    def names(self) -> list[str]:
        return [f"dgx{number:02}" for number in range(1, self.nodes + 1)]

    def gpus_of(self, name: str) -> int:
        fewer = dict(zip(self.names[self.nodes - len(self.gpus_of_last) :], self.gpus_of_last, strict=True))
        return fewer.get(name, self.gpus)

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def scratch(self) -> Path:
        """Return a folder open to every user, like /tmp: pytest's folder is closed to others."""
        return self.folder / "scratch"

    @property
    def bin(self) -> Path:
        """Return the folder with Slurm's commands for use outside the room."""
        return self.folder / "bin"

    @property
    def rest_socket(self) -> Path:
        return self.folder / "rest" / "slurmrestd.sock"

    @property
    def job_ended_hook(self) -> Path:
        """Return the program that slurmctld, if it exists, runs as root for every job that ended (jobcomp/script)."""
        return self.folder / "etc" / "jobcomp.d"

    @property
    def jwt_key(self) -> Path:
        return self.folder / "etc" / "jwt_hs256.key"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "run" / "munge.sock"

    @property
    def mysql_socket(self) -> Path:
        return self.folder / "mysql" / "mysql.sock"

    def port_of(self, daemon: str) -> int:
        return self.port + ("slurmctld", "slurmdbd", "mariadbd", "slurmrestd", *self.names).index(daemon)


def failing_prolog(layout: Layout, node: str) -> Path:
    """Return a file whose existence makes the prolog of every job fail on the node."""
    return layout.folder / "etc" / f"prolog-fails-on-{node}"


def write(layout: Layout, release: Release) -> None:
    """Write the folders, keys and configuration files."""
    folder, etc = layout.folder, layout.folder / "etc"
    for name in ("bin", "etc", "run", "log", "state", "spool", "mysql", "mysql-tmp", "rest", "scratch"):
        (folder / name).mkdir(mode=0o755, exist_ok=True)
    for name in layout.names:
        (folder / "spool" / name).mkdir(exist_ok=True)
    layout.scratch.chmod(0o1777)
    shutil.chown(folder / "rest", REST_USER)
    _secret(etc / "munge.key", secrets.token_bytes(128), 0o400)
    _secret(layout.jwt_key, secrets.token_bytes(32), 0o600)
    layout.slurm_conf.write_text(_slurm_conf(layout))
    (etc / "gres.conf").write_text(_gres_conf(layout))
    (etc / "cgroup.conf").write_text(f"CgroupPlugin={release.cgroup_plugin}\n")
    _secret(etc / "slurmdbd.conf", _slurmdbd_conf(layout).encode(), 0o600)
    _program(etc / "prolog", f'[ ! -e "{failing_prolog(layout, "$SLURMD_NODENAME")}" ]')
    _program(etc / "jobcomp", f"[ ! -x {layout.job_ended_hook} ] || exec {layout.job_ended_hook}")


def write_commands(layout: Layout, enter: str) -> None:
    """Write wrappers of Slurm's commands that enter the room, for root outside it. Jobs must not inherit their path."""
    for command in COMMANDS:
        environment = f"export SLURM_CONF={layout.slurm_conf} PATH=/usr/bin:/bin:${{PATH#{layout.bin}:}}"
        _program(layout.bin / command, f'{environment}\nexec {enter} /usr/bin/{command} "$@"')


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _secret(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _gres_conf(layout: Layout) -> str:
    # A GPU's file has to be a character device: terminals are there on every machine.
    lines = ["AutoDetect=off"]
    for number in sorted({layout.gpus_of(name) for name in layout.names} - {0}):
        names = ",".join(name for name in layout.names if layout.gpus_of(name) == number)
        lines.append(f"NodeName={names} Name=gpu Type={GPU} File=/dev/tty[0-{number - 1}]")
    if layout.slices:
        files = f"/dev/tty[{layout.gpus}-{layout.gpus + layout.slices - 1}]"
        lines.append(f"NodeName={layout.names[-1]} Name=gpu Type={SLICE} File={files}")
    return "\n".join(lines) + "\n"


def _gres(layout: Layout, name: str) -> str:
    slices = f"gpu:{SLICE}:{layout.slices}" if layout.slices and name == layout.names[-1] else ""
    number = layout.gpus_of(name)
    found = ",".join(filter(None, (f"gpu:{GPU}:{number}" if number else "", slices)))
    return f" Gres={found}" if found else ""


def _slurm_conf(layout: Layout) -> str:
    folder, host = layout.folder, socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={layout.port_of(name)} CPUs={NODE_CPUS} Sockets=2"
        f" CoresPerSocket={NODE_CPUS // 2} ThreadsPerCore=1 RealMemory={NODE_MIB}{_gres(layout, name)}"
        f" Feature={GPU},{name} Weight=1 State=UNKNOWN"
        for name in layout.names
    )
    everywhere = ",".join(layout.names)
    return f"""\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={layout.port_of("slurmctld")}
SlurmUser={_user()}
SlurmdUser={_user()}
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket},cred_expire={layout.cred_expire_s}
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={layout.jwt_key}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
RebootProgram=/bin/true
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={layout.slurmd_timeout_s}
MessageTimeout={layout.message_timeout_s}
InactiveLimit=0
KillWait=5
OverTimeLimit=0
JobRequeue=1
EnforcePartLimits=NO
MinJobAge={layout.min_job_age_s}
Prolog={folder}/etc/prolog
JobCompType=jobcomp/script
JobCompLoc={folder}/etc/jobcomp
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/multifactor
PriorityWeightFairshare=10000
PriorityWeightQOS=5000
PriorityWeightAge=1000
PriorityDecayHalfLife=7-0
MaxArraySize=10001
MaxJobCount=20000
Licenses=matlab:2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={layout.port_of("slurmdbd")}
AccountingStoragePass={layout.munge_socket}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/gpu:{GPU},gres/gpu:{SLICE}
AccountingStoreFlags=job_comment,job_script,job_env
{nodes}
PartitionName=batch Nodes={everywhere} Default=YES PriorityTier=1 MaxTime=7-0 DefaultTime=1:00:00 PreemptMode=REQUEUE
PartitionName=urgent Nodes={everywhere} PriorityTier=10 MaxTime=1-0 DefaultTime=1:00:00 PreemptMode=OFF
PartitionName=short Nodes={everywhere} PriorityTier=1 MaxTime=10 DefaultTime=5 PreemptMode=REQUEUE
PartitionName=debug Nodes={layout.names[-1]} PriorityTier=1 MaxTime=30 DefaultTime=10 PreemptMode=REQUEUE
"""


def _slurmdbd_conf(layout: Layout) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={layout.jwt_key}
DbdHost={socket.gethostname().split(".")[0]}
DbdAddr=127.0.0.1
DbdPort={layout.port_of("slurmdbd")}
SlurmUser={_user()}
PidFile={layout.folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={layout.port_of("mariadbd")}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""
