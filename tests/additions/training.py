"""Examples of what a training run may choose."""

from __future__ import annotations

from tests.additions.addition import Addition, after, at_end, before

FEDERATED = "docs/reference/federated.md"
FEDERATED_GUARDS = (
    "tests/training/federated/test_documented_choices.py",
    "tests/training/federated/test_combinations.py::test_the_documented_table_is_the_code_s",
)
CONTRACT = "tests/training/test_contracts.py::test_every_module_keeps_its_contract"
POWERS = "tests/jobs/spec/test_trust.py::test_every_key_is_classified_and_no_other"


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
assert contracts.recipe("constant").call_build("here", run.recipe_options()) == ("here", 2.0)
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
assert contracts.communication("none_at_all").exchange(None).sent_bytes(1) is None
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
)  # fmt: skip
