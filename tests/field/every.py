"""Every kind: whoever reads the catalogue imports this, so that it is whole."""

from tests.field import (  # noqa: F401
    cuts,
    data,
    evaluations,
    loops,
    losses,
    models,
    phases,
    ports,
    schedules,
    sequences,
    shards,
)
