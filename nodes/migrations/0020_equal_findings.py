from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('nodes', '0019_index_of_cleared_entries'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name='healthentry',
            name='detail',
            field=models.CharField(blank=True, default='', help_text='What equal findings on many nodes have in common: the versions below a minimum.', max_length=200),
        ),
        migrations.RemoveIndex(
            model_name='healthentry',
            name='health_active',
        ),
        migrations.AddIndex(
            model_name='healthentry',
            index=models.Index(condition=models.Q(('state', 'cleared'), _negated=True), fields=['state', 'decision', 'severity', 'action', 'rule', 'detail', '-last_seen'], name='health_active_alike'),
        ),
    ]
