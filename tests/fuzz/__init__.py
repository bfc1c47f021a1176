"""Random programs of users, each held against the loop by hand: `nox -s fuzz`."""
