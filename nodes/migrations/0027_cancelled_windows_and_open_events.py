from django.db import migrations, models
from django.db.models import Q


def mark_gpus_with_mig(apps, schema_editor):
    apps.get_model("nodes", "Gpu").objects.filter(facts__mig=True).update(has_mig=True)


class Migration(migrations.Migration):
    dependencies = [("nodes", "0026_lost_nodes_of_burn_ins")]

    operations = [
        migrations.AddField(
            model_name="maintenancewindow",
            name="cancelled_at",
            field=models.DateTimeField(
                blank=True, help_text="When it was cancelled: it ends once its nodes are returned.", null=True
            ),
        ),
        migrations.AddField(
            model_name="gpu",
            name="has_mig",
            field=models.BooleanField(db_default=False, default=False, help_text="It is cut into MIG slices."),
        ),
        migrations.RunPython(mark_gpus_with_mig, migrations.RunPython.noop, elidable=True),
        migrations.AddIndex(
            model_name="gpu", index=models.Index(fields=["agent"], condition=Q(has_mig=True), name="gpus_with_mig")
        ),
        migrations.AddIndex(
            model_name="nodeevent",
            index=models.Index(fields=["kind", "at"], condition=Q(is_open=True), name="events_open"),
        ),
        migrations.AddIndex(
            model_name="nodeevent",
            index=models.Index(fields=["kind", "agent", "gpu", "code", "count"], name="events_counted"),
        ),
    ]
