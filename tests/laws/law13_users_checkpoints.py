"""Law 13: runs by a user's strategies on a mesh are saved, compared and resumed on any other one."""

from dataclasses import replace

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws import law13_users_strategies as users
from tests.laws.law13_users_strategies import SQUARE, replicas_of_parts, shards_of_parts
from tests.support import strategies as ours

pytestmark = users.pytestmark

PLACES = {
    "replicas of parts": (SQUARE, replicas_of_parts),
    "shards of parts": (SQUARE, shards_of_parts),
    "wrap_ddp": ({"dp": 4}, af.wrap_ddp()),
    "wrap_fsdp": ({"dp": 4}, af.wrap_fsdp()),
    "one process": ({"dp": 1}, af.compose()),
}
SIZES = (5, 3, 6, 1)


def built(state, recipe, seed=0):
    torch.manual_seed(seed)
    given = {"loss_fn": ours.token_loss, "weight_fn": af.num_labels("labels")}
    plan = ours.plan(model=users.Perceptron(), optimizer=ours.adamw, **given)
    recipe = af.compose(recipe, af.accumulate(2), af.clip(0.1))
    return af.build(state, recipe(plan))


def held(step):
    """Copy parameters and the optimizer's state, whole."""
    found = dict(step.plan.model.named_parameters())
    for name, parameter in [*found.items()]:
        for key, value in step.plan.optimizer.state[parameter].items():
            found[f"{name} {key}"] = value
    return {name: each.clone() for name, each in ours.whole(found).items()}


def live(state, folder, recipe, *, num_steps=1, seed=0):
    """Go on with the run in a folder for some steps, and save it; return what it holds before and after."""
    state, step = built(state, recipe, seed)
    state = af.resume(folder, state, step)
    before = held(step)
    batches = users.batches(*SIZES)
    for batch in batches[state.step : state.step + num_steps]:
        state, _ = step(state, af.part(batch, state))
    af.save(folder, state, step)
    return before, held(step)


def lived(folder, place, **given):
    mesh, recipe = PLACES[place]
    return simulate(lambda state: live(state, folder, recipe, **given), mesh=mesh)


def by_hand(num_steps):
    return users.by_hand(users.perceptron(), users.batches(*SIZES)[:num_steps])[1]


def check(folder, places):
    """Each of these goes on for a step where the one before has ended; the last is as one process."""
    for seed, place in enumerate(places):
        ranks = lived(folder, place, seed=seed)
    for _, actual in ranks:
        ours.assert_close(actual, by_hand(len(places)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        ["replicas of parts", "one process", "shards of parts", "wrap_ddp"],
        ["shards of parts", "wrap_fsdp", "replicas of parts", "shards of parts"],
    ],
)
def test_a_run_moves_between_meshes(tmp_path, places):
    check(tmp_path, places)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (replicas_of_parts, "0.weight"),
        pytest.param(shards_of_parts, "3.weight", marks=pytest.mark.slow),
    ],
)
def test_one_changed_element_of_a_shard_is_found_by_name_and_rank(recipe, name):
    (batch,) = users.batches(4)

    def changing(plan):
        def change(state, report):
            if state.rank == 3:
                with torch.no_grad():
                    plan.model.get_parameter(name).to_local().view(-1)[-1] += 1e-12
            return state

        return replace(plan, after_update=(change,))

    def run(state):
        state, step = built(state, af.compose(recipe, changing, af.check_replicas(1)))
        step(state, af.part(batch, state))

    rule = "check_replicas: parameters must be equal on all ranks at step 1"
    with pytest.raises(RuntimeError, match=f"{rule}, {name} differs on rank 3; resume"):
        simulate(run, mesh=SQUARE)
