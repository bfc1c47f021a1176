"""wrap_fsdp: what stays the user's, which parts are gathered, and what is refused."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn._blocks import find_blocks
from accel_fn.checkpoint._exporting import export_model
from accel_fn.testing import simulate
from tests import strategies as ours


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        self.calls += 1
        return inputs + self.inner(inputs)


class Stack(nn.Module):
    """Blocks between two layers that are in none of them."""

    def __init__(self, depth=3, width=5):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def encode(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, inputs):
        return self.last(self.encode(inputs))


def stack(seed=0):
    """A stack in float64, drawn without a seed of the whole process."""
    model = Stack().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batches(num=3, size=7):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 3, generator=generator).double() for _ in range(num)]
    return [(each, each.sum(dim=1, keepdim=True)) for each in inputs]


def part(batch, state):
    return tuple(each.tensor_split(state.world_size)[state.rank] for each in batch)


def train(state, recipe, *, model=None, loss_fn=ours.mse, optimizer=ours.adamw, before=None):
    """A few steps; the model, the optimizer and the step."""
    model = stack() if model is None else model
    made = optimizer(model.parameters())
    if before is not None:
        before(model, made)
    state, step = af.build(state, recipe(af.Plan(loss_fn, model, made)))
    for batch in batches():
        state, _ = step(state, part(batch, state))
    return model, made, step, state


def weights_after(recipe, world_size, **settings):
    def run(state):
        return ours.whole(train(state, recipe, **settings)[0].state_dict())

    return simulate(run, world_size=world_size)


def assert_trains_as_alone(recipe, world_size=2, **settings):
    (expected,) = weights_after(af.compose(), 1, **settings)
    for actual in weights_after(recipe, world_size, **settings):
        ours.assert_close(
            {n: v for n, v in actual.items() if "calls" not in n},
            {n: v for n, v in expected.items() if "calls" not in n},
        )


@pytest.mark.parametrize(
    "blocks",
    [
        None,
        Block,
        nn.Linear,
        (Block, nn.Linear),
        "blocks",
        ["blocks.0", "blocks.2"],
        "blocks.1.inner",
    ],
    ids=str,
)
@pytest.mark.parametrize("reshard", [True, False])
def test_any_choice_of_blocks_trains_the_same(blocks, reshard):
    wrap = af.wrap_fsdp(blocks=blocks, reshard_after_forward=reshard)
    assert_trains_as_alone(af.compose(wrap, af.accumulate(2)))


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 2), (4, 2), (4, 4)])
def test_groups_of_shards_train_the_same(world_size, replicate):
    assert_trains_as_alone(af.wrap_fsdp(replicate=replicate), world_size)


def test_a_rank_holds_its_part_of_parameters_gradients_and_optimizer_state():
    def run(state):
        model, optimizer, step, state = train(state, af.wrap_fsdp())
        _, grads, _ = step.grads(state, part(batches()[0], state))
        kept = [value for each in optimizer.state.values() for value in each.values() if value.ndim]
        return [
            sum(each.to_local().numel() for each in tensors)
            for tensors in (model.parameters(), grads.tensors, kept)
        ]

    whole = sum(parameter.numel() for parameter in stack().parameters())
    found = simulate(run, world_size=4)
    assert [sum(column) for column in zip(*found, strict=True)] == [whole, whole, 2 * whole]
    assert (
        max(rank[0] for rank in found) < whole / 2
    )  # 1 and 5 rows over 4 ranks: the first has most


def test_the_model_keeps_its_class_and_its_keys():
    def run(state):
        model, *_ = train(state, af.wrap_fsdp())
        return [type(each) for each in model.modules()], list(model.state_dict())

    for kinds, keys in simulate(run, world_size=2):
        assert kinds == [type(each) for each in stack().modules()]
        assert keys == list(stack().state_dict())


def test_the_loss_may_call_methods_and_the_model_twice():
    def loss_fn(model, batch):
        inputs, targets = batch
        once = F.mse_loss(model.last(model.encode(inputs)), targets)
        return once + F.mse_loss(model(inputs * 2), targets) + model.encode(inputs).square().mean()

    assert_trains_as_alone(af.compose(af.wrap_fsdp(), af.accumulate(3)), loss_fn=loss_fn)


def test_a_model_that_is_a_mere_container_trains_the_same():
    def run(state, recipe):
        models = nn.ModuleDict({"a": stack(0), "b": nn.ModuleList([stack(1)])})
        loss_fn = lambda models, batch: (
            ours.mse(models["a"], batch) + ours.mse(models["b"][0], batch)
        )
        return ours.whole(train(state, recipe, model=models, loss_fn=loss_fn)[0].state_dict())

    expected = run(af.DistState(), af.compose())
    for actual in simulate(lambda state: run(state, af.wrap_fsdp()), world_size=2):
        for name, value in expected.items():
            if "calls" not in name:
                torch.testing.assert_close(actual[name], value, **ours.EXACT)


def test_ranks_start_from_what_the_first_has():
    def run(state):
        model = stack(seed=state.rank)
        kinds = [torch.float64, torch.int64, torch.bool, torch.complex64]
        for kind in kinds:
            buffer = torch.full((3, 2), state.rank).to(kind).t()
            model.register_buffer(str(kind).partition(".")[2], buffer)
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        af.build(state, af.wrap_fsdp()(plan))
        return ours.whole(model.state_dict())

    first, *others = simulate(run, world_size=3)
    ours.assert_identical(first, stack(seed=0).state_dict())
    for other in others:
        ours.assert_identical(other, first)


def test_what_no_rank_uses_stays_as_it_is():
    def with_unused(model, optimizer):
        model.unused = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.ones_(model.unused.weight)
        nn.init.ones_(model.unused.bias)
        optimizer.add_param_group({"params": list(model.unused.parameters())})

    assert_trains_as_alone(af.wrap_fsdp(), before=with_unused)


def warmed_up(model, optimizer):
    """A few steps before the model is sharded."""
    for batch in batches(2):
        ours.mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_two_groups(kind, **settings):
    def make(parameters):
        each = list(parameters)
        groups = [{"params": each[:3], "lr": 0.01}, {"params": each[3:][::-1], "weight_decay": 0.3}]
        return kind(groups, lr=0.05, **settings)

    return make


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [
        in_two_groups(torch.optim.AdamW, amsgrad=True),
        in_two_groups(torch.optim.AdamW, fused=True),
        in_two_groups(torch.optim.SGD, momentum=0.9),
        in_two_groups(torch.optim.Adagrad),
    ],
    ids=["adamw", "fused adamw", "sgd", "adagrad"],
)
def test_an_optimizer_made_before_keeps_its_groups_and_what_it_holds(optimizer, world_size):
    settings = {"optimizer": optimizer, "before": warmed_up}
    assert_trains_as_alone(af.wrap_fsdp(), world_size, **settings)


def test_the_optimizer_points_at_the_parameters_of_the_model():
    def run(state):
        model, optimizer, _, _ = train(
            state, af.wrap_fsdp(), optimizer=in_two_groups(torch.optim.SGD)
        )
        mine = [id(each) for each in model.parameters()]
        first, second = optimizer.param_groups
        assert [id(each) for each in (*first["params"], *second["params"][::-1])] == mine
        assert all(isinstance(each, DTensor) for each in model.parameters())
        return first["lr"], second["lr"], second["weight_decay"]

    assert simulate(run, world_size=2) == [(0.01, 0.05, 0.3)] * 2


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_talk_of_gradients_in_the_last_micro_batch_alone(reshard):
    """And blocks that stay whole until their backward do so from one micro-batch to the next."""

    def run(state):
        model, seen = stack(), []
        optimizer = ours.sgd(model.parameters())

        def loss_fn(model, batch):
            held = [each for group in optimizer.param_groups for each in group["params"]]
            is_whole = not isinstance(model.blocks[0].inner[0].weight, DTensor)
            seen.append((all(each.grad is None for each in held), is_whole))
            return ours.mse(model, batch)

        recipe = af.compose(af.wrap_fsdp(reshard_after_forward=reshard), af.accumulate(3))
        state, step = af.build(state, recipe(af.Plan(loss_fn, model, optimizer)))
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        return seen

    kept = [(True, False), (True, not reshard), (True, not reshard)]
    assert simulate(run, world_size=2) == [kept * 2] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_trains_and_skips_what_overflows(precision, fused):
    def run(state):
        model = stack().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        recipe = af.compose(af.wrap_fsdp(), af.with_amp(precision, init_scale=2.0**10))
        state, step = af.build(state, recipe(af.Plan(ours.mse, model, optimizer)))
        before = ours.whole(model.state_dict())
        batch = torch.ones(2, 3), torch.ones(2, 1)
        if precision == "fp16":
            far = batch[0] * 1e6 if state.is_main else batch[0]
            state, report = step(state, (far, batch[1]))
            assert not report.applied
            assert float(state.scaler.scale) == 2.0**9
            for name, parameter in ours.whole(dict(model.named_parameters())).items():
                assert torch.equal(parameter, before[name])
        losses = [float(step(state, batch)[1].loss) for _ in range(20)]
        return losses[-1] < losses[0] / 2

    assert simulate(run, world_size=2) == [True, True]


def test_a_bound_on_every_element_is_one_on_shards():
    recipe = af.clip_value(0.05)
    (expected,) = weights_after(recipe, 1)
    for actual in weights_after(af.compose(recipe, af.wrap_fsdp()), 2):
        for name, _ in stack().named_parameters():
            torch.testing.assert_close(actual[name], expected[name], **ours.EXACT)


def test_frozen_parameters_stay_as_they_are():
    def freeze(model, _):
        model.first.requires_grad_(False)
        model.blocks[1].requires_grad_(False)

    assert_trains_as_alone(af.wrap_fsdp(), before=freeze)


def test_another_model_in_the_loss_keeps_its_gradients():
    def run(state):
        critic = nn.Linear(1, 1).double()
        critic.weight.grad = torch.full((1, 1), 7.0).double()
        loss_fn = lambda model, batch: critic(model(batch[0])).square().mean()
        train(state, af.wrap_fsdp(), loss_fn=loss_fn)
        return float(critic.weight.grad), critic.bias.grad

    assert simulate(run, world_size=2) == [(7.0, None)] * 2


def test_a_forward_alone_leaves_shards_and_gives_the_loss_of_the_global_batch():
    batch = batches(1)[0]
    expected = ours.mse(stack(), batch).item()

    def run(state):
        model = stack()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        state, step = af.build(state, af.compose(af.wrap_fsdp(), af.accumulate(3))(plan))
        mine = batch if state.rank == 1 else ours.rows(batch, 0, 0)
        loss = float(step.forward(state, mine))
        with torch.no_grad():
            model(batch[0])
        return loss, all(isinstance(each, DTensor) for each in model.parameters())

    assert simulate(run, world_size=3) == [(pytest.approx(expected, rel=1e-6), True)] * 3


def test_evaluation_counts_every_sample_once():
    data = torch.utils.data.TensorDataset(*batches(1, size=11)[0])

    def run(state, recipe):
        model = stack()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        state, step = af.build(state, recipe(plan))
        loader = af.shard_loader(torch.utils.data.DataLoader(data, batch_size=4), state)
        near = lambda model, batch: {"off": (model(batch[0]) - batch[1]).abs().squeeze(1)}
        return {**af.evaluate(step, loader, state), **af.evaluate(step, loader, state, near)}

    expected = run(af.DistState(), af.compose())
    recipe = af.compose(af.wrap_fsdp(), af.accumulate(2))
    for found in simulate(lambda state: run(state, recipe), world_size=3):
        assert found == pytest.approx(expected, rel=1e-12)


def failing_in_the_loss(model, batch):
    model(batch[0])
    raise ZeroDivisionError


def failing_in_a_block(model, batch):
    handle = model.blocks[1].inner[0].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        return ours.mse(model, batch)
    finally:
        handle.remove()


def failing_in_the_backward(model, batch):
    hidden = model.encode(batch[0])
    hidden.register_hook(lambda gradient: 1 / 0)
    return F.mse_loss(model.last(hidden), batch[1])


@pytest.mark.parametrize(
    "failing", [failing_in_the_loss, failing_in_a_block, failing_in_the_backward]
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_that_fails_can_be_followed_by_one(failing, num_microbatches):
    def run(state):
        model, calls = stack(), []

        def loss_fn(model, batch):
            calls.append(None)
            return (failing if len(calls) == num_microbatches + 1 else ours.mse)(model, batch)

        recipe = af.compose(af.wrap_fsdp(), af.accumulate(num_microbatches))
        plan = recipe(af.Plan(loss_fn, model, ours.adamw(model.parameters())))
        state, step = af.build(state, plan)
        for index, batch in enumerate(batches()):
            if index == 1:
                with pytest.raises(ZeroDivisionError):
                    step(state, part(batch, state))
                assert all(isinstance(each, DTensor) for each in model.parameters())
            state, _ = step(state, part(batch, state))
        return ours.whole(dict(model.named_parameters()))

    (expected,) = weights_after(af.compose(), 1)
    for actual in simulate(run, world_size=2):
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], **ours.EXACT)


@pytest.mark.parametrize(
    ("world_size", "wrap"),
    [(1, {"offload": True}), (2, {}), (4, {}), (4, {"replicate": 2})],
    ids=str,
)
def test_weights_of_shards_are_files_of_whole_tensors(tmp_path, world_size, wrap):
    def run(state):
        model, *_ = train(state, af.wrap_fsdp(**wrap))
        af.save_model(model, tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        return ours.whole(model.state_dict())

    trained = simulate(run, world_size=world_size)
    alone = stack(seed=1)
    af.load_model(alone, tmp_path)
    ours.assert_identical(alone.state_dict(), trained[0])


@pytest.mark.parametrize(
    ("world_size", "wrap"),
    [(1, {"offload": True}), (2, {"offload": True}), (4, {"replicate": 2}), (4, {"replicate": 4})],
    ids=str,
)
def test_what_is_saved_in_shards_of_any_kind_goes_on_in_one_process(tmp_path, world_size, wrap):
    def start(state):
        model, _, step, state = train(state, af.wrap_fsdp(**wrap))
        path = af.save(tmp_path / "run", state, step)
        saved = {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}
        return path, saved, go_on(model, step, state)

    def go_on(model, step, state):
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        return ours.whole(dict(model.named_parameters()))

    path, saved, expected = simulate(start, world_size=world_size)[0]
    alone = stack(seed=1)
    plan = af.Plan(ours.mse, alone, ours.adamw(alone.parameters()))
    state, step = af.build(af.DistState(), plan)
    state = af.load(path.parent, state, step)
    ours.assert_close(go_on(alone, step, state), expected)
    other = stack(seed=2)
    export_model(path, tmp_path / "weights")
    af.load_model(other, tmp_path / "weights")
    ours.assert_identical(other.state_dict(), saved)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_files_of_whole_tensors_are_read_into_shards(tmp_path, world_size):
    af.save_model(stack(seed=1), tmp_path)

    def run(state):
        model, *_ = train(state, af.wrap_fsdp())
        af.load_model(model, tmp_path)
        return ours.whole(model.state_dict())

    for found in simulate(run, world_size=world_size):
        ours.assert_identical(found, stack(seed=1).state_dict())


def test_weights_of_shards_cannot_be_saved_by_one_rank_alone(tmp_path):
    def run(state):
        model, *_ = train(state, af.wrap_fsdp())
        try:
            af.on_main(lambda: af.save_model(model, tmp_path), state)
        except Exception as error:
            return str(error)

    _, other = simulate(
        run, world_size=2, timeout_s=0.75
    )  # a world that no other test goes on with
    assert other.startswith(
        "on_main: every rank must be in the same collective, got barrier on rank 0"
    )


class Tied(nn.Module):
    def __init__(self, inside=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        if inside:
            self.blocks[1].inner[0].weight = self.blocks[0].inner[0].weight

    def forward(self, inputs):
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tied(seed=0):
    model = Tied().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_embeddings_stay_tied_and_train_the_same(tmp_path, world_size):
    """Seven rows over three ranks: 3, 3, 1."""
    tokens = torch.arange(7).repeat(2)
    loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

    def run(state, recipe):
        model = tied()
        state, step = af.build(
            state, recipe(af.Plan(loss_fn, model, ours.adamw(model.parameters())))
        )
        for _ in range(3):
            state, _ = step(state, part((tokens, tokens.flip(0)), state))
        assert model.head.weight is model.embedding.weight
        af.save(tmp_path / str(state.world_size), state, step)
        found = {**ours.whole(model.state_dict())}
        other = tied(seed=1)
        plan = af.Plan(loss_fn, other, ours.adamw(other.parameters()))
        state, step = af.build(state, recipe(plan))
        af.load(tmp_path / str(state.world_size), state, step)
        ours.assert_identical(ours.whole(other.state_dict()), found)
        return found

    expected = run(af.DistState(), af.compose())
    for actual in simulate(lambda state: run(state, af.wrap_fsdp()), world_size=world_size):
        assert {name for name in actual if "calls" in name}
        for name, value in expected.items():
            if "calls" not in name:
                torch.testing.assert_close(actual[name], value, **ours.EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_compute_in_the_dtype_asked_for_and_shards_keep_theirs(dtype, world_size):
    seen = set()

    class Looking(Block):
        def forward(self, inputs):
            seen.add((inputs.dtype, self.inner[0].weight.dtype))
            return super().forward(inputs)

    def run(state):
        model = stack().float()
        model.blocks = nn.ModuleList(Looking(5) for _ in range(2))
        wrap = af.wrap_fsdp(param_dtype=dtype, reduce_dtype=None)
        plan = af.Plan(
            lambda model, batch: ours.mse(model, batch).float(), model, ours.sgd(model.parameters())
        )
        state, step = af.build(state, wrap(plan))
        inputs = torch.ones(4, 3)
        losses = [float(step(state, (inputs, inputs[:, :1].to(dtype)))[1].loss) for _ in range(20)]
        return losses[-1] < losses[0], {each.dtype for each in model.parameters()}

    assert simulate(run, world_size=world_size) == [(True, {torch.float32})] * world_size
    assert seen == {(dtype, dtype)}


def test_one_rank_computes_in_a_dtype_as_several_do():
    def run(state):
        model = stack().float()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        state, step = af.build(state, af.wrap_fsdp(param_dtype=torch.bfloat16)(plan))
        batch = tuple(each.to(torch.bfloat16) for each in batches(1, size=8)[0])
        _, grads, _ = step.grads(state, part(batch, state))
        return [each.full_tensor() for each in grads.tensors]

    (alone,) = simulate(run, world_size=1)
    for found in simulate(run, world_size=2):
        for actual, expected in zip(found, alone, strict=True):
            # each half of the batch is summed in bfloat16, of 8 bits: 2 ** -7 of the largest sums
            torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)


def test_in_a_world_of_one_nothing_is_sharded():
    model, *_ = train(af.DistState(), af.wrap_fsdp())
    assert not any(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Stack(), ["blocks.0", "blocks.1", "blocks.2"]),
        (ours.regression_model(), ["0", "2"]),
        (nn.Linear(2, 1), []),
        (nn.Sequential(nn.Linear(2, 2), Block(2), Block(2), nn.ReLU()), ["1", "2"]),
        (
            nn.Sequential(nn.Sequential(Block(2), nn.ReLU()), nn.Sequential(Block(2))),
            ["0.0", "1.0"],
        ),
        (
            nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2)),
            ["0", "2"],
        ),
        (
            nn.ModuleDict({"a": Stack(2), "b": ours.regression_model(), "c": Stack(1)}),
            ["a.blocks.0", "a.blocks.1", "b.0", "b.2", "c.blocks.0"],
        ),
        (nn.ModuleDict({"a": Stack(1), "b": nn.Sequential(nn.Linear(2, 2))}), []),
    ],
    ids=["list", "sequence", "none", "most", "within", "larger", "several", "once"],
)
def test_blocks_are_found(model, names):
    assert list(find_blocks(model, None, "wrap_fsdp")) == names


def refused(recipe, words, *, model=None, optimizer=ours.sgd, world_size=2):
    """Refused on every rank, before anything is changed."""
    models = [stack() if model is None else model() for _ in range(world_size)]

    def run(state):
        mine = models[state.rank]
        before = {name: id(each) for name, each in mine.named_parameters(remove_duplicate=False)}
        with pytest.raises(ValueError, match=words) as caught:
            af.build(state, recipe(af.Plan(ours.mse, mine, optimizer(mine.parameters()))))
        after = {name: id(each) for name, each in mine.named_parameters(remove_duplicate=False)}
        assert after == before
        return isinstance(caught.value, af.AccelError)

    assert simulate(run, world_size=world_size) == [True] * world_size


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            af.compose(af.wrap_ddp(), af.wrap_fsdp()),
            "own_parameters, got replicate() and shard(); leave out one",
        ),
        (
            af.wrap_fsdp(replicate=2),
            "wrap_fsdp(replicate) must divide the number of ranks, 3, got 2",
        ),
        (
            af.wrap_fsdp(blocks="layers"),
            "wrap_fsdp(blocks) must match modules with parameters, got 'layers', which matches none of "
            "Stack; there are Block, Linear, ModuleList, Sequential",
        ),
        (af.wrap_fsdp(blocks=(Block, nn.Conv2d)), "got 'Conv2d', which matches none of Stack"),
    ],
    ids=["wrap_ddp", "replicate", "a name", "a class"],
)
def test_what_cannot_be_built_is_refused(recipe, words):
    refused(recipe, f"^build: .*{re.escape(words)}", world_size=3)


def with_parameter(parameter):
    def make():
        model = stack()
        model.extra = parameter
        return model

    return make


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: Tied(inside=True).double(),
            "tie parameters within a block, or outside of all, got blocks.0.inner.0.weight and "
            "blocks.1.inner.0.weight",
        ),
        (with_parameter(nn.Parameter(torch.ones(()))), "with a dimension to cut, got extra"),
        (
            with_parameter(nn.Parameter(torch.ones(2, 3).t())),
            "hold contiguous parameters, got extra",
        ),
        (
            with_parameter(nn.Parameter(torch.ones(2, dtype=torch.float32))),
            "train parameters of one dtype, torch.float32, got first.weight",
        ),
    ],
    ids=["tied", "0-dim", "transposed", "dtype"],
)
def test_what_cannot_be_sharded_is_refused_by_name(model, words):
    refused(af.wrap_fsdp(), f"^build: wrap_fsdp's model must .*{re.escape(words)}$", model=model)


WHOLE_ONLY = {
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]),
    "SGD(fused=True)": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "Adagrad(fused=True)": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize(("name", "optimizer"), WHOLE_ONLY.items(), ids=WHOLE_ONLY)
def test_optimizers_that_cannot_update_shards_are_refused(name, optimizer):
    words = f"^build: wrap_fsdp's optimizer must .*, got {re.escape(name)}; "
    refused(af.wrap_fsdp(), words, optimizer=optimizer)


def test_what_an_optimizer_holds_in_other_shapes_is_refused():
    def with_rows(parameters):
        optimizer = ours.sgd(parameters)
        optimizer.state[optimizer.param_groups[0]["params"][0]]["rows"] = torch.ones(5).double()
        return optimizer

    words = "got 'rows' of shape [5] for one of [5, 3]; make it anew"
    refused(af.wrap_fsdp(), re.escape(words), optimizer=with_rows)


def test_a_model_in_shards_is_refused_a_second_time():
    def run(state):
        model, optimizer, _, state = train(state, af.wrap_fsdp())
        words = "wrap_fsdp's model must hold parameters whole, got first.weight"
        with pytest.raises(af.AccelError, match=words):
            af.build(state, af.wrap_fsdp()(af.Plan(ours.mse, model, optimizer)))

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"blocks": 3},
            "blocks must be a class of modules, a name of a module, several of these, or None",
        ),
        ({"blocks": [int]}, "blocks must be a class of modules"),
        ({"replicate": 0}, "replicate must be an integer >= 1, got 0"),
        ({"replicate": 1.5}, "replicate must be an integer >= 1, got 1.5"),
        ({"reshard_after_forward": 2}, "reshard_after_forward must be True or False, got 2"),
        ({"offload": "cpu"}, "offload must be True or False, got 'cpu'"),
        (
            {"param_dtype": "bf16"},
            "param_dtype must be a floating-point torch.dtype or None, got 'bf16'",
        ),
        (
            {"reduce_dtype": torch.int32},
            "reduce_dtype must be a floating-point torch.dtype or None",
        ),
    ],
    ids=str,
)
def test_settings_are_checked_when_they_are_given(settings, words):
    with pytest.raises(ValueError, match=f"^wrap_fsdp: {re.escape(words)}"):
        af.wrap_fsdp(**settings)


def test_the_plan_says_what_was_asked_for():
    plan = af.Plan(ours.mse, stack(), ours.sgd(stack().parameters()))
    told = af.explain(af.wrap_fsdp(blocks="blocks", replicate=2)(plan), af.DistState(world_size=4))
    assert "the mean over the global batch, by shard(blocks='blocks', replicate=2)" in told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("settings", [{"param_dtype": torch.float32}, {"offload": True}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_one_accelerator_trains_as_the_cpu_does(settings, fused):
    found = []
    for device, wrap in (("cpu", af.compose()), ("cuda", af.wrap_fsdp(**settings))):
        model = stack().float()
        plan = af.Plan(ours.mse, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
        recipe = af.compose(af.place(), wrap, af.accumulate(2), af.clip(0.5))
        state, step = af.build(af.DistState(device=device), recipe(plan))
        for batch in batches():
            state, _ = step(state, tuple(each.float() for each in batch))
        found.append(ours.whole(dict(model.named_parameters())))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name].cpu(), expected, rtol=1e-4, atol=1e-5)
