"""FEDTAIL: clients look for flat, domain-free and class-balanced models, the server averages (2025, arXiv 2506.08518).

A client descends L_cls + L_adv + L_sharp + Σ γ_c L_c + L_coh (algorithms._tail has each). What the paper leaves open,
and how it is read here:

- Domains are clients. The discriminator is a linear layer on what enters the head, with an output a client; as no
  client sees another's domain, it is part of the model: it travels and is averaged like the rest. It descends its own
  loss, λ times the cross-entropy of the client's number; the model before it descends L_adv, minus the same.
- L_coh = -α ⟨∇L_cls, ∇L_adv⟩ is over all weights, with λ in L_adv and the discriminator held; only those that both
  terms depend on count.
- Classes are those of the batch: L_c is the mean over its samples of class c, 0 where there is none.
- γ_c and ε_c are numbers, found anew at each step, and not differentiated. ∇L_c in ε_c is by the inputs. KL is
  differentiated on both sides.
- γ_c is 1 / (1 + σ) by the formula; the text has the sharper classes weigh more: σ / (1 + σ).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from training.config.asked import ConfigError, Problem
from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor

    from training.data import Task
    from training.federated.client import Client
    from training.federated.server import Round
    from training.federation.config import FederationConfig

SENT = {"delta": "samples"}
HEAD = True
MOMENTUM = False
WEIGHT_DECAY = False


def check(config: FederationConfig) -> Iterator[Misfit]:
    """It is for classes, and for a head on a representation."""
    options = config.recipe_options()
    if config.recipe == "language" or options.get("source") == "synthetic":
        yield Misfit("algorithm", f'is "fedtail", for samples with a class each. {config.recipe} has none so.')
    elif config.recipe == "tabular" and options.get("model") != "mlp":
        yield Misfit("tabular.model", 'is one layer, but fedtail looks at what enters the last one. Write "mlp".')


def equip(task: Task, clients: int, *, adversarial: float, **options: object) -> None:
    """The discriminator, where it has a say. From zero: all domains are alike."""
    from torch import nn

    if not task.head:
        text = 'is "fedtail", but the recipe does not tell which part of its model is the head. Write "fedavg".'
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
    alpha: Annotated[float, "0..100", "Of the coherence of gradients of classification and adversary; 0: none."] = 0.1,
    rho: Annotated[float, "0..100", "How far the inputs of a class are moved, all together; 0: not at all."] = 0.05,
    adversarial: Annotated[float, "0..100", "λ: of the adversary that tells clients apart; 0: there is none."] = 0.1,
    gamma: Annotated[
        Literal["formula", "inverse"],
        "formula: a class counts 1 / (1 + σ), σ the curvature of its loss; inverse: σ / (1 + σ), the sharper the more.",
    ] = "formula",
    power_steps: Annotated[int, "1..1000", "Of the power iteration that finds the curvature."] = 3,
) -> Mapping[str, Tensor]:
    from torch.func import grad

    from training.federated.algorithms._tail import Terms, curvatures

    w = client.model
    for step in range(client.steps):
        terms = Terms(client, step, alpha=alpha, adversarial=adversarial)
        sigma = curvatures(terms.by_class, w, power_steps)
        weights = 1 / (1 + sigma) if gamma == "formula" else sigma / (1 + sigma)
        beside = grad(terms.beside)(w, weights, terms.shift(w, rho) if rho else None)
        w = client.step(w, client.gradient(w, step) + beside)
    return {"delta": w - client.model}


def aggregate(server: Round, **options: object) -> Tensor:
    return server.model + server.mean["delta"]
