"""Law 9: a step that is built again, or loaded by names, in other groups of parameters changes no result."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.longer_runs import WITH_LENGTH, batches_of

SCHEDULES = {
    "function": lambda optimizer: lambda num_updates: 0.9**num_updates,
    "of the state": lambda optimizer: lambda state: 1 / (1 + state.items / 10),
    **{
        name: lambda optimizer, make=make: make(optimizer, 12)
        for name, (make, _) in WITH_LENGTH.items()
    },
}
LENGTH = 8


def grouped(model, places):
    """Make an optimizer whose groups are those of the parameters at the same places."""
    groups = {}
    for place, parameter in zip(places, model.parameters(), strict=True):
        groups.setdefault(place, []).append(parameter)
    # One class moves momenta beside rates, as OneCycleLR does.
    return torch.optim.AdamW([{"params": each} for each in groups.values()], lr=0.1)


def recipe(case, optimizer):
    return af.compose(
        getattr(af, case["wrap"])(),
        af.accumulate(case["k"]),
        af.with_amp("fp16", init_scale=2.0, growth_interval=2),
        af.ema(0.9, num_warmup=1),
        af.schedule(SCHEDULES[case["schedule"]](optimizer)),
    )


def copied(model):
    return {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}


def ending(state, step):
    model, scaler = step.plan.model, state.scaler
    found = copied(model)
    with af.averaged(step):
        means = copied(model)
    counts = [state.samples, state.items, float(scaler.scale), int(scaler.good_steps)]
    found["counts"] = torch.tensor([*map(float, counts)], dtype=torch.float64)
    return found | {f"mean {name}": value for name, value in means.items()}


def go_on(state, step, batches):
    for batch in batches:
        state, _ = step(state, af.shard_batch(batch, state))
    return state


def begun(state, case, places, model=None, **given):
    model = ours.regression_model() if model is None else model
    optimizer = grouped(model, places)
    plan = recipe(case, optimizer)(af.Plan(ours.mse, model, optimizer))
    return af.build(plan, state, check_loss=False, **given)


def unbroken(case, batches):
    whole = case | {"wrap": "wrap_ddp", "k": 1}
    state, step = begun(af.DistState(), whole, case["places"][0])
    return ending(go_on(state, step, batches), step)


def built_again(state, case, batches):
    state, step = begun(state, case, case["places"][0])
    state = go_on(state, step, batches[: case["stop"]])
    model = step.plan.model
    if case["wrap"] == "wrap_fsdp" and state.world_size > 1:
        values = ours.whole(model.state_dict())
        model = ours.regression_model()
        model.load_state_dict(values)
    state, step = begun(state, case, case["places"][1], model, after=step)
    return ending(go_on(state, step, batches[case["stop"] :]), step)


CASES = st.fixed_dictionaries(
    {
        "wrap": st.sampled_from(["wrap_ddp", "wrap_fsdp"]),
        "k": st.integers(1, 3),
        "schedule": st.sampled_from(list(SCHEDULES)),
        "stop": st.integers(0, LENGTH),
        "places": st.tuples(*[st.lists(st.integers(0, 2), min_size=4, max_size=4)] * 2),
        "bad": st.sets(st.integers(0, LENGTH), max_size=3),
    }
)


@ours.share(0.3)
@given(case=CASES, world_size=st.integers(1, 3))
def test_a_step_that_is_built_again_goes_on(case, world_size):
    batches = batches_of(case["bad"])[:LENGTH]
    expected = unbroken(case, batches)
    for found in simulate(lambda state: built_again(state, case, batches), world_size=world_size):
        ours.assert_close(found, expected)


@ours.share(0.3)
@given(case=CASES, worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_a_run_that_is_loaded_by_names_goes_on(tmp_path_factory, case, worlds):
    folder = tmp_path_factory.mktemp("run")
    batches = batches_of(case["bad"])[:LENGTH]
    expected = unbroken(case, batches)

    def first(state):
        state, step = begun(state, case, case["places"][0])
        state = go_on(state, step, batches[: case["stop"]])
        af.save(step, state, folder)

    def second(state):
        model = ours.regression_model(seed=7)
        state, step = begun(state, case, case["places"][1], model)
        state = af.load(step, state, folder, match="names")
        return ending(go_on(state, step, batches[case["stop"] :]), step)

    simulate(first, world_size=worlds[0])
    for found in simulate(second, world_size=worlds[1]):
        ours.assert_close(found, expected)
