"""Test, for random runs, that every refusal ends with what would work, and that it works."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.training.parallel import advice
from training.config.base import ConfigError
from training.config.run_config import parse
from training.planning import checking
from training.planning.layouts import Ranks
from training.planning.plan import plan
from training.units import GIB

PRESETS = ("tiny", "10m", "350m", "1b", "7b")
CONTEXTS = (96, 100, 255, 1024, 6000, 8192, 131_072)
BATCHES = (1, 2, 7, 8, 30, 64, 127, 256, 1000, 4099)
COMMUNICATIONS = ("plain", "bf16", "diloco", "local_sgd", "powersgd", "topk")
SCHEDULES = ("GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw any of these options, each as often as it is left out."""
    return st.fixed_dictionaries({}, optional=fields)


LANGUAGE = _some(
    preset=st.sampled_from(PRESETS),
    layers=st.sampled_from((1, 7, 32, 126)),
    heads=st.sampled_from((1, 6, 32, 128)),
    kv_heads=st.sampled_from((1, 3, 8)),
    head_width=st.sampled_from((33, 64, 128)),
    context=st.sampled_from(CONTEXTS),
    max_context=st.sampled_from((64, 1_000_000)),
    vocabulary=st.sampled_from((256, 257, 32_000, 128_256)),
    tied=st.booleans(),
    lora_rank=st.just(8),
    from_weights=st.just("/data/weights"),
)
RUNS = _some(
    language=LANGUAGE,
    global_batch=st.sampled_from(BATCHES),
    micro_batch=st.sampled_from((1, 3, 8, 64)),
    dtype=st.sampled_from(("fp32", "bf16", "fp16", "fp8")),
    recompute=st.sampled_from(("none", "selective", "full")),
    compile=st.booleans(),
    communication=st.sampled_from(COMMUNICATIONS),
    mesh=st.dictionaries(st.sampled_from(("pp", "dp", "shard", "cp", "tp")), st.sampled_from((1, 2, 3, 4, 7, 16))),
    fsdp=_some(
        reshard=st.sampled_from(("always", "never")), offload=st.booleans(), dtype=st.sampled_from(("fp32", "fp16"))
    ),
    pipeline=_some(schedule=st.sampled_from(SCHEDULES), stages_per_rank=st.integers(1, 4)),
    keep_best=st.just(1),
    validate_every=st.sampled_from((50, 100)),
    warmup_steps=st.sampled_from((20, 200)),
)
RANKS = st.builds(
    lambda nodes, per_node, gib, lacking, on_cpu: Ranks(nodes * per_node, per_node, gib and gib * GIB, lacking, on_cpu),
    st.sampled_from((1, 2, 3, 8, 64, 512)),
    st.sampled_from((1, 3, 4, 8)),
    st.sampled_from((None, 1, 16, 40, 80, 80)),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=examples(200))
@given(RUNS, RANKS)
def test_a_refusal_ends_with_what_works_as_written(table: dict[str, Any], ranks: Ranks) -> None:
    table = {"parallelism": "auto", **table}
    message = _refusal(table, ranks)
    if ranks.memory_bytes is None and ranks.per_node == ranks.world_size:  # as where nobody knows more than a number
        assert checking.can_work(parse(table), ranks.world_size, allow_uneven=ranks.allow_uneven) == (not message)
    remedies = advice.remedies(message)
    assert bool(remedies) == bool(message), message
    for remedy in remedies:
        changed, others = advice.applied(remedy, table, ranks)
        found = plan(parse(changed), others)
        assert str(found.shape) in remedy
        assert f"micro-batch {found.micro}" in remedy
        assert (found.footprint.total if found.footprint else 0) <= others.usable


def _refusal(table: dict[str, Any], ranks: Ranks) -> str:
    """Return the refusal; empty if there is none."""
    try:
        plan(parse(table), ranks)
    except ConfigError as refused:
        return str(refused)
    return ""
