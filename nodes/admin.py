"""Register the cluster's records in the admin, read-only: the scheduler and the agents write them."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from nodes.models import (
    ActionPolicy,
    Agent,
    Association,
    BurnIn,
    BurnInNode,
    EnrolmentSecret,
    GoldenRecord,
    Gpu,
    HealthEntry,
    Holding,
    HotSpare,
    License,
    MaintenanceWindow,
    Node,
    NodeEvent,
    NodeOrder,
    Partition,
    Qos,
    QueuedJob,
    Reading,
    Reservation,
    SiteRule,
)
from portal.admin import HistoryAdmin, ReadOnlyAdmin
from portal.records import site


@admin.register(Node, site=site)
class NodeAdmin(ReadOnlyAdmin):
    list_display = ("name", "state", "reason", "partitions", "cpus", "gpus", "is_made_up")
    list_filter = ("state", "is_made_up")
    search_fields = ("name",)


@admin.register(Partition, site=site)
class PartitionAdmin(ReadOnlyAdmin):
    list_display = ("name", "state", "is_default", "max_time_s", "max_nodes", "is_made_up")


@admin.register(Qos, site=site)
class QosAdmin(ReadOnlyAdmin):
    called = ("QOS", "QOS")
    list_display = ("name", "description", "priority")


@admin.register(Association, site=site)
class AssociationAdmin(ReadOnlyAdmin):
    called = ("account", "accounts")
    list_display = ("account", "user", "partition", "parent", "fair_share", "usage")
    search_fields = ("account", "user")


@admin.register(Reservation, site=site)
class ReservationAdmin(ReadOnlyAdmin):
    list_display = ("name", "starts_at", "ends_at", "partition")


@admin.register(License, site=site)
class LicenseAdmin(ReadOnlyAdmin):
    list_display = ("name", "total", "used", "reserved")


@admin.register(QueuedJob, site=site)
class QueuedJobAdmin(ReadOnlyAdmin):
    called = ("queued job", "queue")
    list_display = ("scheduler_id", "name", "user", "state", "partition", "priority", "reason")
    list_filter = ("state", "partition")
    search_fields = ("scheduler_id", "name", "user")


@admin.register(Reading, site=site)
class ReadingAdmin(ReadOnlyAdmin):
    called = ("scheduler poll", "scheduler polls")
    list_display = ("part", "read_at", "failing_since", "error")


@admin.register(NodeOrder, site=site)
class NodeOrderAdmin(ReadOnlyAdmin):
    called = ("drain order", "drain orders")
    list_display = ("node", "action", "reason", "asked_by", "asked_at", "state", "outcome")
    list_filter = ("action", "state")
    search_fields = ("node",)


@admin.register(Agent, site=site)
class AgentAdmin(ReadOnlyAdmin):
    called = ("agent", "agents")
    list_display = ("node", "version", "heard_at", "clock_offset_s", "enrolled_at", "enrolled_by", "is_made_up")
    search_fields = ("node",)


@admin.register(Gpu, site=site)
class GpuAdmin(ReadOnlyAdmin):
    called = ("GPU", "GPUs")
    list_display = ("uuid", "agent", "index", "model", "first_seen_at", "gone_at", "lost_at")
    search_fields = ("uuid", "agent__node")


@admin.register(Holding, site=site)
class HoldingAdmin(HistoryAdmin):
    called = ("GPU allocation", "GPU allocations")
    list_display = ("gpu", "agent", "scheduler_id", "user", "source", "since", "until")
    list_filter = ("source",)
    search_fields = ("scheduler_id", "user")
    list_select_related = ("gpu", "agent")


@admin.register(NodeEvent, site=site)
class NodeEventAdmin(HistoryAdmin):
    called = ("node event", "node events")
    list_display = ("kind", "code", "agent", "gpu", "at", "count", "is_open", "is_confirmed")
    list_filter = ("kind",)
    search_fields = ("agent__node",)
    list_select_related = ("gpu", "agent")


@admin.register(HealthEntry, site=site)
class HealthEntryAdmin(HistoryAdmin):
    """Findings of health rules; /health has the decisions about them."""

    called = ("health finding", "health findings")
    list_display = (
        "rule", "node", "gpu", "item", "state", "severity", "action", "decision", "decided_by", "last_seen", "count"
    )  # fmt: skip
    list_filter = ("state", "severity", "action", "decision")
    search_fields = ("node", "rule")
    list_select_related = ("gpu", "decided_by")


@admin.register(SiteRule, site=site)
class SiteRuleAdmin(ReadOnlyAdmin):
    """Rules of the site; /health/rules tries and saves them."""

    called = ("health rule of the site", "health rules of the site")
    list_display = ("name", "is_enabled", "version", "changed_by", "changed_at")
    search_fields = ("name",)


@admin.register(ActionPolicy, site=site)
class ActionPolicyAdmin(ReadOnlyAdmin):
    """How far Vigil goes with each action; /health/rules changes it."""

    called = ("health policy", "health policies")
    list_display = ("action", "mode", "changed_by", "changed_at")


@admin.register(BurnIn, site=site)
class BurnInAdmin(HistoryAdmin):
    """Burn-ins; /burnins starts and cancels them."""

    called = ("burn-in", "burn-ins")
    list_display = ("id", "state", "seconds", "started_by", "requested_at", "ended_at", "problem")
    list_filter = ("state",)
    list_select_related = ("started_by",)


@admin.register(BurnInNode, site=site)
class BurnInNodeAdmin(HistoryAdmin):
    called = ("node of a burn-in", "nodes of burn-ins")
    list_display = ("node", "burn_in", "verdict", "outcome", "was_drained", "is_returned")
    list_filter = ("verdict",)
    search_fields = ("node",)
    list_select_related = ("burn_in",)


@admin.register(GoldenRecord, site=site)
class GoldenRecordAdmin(ReadOnlyAdmin):
    called = ("golden record", "golden records")
    list_display = ("model", "driver", "test", "kind", "unit", "count", "updated_at")
    list_filter = ("test",)
    search_fields = ("model", "driver")


@admin.register(MaintenanceWindow, site=site)
class MaintenanceWindowAdmin(HistoryAdmin):
    """Planned maintenance; /maintenance plans and cancels it."""

    called = ("maintenance window", "maintenance windows")
    list_display = ("expression", "reason", "starts_at", "ends_at", "state", "reservation", "planned_by")
    list_filter = ("state",)
    search_fields = ("expression", "reason")
    list_select_related = ("planned_by",)


@admin.register(HotSpare, site=site)
class HotSpareAdmin(ReadOnlyAdmin):
    """Nodes that stand by for others; /drains names and removes them."""

    called = ("hot spare", "hot spares")
    list_display = ("node", "partition", "state", "replaces", "since", "added_by")
    list_filter = ("state", "partition")
    search_fields = ("node", "replaces")
    list_select_related = ("added_by",)


@admin.register(EnrolmentSecret, site=site)
class EnrolmentSecretAdmin(ReadOnlyAdmin):
    """Secrets made on the page of agents or by `vigil agent enroll --many`, shown once; deleting one revokes it."""

    called = ("enrolment secret", "enrolment secrets")
    list_display = ("hint", "made_by", "made_at", "expires_at", "revoked_at")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True
