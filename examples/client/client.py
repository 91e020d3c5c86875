"""Eight hospitals that measure the same twelve things, each on devices of its own: what a client has, and what it does.

`model` and `data` are all that has to be here; every other function may be left out.
"""

import torch
from torch import nn
from torch.nn import functional

MEASURES, KINDS = 12, 4


def model(*, hidden=32):
    """The server's model, before the first round. `hidden`: see [run.client]."""
    return nn.Sequential(nn.Linear(MEASURES, hidden), nn.ReLU(), nn.Linear(hidden, KINDS))


def data(client, *, spread=0.5):
    """What client number 0, 1, 2 … has: tensors whose first dim is its samples, the labels at the end.

    Here it is made up. Read files of your own instead, by the client's number: it is asked once for each, inside the
    allocation, and kept beside the run.
    """
    everybody, random = (torch.Generator().manual_seed(seed) for seed in (0, client + 1))
    kinds = torch.randn(KINDS, MEASURES, generator=everybody)
    labels = torch.randint(KINDS, (100 + 50 * client,), generator=random)
    device = 1 + spread * torch.randn(MEASURES, generator=random)  # measures each thing a little too high or too low
    return kinds[labels] * device + torch.randn(len(labels), MEASURES, generator=random), labels


def name(client):
    """What people call it."""
    return f"hospital {client + 1}"


def train(model, batches, learning_rate, *, momentum=0.9):
    """One round of a client in its own way: it changes the model, and may return its mean loss.

    Without this function clients take plain steps of gradient descent, many of them computed at once.
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
    """How good the model is for one client, over all that it keeps for validation: numbers by name."""
    answers = model(measures).argmax(dim=1)
    found = [(answers[labels == kind] == kind).double().mean() for kind in labels.unique()]
    return {"accuracy": (answers == labels).double().mean(), "recall": sum(found) / len(found)}
