"""FEDTAIL: sharpness-aware, domain-adversarial and class-balanced training (2025, arXiv 2506.08518).

A client minimises L_cls + L_adv + L_sharp + Σ γ_c L_c + L_coh (see algorithms._fedtail_loss). What the paper leaves
open, and our reading:

- Domains are clients. The discriminator is a linear layer on the head's input, with one output for each client. No
  client sees another domain, so it is part of the model: it travels and is averaged like the rest. It minimises its own
  loss, λ times the cross entropy of the client's number; the model before it minimises L_adv, minus the same.
- L_coh = -α ⟨∇L_cls, ∇L_adv⟩ is over all weights, with λ in L_adv and the discriminator constant; only
  weights that both terms depend on contribute.
- Classes are those of the batch: L_c is the mean over its samples of class c, 0 where there is none.
- γ_c and ε_c are computed at each step, and not differentiated. ∇L_c in ε_c is by the inputs. KL is differentiated on
  both sides.
- γ_c is 1 / (1 + σ) in the formula; by the text sharper classes have larger weights: σ / (1 + σ).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.config.base import ConfigError, Problem
from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor

    from training.data import Task
    from training.federated.client import Client
    from training.federation.config import FederationConfig

SENT = {"delta": "samples"}
NEEDS_HEAD = True
ALLOWS_MOMENTUM = False
ALLOWS_WEIGHT_DECAY = False


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield settings without classes, or without a head on a representation."""
    options = config.recipe_options()
    if config.recipe == "language" or options.get("source") == "synthetic":
        yield Misfit("algorithm", f'is "fedtail", which needs samples with classes, and {config.recipe} has none.')
    elif config.recipe == "tabular" and options.get("model") != "mlp":
        yield Misfit("tabular.model", 'has one layer, but fedtail needs features before the last one. Write "mlp".')


def extend_model(task: Task, clients: int, *, adversarial: float, **options: object) -> None:
    """Add the discriminator to the model, initialised with zeros, unless `adversarial` is 0."""
    from torch import nn

    if not task.head:
        text = 'is "fedtail", but the recipe does not name the head of its model. Write "fedavg".'
        raise ConfigError([Problem("run.algorithm", text)])
    if not adversarial:
        return
    features = task.model.get_parameter(f"{task.head}.weight").shape[-1]
    layer = nn.Linear(features, clients)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    task.model.add_module("discriminator", layer)


def train(
    client: Client,
    *,
    alpha: Annotated[
        float, "0..100", "Weight of the coherence of the classification and adversary gradients; 0: none."
    ] = 0.1,
    rho: Annotated[float, "0..100", "Norm of the shift of a class's inputs; 0: none."] = 0.05,
    adversarial: Annotated[float, "0..100", "λ, weight of the adversary that distinguishes clients; 0: none."] = 0.1,
    gamma: Annotated[
        Literal["formula", "inverse"],
        "Weight of a class: formula: 1 / (1 + σ), σ being the curvature of its loss; inverse: σ / (1 + σ).",
    ] = "formula",
    power_steps: Annotated[int, "1..1000", "Steps of the power iteration that estimates the curvature."] = 3,
) -> Mapping[str, Tensor]:
    from training.federated.algorithms._fedtail_loss import FedTailLoss, curvatures
    from training.federated.differentiation import grad

    w = client.model
    for step in range(client.steps):
        loss = FedTailLoss(client, step, alpha=alpha, adversarial=adversarial)
        sigma = curvatures(loss.by_class, w, power_steps)
        weights = 1 / (1 + sigma) if gamma == "formula" else sigma / (1 + sigma)
        regularization = grad(loss.regularization)(w, weights, loss.shift(w, rho) if rho else None)
        w = client.step(w, client.gradient(w, step) + regularization)
    return {"delta": w - client.model}
