from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("nodes", "0027_cancelled_windows_and_open_events")]

    operations = [
        migrations.RemoveField(model_name="healthentry", name="cause"),
        migrations.RemoveField(model_name="nodethermals", name="estimated_c"),
        migrations.RemoveField(model_name="nodethermals", name="measured_c"),
        migrations.RemoveField(model_name="racktemperature", name="max_c"),
    ]
