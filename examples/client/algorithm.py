"""Federated averaging whose steps shorten from round to round: what the server makes of what the clients sent.

Everything is vectors of float64: `server.model`, and in `server.mean` the mean of the clients' updates by samples.
"""


def aggregate(server, *, decay=0.02):
    return server.model + server.mean["delta"] / (1 + decay * (server.number - 1))
