"""Parse partitions, QOS, associations, reservations, licenses and shares from the JSON of any Slurm version."""

from __future__ import annotations

from collections.abc import Mapping

from nodes.schedulers.cluster import AssociationInfo, LicenseInfo, Limits, PartitionInfo, QosInfo, ReservationInfo
from nodes.schedulers.slurm.values import at, hosts, integer, moment, name_of, number, text, tres, words

Raw = Mapping[str, object]


def partition(raw: Raw) -> PartitionInfo:
    def first_present(*places: tuple[str, ...]) -> object:
        return next((found for place in places if (found := at(raw, *place)) not in (None, "")), None)

    limit = number(first_present(("maximums", "time"), ("max_time_limit",)))
    default = number(first_present(("defaults", "time"), ("default_time_limit",)))
    max_nodes = number(first_present(("maximums", "nodes"), ("maximum_nodes_per_job",)))
    state = words(first_present(("partition", "state"), ("state",)))
    modes = words(first_present(("preempt_mode",), ("preemption_mode",), ("preemption", "mode")))
    return PartitionInfo(
        name=name_of(raw),
        state=(state[0] if state else "up").lower(),
        is_default="default" in {flag.lower() for flag in words(raw.get("flags"))},
        nodes=hosts(first_present(("nodes", "configured"), ("nodes",))),
        max_time_s=None if limit is None else int(limit) * 60,
        default_time_s=None if default is None else int(default) * 60,
        max_nodes=None if max_nodes is None else int(max_nodes),
        min_nodes=integer(first_present(("minimums", "nodes"), ("min nodes per job",))),
        priority_tier=integer(first_present(("priority", "tier"), ("priority_tier",)), default=1),
        preempt_mode=(modes[0] if modes else "").lower(),
        qos=text(first_present(("qos", "assigned"), ("qos",))),
        allowed_accounts=words(first_present(("accounts", "allowed"), ("allowed_accounts",))),
        denied_accounts=words(first_present(("accounts", "deny"), ("denied_accounts",))),
        allowed_qos=words(first_present(("qos", "allowed"), ("allowed_qos",))),
        denied_qos=words(first_present(("qos", "deny"), ("denied_qos",))),
    )


def qos(raw: Raw) -> QosInfo:
    maximum = at(raw, "limits", "max")
    wall = number(at(maximum, "wall_clock", "per", "job"))
    return QosInfo(
        name=name_of(raw),
        description=text(raw.get("description")),
        priority=integer(raw.get("priority")),
        preempts=words(at(raw, "preempt", "list")),
        flags=words(raw.get("flags")),
        limits=Limits(
            group=tres(at(maximum, "tres", "total")),
            user=tres(at(maximum, "tres", "per", "user")),
            account=tres(at(maximum, "tres", "per", "account")),
            job=tres(at(maximum, "tres", "per", "job")),
            node=tres(at(maximum, "tres", "per", "node")),
            group_minutes=tres(at(maximum, "tres", "minutes", "total"))
            or tres(at(maximum, "tres", "minutes", "per", "qos")),
            group_jobs=_count(at(maximum, "active_jobs", "count")),
            user_jobs=_count(at(maximum, "jobs", "active_jobs", "per", "user")),
            user_submitted=_count(at(maximum, "jobs", "per", "user")),
            max_time_s=None if wall is None else int(wall) * 60,
        ),
    )


def association(raw: Raw) -> AssociationInfo:
    maximum = raw.get("max")
    wall = number(at(maximum, "jobs", "per", "wall_clock"))
    return AssociationInfo(
        account=name_of(raw, "account"),
        user=text(raw.get("user")),
        partition=text(raw.get("partition")),
        parent=text(raw.get("parent_account")),
        qos=words(raw.get("qos")),
        default_qos=text(at(raw, "default", "qos")),
        is_default=bool(raw.get("is_default")),
        shares=_count(raw.get("shares_raw")),
        limits=Limits(
            group=tres(at(maximum, "tres", "total")),
            job=tres(at(maximum, "tres", "per", "job")),
            node=tres(at(maximum, "tres", "per", "node")),
            group_minutes=tres(at(maximum, "tres", "group", "minutes")),
            group_jobs=_count(at(maximum, "jobs", "per", "count")),
            user_jobs=_count(at(maximum, "jobs", "active")),
            user_submitted=_count(at(maximum, "jobs", "total")),
            max_time_s=None if wall is None else int(wall) * 60,
        ),
    )


def reservation(raw: Raw) -> ReservationInfo:
    return ReservationInfo(
        name=name_of(raw),
        nodes=hosts(raw.get("node_list")),
        starts_at=moment(raw.get("start_time")),
        ends_at=moment(raw.get("end_time")),
        users=words(raw.get("users")),
        accounts=words(raw.get("accounts")),
        partition=text(raw.get("partition")),
        flags=words(raw.get("flags")),
    )


def license(raw: Raw) -> LicenseInfo:
    """Parse one row of /licenses. Use outside of Slurm appears only in `Free`."""
    total, used = integer(raw.get("Total")), integer(raw.get("Used"))
    free = number(raw.get("Free"))
    return LicenseInfo(
        name=name_of(raw, "LicenseName"),
        total=total,
        used=used if free is None else max(used, total - int(free)),
        reserved=integer(raw.get("Reserved")),
    )


def share(raw: Raw) -> tuple[tuple[str, str], tuple[float | None, float | None]]:
    """Parse one row of /shares into (account, user) and (fair share, effective usage), both 0 … 1."""
    name, parent = name_of(raw), text(raw.get("parent"))
    is_user = "USER" in {word.upper() for word in words(raw.get("type"))}
    account_and_user = (parent, name) if is_user else (name, "")
    return account_and_user, (number(at(raw, "fairshare", "factor")), number(raw.get("effective_usage")))


def _count(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)
