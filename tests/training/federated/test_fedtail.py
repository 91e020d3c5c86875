"""FEDTAIL: each term of its loss against what torch.autograd makes of the same model by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.nn import functional

from tests.training.federated.in_process import accuracies, assert_same_state, ready, resumed, train
from training.federated.algorithms._fedtail_loss import FedTailLoss, curvatures
from training.federated.client import Client
from training.federated.rounds import Rounds
from training.federation.config import parse
from training.federation.config_checks import problems

CLIENTS = 4
RUN: dict[str, Any] = {
    "algorithm": "fedtail",
    "clients": CLIENTS,
    "split": "dirichlet",
    "learning_rate": 0.2,
    "batch": 16,
    "validate_every": 0,
    "options": {"dirichlet": {"alpha": 2.0}, "tabular": {"source": "wine", "hidden": 6}},
}
DIGITS = {**RUN, "batch": 128, "learning_rate": 0.3, "options": {"dirichlet": {"alpha": 1.0}}}
NOTHING_BUT_CLASSES = {"alpha": 0.0, "rho": 0.0, "adversarial": 0.0}


def with_options(**options: object) -> dict[str, Any]:
    return {**RUN, "options": {**RUN["options"], "fedtail": options}}


class TailCase:
    """A client of a federation, a point at which to evaluate, and the same model and batch in torch."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.rounds = ready(folder, {**with_options(**options), "dtype": "fp64", "local_steps": 1})
        clients: list[Client] = []

        def record(client: Client, **options: object) -> dict[str, Tensor]:
            clients.append(client)
            return {"delta": client.gradient(client.model, 0)}

        self.rounds.work.unstacked_reason = "to be looked at"
        object.__setattr__(self.rounds.federation.model.algorithm, "train", record)
        train(self.rounds)
        (self.client,) = [client for client in clients if client.number == 2]
        self.layout = self.rounds.federation.model.weights
        self.model = self.rounds.federation.model.task.model
        self.w = self.client.model + 0.3 * torch.randn(
            len(self.client.model), generator=torch.Generator().manual_seed(4), dtype=torch.float64
        )
        for name, value in self.layout.tensors(self.w).items():
            self.model.get_parameter(name).data.copy_(value)
        forward = self.client.forward(self.w, 0)
        self.rows, self.labels = forward.inputs, forward.labels

    def terms(self, *, alpha: float = 0.1, adversarial: float = 0.1) -> FedTailLoss:
        return FedTailLoss(self.client, 0, alpha=alpha, adversarial=adversarial)

    def loss(self) -> Tensor:
        return functional.cross_entropy(self.model(self.rows), self.labels)

    def domain_loss(self) -> Tensor:
        """Return the cross-entropy of the client's number."""
        entered = self.model.get_submodule("hidden")(self.rows).relu()
        domains = torch.full((len(self.rows),), 2)
        return functional.cross_entropy(self.model.get_submodule("discriminator")(entered), domains)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of w."""
        return [self.model.get_parameter(name) for name in self.layout.shapes]

    def slope(self, value: Tensor, *, create_graph: bool = False) -> Tensor:
        """(numbers,): the gradient by all parameters."""
        parameters = self.parameters()
        found = torch.autograd.grad(value, parameters, allow_unused=True, create_graph=create_graph)
        both = zip(found, parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in both])

    def is_discriminator(self) -> Tensor:
        """(numbers,)"""
        names = {name: torch.full(shape, float(name.startswith("disc"))) for name, shape in self.layout.shapes.items()}
        return self.layout.vector(names).bool()


def hessian(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return jacrev(jacrev(loss))


def close(item: Tensor, other: Tensor) -> bool:
    return torch.allclose(item, other, rtol=1e-9, atol=1e-11)


class TestCurvatures:
    @pytest.fixture
    def losses(self) -> Callable[[Tensor], Tensor]:
        """Return the losses of a logistic regression: the mean of each of three classes."""
        draw = torch.Generator().manual_seed(6)
        rows, labels = torch.randn(40, 5, generator=draw, dtype=torch.float64), torch.arange(40) % 3

        def by_class(w: Tensor) -> Tensor:
            each = functional.cross_entropy(rows @ w.view(5, 3), labels, reduction="none")
            return torch.stack([each[labels == label].mean() for label in range(3)])

        return by_class

    def test_are_the_hessians_largest_eigenvalues(self, losses: Callable[[Tensor], Tensor]) -> None:
        w = torch.randn(15, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        expected = torch.linalg.eigvalsh(hessian(losses)(w))[:, -1]
        assert torch.allclose(curvatures(losses, w, 200), expected, rtol=1e-6)
        assert torch.allclose(curvatures(losses, w, 3), expected, rtol=0.1), "few steps come near"

    def test_or_the_most_negative(self) -> None:
        values = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
        found = curvatures(lambda w: (values * w.square()).sum()[None] / 2, torch.ones(3, dtype=torch.float64), 60)
        assert float(found) == pytest.approx(3)

    def test_of_a_network(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        label = int(case.labels.mode().values)
        whole = hessian(lambda w: case.terms().by_class(w)[label])(case.w)
        found = curvatures(case.terms().by_class, case.w, 100)[label]
        assert float(found) == pytest.approx(float(torch.linalg.eigvalsh(whole).abs().max()), rel=1e-4)

    def test_none_where_a_class_is_not_there(self) -> None:
        found = curvatures(lambda w: torch.stack([w.square().sum(), 0 * w.sum()]), torch.ones(3), 3)
        assert found.tolist() == pytest.approx([2, 0])


class TestTerms:
    def test_losses_of_classes(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        each = functional.cross_entropy(case.model(case.rows), case.labels, reduction="none")
        for label, found in enumerate(case.terms().by_class(case.w)):
            of_class = each[case.labels == label]
            assert float(found) == pytest.approx(float(of_class.mean().detach()) if len(of_class) else 0.0)
        assert len(set(case.labels.tolist())) > 1

    def test_coherence_by_double_backward(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        classification = case.slope(case.loss(), create_graph=True)
        adversary = case.slope(-0.7 * case.domain_loss(), create_graph=True)
        discriminators = case.is_discriminator()
        together = -0.3 * classification @ adversary
        terms = case.terms(alpha=0.3, adversarial=0.7)
        assert float(terms.coherence(case.w)) == pytest.approx(float(together.detach()))
        assert abs(float(together.detach())) > 1e-3
        expected = torch.where(discriminators, 0, case.slope(together))
        assert close(grad(terms.coherence)(case.w), expected)

    def test_the_adversary_and_the_discriminator_pull_apart(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        slope, discriminators = 0.7 * case.slope(case.domain_loss()), case.is_discriminator()
        terms = case.terms(adversarial=0.7)
        assert close(grad(terms.discrimination)(case.w), torch.where(discriminators, slope, 0))
        assert close(grad(terms.adversary)(case.w), torch.where(discriminators, 0, -slope))
        assert float(slope[discriminators].norm()) > 0 < float(slope[~discriminators].norm())

    def test_inputs_are_shifted_by_rho_a_class(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        shift = case.terms().shift(case.w, 0.25)
        rows = case.rows.clone().requires_grad_()
        each = functional.cross_entropy(case.model(rows), case.labels, reduction="none")
        for label in set(case.labels.tolist()):
            of_class = case.labels == label
            (slope,) = torch.autograd.grad(each[of_class].mean(), rows, retain_graph=True)
            assert float(shift[of_class].norm()) == pytest.approx(0.25)
            assert close(shift[of_class], 0.25 * slope[of_class] / slope.norm())

    def test_sharpness(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        shift = case.terms().shift(case.w, 0.25)
        log_p, log_q = case.model(case.rows).log_softmax(-1), case.model(case.rows + shift).log_softmax(-1)
        expected = functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        assert float(case.terms().sharpness(case.w, shift)) == pytest.approx(float(expected.detach()))
        assert close(grad(case.terms().sharpness)(case.w, shift), case.slope(expected))
        assert float(case.terms().sharpness(case.w, shift * 0)) == 0

    def test_all_of_them_together(self, tmp_path: Path) -> None:
        case = TailCase(tmp_path)
        terms, weights = case.terms(), torch.linspace(0.1, 1, 3, dtype=torch.float64)
        shift = terms.shift(case.w, 0.25)
        parts = [weights @ terms.by_class(case.w), terms.sharpness(case.w, shift), terms.coherence(case.w)]
        parts += [terms.adversary(case.w), terms.discrimination(case.w)]
        assert float(terms.regularization(case.w, weights, shift)) == pytest.approx(float(sum(parts)))
        assert parts[3] == -parts[4] != 0


class TestRounds:
    @pytest.mark.parametrize("gamma", ["formula", "inverse"])
    def test_without_terms_fedavg_but_for_the_classes(self, tmp_path: Path, gamma: str) -> None:
        run = {**with_options(**NOTHING_BUT_CLASSES, gamma=gamma, power_steps=200), "dtype": "fp64", "batch": 1000}
        rounds = ready(tmp_path, run)
        expected = _by_hand(rounds, gamma)
        train(rounds)
        assert torch.allclose(rounds.server.weights, expected, rtol=0, atol=1e-6)

    def test_what_travels(self, tmp_path: Path) -> None:
        fedavg = ready(tmp_path / "fedavg", {**RUN, "algorithm": "fedavg"})
        without = ready(tmp_path / "without", with_options(**NOTHING_BUT_CLASSES))
        assert without.federation.model.weights.shared_shapes == fedavg.federation.model.weights.shared_shapes
        more = ready(tmp_path / "more", RUN).federation.model.weights.shared_shapes.items()
        added = dict(more - fedavg.federation.model.weights.shared_shapes.items())
        assert added == {"discriminator.weight": (CLIENTS, 6), "discriminator.bias": (CLIENTS,)}

    def test_together_equals_alone(self, tmp_path: Path) -> None:
        """Places without a sample count for nothing, in any of the terms."""
        together, alone = (
            ready(tmp_path / name, {**RUN, "dtype": "fp64", "learning_rate": 0.02}) for name in ("together", "alone")
        )
        alone.work.unstacked_reason = "for once"
        assert not together.work.unstacked_reason
        for rounds in (together, alone):
            train(rounds)
        assert torch.allclose(together.server.weights, alone.server.weights, rtol=1e-8, atol=1e-10)

    def test_it_learns(self, tmp_path: Path) -> None:
        rounds = ready(tmp_path, DIGITS)
        found = accuracies(rounds, 5)
        assert found[5] > 0.6 > 0.3 > found[0]
        assert float(rounds.federation.model.weights.tensors(rounds.server.weights)["discriminator.bias"].norm()) > 0

    def test_resumed_bit_for_bit(self, tmp_path: Path) -> None:
        assert_same_state(*resumed(tmp_path, {**RUN, "local_steps": 2}))


def _by_hand(rounds: Rounds, gamma: str) -> Tensor:
    """Compute one step of each client on all its data, along ∇L_cls + Σ γ_c ∇L_c."""
    model, divided = rounds.federation.model, rounds.federation.divided
    w = rounds.server.weights
    total = torch.zeros_like(w)
    for ids in divided.train:
        rows, labels = model.task.batch("train", ids)
        rows = rows.double()

        def each(w: Tensor, rows: Tensor = rows, labels: Tensor = labels) -> Any:
            answer = torch.func.functional_call(model.task.model, model.weights.tensors(w), (rows,))
            return functional.cross_entropy(answer, labels, reduction="none")

        slope = grad(lambda w, each=each: each(w).mean())(w)
        for label in set(labels.tolist()):

            def loss_of(w: Tensor, each: Any = each, has_label: Tensor = labels == label) -> Any:
                return each(w)[has_label].mean()

            sigma = torch.linalg.eigvalsh(hessian(loss_of)(w)).abs().max()
            slope = slope + (1 / (1 + sigma) if gamma == "formula" else sigma / (1 + sigma)) * grad(loss_of)(w)
        total += len(ids) * (w - 0.2 * slope)
    return total / int(divided.sizes.sum())


@pytest.mark.parametrize(
    ("tabular", "field"), [({"model": "logistic"}, "tabular.model"), ({"source": "synthetic"}, "algorithm")]
)
def test_what_it_can_t_work_with(tabular: dict[str, Any], field: str) -> None:
    found = problems(parse({**RUN, "recipe": "tabular", "options": {"tabular": tabular}}), 1)
    assert [problem.field for problem in found] == [field]
