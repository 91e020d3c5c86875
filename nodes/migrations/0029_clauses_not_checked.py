"""Repair two migrations that no release had: older processes insert nodes of burn-ins, and outcomes have one word."""

import re

from django.db import migrations, models


def rename_not_tried(apps, schema_editor):
    acceptances = apps.get_model("nodes", "Acceptance").objects
    for acceptance in acceptances.order_by("pk").iterator(chunk_size=50):
        renamed = [clause for clause in acceptance.clauses if clause["outcome"] == "not tried"]
        if renamed:
            for clause in renamed:
                clause["outcome"] = "not checked"
            acceptance.summary = re.sub(r"\b(\d+) not tried\b", r"\1 not checked", acceptance.summary)
            acceptance.save(update_fields=["clauses", "summary"])


class Migration(migrations.Migration):
    dependencies = [("nodes", "0028_remove_unused_columns")]

    operations = [
        migrations.AlterField(
            model_name="burninnode",
            name="is_lost",
            field=models.BooleanField(db_default=False, default=False, help_text="The node failed while the tests ran."),
        ),
        migrations.RunPython(rename_not_tried, migrations.RunPython.noop, elidable=True),
    ]
