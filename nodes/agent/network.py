"""Read the counters of network interfaces and InfiniBand ports."""

from __future__ import annotations

from pathlib import Path

from nodes.agent import proc
from nodes.agent.cleaning import clean

MAX_PORTS = 32
MIB = 2**20
IB_WORD_BYTES = 4  # data counters of InfiniBand count words
IB_ACTIVE = 4
IB_ERRORS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
)


def traffic(sys: Path) -> dict[str, float]:
    """Return MiB so far per interface with a device: bridges and container interfaces would count them twice."""
    found: dict[str, float] = {}
    for name in proc.names(sys / "class/net"):
        folder = sys / "class/net" / name
        if len(found) < 2 * MAX_PORTS and (folder / "device").exists():
            for way in ("rx", "tx"):
                if (count := proc.number(folder / f"statistics/{way}_bytes")) is not None:
                    found[f"net_{way}_mib:{clean(name, 64)}"] = count / MIB
    return found


def _ports(sys: Path) -> list[tuple[str, Path]]:
    """Return InfiniBand ports, and Ethernet ports that speak RoCE, as mlx5_0/1."""
    root = sys / "class/infiniband"
    found = [(card, port) for card in proc.names(root) for port in proc.names(root / card / "ports")]
    return [(f"{clean(card, 48)}/{clean(port, 8)}", root / card / "ports" / port) for card, port in found[:MAX_PORTS]]


def infiniband_traffic(sys: Path) -> dict[str, float]:
    """Return MiB so far per port."""
    found: dict[str, float] = {}
    for name, folder in _ports(sys):
        for way, counter in (("rx", "port_rcv_data"), ("tx", "port_xmit_data")):
            if (count := proc.number(folder / "counters" / counter)) is not None:
                found[f"ib_{way}_mib:{name}"] = count * IB_WORD_BYTES / MIB
    return found


def infiniband_state(sys: Path) -> dict[str, float | None]:
    """Return which links are up, and the sum of errors that each has counted."""
    found: dict[str, float | None] = {}
    for name, folder in _ports(sys):
        state = proc.read(folder / "state", 64).partition(":")[0]
        found[f"ib_up:{name}"] = float(int(state) == IB_ACTIVE) if state.isdigit() else None
        errors = [proc.number(folder / "counters" / counter) for counter in IB_ERRORS]
        if counted := [count for count in errors if count is not None]:
            found[f"ib_errors:{name}"] = float(sum(counted))
    return found


def link_downs(sys: Path) -> dict[str, int]:
    """Return how often the link of each port went down since its driver was loaded."""
    counts = {name: proc.number(folder / "counters/link_downed") for name, folder in _ports(sys)}
    return {name: int(count) for name, count in counts.items() if count is not None}
