"""The signatures of the public names except transforms: parameters, keyword-only ones, defaults."""

import inspect

import pytest

import accel_fn as af
from accel_fn import testing

_TIMEOUT = "timeout_s=None"
_SCALE = "growth_factor=2.0, backoff_factor=0.5, growth_interval=2000"
_PLACE = "rank=0, world_size=1, local_rank=0, local_world_size=1, device=device(type='cpu')"

SIGNATURES = {
    af.init: f"*, device=None, backend=None, {_TIMEOUT}, seed=0, mesh=None",
    af.distributed: f"*, device=None, backend=None, {_TIMEOUT}, seed=0, mesh=None",
    af.DistState: f"*, {_PLACE}, scaler=None, step=0, call=0, seed=0, samples=0, items=0, axis='', axes=(), "
    "group=None, watchdog=None",
    af.extend.LossScale: f"*, scale, good_steps, skipped, {_SCALE}",
    af.extend.LossScale.start: f"init_scale=65536.0, *, {_SCALE}, device='cpu'",
    af.Report: "*, loss, weight, samples=0, grad_norm=None, applied=None, metrics=<factory>, "
    "terms=<factory>, counts=<factory>, extras=<factory>",
    af.compose: "*transforms",
    af.build: "plan, state, *, check_loss=True, checks=None, after=None",
    af.Step.__call__: "self, state, batch, *, advance=True",
    af.Step.forward: "self, state, batch",
    af.Step.grads: "self, state, batch",
    af.Step.update: "self, state, grads, report, *, advance=True",
    af.explain: "plan, state",
    af.count_samples: "batch",
    af.count_labels: "key_or_path, ignore_index=-100, *, shift=0, class_weight=None",
    af.shard_loader: (
        "loader, state, *, batch='global', split='auto', collate='rank', order='seed', read_ahead=None"
    ),
    af.ShardedLoader.epochs: "self, num_epochs, *, max_steps=None, since=None",
    af.shard_batch: "tree, state",
    af.draw: "fn, state, name='', *, rows=()",
    af.gather: "tree, state, *, axis=None",
    af.reduce_sum: "tree, state, *, axis=None",
    af.reduce_max: "tree, state",
    af.reduce_min: "tree, state",
    af.extend.to_device: "tree, state",
    af.autocast: "step, state",
    af.extend.compute_dtype: "plan",
    af.evaluate: "step, state, loader, metric_fn=None, *, progress=None, finish=None",
    af.predict: "step, state, loader, fn, *, progress=None",
    af.progress: "loader, state",
    af.log_values: "step, state, values, *, prefix=''",
    af.save_model: "model, folder, max_shard_size='5GB', *, dtype=None, only=None, wait=True, state=None",
    af.load_model: "model, folder=None, *, rename=None, strict=True, dtype=None, init=None",
    af.empty: "fn, *args, **kwargs",
    af.checkpoint.whole_state_dict: "model, state",
    af.reduce_mean: "tree, state, *, weight=1.0, axis=None",
    af.broadcast: "tree, state, *, source=0",
    af.barrier: "state",
    af.on_main: "fn, state",
    af.main_first: "state, *, local=False",
    af.print_on_main: "*values, state, sep=' ', end='\\n', file=None, flush=False",
    af.main_logger: "logger, state",
    af.any_rank: "flag, state",
    af.seed_all: "state, *, per_rank=True",
    testing.simulate: "fn, *, world_size=None, timeout_s=10.0, seed=0, mesh=None",
}


def parameters_of(function):
    """Return the signature without types, and without what is private."""
    signature = inspect.signature(function)
    public = [each for each in signature.parameters.values() if not each.name.startswith("_")]
    bare = [each.replace(annotation=each.empty) for each in public]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda each: each.__qualname__)
def test_a_public_function_takes_what_it_is_documented_to_take(function):
    assert parameters_of(function) == SIGNATURES[function]


def test_a_plan_is_four_things_a_reduction_frozen_models_and_slots_by_name():
    given = list(inspect.signature(af.Plan).parameters.values())
    first, (reduction, frozen, finish, *slots) = given[:4], given[4:]
    assert [each.name for each in first] == ["loss_fn", "model", "optimizer", "weight_fn"]
    assert first[3].default is af.count_samples
    assert (reduction.name, reduction.default) == ("reduction", "mean")
    assert {each.kind for each in (reduction, frozen, finish, *slots)} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    assert (frozen.name, finish.name) == ("frozen", "finish")
    assert {each.default for each in slots} == {()}


def test_two_plans_are_held_against_each_other_in_worlds_of_one_by_default():
    given = parameters_of(testing.assert_equivalent)
    assert given.startswith("plan_a, plan_b, batches, *, world_sizes=(1, 1), ")


@pytest.mark.parametrize(
    "kind",
    [af.DistState, af.extend.LossScale, af.Plan, af.Grads, af.Report, af.Step],
    ids=lambda each: each.__name__,
)
def test_a_public_value_cannot_be_changed(kind):
    value = object.__new__(kind)
    name = next(iter(kind.__dataclass_fields__))
    with pytest.raises(AttributeError, match="cannot assign to field"):
        setattr(value, name, None)
