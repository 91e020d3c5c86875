"""The records of jobs, read-only: people act on jobs on their pages, where the rules are; and projects."""

from typing import TYPE_CHECKING

from django import forms
from django.contrib import admin
from unfold.admin import ModelAdmin

from jobs.errors import SpecError
from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import Environment
from portal.admin import Audited, MembershipInline, ReadOnly, site
from portal.models import Project

if TYPE_CHECKING:  # generic only for the type checker
    _ProjectForm = forms.ModelForm[Project]
else:
    _ProjectForm = forms.ModelForm


class ProjectForm(_ProjectForm):
    class Meta:
        model = Project
        fields = ("slug", "title", "slurm_account", "job_environment", "keep_checkpoints_days")

    def clean_job_environment(self) -> str:
        text = str(self.cleaned_data["job_environment"]).replace("\r\n", "\n")
        try:
            Environment.parse_toml(text)
        except SpecError as error:
            raise forms.ValidationError([str(problem) for problem in error.problems]) from None
        return text


@admin.register(Project, site=site)
class ProjectAdmin(Audited, ModelAdmin):
    form = ProjectForm
    inlines = (MembershipInline,)
    list_display = ("slug", "title", "slurm_account", "created_at")
    search_fields = ("slug", "title")


@admin.register(Job, site=site)
class JobAdmin(ReadOnly):
    list_display = ("id", "name", "kind", "project", "owner", "created_at")
    list_filter = ("kind", "project")
    list_select_related = ("project", "owner")
    search_fields = ("name", "owner__username")


@admin.register(Attempt, site=site)
class AttemptAdmin(ReadOnly):
    list_display = ("id", "job", "number", "state", "scheduler_id", "created_at", "ended_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("scheduler_id", "job__name", "key")
    exclude = ("token_digest",)


@admin.register(Checkpoint, site=site)
class CheckpointAdmin(ReadOnly):
    list_display = ("id", "job", "step", "name", "state", "bytes", "created_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("job__name", "name")
