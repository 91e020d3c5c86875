"""Explain why no nodes have room for a job: too few free, too few at all, wrong shape, or not free for long enough."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from jobs.waiting import maintenance
from jobs.waiting.block import Block, WaitFacts, are, clock
from nodes.schedulers.cluster import ALLOCATED_STATES
from nodes.scheduling.capacity import WINDOW, CandidateNode, Request
from vigil_core import formatting


def blocks(facts: WaitFacts, *, is_reason: bool) -> Iterator[Block]:
    """Yield the blocks of nodes: too few with room, too few at all, the wrong shape, or not free for long enough."""
    fit, request = facts.fit, facts.request
    if not facts.candidates or fit.starts:
        return
    if not fit.is_sure:
        text = f"Vigil cannot evaluate the constraint {request.constraint}; see Slurm's reason."
        yield Block(kind="nodes", text=text, name=request.constraint, is_reason=is_reason)
        return
    if facts.cluster.simulates_nodes:
        yield from _single_machine(facts)
        return
    yield _too_few_nodes(facts, is_reason=is_reason)
    if fit.fits_if_empty and (fragments := _fragments(facts)):
        yield fragments
    if fit.until < inf and (reserved := _reserved(facts)):
        yield reserved


def _too_few_nodes(facts: WaitFacts, *, is_reason: bool) -> Block:
    fit, request = facts.fit, facts.request
    have = len(fit.nodes)
    others = others_text(facts)
    if not fit.can_ever_fit:
        most = f"{fit.suitable_nodes} in service" if fit.suitable_nodes else "none"
        text = f"It requests {_request_text(request, free=False)}; there {are(fit.suitable_nodes)} {most}: {others}."
        return _nodes_block(
            request,
            f"{text} It can never start as requested.",
            have=fit.suitable_nodes,
            is_reason=is_reason,
            final=True,
        )
    if not fit.fits_if_empty:
        in_service = f"{fit.suitable_nodes} {are(fit.suitable_nodes)} in service"
        text = f"It requests {_request_text(request, free=False)}; {in_service}: {others}."
        return _nodes_block(request, text, have=fit.suitable_nodes, is_reason=is_reason)
    has = "none has" if not have else "1 has" if have == 1 else f"{have} have"
    missing = set(request.required_nodes) - set(fit.nodes)
    if have >= request.min_nodes and missing:
        required, full = (formatting.listed(sorted(names)) for names in (request.required_nodes, missing))
        text = f"It requests {required}; {full} has no room."
    elif have >= request.min_nodes:
        text = f"It requests nodes with {request.constraint}; the ones with room do not satisfy that."
    else:
        text = f"It needs {_request_text(request, free=True)}; {has} that" + (f": {others}." if others else ".")
    return _nodes_block(request, text, have=have, is_reason=is_reason)


def _nodes_block(request: Request, text: str, *, have: int, is_reason: bool, final: bool = False) -> Block:
    return Block(
        kind="nodes",
        text=text,
        amount="nodes",
        limit=have,
        requested=request.min_nodes,
        is_reason=is_reason,
        is_final=final,
    )


def others_text(facts: WaitFacts) -> str:
    """Return why the other nodes do not fit, grouped: "2 are drained, 1 is down, 5 have fewer than 8 free GPUs"."""
    return ", ".join(
        f"{formatting.count(number)} {_other_text(facts, why, number)}" for why, number in facts.fit.obstacles
    )


def _other_text(facts: WaitFacts, why: str, number: int) -> str:
    request, has, is_ = facts.request, "has" if number == 1 else "have", "is" if number == 1 else "are"
    what, _, short = why.partition(":")
    if what in {"room", "small"}:
        free = " free" if what == "room" else ""
        if short == "memory":
            return f"{has} less than {formatting.memory(request.memory_mib * 1024**2)} of{free} memory"
        many, unit = (request.gpus, "GPU") if short == "gpus" else (request.cpus, "CPU")
        kind = f" {request.gpu_type}" if unit == "GPU" and request.gpu_type and _has_several(facts) else ""
        if many == 1:
            return f"{has} no{free}{kind} {unit}"
        return f"{has} fewer than {many}{free}{kind} {unit}s"
    if what == WINDOW:
        return f"{is_} reserved before it would end"
    if what in {"other GPUs", "other features"}:
        return f"{has} {what}"
    return f"{is_} {what}"


def _has_several(facts: WaitFacts) -> bool:
    """Return whether some node has more than one type of GPU, so that "free GPUs" alone would not say enough."""
    return any(candidate.node.gpus_by_type for candidate in facts.candidates)


def _fragments(facts: WaitFacts) -> Block | None:
    """Return the block of GPUs that are enough in total, but on too many nodes."""
    request, by_free = facts.request, facts.fit.free_gpus
    total = sum(free * nodes for free, nodes in by_free.items())
    whole = sum(nodes for free, nodes in by_free.items() if free >= request.gpus)
    want = request.gpus * request.min_nodes
    if request.gpus < 2 or total < want or whole >= request.min_nodes:
        return None
    shapes: list[str] = []
    for free, nodes in sorted(by_free.items(), reverse=True):
        if 0 < free < request.gpus:
            each = " each" if nodes > 1 else ""
            many = f"{formatting.plural(nodes, 'node')} {'have' if nodes > 1 else 'has'}" if not shapes else f"{nodes}"
            shapes.append(f"{many} {formatting.plural(free, 'free GPU') if not shapes else free}{each}")
    has = f"none has {request.gpus}" if not whole else f"only {whole} {'has' if whole == 1 else 'have'} {request.gpus}"
    text = f"{total} GPUs are free, but fragmented: {', '.join(shapes)}, {has}."
    return Block(kind="fragmentation", text=text, amount="gres/gpu", limit=total, requested=want)


def _reserved(facts: WaitFacts) -> Block | None:
    """Return the block of nodes that a reservation takes before the job would end; None if that is maintenance."""
    until, now = facts.fit.until, facts.cluster.now
    first = next((candidate for candidate in facts.candidates if candidate.until == until), None)
    name = first.taken_by if first else ""
    if maintenance.is_reserved_for(name, facts):
        return None
    nodes = dict(facts.fit.obstacles).get(WINDOW, 0)
    who = formatting.plural(nodes, "node")
    text = (
        f"Reservation {name} takes {who} at {clock(until, now)}, {formatting.duration(until - now)} from now;"
        f" this job requests {formatting.duration(facts.request.time_limit_s)}."
    )
    seconds = int(until - now)
    return Block(
        kind="reservation", text=text, name=name, amount="seconds", limit=seconds, requested=facts.request.time_limit_s
    )


def _single_machine(facts: WaitFacts) -> Iterator[Block]:
    """Yield the blocks of a single machine, such as "Needs 4 CPUs, 2 are free; #12 uses 6."."""
    request, candidate = facts.request, facts.candidates[0]
    if candidate.why and not maintenance.drained(candidate, facts):
        yield Block(kind="nodes", text=_out_of_service_text(candidate), name=candidate.why, is_reason=True)
    for unit, each, free, there in (
        ("GPU", request.gpus, candidate.room.gpus, candidate.size.gpus),
        ("CPU", request.cpus, candidate.room.cpus, candidate.node.cpus),
    ):
        want = each * request.min_nodes
        if want <= free:
            continue
        final = want > there
        holders = _holders(facts, unit)
        text = f"It needs {formatting.plural(want, unit)}, {free} {are(free)} free{'; ' + holders if holders else ''}."
        if final:
            text = (
                f"It needs {formatting.plural(want, unit)}, this machine has {there}. It can never start as requested."
            )
        yield Block(
            kind="nodes", text=text, amount=unit.lower(), limit=there, used=there - free, requested=want,
            is_reason=not candidate.why, is_final=final,
        )  # fmt: skip
    memory = request.memory_mib * request.min_nodes
    if memory > candidate.room.memory_mib > 0 or (
        memory and not candidate.room.memory_mib and candidate.node.memory_mib
    ):
        want_text, free_text = (formatting.memory(mib * 1024**2) for mib in (memory, candidate.room.memory_mib))
        text = f"It needs {want_text} of memory, {free_text} are free."
        yield Block(
            kind="nodes", text=text, amount="mem", limit=candidate.node.memory_mib, requested=memory,
            used=candidate.node.memory_mib - candidate.room.memory_mib, is_reason=not candidate.why,
            is_final=memory > candidate.node.memory_mib,
        )  # fmt: skip


def _out_of_service_text(candidate: CandidateNode) -> str:
    """Return a text such as "box is draining: fan 3.

    Running jobs continue; none starts before a sysadmin undrains it.".
    """
    because = f": {candidate.node.reason.rstrip('.')}" if candidate.node.reason else ""
    runs = "Running jobs continue; nothing" if candidate.why == "draining" else "Nothing"
    return f"{candidate.node.name} is {candidate.why}{because}. {runs} new starts until a sysadmin undrains it."


def _holders(facts: WaitFacts, unit: str) -> str:
    """Return who uses the resource: jobs that the reader may see by number, the rest in one sum."""
    named: list[str] = []
    rest = 0
    for job in facts.cluster.queue:
        many = job.gpus if unit == "GPU" else job.cpus
        if job.state not in ALLOCATED_STATES or not many:
            continue
        if job.scheduler_id in facts.names and len(named) < 4:
            named.append(f"{facts.names[job.scheduler_id].partition(' ')[0]} uses {many}")
        else:
            rest += many
    return ", ".join([*named, *([f"others use {rest}"] if rest else [])])


def _request_text(request: Request, *, free: bool) -> str:
    """Return a text such as "4 nodes with 8 free h100 GPUs each"."""
    word = "free " if free else ""
    kind = f"{request.gpu_type} " if request.gpu_type else ""
    what = [formatting.plural(request.gpus, f"{word}{kind}GPU")] if request.gpus else []
    what += [formatting.plural(request.cpus, f"{word}CPU")]
    what += [f"{formatting.memory(request.memory_mib * 1024**2)} of {word}memory"] if request.memory_mib else []
    each = " each" if request.min_nodes > 1 else ""
    more = f" and {request.constraint}" if request.constraint else ""
    return f"{formatting.plural(request.min_nodes, 'node')} with {formatting.listed(what)}{each}{more}"
