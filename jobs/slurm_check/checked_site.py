"""Gather what the checks inspect: settings, cluster and people. Each is read once, and only when needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nodes.schedulers.base import Listing, NodeStatus, Scheduler, SchedulerError
from nodes.schedulers.cluster import AccountsInfo, PartitionInfo
from nodes.schedulers.slurm.commands import run
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import CommandTokens, KeyFileTokens, TokenSource
from nodes.schedulers.slurm.values import at, mapping, objects, text, words


@dataclass(frozen=True)
class Submitter:
    """A person in a project, as Slurm would know them: whom jobs may be submitted as."""

    name: str
    slurm_user: str
    project: str
    account: str = ""  # "": Slurm's default


@dataclass
class CheckedSite:
    """The site under check. `people`: None if the portal has no database yet."""

    home: Path
    runs: Path
    scheduler_name: str = "slurm"
    url: str = ""
    key_file: str = ""
    token_command: str = ""
    user: str = ""
    ca_file: str = ""
    report_url: str = ""
    reports: str = "post"
    people: Sequence[Submitter] | None = ()
    without_project: Sequence[str] = ()  # Slurm users of people who belong to no project
    accounts_of_projects: Mapping[str, str] = field(default_factory=dict)
    open: Callable[[], Scheduler] | None = None  # the worker's way to its scheduler
    scontrol: str = "scontrol"
    conf_on_node: dict[str, str] = field(default_factory=dict)  # slurm.conf, as a job saw it

    @cached_property
    def scheduler(self) -> Scheduler:
        if self.open is None:
            raise SchedulerError("No scheduler can be opened here. Set VIGIL_SCHEDULER=slurm.")
        return self.open()

    @property
    def rest(self) -> SlurmRest:
        if not isinstance(self.scheduler, Slurm):
            raise SchedulerError(f"VIGIL_SCHEDULER={self.scheduler_name}. Set it to slurm.")
        return self.scheduler.rest

    @property
    def tokens(self) -> TokenSource:
        return self.rest.http.tokens

    def rest_with(self, tokens: TokenSource) -> SlurmRest:
        """Return another client of the same slurmrestd, with other tokens."""
        return SlurmRest(SlurmHttp(self.url, tokens=tokens, user=self.user, ca_file=self.ca_file))

    def make_tokens(self) -> TokenSource:
        """Make a source of tokens without network access."""
        return CommandTokens(self.token_command) if self.token_command else KeyFileTokens(Path(self.key_file))

    @cached_property
    def release(self) -> str:
        """Return Slurm's release, such as "24.11.5", from its responses."""
        meta = mapping((self.rest.http.get("diag") or {}).get("meta"))
        return text(at(meta, "slurm", "release")) or text(at(meta, "Slurm", "release"))

    @cached_property
    def partitions(self) -> Listing[PartitionInfo]:
        return self.rest.partitions()

    @cached_property
    def nodes(self) -> Listing[NodeStatus]:
        return self.rest.nodes()

    @cached_property
    def accounts(self) -> AccountsInfo:
        return self.rest.accounts()

    @cached_property
    def admin_level(self) -> str:
        """Return the level of our Slurm user in accounting: none, operator or administrator.

        "" if it is unknown there.
        """
        answer = self.rest.http.get(f"user/{self.user}", service="slurmdb") or {}
        found = next((user for user in objects(answer.get("users")) if text(user.get("name")) == self.user), None)
        return "" if found is None else (words(found.get("administrator_level")) or ("None",))[0].lower()

    @cached_property
    def conf(self) -> Mapping[str, str]:
        """Return slurm.conf by `scontrol show config` with our token. Raises SchedulerError if that fails."""
        return conf_of(self.run_scontrol("show", "config", token=self.tokens.token_for(self.user)))

    def run_scontrol(self, *words: str, token: str) -> str:
        command = shutil.which(self.scontrol)
        if command is None:
            raise SchedulerError(
                "scontrol is not installed on the worker's machine. Install Slurm's client commands there."
            )
        code, printed, errors = run(command, *words, token=token)
        if code:
            last = (errors or f"exit code {code}").splitlines()[-1]
            raise SchedulerError(f"scontrol: {last}. Does SLURM_CONF, or /etc/slurm, name this cluster?")
        return printed


def conf_of(printed: str) -> dict[str, str]:
    """Parse lines such as "MinJobAge = 60 sec" by name; (null) and N/A become ""."""
    found = {}
    for line in printed.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip().replace("_", "").isalnum():
            found[name.strip()] = "" if value.strip() in {"(null)", "N/A"} else value.strip()
    return found
