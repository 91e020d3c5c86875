"""Differentiate functions of one tensor as torch.func does, without importing torch.compile.

torch.func's grad, vjp and jacrev ask torch._dynamo to stand back while they differentiate, and import it to do so: 1.1
to 1.4 s and 30 MB in each process (docs/decisions/0006). The functions here do the same arithmetic on torch.func's own
levels, so they nest with one another and with vmap, but they call torch.autograd.grad themselves. An algorithm.py may
use torch.func as well: the results are the same bits, and its first call takes that second longer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.eager_transforms import (
    _create_differentiable,
    _undo_create_differentiable,
    _wrap_all_tensors,
    grad_increment_nesting,
)
from torch.func import vmap

_NO_HOOKS = "torch.func's levels do not support hooks on saved tensors"


def grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes the gradient of a scalar function by its first argument, in that one's shape."""

    def differentiated(w: Tensor, *others: Any) -> Tensor:
        return grad_and_value(lambda w: (function(w, *others), ()))(w)[0]

    return differentiated


def grad_and_value(
    function: Callable[[Tensor], tuple[Tensor, Any]],
) -> Callable[[Tensor], tuple[Tensor, tuple[Any, Any]]]:
    """Return a function of w that computes (gradient, (value, more)), where `function` returns (scalar value, more).

    As torch.func.grad_and_value(function, has_aux=True).
    """

    def differentiated(w: Tensor) -> tuple[Tensor, tuple[Tensor, Any]]:
        with _level() as level:
            inner = _differentiable(w, level)
            value, more = function(inner)
            gradient = _gradient(value, inner, None, create_graph=True)
            return _outer(gradient, level), (_outer(value, level), _outer(more, level))

    return differentiated


def vjp(function: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return function(w), and the function that maps a cotangent of the output's shape to one of w's shape."""
    with _level() as level:
        inner = _differentiable(w, level)
        output = function(inner)
        value: Tensor = _outer(output, level)

    def pullback(cotangent: Tensor) -> Tensor:
        return _gradient(output, inner, cotangent, retain_graph=True, create_graph=torch.is_grad_enabled())

    return value, pullback


def jacrev(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the Jacobian (outputs, *w.shape) of a function with outputs (outputs,)."""

    def differentiated(w: Tensor) -> Tensor:
        output, pullback = vjp(function, w)
        basis = torch.eye(len(output), dtype=output.dtype, device=output.device)
        jacobian: Tensor = vmap(pullback)(basis)
        return jacobian

    return differentiated


@contextmanager
def _level() -> Iterator[int]:
    hooks = torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS)
    with hooks, grad_increment_nesting() as level, torch.enable_grad():
        yield level


def _differentiable(w: Tensor, level: int) -> Tensor:
    inner: Tensor = _create_differentiable(_wrap_all_tensors(w, level), level)
    return inner


def _outer(found: Any, level: int) -> Any:
    return _undo_create_differentiable(found, level)


def _gradient(output: Tensor, w: Tensor, cotangent: Tensor | None, **options: bool) -> Tensor:
    """Return the gradient of `output` by w; zeros if it does not depend on w."""
    if not output.requires_grad:
        return torch.zeros_like(w)
    with _compiled_autograd_disabled():
        (found,) = torch.autograd.grad((output,), (w,), cotangent, allow_unused=True, **options)
    return torch.zeros_like(w) if found is None else found


def _compiled_autograd_disabled() -> AbstractContextManager[Any]:
    """Return torch.func's own guard where torch.compile has been imported already, by a user's code say."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    from torch._dynamo import compiled_autograd  # waits where another thread is still importing it

    return compiled_autograd._disable()
