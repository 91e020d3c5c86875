"""Network interfaces and InfiniBand ports, by what the kernel counts."""

from __future__ import annotations

from pathlib import Path

from nodes.agent import proc
from nodes.agent.cleaning import clean

MOST = 32
MIB = 2**20
IB_WORD_BYTES = 4  # data counters of InfiniBand count words
IB_ACTIVE = 4
IB_ERRORS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
)


def traffic(sys: Path) -> dict[str, float]:
    """MiB so far of each interface that has a device behind it: bridges and containers' own would count them twice."""
    found: dict[str, float] = {}
    for name in proc.names(sys / "class/net"):
        folder = sys / "class/net" / name
        if len(found) < 2 * MOST and (folder / "device").exists():
            for way in ("rx", "tx"):
                if (count := proc.number(folder / f"statistics/{way}_bytes")) is not None:
                    found[f"net_{way}_mib:{clean(name, 64)}"] = count / MIB
    return found


def _ports(sys: Path) -> list[tuple[str, Path]]:
    """InfiniBand ports, and those of Ethernet that speak its language (RoCE), as mlx5_0/1."""
    root = sys / "class/infiniband"
    found = [(card, port) for card in proc.names(root) for port in proc.names(root / card / "ports")]
    return [(f"{clean(card, 48)}/{clean(port, 8)}", root / card / "ports" / port) for card, port in found[:MOST]]


def infiniband_traffic(sys: Path) -> dict[str, float]:
    """MiB so far."""
    found: dict[str, float] = {}
    for name, folder in _ports(sys):
        for way, counter in (("rx", "port_rcv_data"), ("tx", "port_xmit_data")):
            if (count := proc.number(folder / "counters" / counter)) is not None:
                found[f"ib_{way}_mib:{name}"] = count * IB_WORD_BYTES / MIB
    return found


def infiniband_state(sys: Path) -> dict[str, float | None]:
    """Which links are up, and all errors that each has counted."""
    found: dict[str, float | None] = {}
    for name, folder in _ports(sys):
        state = proc.read(folder / "state", 64).partition(":")[0]
        found[f"ib_up:{name}"] = float(int(state) == IB_ACTIVE) if state.isdigit() else None
        errors = [proc.number(folder / "counters" / counter) for counter in IB_ERRORS]
        if known := [count for count in errors if count is not None]:
            found[f"ib_errors:{name}"] = float(sum(known))
    return found
