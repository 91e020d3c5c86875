"""Test MFU: the formula against torch's count of operations, and the table of GPUs."""

from __future__ import annotations

import pytest
import torch

from training.config.dims import Dims
from training.metrics import flops
from training.models.llama import Llama, initialise


def dims(**given: int | bool) -> Dims:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 4, "head_width": 16, "hidden": 176, "context": 64, "vocabulary": 256}
    merged = {**sizes, **given}
    return Dims(width=int(merged["heads"]) * int(merged["head_width"]), **merged)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes",
    [
        dims(),
        dims(heads=8, kv_heads=2, hidden=344, context=128),  # grouped queries
        dims(heads=6, kv_heads=1, head_width=32, hidden=512, context=32, vocabulary=1000),
        dims(layers=4, tied=True, context=256),  # attention is most of it
    ],
)
def test_agrees_with_counted_operations(sizes: Dims) -> None:
    """FlopCounterMode counts no attention on a CPU (protocols.md §7), so it is added: QKᵀ and PV over the full T²,
    four operations a pair of tokens and channel forward, twice that backward."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Llama(sizes)
    for name, parameter in model.named_parameters():
        initialise(sizes, name, parameter.data, torch.Generator())
    tokens = torch.randint(sizes.vocabulary, (2, sizes.context))
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    by_name = counter.get_flop_counts()["Global"]
    counted = sum(count for operation, count in by_name.items() if "attention" not in str(operation))
    pairs = sizes.layers * sizes.heads * sizes.head_width * sizes.context
    attention = 3 * 4 * pairs * tokens.numel()
    assert sizes.flops_per_token * tokens.numel() == pytest.approx(counted + attention, rel=0.03)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla T4", 65),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_knows_gpus_by_their_names(name: str, tera: float) -> None:
    assert flops.peak(name) == pytest.approx(tera * 1e12)


OTHERS = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti")
"""Other chips than the card whose name is in theirs."""


@pytest.mark.parametrize(
    "name", ["", "AMD EPYC 9654", "NVIDIA Unheard X9", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", *OTHERS]
)
def test_invents_no_peak(name: str) -> None:
    assert flops.peak(name) is None


def test_is_absent_where_an_input_is_missing() -> None:
    assert flops.mfu(6e9, 1e5, 8 * 989.5e12) == pytest.approx(6e14 / (8 * 989.5e12))
    for wrong in ((6e9, 1e5, float("nan")), (0.0, 1e5, 1e15), (6e9, 1e5, 0.0)):
        assert flops.mfu(*wrong) is None
