"""Federated averaging with steps that shorten from round to round: how the server combines the clients' updates.

All values are float64 vectors: `server.model`, and in `server.mean` the mean of the clients' updates by samples.
"""


def aggregate(server, *, decay=0.02):
    return server.model + server.mean["delta"] / (1 + decay * (server.number - 1))
