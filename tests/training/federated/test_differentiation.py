"""Clients are differentiated as by torch.func, without torch.compile, whose import takes as long as torch's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from training.federated import differentiation

SCRIPT = """
import sys, torch
from torch.func import vmap
from training.federated.differentiation import grad
rows = torch.arange(6.0).view(3, 2)
cubes = vmap(grad(lambda row: row.pow(3).sum()))(rows)
second = vmap(grad(lambda row: grad(lambda inner: inner.pow(3).sum())(row).sum()))(rows)
assert torch.equal(cubes, 3 * rows**2) and torch.equal(second, 6 * rows)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
INPUTS = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
W = torch.randn(5, 7, generator=torch.Generator().manual_seed(4))


def loss(w: Tensor) -> Tensor:
    return (INPUTS @ w).tanh().square().mean() + w.square().sum() / 3


def outputs(w: Tensor) -> Tensor:
    return (INPUTS @ w).tanh()


def test_results_are_those_of_torch_func() -> None:
    def with_value(w: Tensor) -> tuple[Tensor, Tensor]:
        return loss(w), w.sum()

    gradients, (values, sums) = vmap(differentiation.grad_and_value(with_value))(W)
    expected, (expected_values, expected_sums) = vmap(torch.func.grad_and_value(with_value, has_aux=True))(W)
    assert torch.equal(gradients, expected)
    assert torch.equal(values, expected_values)
    assert torch.equal(sums, expected_sums)
    assert torch.equal(vmap(differentiation.grad(loss))(W), expected)
    hessian = differentiation.jacrev(differentiation.grad(loss))
    assert torch.equal(vmap(hessian)(W), vmap(torch.func.jacrev(torch.func.grad(loss)))(W))
    value, pullback = differentiation.vjp(outputs, W[0])
    expected_value, expected_pullback = torch.func.vjp(outputs, W[0])
    assert torch.equal(value, expected_value)
    assert torch.equal(pullback(value), expected_pullback(value)[0])


def test_what_does_not_depend_on_the_argument_has_a_gradient_of_zeros() -> None:
    assert torch.equal(differentiation.grad(lambda w: INPUTS.sum())(W), torch.zeros_like(W))


@pytest.mark.slow
def test_a_client_s_gradient_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
