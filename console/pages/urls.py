"""The home page, and pages that need both jobs and nodes."""

from django.urls import path

from console.pages import announcements, context, docs, home, queue, reliability, runbooks, waste
from console.pages.cluster_map import page as cluster_map
from console.pages.cluster_map import racks
from console.pages.cluster_tests import acceptances, burnins, gameday
from console.pages.drains import bulk_drain, bulk_return, maintenance, spares
from console.pages.drains import page as drains
from console.pages.health import entries as health_entries
from console.pages.health import page as health
from console.pages.health import rules as health_rules
from console.pages.nodes import agents, inventory, node
from console.pages.nodes import page as nodes

urlpatterns = [
    path("", home.home, name="home"),
    path("seen", home.acknowledge, name="seen"),
    path("notices/<int:notice_id>/read", home.read_notice, name="notice_read"),
    path("theme", context.theme, name="theme"),
    path("cluster", cluster_map.index, name="cluster"),
    path("cluster/<str:name>/<int:index>", cluster_map.gpu, name="cluster_gpu"),
    path("announcements", announcements.index, name="announcements"),
    path("announcements/<int:announcement_id>/withdraw", announcements.withdraw, name="announcement_withdraw"),
    path("agents", agents.index, name="agents"),
    path("agents/secret", agents.make_secret, name="agents_secret"),
    path("drains", drains.index, name="drains"),
    path("drains/return", bulk_return.page, name="drains_return"),
    path("drains/several", bulk_drain.page, name="drains_several"),
    path("acceptances", acceptances.index, name="acceptances"),
    path("acceptances/start", acceptances.start, name="acceptance_start"),
    path("acceptances/<int:acceptance_id>", acceptances.acceptance_page, name="acceptance"),
    path("acceptances/<int:acceptance_id>/cancel", acceptances.cancel, name="acceptance_cancel"),
    path("burnins", burnins.index, name="burn_ins"),
    path("burnins/start", burnins.start, name="burn_in_start"),
    path("burnins/golden", burnins.reset_golden, name="burn_ins_golden"),
    path("burnins/<int:burn_in_id>", burnins.burn_in_page, name="burn_in"),
    path("gameday", gameday.index, name="game_days"),
    path("gameday/start", gameday.start, name="game_day_start"),
    path("gameday/<int:game_day_id>", gameday.index, name="game_day"),
    path("gameday/<int:game_day_id>/cancel", gameday.cancel, name="game_day_cancel"),
    path("burnins/<int:burn_in_id>/cancel", burnins.cancel, name="burn_in_cancel"),
    path("drains/spares", spares.add, name="spares_add"),
    path("drains/spares/<str:name>/remove", spares.remove, name="spare_remove"),
    path("health", health.index, name="health"),
    path("health/rules", health_rules.index, name="health_rules"),
    path("health/rules/new", health_rules.edit, name="health_rule_new"),
    path("health/rules/<str:name>", health_rules.edit, name="health_rule"),
    path("health/rules/<str:name>/off", health_rules.switch_off, name="health_rule_off"),
    path("health/rules/<str:name>/delete", health_rules.delete, name="health_rule_delete"),
    path("health/policies", health_rules.set_policies, name="health_policies"),
    path("health/entries", health_entries.index, name="health_entries"),
    path("health/breaker", health.reset_breaker, name="health_breaker"),
    path("health/<int:entry_id>/<str:action>", health.decide, name="health_decide"),
    path("inventory", inventory.index, name="inventory"),
    path("maintenance", maintenance.index, name="maintenance"),
    path("maintenance/<int:window_id>/cancel", maintenance.cancel, name="maintenance_cancel"),
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
