"""Whether a node failed during its burn-in. Until now that was recognised by this sentence."""

from django.db import migrations, models
from django.db.models import Q

LOST_NODE = "The node failed during the burn-in."


def mark_lost_nodes(apps, schema_editor):
    rows = apps.get_model("nodes", "BurnInNode").objects
    rows.filter(is_active=True, outcome=LOST_NODE).update(is_lost=True)
    to_be_judged = rows.filter(Q(is_active=True) | Q(burn_in__acceptance__result=""))
    judged = to_be_judged.values_list("pk", "findings").iterator()
    lost = [pk for pk, findings in judged if any(finding["text"] == LOST_NODE for finding in findings)]
    rows.filter(pk__in=lost).update(is_lost=True)


class Migration(migrations.Migration):
    dependencies = [("nodes", "0025_drains_before_burn_ins")]

    operations = [
        migrations.AddField(
            model_name="burninnode",
            name="is_lost",
            field=models.BooleanField(default=False, help_text="The node failed while the tests ran."),
        ),
        migrations.RunPython(mark_lost_nodes, migrations.RunPython.noop, elidable=True),
    ]
