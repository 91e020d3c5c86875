"""Examples of what tests and judges nodes: actions, burn-ins, game days, the inventory, acceptances."""

from __future__ import annotations

from tests.additions.addition import Addition, Edit, after, at_end, before

ALL = (
    Addition(
        thing="action of health rules",
        edits={
            "nodes/health/rules/rule.py": Edit(
                'Action = Literal["ignore", "watch", "exclude"', 'Action = Literal["ignore", "watch", "ring", "exclude"'
            ),
            "docs/reference/health-rules.md": at_end("- `ring`: somebody is called."),
        },
        check="""
from nodes.health.rules.rule import parse_rules
from nodes.monitoring.policies import GOVERNED
(rule,) = parse_rules('''
[[rule]]
name = "loud"
title = "Loud"
source = "a test"
severity = "info"
action = "ring"
signal = "gpu_samples"
where = { temperature_c = "> 99" }
clears = "recovered"
''')
assert rule.action == "ring" and "ring" in GOVERNED
""",
    ),
    Addition(
        thing="test of a burn-in",
        edits={
            "training/burnin/host_tests.py": [
                before("def test_mount(", 'def test_fan() -> None:\n    emit(result("fan", "fan 1"))\n\n\n'),
                before('    emit({"begin": "host memory"', "    test_fan()\n"),
            ],
            "nodes/burnin/reports.py": Edit('"host memory", "disk")', '"host memory", "disk", "fan")'),
            "docs/how-to/burn-in.md": at_end("- fan: it does not turn."),
        },
        check="""
import json
from nodes.burnin.reports import parse_line
from training.burnin import host_tests
lines = []
host_tests.emit = lambda line: lines.append(json.dumps(line).encode())
host_tests.test_fan()
assert parse_line(lines[0]).item == "fan 1" and "test_fan" in host_tests.test_host.__code__.co_names
""",
    ),
    Addition(
        thing="fault of a game day",
        edits={
            "training/gameday.py": [
                before("def exception() -> None:", 'def smoke() -> None:\n    sys.exit("smoke")\n\n\n'),
                after("FAULTS: dict[str, Callable[[], None]] = {\n", '    "smoke": smoke,\n'),
            ],
            "jobs/gameday/faults.py": after(
                '    BASELINE: Fault("Undisturbed run"),\n',
                '    "smoke": Fault("A rank smokes", frozenset({"unknown"}), resumes=True),\n',
            ),
            "docs/how-to/game-day.md": at_end("- `smoke`: a rank smokes."),
        },
        check="""
import ast, pathlib
from jobs.gameday.faults import FAULTS
assert FAULTS["smoke"].resumes
tree = ast.parse(pathlib.Path("training/gameday.py").read_text())
assert "smoke" in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
""",
    ),
    Addition(
        thing="software in the inventory",
        edits={
            "nodes/agent/software.py": after(
                "COMMANDS = (\n", '    VersionCommand("balloon", ("balloon", "-V"), r"balloon ([0-9.]+)"),\n'
            ),
            "nodes/inventory/software.py": after('    "slurm": "Slurm",\n', '    "balloon": "Balloon",\n'),
            "docs/reference/inventory.md": at_end("- `balloon`: `balloon -V`, once an hour."),
        },
        check="""
from nodes.agent.software import COMMANDS
from nodes.inventory.software import Software, read_facts
assert COMMANDS[0].software == "balloon"
assert read_facts("dgx-01", "", {"balloon": "1.17"}).versions[Software("balloon")] == ("1.17",)
""",
    ),
    Addition(
        thing="minimum version",
        edits={
            "nodes/inventory/minimums.toml": at_end(
                """
[[minimum]]
software = "nccl"
version = "2.26.2"
why = "it hangs"
source = "a test"
"""
            ),
        },
        check="""
from nodes.inventory.minimums import MinimumVersions, shipped_minimums
from nodes.inventory.software import Software
assert MinimumVersions(shipped_minimums()).violated(Software("nccl"), "NVIDIA H100", "2.25.1").why == "it hangs"
""",
        guards=("tests/nodes/inventory/test_versions.py::test_a_branch_has_a_separate_minimum_and_ended_branches_are_below_a_floor",),
    ),
    Addition(
        thing="clause of an acceptance",
        edits={
            "nodes/acceptance/requirements.toml": before(
                '[[clause]]\nkey = "driver"\n',
                """[[clause]]
key = "fans"
group = "configuration"
title = "Fans"
requirement = "Every fan turns."
source = "a test"

""",
            ),
            "nodes/acceptance/configuration.py": [
                after("        _gpus(nodes),\n", '        ClauseOutcome("fans", PASSED, "All of them."),\n'),
            ],
            "docs/how-to/accept-a-cluster.md": at_end("- **fans**: every fan turns."),
        },
        check="""
from nodes.acceptance.clauses import requirements, stored
from nodes.acceptance.configuration import configuration_clauses
rows = {row["key"]: row["outcome"] for row in stored(configuration_clauses([], "https://vigil.lab"))}
assert rows["fans"] == "passed" and len(rows) == len(requirements())
""",
    ),
)  # fmt: skip
