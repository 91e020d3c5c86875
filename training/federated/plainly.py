"""torch.func's gradients without torch.compile's machinery, whose import takes as long as torch's own and 30 MB.

Each of them asks it to stand back while it differentiates. Where nothing has imported it there is nobody to ask
(docs/decisions/0006).
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch._functorch import eager_transforms

_asking: Any = eager_transforms._autograd_grad


class _Torch:
    """torch as that one function sees it."""

    _dynamo = SimpleNamespace(compiled_autograd=SimpleNamespace(_disable=nullcontext))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_plain = FunctionType(_asking.__code__, {**_asking.__globals__, "torch": _Torch()}, argdefs=_asking.__defaults__)


def _autograd_grad(*arguments: Any, **options: Any) -> Any:
    return (_asking if "torch._dynamo" in sys.modules else _plain)(*arguments, **options)


def differentiate_plainly() -> None:
    """From now on, in this process. Not by a stand-in for torch._dynamo itself, which other threads could see."""
    eager_transforms._autograd_grad = _autograd_grad
