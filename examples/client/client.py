"""Eight hospitals measure the same twelve values, each on its own devices: the clients' model, data and training.

Only `model` and `data` are required; every other function is optional.
"""

import torch
from torch import nn
from torch.nn import functional

MEASURES, KINDS = 12, 4


def model(*, hidden=32):
    """Return the server's model before the first round. `hidden`: see [run.client]."""
    return nn.Sequential(nn.Linear(MEASURES, hidden), nn.ReLU(), nn.Linear(hidden, KINDS))


def data(client, *, spread=0.5):
    """Return the data of client 0, 1, 2 …: tensors whose first dim is the samples, labels last.

    These are made up. Read your own files instead, by the client's number: the function is called once for each client,
    inside the allocation, and its result is stored with the run.
    """
    everybody, random = (torch.Generator().manual_seed(seed) for seed in (0, client + 1))
    kinds = torch.randn(KINDS, MEASURES, generator=everybody)
    labels = torch.randint(KINDS, (100 + 50 * client,), generator=random)
    device = 1 + spread * torch.randn(MEASURES, generator=random)  # measures each thing a little too high or too low
    return kinds[labels] * device + torch.randn(len(labels), MEASURES, generator=random), labels


def name(client):
    """Return the client's name on pages."""
    return f"hospital {client + 1}"


def train(model, batches, learning_rate, *, momentum=0.9):
    """Train one client for one round: change the model, and optionally return the mean loss.

    Without this function clients take plain steps of gradient descent, and many of them are computed at once.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    losses = []
    for measures, labels in batches:
        loss = functional.cross_entropy(model(measures), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def evaluate(model, measures, labels):
    """Return scores by name for all validation samples of one client."""
    answers = model(measures).argmax(dim=1)
    found = [(answers[labels == kind] == kind).double().mean() for kind in labels.unique()]
    return {"accuracy": (answers == labels).double().mean(), "recall": sum(found) / len(found)}
