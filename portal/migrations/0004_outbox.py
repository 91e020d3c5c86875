import django.db.models.deletion
import django.utils.timezone
import portal.models.outbox
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0003_restart_on'),
    ]

    operations = [
        migrations.AddField(
            model_name='notice',
            name='edition',
            field=models.CharField(blank=True, help_text='With another it is news again, though it stands.', max_length=64),
        ),
        migrations.AddField(
            model_name='notice',
            name='facts',
            field=models.JSONField(blank=True, default=list, help_text='Pairs of words: what it is about, and what is known.'),
        ),
        migrations.CreateModel(
            name='Channel',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('email', 'E-mail'), ('slack', 'Slack, or what takes its webhooks'), ('webhook', 'Signed webhook')], max_length=8)),
                ('address', models.CharField(help_text='An e-mail address or a URL. Of a URL only the host is shown.', max_length=500)),
                ('salt', models.CharField(default=portal.models.outbox._new_salt, help_text='The signing secret is made of it, never kept.', max_length=32)),
                ('left_out', models.JSONField(blank=True, default=list, help_text='Kinds of notices that are not sent there.')),
                ('digest', models.CharField(blank=True, choices=[('', 'At once'), ('hourly', 'Together, every hour'), ('daily', 'Together, once a day at 08:00')], default='', max_length=8)),
                ('quiet_from', models.TimeField(blank=True, help_text='From then on it waits …', null=True)),
                ('quiet_until', models.TimeField(blank=True, help_text='… until then, by the clock of the time zone.', null=True)),
                ('time_zone', models.CharField(default='UTC', max_length=64)),
                ('is_paused', models.BooleanField(default=False)),
                ('rests_until', models.DateTimeField(blank=True, help_text='After a failure nothing is tried before.', null=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('project', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='channels', to='portal.project')),
                ('user', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='channels', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('id',),
            },
        ),
        migrations.CreateModel(
            name='Delivery',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uid', models.UUIDField(default=uuid.uuid4, help_text='The same at each try: receivers tell by it.', unique=True)),
                ('key', models.CharField(help_text='What it tells of, once a channel.', max_length=300)),
                ('kind', models.CharField(max_length=64)),
                ('title', models.CharField(max_length=300)),
                ('content', models.JSONField(blank=True, help_text='What was sent, from the first try on.', null=True)),
                ('state', models.CharField(choices=[('held', 'Held'), ('waiting', 'Waiting'), ('sent', 'Sent'), ('gathered', 'in a digest'), ('dropped', 'no longer so'), ('given_up', 'given up')], default='waiting', max_length=8)),
                ('due_at', models.DateTimeField(help_text='When it is to be tried next, or let go.')),
                ('tries', models.PositiveIntegerField(default=0)),
                ('error', models.CharField(blank=True, help_text='Of the last try.', max_length=300)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('sent_at', models.DateTimeField(blank=True, null=True)),
                ('carried_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='carries', to='portal.delivery')),
                ('channel', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='portal.channel')),
                ('notice', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='deliveries', to='portal.notice')),
            ],
            options={
                'ordering': ('-id',),
            },
        ),
        migrations.CreateModel(
            name='SiteRunbook',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('code', models.CharField(max_length=32, unique=True)),
                ('text', models.TextField(max_length=20000)),
                ('changed_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('changed_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.AddConstraint(
            model_name='channel',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('project__isnull', False), ('user', None)), models.Q(('project', None), ('user__isnull', False)), _connector='OR'), name='one_owner_a_channel'),
        ),
        migrations.AddIndex(
            model_name='delivery',
            index=models.Index(condition=models.Q(('state__in', ['held', 'waiting'])), fields=['due_at'], name='deliveries_due'),
        ),
        migrations.AddIndex(
            model_name='delivery',
            index=models.Index(fields=['channel', '-id'], name='deliveries_of_a_channel'),
        ),
        migrations.AddIndex(
            model_name='delivery',
            index=models.Index(fields=['state', '-id'], name='deliveries_by_state'),
        ),
        migrations.AddIndex(
            model_name='delivery',
            index=models.Index(fields=['created_at'], name='deliveries_by_age'),
        ),
        migrations.AddConstraint(
            model_name='delivery',
            constraint=models.UniqueConstraint(fields=('channel', 'key'), name='one_delivery_a_channel'),
        ),
    ]
