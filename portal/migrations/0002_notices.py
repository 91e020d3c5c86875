import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Notice',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(help_text='The thing that is told of, once.', max_length=200, unique=True)),
                ('kind', models.CharField(help_text='A short word, such as gpu.idle.', max_length=64)),
                ('tone', models.CharField(choices=[('notice', 'Notice'), ('warn', 'warning')], default='notice', max_length=8)),
                ('audience', models.CharField(choices=[('person', 'Person'), ('sysadmins', 'all sysadmins')], max_length=16)),
                ('title', models.CharField(help_text='A sentence.', max_length=300)),
                ('detail', models.CharField(blank=True, max_length=1000)),
                ('link', models.CharField(blank=True, help_text='Where it leads: a path of this site.', max_length=500)),
                ('raised_at', models.DateTimeField(help_text='Since when it stands.')),
                ('last_raised_at', models.DateTimeField(help_text='When it was last found to be so.')),
                ('withdrawn_at', models.DateTimeField(blank=True, null=True)),
                ('user', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='notices', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('withdrawn_at', None)), fields=['kind'], name='standing_notices')],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('audience', 'person'), ('user__isnull', False)), models.Q(models.Q(('audience', 'person'), _negated=True), ('user', None)), _connector='OR'), name='one_audience_a_notice')],
            },
        ),
        migrations.CreateModel(
            name='NoticeRead',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('read_at', models.DateTimeField()),
                ('notice', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='reads', to='portal.notice')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('notice', 'user'), name='read_once_a_person')],
            },
        ),
    ]
