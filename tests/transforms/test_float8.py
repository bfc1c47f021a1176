"""with_amp("fp8") trains as torchao's own layers do, and the model keeps its layers."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.compilers import compiles
from tests.support.reproducible_runs import fingerprint


def make_model():
    """Make three layers that fit, one without a bias, and one that does not fit."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.GELU(),
        torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 16)),
        torch.nn.Linear(16, 3),
    )


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


# A loss is weighed by its number of samples; a power of two is exact.
def make_batches(number=3, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 16, generator=generator), torch.arange(size) % 3) for _ in range(number)
    ]


def by_hand(model, optimizer, parts):
    """Make one update of torchao's layers over the mean of the parts; return its loss."""
    losses = []
    for part in parts:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model, part)
        (loss / len(parts)).backward()
        losses.append(loss.detach() / len(parts))
    optimizer.step()
    optimizer.zero_grad()
    return float(sum(losses))


def torchaos(model, skipped=()):
    import torchao.float8 as torchao_float8  # takes seconds

    config = torchao_float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)

    def fits(layer, name):
        return layer.out_features % 16 == 0 and not name.startswith(tuple(skipped))

    convert = torchao_float8.convert_to_float8_training
    for layer in convert(model, module_filter_fn=fits, config=config).modules():
        # torchao's layers read only the dtype of autocast on a GPU
        if "Float8" in type(layer).__name__:
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.bfloat16),))
    return model


@pytest.mark.parametrize("how", ["micro-batches", pytest.param("ranks", marks=pytest.mark.slow)])
def test_it_is_the_training_of_torchaos_layers(how):
    num_parts = 2
    start = make_model()
    other = torchaos(copy.deepcopy(start))
    optimizer = ours.adamw(other.parameters())
    batches = make_batches()
    cut = [
        [ours.rows(batch, 4 * i, 4 * i + 8 // num_parts) for i in range(num_parts)]
        for batch in batches
    ]
    expected = [by_hand(other, optimizer, parts) for parts in cut]

    def run(state):
        model = copy.deepcopy(start)
        kinds = [type(each) for each in model.modules()]
        recipe = af.compose(af.with_amp("fp8"), af.wrap_ddp())
        if how == "micro-batches":
            recipe = af.compose(recipe, af.accumulate(num_parts))
        state, step = ours.built(recipe, state, model=model, optimizer=ours.adamw, loss_fn=loss_fn)
        losses = []
        for whole, parts in zip(batches, cut, strict=True):
            state, report = step(state, whole if state.world_size == 1 else parts[state.rank])
            losses.append(float(report.loss))
        assert [type(each) for each in model.modules()] == kinds
        assert not any("forward" in vars(each) for each in model.modules())
        return losses, model.state_dict()

    for losses, parameters in simulate(run, world_size=num_parts if how == "ranks" else 1):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert list(parameters) == list(other.state_dict())
        for name, value in other.state_dict().items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("skip", "text"),
    [
        (
            "head",
            r"with_amp\(skip\) must match modules with parameters, got 'head', which matches none",
        ),
        (
            torch.nn.Linear,
            r"multiples of 16, got none in Sequential beside those of skip; take with_amp",
        ),
    ],
)
def test_what_is_skipped_must_be_there_and_leave_something(skip, text):
    def run(state):
        with pytest.raises(ValueError, match=f"build: .*{text}"):
            ours.built(
                af.compose(af.wrap_ddp(), af.with_amp("fp8", skip=skip)),
                state,
                model=make_model(),
                loss_fn=loss_fn,
            )

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("skip", "error", "text"),
    [
        (3, TypeError, "with_amp: skip must be a class of modules, a name of a module, .* got 3"),
        ([], ValueError, r"with_amp: skip must name one block at least, got \[\]; leave it out$"),
    ],
)
def test_what_names_no_layer_is_refused(skip, error, text):
    with pytest.raises(error, match=text):
        af.with_amp("fp8", skip=skip)


def test_shards_and_blocks_that_are_computed_again_take_it_too():
    """Both ranks have the same rows, so their largest values are those of the batch."""
    (batch,) = make_batches(1)
    start = make_model()

    def run(state, recipe):
        state, step = ours.built(
            recipe, state, model=copy.deepcopy(start), optimizer=ours.adamw, loss_fn=loss_fn
        )
        for _ in range(3):
            state, _ = step(state, batch)
        return ours.whole(step.plan.model.state_dict())

    amp = af.with_amp("fp8")
    (expected,) = simulate(lambda state: run(state, amp), world_size=1)
    recipes = [
        af.compose(amp, af.wrap_fsdp(blocks="2")),
        af.compose(amp, af.wrap_ddp(), af.checkpoint_activations(blocks="2")),
        af.compose(af.checkpoint_activations(blocks="2"), amp, af.wrap_ddp()),
    ]
    for recipe in recipes:
        for parameters in simulate(lambda state, each=recipe: run(state, each), world_size=2):
            for name, value in expected.items():
                torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-6)


def test_a_model_without_layers_that_fit_is_refused():
    plan = af.with_amp("fp8")(
        ours.plan(model=torch.nn.Linear(3, 16), optimizer=ours.adamw, loss_fn=loss_fn)
    )
    with pytest.raises(
        ValueError, match=r"build: with_amp\('fp8'\) must find linear layers .*16.*Linear"
    ):
        af.build(plan, af.DistState())


def test_missing_torchao_is_an_error_that_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # makes any import of it raise
    with pytest.raises(
        ModuleNotFoundError,
        match=r'precision=\'fp8\'; in a clone of accel_fn: pip install "\.\[float8\]"',
    ):
        af.with_amp("fp8")


def plan_under(amp):
    return amp(ours.plan(model=make_model(), optimizer=ours.adamw, loss_fn=loss_fn))


def test_the_launch_can_choose_it(monkeypatch):
    monkeypatch.setenv("ACCEL_FN_MIXED_PRECISION", "fp8")
    plan = plan_under(af.with_amp())
    text = af.explain(plan, af.DistState())
    assert "forward    loss_fn(Sequential, batch) under with_amp(), fp8 from the launch\n" in text
    (batch,) = make_batches(1)
    losses = [
        float(step.forward(state, batch))
        for state, step in (
            af.build(each, af.DistState()) for each in (plan, plan_under(af.with_amp("fp8")))
        )
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_reproducible_has_one_hash_of_it_on_any_number_of_ranks():
    """The scales come from the largest values of a slice, which do not depend on its rank."""
    start = make_model()

    def run(state):
        model = copy.deepcopy(start)
        recipe = af.compose(af.with_amp("fp8"), af.clip(0.5))
        data = make_batches()
        return fingerprint(state, recipe, data[:2], model=model, loss_fn=loss_fn)

    hashes = {each for size in (1, 4) for each in simulate(run, world_size=size)}
    assert len(hashes) == 1


@compiles
@pytest.mark.filterwarnings("ignore")  # warnings of torchao's and the compiler's own code
def test_compiled_products_take_one_graph():
    """One graph per step would end after eight, the most that torch keeps."""
    recipe = af.compose(af.with_amp("fp8"), af.compiled())
    state, step = ours.built(recipe, model=make_model(), optimizer=ours.adamw, loss_fn=loss_fn)
    graphs = counters["stats"]["unique_graphs"]
    for batch in make_batches(4):
        state, _ = step(state, batch)
    assert counters["stats"]["unique_graphs"] - graphs == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="products in float8 are for CUDA devices")
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # of torchao
def test_real_products_in_float8_train_as_bf16_does():
    ends = []
    for precision in ("fp8", "bf16"):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        recipe = af.compose(af.place(), af.with_amp(precision))
        state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), af.init())
        for batch in make_batches(1, size=33) * 50:  # the number of rows is no multiple of 16
            state, report = step(state, batch)
        ends.append(float(report.loss))
    assert ends[0] == pytest.approx(ends[1], abs=0.1)
    assert ends[0] < 0.5
