"""The pages that need both jobs and nodes, and home."""

from django.urls import path

from portal.pages import context, home, node, nodes, queue, waste

urlpatterns = [
    path("", home.home, name="home"),
    path("seen", home.seen, name="seen"),
    path("notices/<int:notice_id>/read", home.read_notice, name="notice_read"),
    path("theme", context.theme, name="theme"),
    path("nodes", nodes.index, name="nodes"),
    path("nodes/<str:name>", node.one, name="node"),
    path("nodes/<str:name>/drain", node.drain, name="node_drain"),
    path("nodes/<str:name>/undrain", node.undrain, name="node_undrain"),
    path("queue", queue.index, name="queue"),
    path("waste", waste.page, name="waste"),
]
