from django.db import migrations, models
from django.db.models import Q

_ACTIVE = ~Q(state="cleared")


class Migration(migrations.Migration):
    dependencies = [("nodes", "0020_equal_findings")]

    operations = [
        migrations.RemoveIndex(model_name="healthentry", name="health_of_a_state"),
        migrations.RemoveIndex(model_name="healthentry", name="health_last_cleared"),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["-cleared_at"], condition=Q(state="cleared"), name="health_cleared_newest"),
        ),
        migrations.AddIndex(
            model_name="healthentry", index=models.Index(fields=["severity", "-id"], name="health_of_a_severity")
        ),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["rule", "severity", "-id"], name="health_of_rule_and_severity"),
        ),
        migrations.AddIndex(
            model_name="healthentry", index=models.Index(fields=["-id"], condition=_ACTIVE, name="health_active_newest")
        ),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["rule", "-id"], condition=_ACTIVE, name="health_active_of_a_rule"),
        ),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["severity", "-id"], condition=_ACTIVE, name="health_active_of_severity"),
        ),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(
                fields=["rule", "severity", "-id"], condition=_ACTIVE, name="health_active_rule_severity"
            ),
        ),
        migrations.AddIndex(
            model_name="healthentry", index=models.Index(fields=["opened_at"], name="health_opened")
        ),
        migrations.AddIndex(
            model_name="healthentry",
            index=models.Index(fields=["order"], condition=Q(order__isnull=False), name="health_of_an_order"),
        ),
        migrations.AddIndex(
            model_name="nodeorder",
            index=models.Index(fields=["asked_at"], condition=~Q(rule=""), name="orders_by_rules_since"),
        ),
    ]
