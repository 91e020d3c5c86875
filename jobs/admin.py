"""Read-only admin pages of job records (people act on jobs on their own pages, which enforce the rules), and
projects.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import actions
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from unfold.admin import ModelAdmin

from jobs.errors import SpecError
from jobs.listing.jobs import JobSearch
from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import Environment, restarts
from portal.access import note, user_of
from portal.accounts import projects
from portal.admin import AuditedAdmin, HistoryAdmin, MembershipInline
from portal.audit import Change
from portal.models import Project
from portal.records import site
from vigil_core import formatting
from vigil_core.untrusted import plain, whole

SUCCESSOR = "successor"
"""Query parameter of a deletion: the project that takes the default one's place."""
BEFORE_DELETION = "Delete them on their pages first, or keep the project and rename it."
FOUND = 200
"""Maximum number of jobs found by a search."""
MAX_NAMED = 8
"""Maximum number of projects named in a message."""

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
class ProjectAdmin(AuditedAdmin, ModelAdmin):
    form = ProjectForm
    inlines = (MembershipInline,)
    actions = ("delete_selected",)
    list_display = ("slug", "title", "is_default", "slurm_account", "created_at")
    search_fields = ("slug", "title")

    @admin.action(permissions=["delete"], description="Delete selected projects")
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Project]) -> Any:
        """Ask before deleting several projects; delete none if one must stay, and say which and why."""
        if reasons := _reasons_to_keep(queryset):
            messages.error(request, f"Nothing was deleted. {' '.join(reasons)}")
            return None
        return actions.delete_selected(self, request, queryset)

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Refuse to delete a project with jobs; ask for the successor of the default project first."""
        project = Project.objects.filter(pk=whole(object_id) or 0).first()
        if project is not None and (many := Job.objects.filter(project=project).count()):
            messages.error(request, f"Not deleted: {project} has {formatting.plural(many, 'job')}. {BEFORE_DELETION}")
            return redirect("admin:portal_project_change", project.pk)
        if project is not None and project.is_default and self._successor(request, project) is None:
            return self._successor_page(request, project)
        try:
            return super().delete_view(request, object_id, extra_context)
        except projects.NoSuccessor:  # it has just become the default one, as another was deleted
            return redirect(request.path)

    def delete_model(self, request: HttpRequest, obj: Project) -> None:
        successor = self._successor(request, obj)
        projects.delete(obj, successor)
        if successor is not None:
            change = Change(before={"default project": str(obj)}, after={"default project": str(successor)})
            note(user_of(request), "project.default", successor, change=change)

    def _successor(self, request: HttpRequest, project: Project) -> Project | None:
        chosen = whole(request.GET.get(SUCCESSOR)) or 0
        return Project.objects.exclude(pk=project.pk).filter(pk=chosen).first()

    def _successor_page(self, request: HttpRequest, project: Project) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": f"Delete {project}",
            "project": project,
            "others": Project.objects.exclude(pk=project.pk),
            "opts": self.opts,
        }
        return render(request, "records/successor.html", context)


def _reasons_to_keep(chosen: QuerySet[Project]) -> list[str]:
    """Return why these projects cannot be deleted together, as sentences; empty if they can."""
    counted = Job.objects.filter(project__in=chosen).values_list("project__slug").annotate(Count("pk"))
    jobs = [f"{slug} has {formatting.plural(many, 'job')}" for slug, many in counted.order_by("project__slug")]
    reasons = [f"{formatting.listed(_first(jobs))}. {BEFORE_DELETION}"] if jobs else []
    if default := chosen.filter(is_default=True).first():
        reasons.append(
            f"{default} is the default project: delete it by itself, and choose the one that takes its place."
        )
    return reasons


def _first(names: list[str]) -> list[str]:
    more = len(names) - MAX_NAMED
    return [*names[:MAX_NAMED], f"{formatting.count(more)} more have jobs"] if more > 0 else names


def _found(request: HttpRequest, term: str) -> list[int]:
    """Return the ids of the newest jobs that the jobs page would find."""
    page = JobSearch(text=plain(term)[:200]).finder(user_of(request)).page(None, FOUND)
    return [pk for _, pk in page.places]


@admin.register(Job, site=site)
class JobAdmin(HistoryAdmin):
    list_display = ("id", "name", "kind", "project", "owner", "created_at")
    list_filter = ("project",)
    list_select_related = ("project", "owner")
    search_fields = ("name",)
    search_help_text = f"Searches like the jobs page; shows the newest {FOUND:,}."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        return super().get_queryset(request).defer("spec", "spec_toml", "notes")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if search_term:
            queryset = queryset.filter(pk__in=_found(request, search_term))
        return queryset, False


@admin.register(Attempt, site=site)
class AttemptAdmin(HistoryAdmin):
    list_display = ("id", "job", "number", "state", "scheduler_id", "created_at", "ended_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("scheduler_id", "key")
    search_help_text = "Exact job number, scheduler id or key."
    exclude = ("token_digest",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Attempt]:
        return super().get_queryset(request).defer("job__spec", "job__spec_toml", "job__notes")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if word := plain(search_term).strip():
            condition = Q(scheduler_id=word) | Q(key=word)
            if (number := whole(word.removeprefix("#"))) is not None:
                condition |= Q(job=number)
            queryset = queryset.filter(condition)
        return queryset, False


@admin.register(Checkpoint, site=site)
class CheckpointAdmin(HistoryAdmin):
    list_display = ("id", "job", "step", "name", "state", "bytes", "created_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("job__name",)
    search_help_text = f"Searches jobs like the jobs page; shows checkpoints of the newest {FOUND:,}."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Checkpoint]:
        return super().get_queryset(request).defer("job__spec", "job__spec_toml", "job__notes")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if search_term:
            queryset = queryset.filter(job__in=_found(request, search_term))
        return queryset, False
