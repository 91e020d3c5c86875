"""FedStein: shares James-Stein estimates of batch statistics; below FedBN in our tests (2024, arXiv 2410.03499).

**The gain over FedBN that the paper reports is not reproduced**: with `split = "shift"` it reaches 0.85 on digits,
FedAvg 0.86, FedBN 0.98 (10 clients, 30 rounds). Clients are normalised by shared statistics, which fit none of them
there.

γ and β stay with each client; everything else is FedAvg. The paper names neither the estimator nor the variance of a
statistic. Our reading: each client shrinks its statistics, layer by layer, towards their mean over the channels
(Lindley's estimator, positive part), means with squared errors σ²/n, logarithms of variances with 2/(n - 1), n being
its samples; and the server averages the results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.federated.client import Client
    from training.federation.config import FederationConfig

NEEDS_PERSONAL_TENSORS = True
SENT = {"delta": "samples"}
MEAN, VARIANCE = "running_mean", "running_var"
MIN_CHANNELS = 4
"""Channels that a layer needs: with fewer, shrinking gains nothing."""
MIN_VARIANCE = 1e-12
"""Lower bound of variances: that of a constant channel goes to 0, which has no logarithm."""


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield models without batch normalisation, for which it would be FedAvg."""
    options = config.recipe_options()
    if config.recipe == "tabular" and (options.get("model") != "mlp" or not options.get("batch_norm")):
        message = 'is "fedstein", but the model does not normalise over batches. Write batch_norm = true and model = '
        yield Misfit("algorithm", f'{message}"mlp" in [run.tabular], or algorithm = "fedavg".')


def personal(model: nn.Module, **options: object) -> Collection[str]:
    """Return the names of γ and β. The running statistics are shared."""
    from torch.nn.modules.batchnorm import _NormBase

    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _NormBase)]
    return [f"{name}.{parameter}".strip(".") for name, layer in layers for parameter, _ in layer.named_parameters()]


def train(client: Client) -> Mapping[str, Tensor]:
    return {"delta": client.descend() - client.model}


def share(statistics: Mapping[str, Tensor], samples: Tensor, **options: object) -> Mapping[str, Tensor]:
    shared = dict(statistics)
    for name, mean in statistics.items():
        if name.endswith(MEAN) and len(mean) >= MIN_CHANNELS:
            other = name.removesuffix(MEAN) + VARIANCE
            variance = statistics[other].clamp(min=MIN_VARIANCE)
            shared[name] = shrunk(mean, variance / samples)
            shared[other] = shrunk(variance.log(), 2 / (samples - 1).clamp(min=1).expand_as(variance)).exp()
    return shared


def shrunk(values: Tensor, squared_errors: Tensor) -> Tensor:
    """Return Lindley's estimates (channels,) of values that were measured with these squared errors (channels,)."""
    errors = squared_errors.sqrt()
    z = values / errors
    centred = z - z.mean()
    part = ((len(z) - 3) / centred.square().sum()).clamp(max=1)
    return values - part * centred * errors
