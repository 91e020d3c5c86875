"""The home page, and pages that need both jobs and nodes."""

from django.urls import path

from console.pages import (
    agents,
    cluster_map,
    context,
    docs,
    home,
    node,
    nodes,
    queue,
    racks,
    reliability,
    runbooks,
    waste,
)

urlpatterns = [
    path("", home.home, name="home"),
    path("seen", home.acknowledge, name="seen"),
    path("notices/<int:notice_id>/read", home.read_notice, name="notice_read"),
    path("theme", context.theme, name="theme"),
    path("cluster", cluster_map.index, name="cluster"),
    path("cluster/<str:name>/<int:index>", cluster_map.gpu, name="cluster_gpu"),
    path("agents", agents.index, name="agents"),
    path("agents/secret", agents.make_secret, name="agents_secret"),
    path("racks", racks.index, name="racks"),
    path("racks/all", racks.replace, name="racks_replace"),
    path("racks/one", racks.put, name="rack_put"),
    path("nodes", nodes.index, name="nodes"),
    path("nodes/<str:name>", node.node_page, name="node"),
    path("nodes/<str:name>/drain", node.drain, name="node_drain"),
    path("nodes/<str:name>/notes", node.add_note, name="node_notes"),
    path("nodes/<str:name>/notes/<int:note_id>/remove", node.remove_note, name="node_note_remove"),
    path("nodes/<str:name>/undrain", node.undrain, name="node_undrain"),
    path("queue", queue.index, name="queue"),
    path("waste", waste.page, name="waste"),
    path("docs", docs.index, name="docs"),
    path("docs/<path:name>", docs.page, name="doc"),
    path("runbooks", runbooks.index, name="runbooks"),
    path("runbooks/<str:code>", runbooks.runbook_page, name="runbook"),
    path("runbooks/<str:code>/edit", runbooks.edit, name="runbook_edit"),
    path("runbooks/<str:code>/own", runbooks.restore_built_in, name="runbook_forget"),
    path("reliability", reliability.page, name="reliability"),
]
