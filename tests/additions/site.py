"""Examples of what the site has: schedulers, checks, notifications, pages, REST, commands, settings, documents."""

from __future__ import annotations

from tests.additions.addition import Addition, Edit, after, at_end, before

ALL = (
    Addition(
        thing="scheduler",
        files={
            "nodes/schedulers/paper/__init__.py": "",
            "nodes/schedulers/paper/capabilities.py": '''
"""The capabilities of a scheduler on paper."""
from dataclasses import replace
from nodes.schedulers.local import capabilities as local

CAPABILITIES = replace(local.CAPABILITIES, label="The list", runs_jobs_here=False)
''',
            "nodes/schedulers/paper/scheduler.py": '''
"""A scheduler that writes jobs on a list."""
from nodes.schedulers.paper.capabilities import CAPABILITIES

class PaperScheduler:
    capabilities = CAPABILITIES
    jobs: list = []

    def submit(self, submission):
        self.jobs.append(submission)
        return str(len(self.jobs))
''',
        },
        edits={
            "nodes/schedulers/choose.py": [after(
                "from nodes.schedulers.local.scheduler import LocalScheduler\n",
                "from nodes.schedulers.paper import capabilities as paper\n"
            ), Edit(
                '"slurm": slurm.CAPABILITIES}', '"slurm": slurm.CAPABILITIES, "paper": paper.CAPABILITIES}'
            )],
            "docs/reference/settings.md": at_end("`VIGIL_SCHEDULER=paper`, or `paper`, writes jobs on a list."),
        },
        check="""
from nodes.schedulers import choose
from nodes.schedulers.paper.scheduler import PaperScheduler
assert choose.capabilities_of("paper").label == "The list" and "paper" in choose.NAMES
assert PaperScheduler().submit(None) == "1"
""",
        guards=("tests/nodes/test_capabilities.py", "tests/test_contributing.py::test_every_scheduler_is_documented"),
    ),
    Addition(
        thing="version of Slurm's REST API",
        edits={
            "nodes/schedulers/slurm/versions.py": Edit(
                "NEWEST: Version = (0, 0, 45)  # Slurm 26.05", "NEWEST: Version = (0, 0, 46)  # Slurm 26.11"
            )
        },
        check="""
from nodes.schedulers.slurm import versions
assert versions.text_of(versions.NEWEST) == "v0.0.46"
""",
    ),
    Addition(
        thing="kind of notification",
        edits={
            "portal/outbox/kinds.py": before(
                '    NoticeKind("gpu.idle",',
                '    NoticeKind("gpu.noise", "GPUs whose fan is loud", is_for_sysadmins=True),\n'
            )
        },
        check="""
from portal.outbox import kinds
assert ("gpu.noise", "GPUs whose fan is loud") in kinds.choices(is_sysadmin=True, of_project=False)
assert "gpu.noise" not in dict(kinds.choices(is_sysadmin=False, of_project=False))
""",
    ),
    Addition(
        thing="check of the portal's health",
        files={
            "console/health/moon.py": '''
"""Check the phase of the moon."""
from console.health.finding import Finding

def check():
    yield Finding("moon", "moon.full", "warning", "The moon is full.")
'''
        },
        edits={
            "console/health/run.py": [
                Edit("clock, database, disk, processes", "clock, database, disk, moon, processes"),
                after('    "clock": clock.check,\n', '    "moon": moon.check,\n'),
            ],
        },
        check="""
from console.health import run
assert [finding.code for finding in run._run("moon")] == ["moon.full"]
""",
    ),
    Addition(
        thing="check of `vigil check slurm`",
        edits={
            "jobs/slurm_check/settings.py": before(
                "def _scheduler(", 'def weather(site):\n    yield ok("weather", "dry")\n\n\n'
            ),
            "jobs/slurm_check/all_checks.py": before(
                '    SiteCheck("key", settings.key', '    SiteCheck("weather", settings.weather, ("settings",)),\n'
            ),
        },
        check="""
from jobs.slurm_check import all_checks
(check,) = [check for check in all_checks.CHECKS if check.name == "weather"]
assert [finding.detail for finding in check.run(None)] == ["dry"]
""",
    ),
    Addition(
        thing="step of the follower's tick",
        files={
            "jobs/following/greetings.py": '''
"""Greet the log once a tick."""

def greet(tick):
    tick.is_greeted = True
'''
        },
        edits={
            "jobs/following/follow.py": [
                before("from jobs.following.idle import", "from jobs.following import greetings\n"),
                before("            self.submit,\n            self.settle,", "            self.greet,\n"),
                before("    def leave_token(self,", "    def greet(self) -> None:\n        greetings.greet(self)\n\n"),
            ]
        },
        check="""
from jobs.following.follow import Tick
tick = Tick.__new__(Tick)
tick.greet()
assert tick.is_greeted and "greet" in Tick.run.__code__.co_names
""",
    ),
    Addition(
        thing="page",
        files={
            "console/pages/greeting.py": '''
"""The page that greets."""
from django.contrib.auth.decorators import login_required
from django.shortcuts import render
from django.views.decorators.http import require_safe

@login_required
@require_safe
def page(request):
    return render(request, "portal/greeting.html", {"section": "docs"})
''',
            "templates/portal/greeting.html": '{% extends "base.html" %}\n{% block main %}Hello{% endblock main %}\n',
        },
        edits={
            "console/pages/urls.py": [
                before("home, queue,", "greeting, "),
                before('    path("waste",', '    path("greeting", greeting.page, name="greeting"),\n'),
            ],
        },
        check="""
from django.template.loader import get_template
from django.urls import resolve, reverse
assert resolve(reverse("greeting")).func.__module__ == "console.pages.greeting"
get_template("portal/greeting.html")
""",
    ),
    Addition(
        thing="endpoint or field of the REST API",
        edits={
            "jobs/api/failures/runbooks.py": Edit(
                '    is_site: bool = Field(description="Whether the text is the site\'s.")',
                '    is_site: bool = Field(description="Whether the text is the site\'s.")\n'
                '    letters: int = Field(default=0, description="Length of the text.")',
            )
        },
        check="""
from console.urls import api
fields = api.get_openapi_schema()["components"]["schemas"]["RunbookShape"]["properties"]
assert fields["letters"]["description"] == "Length of the text."
""",
    ),
    Addition(
        thing="command",
        files={
            "vigil_cli/greet.py": '''
"""`vigil greet`: say hello."""
import click
from vigil_cli.terminal import echo

@click.command()
def greet() -> None:
    """Say hello."""
    echo("Hello.")

ALL = (greet,)
'''
        },
        edits={
            "vigil_cli/main.py": [
                before("    notices,\n    profiles,", "    greet,\n"),
                after("    *rounds.ALL,\n", "    *greet.ALL,\n"),
            ],
            "docs/reference/cli.md": at_end("`vigil greet` says hello."),
        },
        check="""
from click.testing import CliRunner
from vigil_cli.main import main
assert CliRunner().invoke(main, ["greet"]).output == "Hello.\\n"
""",
        guards=("tests/test_contributing.py::test_every_command_is_documented",),
    ),
    Addition(
        thing="setting",
        edits={
            "portal/settings.py": before(
                'VIGIL_SCHEDULER = env("VIGIL_SCHEDULER", "local")', 'VIGIL_GREETING = env("VIGIL_GREETING", "Hello")\n'
            ),
            "docs/reference/settings.md": at_end("- `VIGIL_GREETING` (default `Hello`): what pages say."),
        },
        check="""
from django.conf import settings
assert settings.VIGIL_GREETING == "Hello"
""",
        guards=("tests/test_contributing.py::test_every_setting_is_documented",),
    ),
    Addition(
        thing="page of the documentation",
        files={"docs/how-to/greet.md": "# Greet\n\nSay hello.\n"},
        edits={
            "docs/README.md": at_end("- [Greet](how-to/greet.md)"),
        },
        check="""
from console.pages import docs
assert docs.title_of("how-to/greet") == "Greet" and "Say hello" in docs.html_of("how-to/greet")
assert 'href="/docs/how-to/greet"' in docs.html_of(docs.INDEX)
""",
    ),
)  # fmt: skip
