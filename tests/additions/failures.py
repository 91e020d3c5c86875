"""Examples of job specifications, diagnosis, secrets and the health of machines."""

from __future__ import annotations

from tests.additions.addition import Addition, Edit, after, at_end, before
from tests.additions.training import POWERS

ALL = (
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
            "tests/jobs/postmortem/test_runbooks.py::test_every_cause_has_a_runbook_and_nothing_else_does",
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
        thing="health rule",
        edits={
            "nodes/health/catalogue/thermal.toml": at_end(
                """
[[rule]]
name = "cold"
title = "GPU is colder than its room"
source = "a test"
severity = "info"
action = "watch"
where = { temperature_c = "< 5" }
clears = "recovered"
example = [
  { fires = true, steps = [{ temperature_c = 1 }] },
  { fires = false, steps = [{ temperature_c = 30 }] },
]
"""
            ),
        },
        check="""
from nodes.health.examples import broken_examples
from nodes.health.rules.catalogue import shipped_rules
assert broken_examples(shipped_rules()["cold"]) == []
""",
        guards=("tests/nodes/health/test_rules.py::test_every_shipped_rule_fires_on_what_it_must_and_on_nothing_else[cold]",),
    ),
    Addition(
        thing="telemetry field of a GPU",
        edits={
            "gpus/device.py": after(
                '            "watts": watts(query("nvmlDeviceGetPowerUsage")),\n',
                '            "fan_percent": query("nvmlDeviceGetFanSpeed"),\n',
            ),
            "nodes/agent/gpus/samples.py": Edit('"pcie_rx_mib"),\n)', '"pcie_rx_mib", "fan_percent"),\n)'),
            "nodes/telemetry/fields.py": Edit('    "pcie_rx_mib",\n)', '    "pcie_rx_mib",\n    "fan_percent",\n)'),
            "docs/reference/protocols.md": at_end("`fan_percent` is a column of telemetry, too."),
        },
        check="""
import json
from nodes.agent.gpus.samples import SampleWindow
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
)  # fmt: skip
