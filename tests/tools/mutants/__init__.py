"""Known bugs of training libraries, planted one by one: `nox -s mutants`."""
