"""Training on masked labels by hand and on a mesh, and their comparison."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accel_fn as af
from tests.support import strategies as ours

STYLES = {"0": "colwise", "2": "rowwise"}
"""How `wrap_tp` splits a perceptron."""


def perceptron(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1, bias=bias)).double()


def train_by_hand(model, batches, *, loss_fn, optimizer=ours.adamw, max_norm):
    """Return losses, norms before clipping, weights and parameters of one process."""
    model = copy.deepcopy(model)
    made, found = optimizer(model.parameters()), []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.step()
        made.zero_grad()
        found.append((loss.item(), norm.item(), int((batch["labels"] != -100).sum())))
    return found, model.state_dict()


def train(state, model, parts, recipe, *, loss_fn, optimizer=ours.adamw, **given):
    """Return the same of a rank, which trains on `parts[its place along dp]`."""
    mine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(state.rank)  # the values of rank 0 are everyone's
    plan = af.Plan(loss_fn, mine, optimizer(mine.parameters()), af.count_labels("labels"), **given)
    state, step = af.build(recipe(plan), state)
    found = []
    for part in parts[state.data.rank]:
        state, report = step(state, part)
        found.append((float(report.loss), float(report.grad_norm), report.weight))
    return found, ours.whole(mine.state_dict())


def assert_one_process(ranks, expected):
    reports, parameters = expected
    for found, actual in ranks:
        ours.assert_close(actual, parameters)
        assert found == [pytest.approx(each, rel=1e-6) for each in reports]
