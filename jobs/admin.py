"""The records of jobs, read-only: people act on jobs on their pages, where the rules are; and projects."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from jobs.errors import SpecError
from jobs.listing.jobs import Search
from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import Environment, restarts
from portal.access import user_of
from portal.admin import Audited, History, MembershipInline
from portal.models import Project
from portal.records import site
from portal.untrusted import plain, whole

FOUND = 200
"""Jobs that a search gives."""

if TYPE_CHECKING:  # generic only for the type checker
    _ProjectForm = forms.ModelForm[Project]
else:
    _ProjectForm = forms.ModelForm


class ProjectForm(_ProjectForm):
    class Meta:
        model = Project
        fields = ("slug", "title", "slurm_account", "job_environment", "restart_on", "keep_checkpoints_days")

    def clean_job_environment(self) -> str:
        return self._clean("job_environment", Environment.parse_toml)

    def clean_restart_on(self) -> str:
        return self._clean("restart_on", restarts.parse_toml)

    def _clean(self, name: str, parse: Callable[[str], object]) -> str:
        text = str(self.cleaned_data[name]).replace("\r\n", "\n")
        try:
            parse(text)
        except SpecError as error:
            raise forms.ValidationError([str(problem) for problem in error.problems]) from None
        return text


@admin.register(Project, site=site)
class ProjectAdmin(Audited, ModelAdmin):
    form = ProjectForm
    inlines = (MembershipInline,)
    list_display = ("slug", "title", "slurm_account", "created_at")
    search_fields = ("slug", "title")


def _found(request: HttpRequest, term: str) -> list[int]:
    """Numbers of the newest jobs that the page of jobs would show."""
    page = Search(text=plain(term)[:200]).finder(user_of(request)).page(None, FOUND)
    return [pk for _, pk in page.places]


@admin.register(Job, site=site)
class JobAdmin(History):
    list_display = ("id", "name", "kind", "project", "owner", "created_at")
    list_filter = ("project",)
    list_select_related = ("project", "owner")
    search_fields = ("name",)
    search_help_text = f"As on the page of jobs; the newest {FOUND:,}."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        return super().get_queryset(request).defer("spec", "spec_toml", "notes")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if search_term:
            queryset = queryset.filter(pk__in=_found(request, search_term))
        return queryset, False


@admin.register(Attempt, site=site)
class AttemptAdmin(History):
    list_display = ("id", "job", "number", "state", "scheduler_id", "created_at", "ended_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("scheduler_id", "key")
    search_help_text = "A number of a job, of the scheduler's, or a key: exactly."
    exclude = ("token_digest",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Attempt]:
        return super().get_queryset(request).defer("job__spec", "job__spec_toml", "job__notes")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if word := plain(search_term).strip():
            known = Q(scheduler_id=word) | Q(key=word)
            if (number := whole(word.removeprefix("#"))) is not None:
                known |= Q(job=number)
            queryset = queryset.filter(known)
        return queryset, False


@admin.register(Checkpoint, site=site)
class CheckpointAdmin(History):
    list_display = ("id", "job", "step", "name", "state", "bytes", "created_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("job__name",)
    search_help_text = f"Those of jobs, as on their page; of the newest {FOUND:,}."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Checkpoint]:
        return super().get_queryset(request).defer("job__spec", "job__spec_toml", "job__notes")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if search_term:
            queryset = queryset.filter(job__in=_found(request, search_term))
        return queryset, False
