"""One small example of each thing that CONTRIBUTING.md says how to add, with a check that it is found and works.

tests/test_contributing.py adds all of them to a copy of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Edit(NamedTuple):
    """A change of a file: a text that occurs there once, and what is written instead; "" is the end of the file."""

    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Addition:
    """An example of one row of the table."""

    thing: str
    """As in the first column."""
    files: Mapping[str, str] = field(default_factory=dict)
    """New files by path."""
    edits: Mapping[str, Edit | Sequence[Edit]] = field(default_factory=dict)
    """Changes of existing files by path."""
    check: str
    """Python that fails unless the copy has it and it works."""
    guards: tuple[str, ...] = ()
    """Existing tests of this kind of thing."""

    @property
    def paths(self) -> set[str]:
        return {*self.files, *self.edits}

    def edits_of(self, path: str) -> list[Edit]:
        edits = self.edits[path]
        return [edits] if isinstance(edits, Edit) else [*edits]


FEDERATED = "docs/reference/federated.md"
FEDERATED_GUARDS = (
    "tests/training/federated/test_documented_choices.py",
    "tests/training/federated/test_combinations.py::test_the_documented_table_is_the_code_s",
)
CONTRACT = "tests/training/test_contracts.py::test_every_module_keeps_its_contract"
POWERS = "tests/jobs/spec/test_trust.py::test_every_key_is_classified_and_no_other"


def before(anchor: str, text: str) -> Edit:
    return Edit(anchor, text + anchor)


def after(anchor: str, text: str) -> Edit:
    return Edit(anchor, anchor + text)


def at_end(text: str) -> Edit:
    """Return the edit that appends a line to a document."""
    return Edit("", f"\n{text}\n")


ALL = (
    Addition(
        thing="recipe",
        files={
            "training/recipes/constant.py": '''
"""A model of one number."""
from __future__ import annotations
from typing import Annotated

def prepare(cache, identity=None, *, samples: Annotated[int, "1..100", "Samples."] = 3):
    return cache

def build(data, *, start: Annotated[float, "The number's initial value."] = 0.5):
    return data, start
'''
        },
        check="""
from training import contracts
from training.config import layout_checks, run_config
run = run_config.parse({"recipe": "constant", "constant": {"start": 2.0}})
assert contracts.recipe("constant").built("here", run.recipe_options()) == ("here", 2.0)
assert not list(layout_checks.check(run, 2))
""",
        guards=(CONTRACT, POWERS),
    ),
    Addition(
        thing="parallelism",
        files={
            "training/parallel/alone.py": '''
"""Every rank trains alone, on its part of the batch."""
AXES = ("dp",)

def apply(model, mesh):
    return model
'''
        },
        check="""
from training import contracts
from training.config import mesh, run_config
run = run_config.parse({"parallelism": "alone"})
assert dict(mesh.shape_of(run, 4)) == {"dp": 4}
assert contracts.parallelism("alone").apply("model", None) == "model"
""",
        guards=(CONTRACT,),
    ),
    Addition(
        thing="communication",
        files={
            "training/comm/none_at_all.py": '''
"""Replicas never synchronise."""
SENDS = "0"

def exchange(peers):
    from training.comm._exchange import Exchange

    return Exchange()
'''
        },
        edits={
            "docs/reference/communication.md": before(
                "\n- `parameter_server`: Exp", "\n- `none_at_all`: Replicas never synchronise. Sends 0."
            )
        },
        check="""
from training import contracts
from training.config import layout_checks, run_config
run = run_config.parse({"communication": "none_at_all"})
assert not list(layout_checks.check(run, 2))
assert contracts.communication("none_at_all").exchange(None).communicated(1) is None
""",
        guards=(CONTRACT, "tests/training/comm/test_comm.py::test_the_documented_tables_are_the_code_s"),
    ),
    Addition(
        thing="algorithm or pace of a federation",
        files={
            "training/federated/algorithms/halfavg.py": '''
"""Half of the mean of the clients' updates."""
SENT = {"delta": "samples"}

def train(client):
    return {"delta": client.descend() - client.model}

def aggregate(server):
    return server.model + server.mean["delta"] / 2
'''
        },
        edits={FEDERATED: at_end("- `halfavg`: Half of the mean of the clients' updates.")},
        check="""
from training.federation import parts
from training.federation.config import parse
assert parse({"algorithm": "halfavg", "recipe": "vision"}).algorithm == "halfavg"
assert parts.algorithm("halfavg").SENT == {"delta": "samples"}
""",
        guards=(CONTRACT, *FEDERATED_GUARDS),
    ),
    Addition(
        thing="aggregation, selection, split, adapter or filter of a federation",
        files={
            "training/federated/aggregation/shortened.py": '''
"""The weighted mean of updates that are no longer than a bound."""
from __future__ import annotations
from typing import Annotated

def combine(rows, weights, *, longest: Annotated[float, "0.001..1000", "Largest length of an update."] = 1.0):
    rows = rows.to(weights.dtype)
    factors = (longest / rows.norm(dim=1).clamp(min=1e-12)).clamp(max=1.0)
    return (weights * factors) @ rows / weights.sum(), []
'''
        },
        edits={FEDERATED: at_end("- `shortened`: the mean of updates, each no longer than `longest`")},
        check="""
import torch
from jobs.spec.trust import Power, power_of
from training.federation import parts
from training.federation.config import parse
table = {"aggregation": "shortened", "recipe": "vision", "shortened": {"longest": 2.0}}
assert parse(table).options_of("shortened") == {"longest": 2.0}
row, rejected = parts.aggregation("shortened").combine(
    torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.ones(2, dtype=torch.float64), longest=1.0
)
assert torch.allclose(row, torch.tensor([0.3, 0.4], dtype=torch.float64)) and rejected == []
assert power_of("run.shortened.longest") is Power.DATA
""",
        guards=(CONTRACT, POWERS, *FEDERATED_GUARDS),
    ),
    Addition(
        thing="attack of a federation",
        files={
            "training/federated/attack/silence.py": '''
"""Attackers send nothing but zeros."""

def forge(updates, knowledge):
    return 0 * updates
'''
        },
        edits={
            FEDERATED: at_end("- `silence`: attackers send zeros"),
            "tests/training/federated/test_attack_choices.py": after(
                "FORGED: dict[str, tuple[dict[str, Any], Callable[[Rows], Rows]]] = {",
                '\n    "silence": ({}, lambda rows: np.zeros_like(rows[BAD])),',
            ),
        },
        check="""
import torch
from training.federation import parts
assert parts.attack("silence").forge(torch.ones(2, 3), None).sum() == 0
""",
        guards=("tests/training/federated/test_attack_choices.py::test_each_has_a_test", *FEDERATED_GUARDS),
    ),
    Addition(
        thing="learning-rate schedule of clients",
        files={
            "training/federated/learning_rate/halves.py": '''
"""Halved after every round."""

def factor(round_, rounds):
    return 0.5 ** (round_ - 1)
'''
        },
        edits={
            FEDERATED: at_end("- `halves`: 2 ^ (1 − r)"),
            "tests/training/federated/test_client_steps.py": before(
                '    "exponential": (', '    "halves": ({}, [1, 0.5, 0.25, 0.125, 0.0625]),\n'
            ),
        },
        check="""
from training.federation import parts
assert parts.learning_rate("halves").factor(3, 10) == 0.25
""",
        guards=(
            "tests/training/federated/test_client_steps.py::TestSchedule::test_all_are_tested",
            "tests/training/federated/test_client_steps.py::TestSchedule::test_a_round_s_rate_is_its_formula",
            *FEDERATED_GUARDS,
        ),
    ),
    Addition(
        thing="key of the job specification",
        edits={
            "jobs/spec/resources.py": before(
                "    gpus_per_node: int = Field(",
                '    rack: str = Field(default="", title="Rack", description="The only rack to use.")\n',
            ),
            "jobs/spec/trust.py": Edit('"nodes spares gpus_per_node', '"nodes spares rack gpus_per_node'),
            "docs/reference/jobspec.md": at_end("- `rack`: the only rack to use."),
        },
        check="""
from jobs.spec import JobSpec
from jobs.spec.trust import Power, power_of
assert JobSpec.parse({"name": "x", "resources": {"rack": "r7"}}).resources.rack == "r7"
assert power_of("resources.rack") is Power.DATA
""",
        guards=(POWERS,),
    ),
    Addition(
        thing="failure signature",
        edits={
            "diagnosis/catalogue/ray.toml": after(
                'look_alike = "Connection to tcp://10.0.0.3:8786 is up"\n',
                """
[[entry]]
name = "balloon.burst"
role = "root"
cause = "program.exception"
pattern = '''BalloonError: the balloon has burst after \\d+ breaths'''
source = "balloon 1.0: balloon/errors.py"
frameworks = ["balloon"]
example = "BalloonError: the balloon has burst after 17 breaths"
look_alike = "the balloon is full after 17 breaths"
""",
            )
        },
        check="""
from diagnosis.signatures.catalogue import shipped_catalogue
assert "balloon.burst" in {entry.name for entry in shipped_catalogue().entries}
""",
        guards=("tests/diagnosis/test_catalogue.py::test_its_example_is_found_and_its_look_alike_is_not[ray:balloon.burst]",),
    ),
    Addition(
        thing="cause of failures",
        files={
            "docs/runbooks/gpu.noise.md": """# gpu.noise: GPU fan is loud

The fan runs at full speed.

## What it looks like
- You hear it.
"""
        },
        edits={
            "diagnosis/causes.py": before(
                '    Cause(\n        "gpu.off_bus",',
                '    Cause("gpu.noise", "GPU fan is loud", "sysadmin", "Clean the fan."),\n',
            )
        },
        check="""
from diagnosis import runbook
from diagnosis.causes import CAUSES
assert CAUSES["gpu.noise"].is_hardware
assert runbook.shipped_runbook("gpu.noise").startswith("# gpu.noise")
""",
        guards=(
            "tests/jobs/postmortem/test_runbooks.py::test_every_cause_has_one_and_nothing_else_does",
            "tests/jobs/postmortem/test_runbooks.py::test_it_begins_with_its_code_and_its_links_lead_somewhere",
        ),
    ),
    Addition(
        thing="form of a secret",
        edits={
            "vigil_core/secrets.toml": before(
                '[[form]]\nname = "munge_and_slurm"',
                """[[form]]
name = "balloon"
words = ["balloon_key_"]
source = "balloon 1.0"
pattern = '''\\bballoon_key_\\w{8,}'''
example = "using balloon_key_00000000aaaa"
harmless = "balloon_key_ is empty"

""",
            )
        },
        check="""
from vigil_core.masking import masked
assert "00000000aaaa" not in masked("using balloon_key_00000000aaaa")
""",
        guards=("tests/vigil_core/test_masking.py::test_each_form_masks_its_example_alone[balloon]",),
    ),
    Addition(
        thing="GPU health rule",
        files={
            "nodes/health/power.py": '''
"""Decide when a GPU draws too much power. Pure."""

def is_above_cap(watts: float | None, cap_watts: float | None) -> bool:
    return watts is not None and cap_watts is not None and watts > cap_watts
''',
            "tests/nodes/health/test_power.py": """
from nodes.health import power

def test_unknown_power_is_not_above_the_cap() -> None:
    assert not power.is_above_cap(None, 700)
    assert power.is_above_cap(701, 700)
""",
        },
        check="""
from nodes.health import power
assert power.is_above_cap(701, 700)
""",
        guards=("tests/nodes/health/test_power.py",),
    ),
    Addition(
        thing="telemetry field of a GPU",
        edits={
            "gpus/device.py": after(
                '            "watts": watts(query("nvmlDeviceGetPowerUsage")),\n',
                '            "fan_percent": query("nvmlDeviceGetFanSpeed"),\n',
            ),
            "nodes/agent/samples.py": Edit('"pcie_rx_mib"),\n)', '"pcie_rx_mib", "fan_percent"),\n)'),
            "nodes/telemetry/fields.py": Edit('    "pcie_rx_mib",\n)', '    "pcie_rx_mib",\n    "fan_percent",\n)'),
            "docs/reference/protocols.md": at_end("`fan_percent` is a column of telemetry, too."),
        },
        check="""
import json
from nodes.agent.samples import SampleWindow
from nodes.telemetry import frames, wire
from nodes.telemetry.fields import PLACE
window = SampleWindow(1.0)
window.add(100.0, {"GPU-1": {"fan_percent": 42, "watts": 300}})
batch = {"at": 100, "period": 1, "n": 1, "host": {}, "processes": [], "events": [], **window.take(100, 1)}
post = {"version": 1, "stream": "a" * 16, "first": 0, "given_up": 0, "boot_id": "b", "agent": "1", "sent_at": 101.0}
(parsed,) = wire.parse(json.dumps({**post, "batches": [batch]}).encode()).batches
stored = frames.decode(frames.encode(100, 1, [7], {}, parsed.values))
assert stored.values[PLACE["fan_percent"]].tolist() == [[42]]
""",
        guards=("tests/nodes/agent/test_contract.py::test_agent_and_portal_have_the_same_columns",),
    ),
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
            "jobs/checking/settings.py": before(
                "def _scheduler(", 'def weather(site):\n    yield ok("weather", "dry")\n\n\n'
            ),
            "jobs/checking/run.py": before(
                '    SiteCheck("key", settings.key', '    SiteCheck("weather", settings.weather, ("settings",)),\n'
            ),
        },
        check="""
from jobs.checking import run
(check,) = [check for check in run.CHECKS if check.name == "weather"]
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
                before("    handover,\n    held_launches,", "    greetings,\n"),
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
                before("    home,\n", "    greeting,\n"),
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
            "jobs/api/runbooks.py": Edit(
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
