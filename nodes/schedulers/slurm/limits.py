"""Read partitions, QOS, associations, reservations, licences and shares, in the JSON of any version of Slurm."""

from __future__ import annotations

from collections.abc import Mapping

from nodes.schedulers.cluster import Association, License, Limits, Partition, Qos, Reservation
from nodes.schedulers.slurm.values import at, hosts, integer, moment, name_of, number, text, tres, words

Raw = Mapping[str, object]


def partition(raw: Raw) -> Partition:
    def pick(*places: tuple[str, ...]) -> object:
        return next((found for place in places if (found := at(raw, *place)) not in (None, "")), None)

    limit = number(pick(("maximums", "time"), ("max_time_limit",)))
    default = number(pick(("defaults", "time"), ("default_time_limit",)))
    most = number(pick(("maximums", "nodes"), ("maximum_nodes_per_job",)))
    state = words(pick(("partition", "state"), ("state",)))
    modes = words(pick(("preempt_mode",), ("preemption_mode",), ("preemption", "mode")))
    return Partition(
        name=name_of(raw),
        state=(state[0] if state else "up").lower(),
        is_default="default" in {flag.lower() for flag in words(raw.get("flags"))},
        nodes=hosts(pick(("nodes", "configured"), ("nodes",))),
        max_time_s=None if limit is None else int(limit) * 60,
        default_time_s=None if default is None else int(default) * 60,
        max_nodes=None if most is None else int(most),
        min_nodes=integer(pick(("minimums", "nodes"), ("min nodes per job",))),
        priority_tier=integer(pick(("priority", "tier"), ("priority_tier",)), default=1),
        preempt_mode=(modes[0] if modes else "").lower(),
        qos=text(pick(("qos", "assigned"), ("qos",))),
        allowed_accounts=words(pick(("accounts", "allowed"), ("allowed_accounts",))),
        denied_accounts=words(pick(("accounts", "deny"), ("denied_accounts",))),
        allowed_qos=words(pick(("qos", "allowed"), ("allowed_qos",))),
        denied_qos=words(pick(("qos", "deny"), ("denied_qos",))),
    )


def qos(raw: Raw) -> Qos:
    most = at(raw, "limits", "max")
    wall = number(at(most, "wall_clock", "per", "job"))
    return Qos(
        name=name_of(raw),
        description=text(raw.get("description")),
        priority=integer(raw.get("priority")),
        preempts=words(at(raw, "preempt", "list")),
        flags=words(raw.get("flags")),
        limits=Limits(
            group=tres(at(most, "tres", "total")),
            user=tres(at(most, "tres", "per", "user")),
            account=tres(at(most, "tres", "per", "account")),
            job=tres(at(most, "tres", "per", "job")),
            node=tres(at(most, "tres", "per", "node")),
            group_minutes=tres(at(most, "tres", "minutes", "total")) or tres(at(most, "tres", "minutes", "per", "qos")),
            group_jobs=_count(at(most, "active_jobs", "count")),
            user_jobs=_count(at(most, "jobs", "active_jobs", "per", "user")),
            user_submitted=_count(at(most, "jobs", "per", "user")),
            max_time_s=None if wall is None else int(wall) * 60,
        ),
    )


def association(raw: Raw) -> Association:
    most = raw.get("max")
    wall = number(at(most, "jobs", "per", "wall_clock"))
    return Association(
        account=name_of(raw, "account"),
        user=text(raw.get("user")),
        partition=text(raw.get("partition")),
        parent=text(raw.get("parent_account")),
        qos=words(raw.get("qos")),
        default_qos=text(at(raw, "default", "qos")),
        is_default=bool(raw.get("is_default")),
        shares=_count(raw.get("shares_raw")),
        limits=Limits(
            group=tres(at(most, "tres", "total")),
            job=tres(at(most, "tres", "per", "job")),
            node=tres(at(most, "tres", "per", "node")),
            group_minutes=tres(at(most, "tres", "group", "minutes")),
            group_jobs=_count(at(most, "jobs", "per", "count")),
            user_jobs=_count(at(most, "jobs", "active")),
            user_submitted=_count(at(most, "jobs", "total")),
            max_time_s=None if wall is None else int(wall) * 60,
        ),
    )


def reservation(raw: Raw) -> Reservation:
    return Reservation(
        name=name_of(raw),
        nodes=hosts(raw.get("node_list")),
        starts_at=moment(raw.get("start_time")),
        ends_at=moment(raw.get("end_time")),
        users=words(raw.get("users")),
        accounts=words(raw.get("accounts")),
        partition=text(raw.get("partition")),
        flags=words(raw.get("flags")),
    )


def license(raw: Raw) -> License:
    """Read one row of /licenses. What is used outside of Slurm is in `Free` alone."""
    total, used = integer(raw.get("Total")), integer(raw.get("Used"))
    free = number(raw.get("Free"))
    return License(
        name=name_of(raw, "LicenseName"),
        total=total,
        used=used if free is None else max(used, total - int(free)),
        reserved=integer(raw.get("Reserved")),
    )


def share(raw: Raw) -> tuple[tuple[str, str], tuple[float | None, float | None]]:
    """Read one row of /shares: (account, user) and (fair share, effective usage), both 0 … 1."""
    name, parent = name_of(raw), text(raw.get("parent"))
    is_user = "USER" in {word.upper() for word in words(raw.get("type"))}
    place = (parent, name) if is_user else (name, "")
    return place, (number(at(raw, "fairshare", "factor")), number(raw.get("effective_usage")))


def _count(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)
