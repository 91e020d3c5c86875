"""Clients are differentiated without torch.compile, whose import takes as long as torch's."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from torch.func import grad, vmap
from training.federated.plainly import differentiate_plainly
differentiate_plainly()
rows = torch.arange(6.0).view(3, 2)
cubes = vmap(grad(lambda row: row.pow(3).sum()))(rows)
second = vmap(grad(lambda row: grad(lambda inner: inner.pow(3).sum())(row).sum()))(rows)
assert torch.equal(cubes, 3 * rows**2) and torch.equal(second, 6 * rows)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_client_s_gradient_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
