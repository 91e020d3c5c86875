"""The records of nodes, read-only: the scheduler writes them."""

from django.contrib import admin

from nodes.models import Node
from portal.admin import ReadOnly, site


@admin.register(Node, site=site)
class NodeAdmin(ReadOnly):
    list_display = ("name", "state", "reason", "partition", "cpus", "gpus", "seen_at")
    list_filter = ("state", "partition")
    search_fields = ("name",)
