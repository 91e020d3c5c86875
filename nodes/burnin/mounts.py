"""Find nodes on which a folder is not mounted, or from elsewhere than on most nodes of the burn-in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodes.burnin.evidence import BurnInFinding, NodeResults
from nodes.burnin.reports import MOUNT

LOCAL = frozenset({"btrfs", "ext", "overlay", "ramfs", "rootfs", "squashfs", "tmpfs", "xfs", "zfs"})


@dataclass(frozen=True)
class NodeMount:
    """Describes the file system that holds a folder of a node, such as "nfs4" from "filer:/export/data"."""

    fstype: str
    source: str

    @property
    def family(self) -> str:
        """Return the type without its version: NFS 3 and 4 hold the same files."""
        return self.fstype.rstrip("0123456789") or self.fstype

    @property
    def export(self) -> str:
        """Return what a server exports, which may have several addresses; "" for disks."""
        return self.source.rpartition(":")[2] if ":" in self.source else ""

    def __str__(self) -> str:
        return f"{self.fstype} from {self.source}" if self.source else self.fstype


def differing_mounts(nodes: Sequence[NodeResults]) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield the nodes on which a folder's file system differs from most nodes.

    A folder that is on a local disk there and on a server elsewhere fails the node.
    """
    folders: dict[str, dict[str, NodeMount]] = {}
    for results in nodes:
        for test in results.tests:
            if test.test == MOUNT and test.basis:
                fstype, _, source = test.basis.partition(" ")
                folders.setdefault(test.item, {})[results.node] = NodeMount(fstype, source)
    for folder, mounts in folders.items():
        yield from _differing(folder, mounts)


def _differing(folder: str, mounts: Mapping[str, NodeMount]) -> Iterable[tuple[str, BurnInFinding]]:
    family, count = _most_common(mount.family for mount in mounts.values())
    has_majority = count * 2 > len(mounts)
    export, exporting = _most_common(mount.export for mount in mounts.values() if mount.family == family)
    for node, mount in mounts.items():
        if not has_majority:
            yield node, BurnInFinding(f"{folder} is {mount} here, and of other types on other nodes.", is_warning=True)
        elif mount.family != family:
            is_missing = mount.family in LOCAL and family not in LOCAL
            what = f"not mounted: {mount}" if is_missing else str(mount)
            text = f"{folder} is {what}; {family} on {count} of {len(mounts)} nodes."
            yield node, BurnInFinding(text, is_warning=not is_missing)
        elif mount.export != export and exporting * 2 > count:
            yield node, BurnInFinding(f"{folder} is {mount}; {export} on most nodes.", is_warning=True)


def _most_common(texts: Iterable[str]) -> tuple[str, int]:
    return next(iter(Counter(texts).most_common(1)), ("", 0))
