"""Judge the configuration of an acceptance's nodes: the clauses about what their agents and the tests report.

A clause is not checked if a node or GPU does not report the value, unless those that report it already fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from nodes.acceptance.clauses import FAILED, NOT_APPLICABLE, NOT_CHECKED, PASSED, ClauseOutcome
from nodes.acceptance.facts import GpuConfiguration, NodeConfiguration
from vigil_core import formatting

MAX_CLOCK_OFFSET_S = 5.0
MIN_OPEN_FILES = 65_536
MIN_SHM_BYTES = 2**30
UNLIMITED = -1
MAX_NAMES = 5
NO_GPUS = "These nodes have no GPUs."
Nodes = Sequence[NodeConfiguration]
Value = TypeVar("Value")


def configuration_clauses(nodes: Nodes, portal_url: str) -> list[ClauseOutcome]:
    """Return the outcomes of all clauses of the groups configuration, limits and security."""
    return [
        _agents(nodes),
        _gpus(nodes),
        _same_on_nodes("driver", nodes, lambda node: node.driver, needs_gpus=True),
        _same_on_nodes("kernel", nodes, lambda node: node.kernel),
        _same_by_model("vbios", nodes, lambda gpu: gpu.vbios, lambda vbios: vbios),
        _pcie(nodes),
        _nvlinks(nodes),
        _same_on_nodes("topology", nodes, _topology_text, needs_gpus=True),
        _ecc(nodes),
        _same_by_model("power", nodes, lambda gpu: gpu.power_cap_watts, lambda watts: f"{watts} W"),
        _heat(nodes),
        _mounts(nodes),
        _clock(nodes),
        *_limits(nodes),
        _encrypted(portal_url),
        _tokens(nodes),
    ]


def _agents(nodes: Nodes) -> ClauseOutcome:
    silent = [node.node for node in nodes if not node.is_reporting]
    measured = f"{len(nodes) - len(silent)} of {formatting.plural(len(nodes), 'node')}."
    details = tuple(f"{name}: no agent reports." for name in silent)
    return ClauseOutcome("agents", FAILED if silent else PASSED, measured, details)


def _gpus(nodes: Nodes) -> ClauseOutcome:
    if not _gpus_of(nodes) and not any(node.expected_gpus for node in nodes):
        return ClauseOutcome("gpus", NOT_APPLICABLE, NO_GPUS)
    reporting = [node for node in nodes if node.is_reporting]
    details = []
    for node in reporting:
        expected = max(node.expected_gpus, len(node.gpus))
        if len(node.gpus) < expected:
            details.append(f"{node.node}: {len(node.gpus)} of {formatting.plural(expected, 'GPU')}.")
        if node.scheduler_gpus < expected:
            listed = f"the scheduler lists {node.scheduler_gpus} of {formatting.plural(expected, 'GPU')}"
            details.append(f"{node.node}: {listed}, so jobs cannot use all.")
    kinds = _groups((f"{gpu.model or 'unknown'}{_gib(gpu.memory_mib)}", node.node) for node, gpu in _gpus_of(reporting))
    if len(kinds) > 1:
        details += _group_texts(kinds)
    gpus = formatting.plural(len(_gpus_of(reporting)), "GPU")
    measured = f"{gpus} on {formatting.plural(len(reporting), 'node')}: {', '.join(kinds)}."
    return _outcome("gpus", measured, details, missing=[node.node for node in nodes if not node.is_reporting])


def _pcie(nodes: Nodes) -> ClauseOutcome:
    gpus = _gpus_of(nodes)
    if not gpus:
        return ClauseOutcome("pcie", NOT_APPLICABLE, NO_GPUS)
    details, missing = [], []
    for node, gpu in gpus:
        if gpu.pcie_width and gpu.pcie_width_most and gpu.pcie_width < gpu.pcie_width_most:
            details.append(f"{_place(node, gpu)}: width x{gpu.pcie_width} of x{gpu.pcie_width_most}.")
        if gpu.is_working and gpu.pcie_generation and gpu.pcie_generation < (gpu.pcie_generation_most or 0):
            generations = f"{gpu.pcie_generation} of {gpu.pcie_generation_most}"
            details.append(f"{_place(node, gpu)}: generation {generations} while it works.")
        if not (gpu.is_working and gpu.pcie_width and gpu.pcie_width_most and gpu.pcie_generation):
            missing.append(_place(node, gpu))
    details += _differing_by_model(
        gpus, lambda gpu: _pcie_text(gpu.pcie_width_most, gpu.pcie_generation_most), lambda text: text
    )
    links = sorted({text for _, gpu in gpus if (text := _pcie_text(gpu.pcie_width, gpu.pcie_generation))})
    measured = f"{', '.join(links) or 'No link'} on {formatting.plural(len(gpus), 'GPU')}."
    return _outcome("pcie", measured, details, missing, why="not observed at work")


def _nvlinks(nodes: Nodes) -> ClauseOutcome:
    gpus = _gpus_of(nodes)
    if not gpus:
        return ClauseOutcome("nvlinks", NOT_APPLICABLE, NO_GPUS)
    linked = [(node, gpu) for node, gpu in gpus if gpu.nvlinks]
    if not linked:
        return ClauseOutcome("nvlinks", NOT_CHECKED, "No GPU reports NVLinks.")
    models = {gpu.model for _, gpu in linked}
    missing = [_place(node, gpu) for node, gpu in gpus if gpu.nvlinks is None and gpu.model in models]
    details = [
        f"{_place(node, gpu)}: {formatting.plural(gpu.nvlinks.count(False), 'inactive link')} of {len(gpu.nvlinks)}."
        for node, gpu in linked
        if gpu.nvlinks and not all(gpu.nvlinks)
    ]
    details += _differing_by_model(gpus, _nvlinks_text, lambda text: text)
    links = sum(sum(gpu.nvlinks or ()) for _, gpu in linked)
    measured = f"{formatting.plural(links, 'active link')} on {formatting.plural(len(linked), 'GPU')}."
    return _outcome("nvlinks", measured, details, missing)


def _ecc(nodes: Nodes) -> ClauseOutcome:
    gpus = _gpus_of(nodes)
    if not gpus:
        return ClauseOutcome("ecc", NOT_APPLICABLE, NO_GPUS)
    having = sum(gpu.has_ecc is True for _, gpu in gpus)
    if not having:
        return ClauseOutcome("ecc", NOT_CHECKED, "No GPU reports memory errors: ECC is off, or its model has none.")
    details = [f"{_place(node, gpu)}: ECC is off." for node, gpu in gpus if gpu.has_ecc is False]
    missing = [_place(node, gpu) for node, gpu in gpus if gpu.has_ecc is None]
    return _outcome("ecc", f"On for {having} of {formatting.plural(len(gpus), 'GPU')}.", details, missing)


def _heat(nodes: Nodes) -> ClauseOutcome:
    gpus = _gpus_of(nodes)
    if not gpus:
        return ClauseOutcome("heat", NOT_APPLICABLE, NO_GPUS)
    details = [f"{_place(node, gpu)}: slowed down by heat or power brake." for node, gpu in gpus if gpu.is_slowed]
    missing = [_place(node, gpu) for node, gpu in gpus if not gpu.is_working]
    measured = f"{formatting.plural(len(gpus) - len(missing), 'GPU')} observed at work, {len(details)} slowed down."
    return _outcome("heat", measured, details, missing, why="not observed at work")


def _mounts(nodes: Nodes) -> ClauseOutcome:
    mounts = {node.node: node.mounts for node in nodes if node.mounts}
    if not mounts:
        return ClauseOutcome("mounts", NOT_CHECKED, "No agent reports mounts.")
    details = [f"{node.node}: {path} is slow or hangs." for node in nodes for path in node.slow_mounts]
    for path in sorted({path for there in mounts.values() for path in there}):
        details += [f"{name}: {path} is not mounted." for name, there in mounts.items() if not there.get(path)]
        sources = _groups(
            (there[path], name)
            for name, there in mounts.items()
            if there.get(path) and not there[path].startswith("/dev/")  # local disks differ between nodes
        )
        if len(sources) > 1:
            details += [f"{path}: {text}" for text in _group_texts(sources)]
    paths = {path for there in mounts.values() for path in there}
    measured = f"{formatting.plural(len(paths), 'mount')} on {formatting.plural(len(mounts), 'node')}."
    return _outcome("mounts", measured, details, [node.node for node in nodes if node.node not in mounts])


def _clock(nodes: Nodes) -> ClauseOutcome:
    offsets = {node.node: node.clock_offset_s for node in nodes if node.clock_offset_s is not None}
    if not offsets:
        return ClauseOutcome("clock", NOT_CHECKED, "No agent reports its clock.")
    details = [f"{name}: {offset:+.1f} s." for name, offset in offsets.items() if abs(offset) > MAX_CLOCK_OFFSET_S]
    measured = f"At most {max(map(abs, offsets.values())):.1f} s."
    return _outcome("clock", measured, details, [node.node for node in nodes if node.node not in offsets])


def _limits(nodes: Nodes) -> Iterable[ClauseOutcome]:
    with_gpus = [node for node in nodes if node.expected_gpus or node.gpus]
    if with_gpus:
        yield _at_least("memlock", with_gpus, lambda node: node.memlock_bytes, UNLIMITED, formatting.memory)
    else:
        yield ClauseOutcome("memlock", NOT_APPLICABLE, NO_GPUS)
    yield _at_least("open_files", nodes, lambda node: node.open_files, MIN_OPEN_FILES, lambda value: f"{value:,.0f}")
    yield _at_least("shm", nodes, lambda node: node.shm_bytes, MIN_SHM_BYTES, formatting.memory)


def _at_least(
    key: str,
    nodes: Nodes,
    value_of: Callable[[NodeConfiguration], float | None],
    least: float,
    text_of: Callable[[float], str],
) -> ClauseOutcome:
    """Compare a limit on every node with the least that is allowed. -1 is unlimited."""
    values = {node.node: value for node in nodes if (value := value_of(node)) is not None}
    if not values:
        return ClauseOutcome(key, NOT_CHECKED, "Not reported: the burn-in's program reports it.")
    low = {
        name: value
        for name, value in values.items()
        if value != UNLIMITED and (least == UNLIMITED or value < least)
    }  # fmt: skip
    limited = [value for value in values.values() if value != UNLIMITED]
    measured = f"At least {text_of(min(limited))}." if limited else "Unlimited."
    details = [f"{name}: {text_of(value)}." for name, value in low.items()]
    return _outcome(key, measured, details, [node.node for node in nodes if node.node not in values])


def _encrypted(portal_url: str) -> ClauseOutcome:
    address = urlsplit(portal_url)
    host = address.hostname or ""
    is_here = host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdigit())
    return ClauseOutcome("encrypted", PASSED if address.scheme == "https" or is_here else FAILED, portal_url)


def _tokens(nodes: Nodes) -> ClauseOutcome:
    without = [node.node for node in nodes if node.is_reporting and not node.has_token]
    missing = [node.node for node in nodes if not node.is_reporting]
    if len(missing) == len(nodes):
        return ClauseOutcome("tokens", NOT_CHECKED, "No agent reports.")
    there = len(nodes) - len(without) - len(missing)
    measured = f"{there} of {formatting.plural(len(nodes), 'node')}."
    return _outcome("tokens", measured, [f"{name}: its agent has no token." for name in without], missing)


def _same_on_nodes(
    key: str, nodes: Nodes, text_of: Callable[[NodeConfiguration], str], *, needs_gpus: bool = False
) -> ClauseOutcome:
    """Require the same text on all nodes that have a value."""
    if needs_gpus and not _gpus_of(nodes):
        return ClauseOutcome(key, NOT_APPLICABLE, NO_GPUS)
    groups = _groups((text, node.node) for node in nodes if (text := text_of(node)))
    if not groups:
        return ClauseOutcome(key, NOT_CHECKED, "No agent reports it.")
    details = _group_texts(groups) if len(groups) > 1 else []
    measured = f"{next(iter(groups))}." if len(groups) == 1 else f"{len(groups)} different ones."
    return _outcome(key, measured, details, [node.node for node in nodes if not text_of(node)])


def _same_by_model(
    key: str, nodes: Nodes, value_of: Callable[[GpuConfiguration], Value | None], text_of: Callable[[Value], str]
) -> ClauseOutcome:
    """Require the same value on all GPUs of a model."""
    gpus = _gpus_of(nodes)
    if not gpus:
        return ClauseOutcome(key, NOT_APPLICABLE, NO_GPUS)
    texts = sorted({text_of(value) for _, gpu in gpus if (value := value_of(gpu))})
    if not texts:
        return ClauseOutcome(key, NOT_CHECKED, "No GPU reports it.")
    missing = [_place(node, gpu) for node, gpu in gpus if not value_of(gpu)]
    return _outcome(key, f"{', '.join(texts)}.", _differing_by_model(gpus, value_of, text_of), missing)


def _differing_by_model(
    gpus: Sequence[tuple[NodeConfiguration, GpuConfiguration]],
    value_of: Callable[[GpuConfiguration], Value | None],
    text_of: Callable[[Value], str],
) -> list[str]:
    """Return which GPUs have which value, for each model whose GPUs have several."""
    found = []
    for model in sorted({gpu.model for _, gpu in gpus}):
        groups = _groups(
            (text_of(value), _place(node, gpu))
            for node, gpu in gpus
            if gpu.model == model and (value := value_of(gpu))
        )  # fmt: skip
        if len(groups) > 1:
            found += _group_texts(groups)
    return found


def _outcome(
    key: str, measured: str, details: Iterable[str], missing: Sequence[str] = (), *, why: str = "not reported"
) -> ClauseOutcome:
    details = tuple(details)
    if details:
        return ClauseOutcome(key, FAILED, measured, details)
    if missing:
        return ClauseOutcome(key, NOT_CHECKED, measured, (f"{formatting.listed(missing, MAX_NAMES)}: {why}.",))
    return ClauseOutcome(key, PASSED, measured)


def _groups(pairs: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    """Return the places by value, the most frequent value first."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for value, place in pairs:
        found[value].append(place)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _group_texts(groups: Mapping[str, list[str]]) -> list[str]:
    return [
        f"{value}: {formatting.listed(list(dict.fromkeys(places)), MAX_NAMES)}." for value, places in groups.items()
    ]


def _gpus_of(nodes: Nodes) -> list[tuple[NodeConfiguration, GpuConfiguration]]:
    return [(node, gpu) for node in nodes for gpu in node.gpus]


def _place(node: NodeConfiguration, gpu: GpuConfiguration) -> str:
    return f"{node.node} GPU {gpu.index}"


def _topology_text(node: NodeConfiguration) -> str:
    """Return how often each kind of link connects two GPUs of the node."""
    links = [link for row, others in enumerate(node.topology) for link in others[row + 1 :] if link]
    counts = _groups((link, "") for link in links)
    return ", ".join(f"{len(places)} × {link}" for link, places in counts.items())


def _nvlinks_text(gpu: GpuConfiguration) -> str:
    return "" if gpu.nvlinks is None else f"{len(gpu.nvlinks) or 'No'} NVLinks"


def _pcie_text(width: int | None, generation: int | None) -> str:
    return f"x{width} generation {generation}" if width and generation else ""


def _gib(memory_mib: int | None) -> str:
    return f" {round(memory_mib / 1024)} GiB" if memory_mib else ""
