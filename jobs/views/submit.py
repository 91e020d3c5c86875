"""The submit page: a form and the same spec as text, kept in sync, with a dry run."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff
from functools import cached_property, partial
from itertools import count
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from jobs.disk.upload import MAX_BYTES as MAX_CODE
from jobs.errors import JobError, Problem, SpecError
from jobs.models import Job, Listing
from jobs.presenting.federations.outline import DrawnOutline, draw
from jobs.presenting.submit_form import spec_text
from jobs.presenting.submit_form.fields import FormSection
from jobs.presenting.submit_form.sections import locate_problem, sections
from jobs.presenting.submit_form.toml_lines import line_of, locate
from jobs.spec import MAX_BYTES, JobSpec, SweepSpec, has_sweep, read_toml, set_values
from jobs.spec.remaining_problems import independent_problems, validate_rest
from jobs.spec.resources import Resources
from jobs.submitting import names, submit, sweeps
from jobs.submitting.admission import project_of, site_problems
from jobs.submitting.dryrun import DryRunFinding, dry_run, sweep_run
from portal.access import user_of
from portal.models import DEFAULT_PROJECT, Project, User
from vigil_core import formatting
from vigil_core.untrusted import whole

PREFILLABLE = frozenset(Resources.model_fields)  # fields that a link may fill in
MAX_STEM = 59  # of a name of 64 characters, which a dash and a number follow
NAMES_PER_QUERY = 100  # names of clones that are searched
START = """\
name = "my-first-run"
kind = "distributed"
project = {project}

[resources]
nodes = 1
gpus_per_node = 0
ranks_per_node = 2
time_limit = "00:30:00"

[run]
recipe = "language"
steps = 200
"""


_CODE = re.compile(r" \(`[^`]*`\)")  # in a headline; the finding below has it


@dataclass
class SpecDraft:
    """A spec being edited: its text, parsed content and problems."""

    text: str
    data: dict[str, Any]
    spec: JobSpec | SweepSpec | None
    problems: list[Problem]
    findings: list[DryRunFinding]
    packed: bool = False
    """Whether a code archive is selected but not uploaded yet."""

    @property
    def lacks_code(self) -> bool:
        """Return whether the code archive is all that is missing."""
        if self.spec is None or self.spec.code is None or self.spec.code.git or self.packed:
            return False
        return not self.problems and not any(finding.level == "error" for finding in self.findings)

    @property
    def marks(self) -> list[dict[str, object]]:
        """Return the problems with the lines at which the editor shows them."""
        places = locate(self.text)
        found: list[dict[str, object]] = []
        for problem in self.problems:
            line = line_of(places, problem.field, problem.message)
            found.append({"line": line, "field": problem.field, "why": problem.message})
        return found

    @property
    def elsewhere(self) -> list[dict[str, object]]:
        """Return problems that no field of the form can show."""
        shown = {f.path for section in sections(self.data, self.problems) for f in section.all}
        return [mark for mark in self.marks if mark["field"] not in shown]

    @property
    def fixes(self) -> list[tuple[str, str]]:
        """Return what to fix in the form's order, as (title, id of the element that shows it)."""
        if self.lacks_code:
            return [("Code", "f-code")]
        if not any(problem.field for problem in self.problems):
            return []
        wrong = {problem.field for problem in self.problems}
        drawn = [f for section in sections(self.data, self.problems) for f in section.all]
        named = [(f.title, f.id) for f in drawn if f.path in wrong]
        return named + [(str(mark["field"] or "the specification"), "marks") for mark in self.elsewhere]

    @property
    def summary(self) -> tuple[str, str]:
        """Return the lead: what prevents submission, then what would happen. The page puts `fixes` in between."""
        if doubts := [finding for finding in self.findings if finding.level == "error"]:
            lead = (
                "One thing looks wrong." if len(doubts) == 1 else f"{formatting.count(len(doubts))} things look wrong."
            )
            return lead, doubts[0].text
        many = len(self.problems)
        if self.lacks_code:
            return "Choose the code to upload:", self.outlook
        if not many:
            return "Ready to submit.", self.outlook
        if many > 1:
            return f"{formatting.count(many)} things to fix:", ""
        only = self.problems[0]
        return ("One thing to fix:", only.message) if only.field else (only.message, "")

    @property
    def continues_name(self) -> bool:
        """Return whether the only field's name and its message form one sentence: "Clients are 2,000, but …"."""
        return self.summary[1][:1].islower()

    @cached_property
    def split(self) -> DrawnOutline | None:
        """Return how a federation's data would be split, if that is known before the data exist."""
        found = (draw(finding.split, finding.text) for finding in self.findings if finding.split is not None)
        return next(found, None)

    @property
    def outlook(self) -> str:
        """Return when the job would start, according to the dry run."""
        return next((_CODE.sub("", finding.text) for finding in self.findings if finding.title == "Start"), "")


def draft(user: User, text: str) -> SpecDraft:
    """Parse and check a text. Nothing is allocated or stored."""
    try:
        data = read_toml(text)
    except SpecError as error:
        return SpecDraft(text, {}, None, error.problems, [])
    if has_sweep(data):
        return _sweep_draft(user, text, data)
    try:
        spec = JobSpec.parse(data)
    except SpecError as error:
        rest, _ = validate_rest(JobSpec, data, error.problems)
        more = (
            independent_problems(JobSpec, _context_problems(user, rest), error.problems, data.get("kind"))
            if rest is not None
            else []
        )
        return SpecDraft(text, data, None, [locate_problem(problem) for problem in (*error.problems, *more)], [])
    if problems := _context_problems(user, spec):
        return SpecDraft(text, data, None, problems, [])
    return SpecDraft(text, data, spec, [], dry_run(user, spec))


def _sweep_draft(user: User, text: str, data: dict[str, Any]) -> SpecDraft:
    """Return the draft of a text with [sweep].

    A combination's problem names path and value; the form shows the rest.
    """
    try:
        sweep = SweepSpec.parse(data, text)
    except SpecError as error:
        return SpecDraft(text, data, None, error.problems, [])
    if problems := _context_problems(user, sweep.first, sweep.others):
        return SpecDraft(text, data, None, problems, [])
    return SpecDraft(text, data, sweep, [], sweep_run(user, sweep))


def _context_problems(user: User, spec: JobSpec, alike: Sequence[JobSpec] = ()) -> list[Problem]:
    """Return problems that the specification itself cannot know: its project, and what exists on the cluster."""
    try:
        project = project_of(user, spec)
    except SpecError as error:
        return [*error.problems, *site_problems(user, spec, None, others=alike)]
    return site_problems(user, spec, project, others=alike)


@login_required
@require_http_methods(["GET", "POST"])
def page(request: HttpRequest) -> HttpResponse:
    """Show the page. POST submits, or without JavaScript only checks (`do=check`)."""
    user = user_of(request)
    parent = _parent(request, user)
    if request.method == "GET":
        text = _changed(_first_text(user, parent), request.GET.getlist("set"))
        return _render(request, draft(user, text), parent)
    text = _posted_text(request)
    drafted = draft(user, text)
    if request.POST.get("do") == "submit" and drafted.spec is not None:
        try:
            if isinstance(drafted.spec, SweepSpec):
                key = request.POST.get("key") or None
                sweep, _ = sweeps.submit(user, drafted.spec, spec_toml=text, key=key, code=_code(request))
                messages.success(request, f"Submitted sweep {sweep.pk} {sweep.name}.")
                return redirect("sweep", sweep_id=sweep.pk)
            job, _ = submit.submit(
                user,
                drafted.spec,
                spec_toml=text,
                key=request.POST.get("key") or None,
                parent=parent,
                code=_code(request),
            )
        except SpecError as error:
            drafted.problems, drafted.findings = error.problems, []
        except JobError as error:
            drafted.problems, drafted.findings = [Problem("", str(error))], []
        else:
            messages.success(request, f"Submitted #{job.pk} {job.name}.")
            return redirect("job", job_id=job.pk)
    return _render(request, drafted, parent, status=422 if drafted.problems else 200)


@login_required
@require_POST
def sync(request: HttpRequest) -> HttpResponse:
    """Update the other side after an edit, along with errors, sentence and dry run, for htmx to swap in."""
    user = user_of(request)
    text = _posted_text(request)
    drafted = draft(user, text)
    drafted.packed = bool(request.POST.get("packed"))
    side = "toml" if request.POST.get("side") == "toml" else "form"
    shape = [f.path for section in _sections(user, drafted) for f in section.all]
    reshaped = side == "form" and set(shape) != {name for name in request.POST if name in _names(request.POST)}
    context = _context(user, drafted, _parent(request, user)) | {"side": side, "reshaped": reshaped}
    return render(request, "jobs/_submit_sync.html", context)


def _names(posted: QueryDict) -> set[str]:
    """Return the posted names that are fields of the spec."""
    return {name for name in posted if name.partition(".")[0] in JobSpec.model_fields}


def _posted_text(request: HttpRequest) -> str:
    """Return the spec's text: an uploaded file, else the editor's text.

    If the form was edited last, the text gets the form's changes.
    """
    upload = request.FILES.get("file")
    if upload is not None and upload.size:
        sent: bytes = upload.read(MAX_BYTES + 1)
        return sent.decode("utf-8", "replace")
    text: str = request.POST.get("toml", "").replace("\r\n", "\n")
    if request.POST.get("side") == "toml":
        return text
    try:
        return spec_text.merge_form(text, request.POST.dict())
    except SpecError:
        return text


def _code(request: HttpRequest) -> bytes | None:
    """Return the uploaded code archive.

    One byte more than allowed is read, so that the check can report an archive that is too large.
    """
    upload = request.FILES.get("code")
    return upload.read(MAX_CODE + 1) if upload is not None and upload.size else None


def _parent(request: HttpRequest, user: User) -> Job | None:
    """Return the job that this one is cloned from."""
    number = request.POST.get("from") or request.GET.get("from")
    if not number:
        return None
    jobs = Job.objects.visible_to(user).exclude(kind=Job.ATTACHED)  # Vigil can't resubmit what it did not submit
    return get_object_or_404(jobs, pk=whole(number) or 0)


def _first_text(user: User, parent: Job | None) -> str:
    if parent is None:
        visible = Project.objects.visible_to(user)
        projects = list(visible.values_list("slug", flat=True)[:50])
        default = visible.named(DEFAULT_PROJECT).values_list("slug", flat=True).first()
        slug = default or (projects[0] if projects else DEFAULT_PROJECT)
        return START.format(project=json.dumps(slug))
    try:
        return set_values(parent.spec_toml, {"name": _next_name(parent)})
    except SpecError:
        return parent.spec_toml


def _changed(text: str, options: list[str]) -> str:
    """Return the text with the changes in links of "Why it waits": `set=resources.nodes=2`, any number of times."""
    pairs = [option.removeprefix("resources.").partition("=") for option in options[:10]]
    try:
        return set_values(
            text, {f"resources.{name}": _value(name, value) for name, _, value in pairs if name in PREFILLABLE}
        )
    except SpecError:
        return text


def _value(name: str, value: str) -> int | float | str:
    if name == "memory_gib":
        try:
            return float(value[:20])
        except ValueError:
            return value
    number = whole(value) if name in {"nodes", "gpus_per_node", "ranks_per_node"} else None
    return value if number is None else number


def _next_name(parent: Job) -> str:
    """Return the next name that no job of the project has: `probe` → `probe-2` → `probe-3`."""
    stem, dash, number = parent.name.rpartition("-")
    if not (dash and number.isdigit() and len(number) < 4):
        stem, number = parent.name, "1"
    stem = stem[:MAX_STEM]
    for first in count(int(number) + 1, NAMES_PER_QUERY):  # uses the listing's index on name and project
        others = [f"{stem}-{n}" for n in range(first, first + NAMES_PER_QUERY)]
        alike = Listing.objects.filter(project_id=parent.project_id, name__in=others)
        taken = set(alike.values_list("name", flat=True))
        if free := [name for name in others if name not in taken]:
            return free[0]
    raise AssertionError("unreachable")


def _sections(user: User, drafted: SpecDraft) -> list[FormSection]:
    projects = Project.objects.visible_to(user).values_list("slug", flat=True)[:200]
    return sections(drafted.data, drafted.problems, projects, suggest=partial(names.choices_for, user))


def _context(user: User, drafted: SpecDraft, parent: Job | None) -> dict[str, Any]:
    changes = _changes(parent.spec_toml, drafted.text) if parent else []
    return {
        "section": "submit",
        "draft": drafted,
        "marks_json": json.dumps([mark for mark in drafted.marks if mark["line"]]),
        "sections": _sections(user, drafted),
        "parent": parent,
        "changes": changes,
        "changed": sum(mark == "ins" for mark, _ in changes) or sum(mark == "del" for mark, _ in changes),
        "key": uuid.uuid4().hex,
    }


def _render(request: HttpRequest, drafted: SpecDraft, parent: Job | None, status: int = 200) -> HttpResponse:
    return render(request, "jobs/submit.html", _context(user_of(request), drafted, parent), status=status)


def _changes(before: str, after: str) -> list[tuple[str, str]]:
    """Return the lines that differ, with context: ("same" | "del" | "ins" | "gap", line)."""
    marks = {" ": "same", "-": "del", "+": "ins", "@": "gap"}
    lines = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    return [(marks[line[0]], line[1:]) for line in lines if line[:1] in marks]
