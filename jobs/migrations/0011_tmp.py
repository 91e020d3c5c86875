"""What had closed before there were incidents counts as counted: how often it failed, nobody has noted."""

from django.db import migrations


def leave_out(apps, schema_editor):
    apps.get_model("jobs", "Attempt").objects.exclude(closed_at=None).update(is_counted=True)


class Migration(migrations.Migration):
    dependencies = [("jobs", "0010_failures")]

    operations = [migrations.RunPython(leave_out, migrations.RunPython.noop, elidable=True)]
