from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    dependencies = [("nodes", "0022_planted_faults")]

    operations = [
        migrations.RemoveIndex(model_name="healthentry", name="health_of_rule_and_severity"),
        migrations.RemoveIndex(model_name="healthentry", name="health_active_rule_severity"),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["node", "rule"], condition=~Q(state="cleared"), name="health_active_of_a_node"),
        ),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["node", "rule"], condition=Q(state="cleared"), name="health_cleared_of_a_node"),
        ),
    ]
