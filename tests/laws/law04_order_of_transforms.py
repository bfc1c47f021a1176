"""Law 4: the order of transforms does not matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from tests.support import strategies as ours
from tests.support.compilers import MARKS

TRANSFORMS = {
    "place": af.place(),
    "wrap_ddp": af.wrap_ddp(),
    "accumulate": af.accumulate(2),
    "clip": af.clip(0.3),
    "with_amp": af.with_amp("bf16"),
    "skip_nonfinite": af.skip_nonfinite(),
    "skip_spikes": af.skip_spikes(),
    "freeze": af.freeze("0.weight", until=2),
    "check_replicas": af.check_replicas(2),
    "average": af.ema(0.9),
    "schedule": af.schedule(lambda num_updates: 1 / (num_updates + 1)),
    "checkpoint_activations": af.checkpoint_activations(blocks="0"),
    "Preemption": af.Preemption(signals=()),
}


MORE = {
    "wrap_fsdp": af.wrap_fsdp(),
    "local_sgd": af.local_sgd(2),
    "reproducible": af.reproducible(2),
    "accumulate auto": af.accumulate("auto"),
    "average.uniform": af.swa(),
    "compiled": af.compiled(),
}
"""Transforms that are refused beside some of those."""

ELSEWHERE = {
    "local_sgd": ["wrap_ddp", "skip_nonfinite", "skip_spikes", "check_replicas", "average"],
    "reproducible": ["wrap_ddp"],
    "compiled": [],
}
"""The pairs that are refused. compiled(scope="step") works with few transforms:
tests/laws/law02_compilation.py."""


PRECISIONS = {
    "float64": (torch.float64, af.with_amp("bf16")),  # under which autocast changes nothing
    "bf16": (torch.float32, af.with_amp("bf16")),
    "fp16": (torch.float32, af.with_amp("fp16", init_scale=2.0**8)),
}


def changed(**instead):
    """Return the transforms in this order, with some replaced."""
    return {**TRANSFORMS, **instead}


@ours.share(0.5)
@given(
    order=st.permutations(list(TRANSFORMS)),
    shared=st.sampled_from(
        [
            (af.wrap_ddp(), af.accumulate(2)),
            (af.wrap_ddp(), af.accumulate("auto")),
            (af.wrap_fsdp(), af.accumulate(2)),
        ]
    ),
    clip=st.sampled_from([af.clip(0.3), af.clip_value(0.1)]),
    precision=st.sampled_from(list(PRECISIONS)),
    world_size=st.integers(1, 3),
)
def test_any_order_of_transforms_is_the_same_step_to_the_bit(
    order, shared, clip, precision, world_size
):
    dtype, autocast = PRECISIONS[precision]
    wrap, accumulate = shared
    transforms = changed(wrap_ddp=wrap, accumulate=accumulate, clip=clip, with_amp=autocast)
    model = ours.regression_model().to(dtype)
    assert_order_does_not_matter(model, parts_of(dtype, world_size), transforms, order)


def parts_of(dtype, world_size):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 3, generator=generator, dtype=dtype) for _ in range(2)]
    batches = [(each, each.sum(dim=1, keepdim=True)) for each in inputs]
    return ours.dealt_evenly(batches, world_size)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("local_sgd", 2),
        ("reproducible", 2),
        pytest.param("compiled", 1, marks=MARKS),
    ],
)
@ours.share(0.2)
@given(data=st.data())
# torch's compiler reads the gradients of tensors that have none, which warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_any_order_is_the_same_where_not_all_go_together(name, world_size, data):
    transforms = {**TRANSFORMS, name: MORE[name]}
    for each in ELSEWHERE[name]:
        del transforms[each]
    order = data.draw(st.permutations(list(transforms)))
    # each pair of transforms in the reverse order
    turned = {each: transforms[each] for each in reversed(order)}
    parts = parts_of(torch.float32, world_size)
    assert_order_does_not_matter(ours.regression_model().float(), parts, turned, order)


def assert_order_does_not_matter(model, parts, transforms, order):
    listed = ours.trained(model, parts, af.compose(*transforms.values()))
    permuted = ours.trained(model, parts, af.compose(*[transforms[name] for name in order]))
    for (losses, parameters), (expected_losses, expected) in zip(permuted, listed, strict=True):
        ours.assert_identical(parameters, expected)
        assert losses == expected_losses
        assert not torch.equal(parameters["2.weight"], model[2].weight)  # the plan did train


def test_gradient_transforms_run_in_the_order_listed():
    plan = ours.plan()
    grads = af.Grads((torch.tensor([3.0, 0.1]),))
    results = []
    for recipe in (
        af.compose(af.clip(1.0), af.clip_value(0.5)),
        af.compose(af.clip_value(0.5), af.clip(1.0)),
    ):
        found = grads
        for transform in recipe(plan).gradients:
            found = transform(af.DistState(), found)
        results.append(found.values()[0])
    torch.testing.assert_close(results[0], torch.tensor([0.5, 0.1 / 9.01**0.5]), rtol=1e-4, atol=0)
    torch.testing.assert_close(results[1], torch.tensor([0.5, 0.1]))
