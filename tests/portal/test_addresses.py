"""Test that the benchmark of lists requests every address that may list or count."""

from bench import addresses


def test_no_address_is_forgotten() -> None:
    """A route without a place for one thing lists, unless it is listed in STILL."""
    whole = {
        route
        for route, name in addresses.routes()
        if "<" not in route and (not route.startswith("admin/") or name.endswith("_changelist"))
    }
    requests = set(addresses.requests_by_route())
    assert whole - requests - addresses.STILL - addresses.lead_elsewhere() == set()
    assert requests - {route for route, _ in addresses.routes()} == set(), "requested, but no route"
    assert requests & addresses.STILL == set()
