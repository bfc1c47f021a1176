"""Random user programs, each compared with the loop by hand: `nox -s fuzz`."""
