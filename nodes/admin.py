"""The records of the cluster, read-only: the scheduler writes them."""

from django.contrib import admin

from nodes.models import Association, Node, NodeOrder, Partition, Qos, QueuedJob, Reading, Reservation
from portal.admin import ReadOnly
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


@admin.register(QueuedJob, site=site)
class QueuedJobAdmin(ReadOnly):
    called = ("job in the queue", "queue")
    list_display = ("scheduler_id", "name", "user", "state", "partition", "priority", "reason")
    list_filter = ("state", "partition")
    search_fields = ("scheduler_id", "name", "user")


@admin.register(Reading, site=site)
class ReadingAdmin(ReadOnly):
    called = ("reading of the scheduler", "readings of the scheduler")
    list_display = ("part", "read_at", "failing_since", "error")


@admin.register(NodeOrder, site=site)
class NodeOrderAdmin(ReadOnly):
    called = ("drain or undrain", "drains and undrains")
    list_display = ("node", "action", "reason", "asked_by", "asked_at", "state", "outcome")
    list_filter = ("action", "state")
    search_fields = ("node",)
