"""Register the cluster's records in the admin, read-only: the scheduler and the agents write them."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from nodes.models import (
    Agent,
    Association,
    EnrolmentSecret,
    Gpu,
    Holding,
    License,
    Node,
    NodeEvent,
    NodeOrder,
    Partition,
    Qos,
    QueuedJob,
    Reading,
    Reservation,
)
from portal.admin import History, ReadOnly
from portal.records import site


@admin.register(Node, site=site)
class NodeAdmin(ReadOnly):
    list_display = ("name", "state", "reason", "partitions", "cpus", "gpus", "is_made_up")
    list_filter = ("state", "is_made_up")
    search_fields = ("name",)


@admin.register(Partition, site=site)
class PartitionAdmin(ReadOnly):
    list_display = ("name", "state", "is_default", "max_time_s", "max_nodes", "is_made_up")


@admin.register(Qos, site=site)
class QosAdmin(ReadOnly):
    called = ("QOS", "QOS")
    list_display = ("name", "description", "priority")


@admin.register(Association, site=site)
class AssociationAdmin(ReadOnly):
    called = ("account", "accounts")
    list_display = ("account", "user", "partition", "parent", "fair_share", "usage")
    search_fields = ("account", "user")


@admin.register(Reservation, site=site)
class ReservationAdmin(ReadOnly):
    list_display = ("name", "starts_at", "ends_at", "partition")


@admin.register(License, site=site)
class LicenseAdmin(ReadOnly):
    list_display = ("name", "total", "used", "reserved")


@admin.register(QueuedJob, site=site)
class QueuedJobAdmin(ReadOnly):
    called = ("queued job", "queue")
    list_display = ("scheduler_id", "name", "user", "state", "partition", "priority", "reason")
    list_filter = ("state", "partition")
    search_fields = ("scheduler_id", "name", "user")


@admin.register(Reading, site=site)
class ReadingAdmin(ReadOnly):
    called = ("scheduler poll", "scheduler polls")
    list_display = ("part", "read_at", "failing_since", "error")


@admin.register(NodeOrder, site=site)
class NodeOrderAdmin(ReadOnly):
    called = ("drain order", "drain orders")
    list_display = ("node", "action", "reason", "asked_by", "asked_at", "state", "outcome")
    list_filter = ("action", "state")
    search_fields = ("node",)


@admin.register(Agent, site=site)
class AgentAdmin(ReadOnly):
    called = ("agent", "agents")
    list_display = ("node", "version", "heard_at", "clock_offset_s", "enrolled_at", "enrolled_by", "is_made_up")
    search_fields = ("node",)


@admin.register(Gpu, site=site)
class GpuAdmin(ReadOnly):
    called = ("GPU", "GPUs")
    list_display = ("uuid", "agent", "index", "model", "first_seen_at", "gone_at", "lost_at")
    search_fields = ("uuid", "agent__node")


@admin.register(Holding, site=site)
class HoldingAdmin(History):
    called = ("GPU allocation", "GPU allocations")
    list_display = ("gpu", "agent", "scheduler_id", "user", "source", "since", "until")
    list_filter = ("source",)
    search_fields = ("scheduler_id", "user")
    list_select_related = ("gpu", "agent")


@admin.register(NodeEvent, site=site)
class NodeEventAdmin(History):
    called = ("node event", "node events")
    list_display = ("kind", "code", "agent", "gpu", "at", "count", "is_open", "is_confirmed")
    list_filter = ("kind",)
    search_fields = ("agent__node",)
    list_select_related = ("gpu", "agent")


@admin.register(EnrolmentSecret, site=site)
class EnrolmentSecretAdmin(ReadOnly):
    """Secrets made on the page of agents or by `vigil agent enroll --many`, shown once; deleting one revokes it."""

    called = ("enrolment secret", "enrolment secrets")
    list_display = ("hint", "made_by", "made_at", "expires_at", "revoked_at")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True
