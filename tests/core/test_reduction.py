"""The first batches compare a loss with the mean or the sum over its items: refusals and warnings."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law03_reduction import summed, trained
from tests.support import strategies as ours

INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)

BATCH = (INPUTS, INPUTS.sum(1, keepdim=True) + 0.5)


CUT = [
    (af.accumulate(2), 1),
    (af.wrap_fsdp(), 2),
    (af.reproducible(4), 1),
    (af.compose(af.wrap_ddp(), af.accumulate("auto")), 2),
]
OF_SUM = (summed, "mean", r"return the mean .* got a sum.* use Plan\(..., reduction='sum'\)")
OF_MEAN = (ours.mse, "sum", r"return the sum .* got a mean.* use Plan\(..., reduction='mean'\)")


@pytest.mark.parametrize(
    ("cut", "case"), [*((cut, OF_SUM) for cut in CUT), (CUT[0], OF_MEAN), (CUT[-1], OF_MEAN)]
)
def test_another_reduction_is_refused_on_every_rank(cut, case):
    (recipe, world_size), (loss_fn, reduction, words) = cut, case
    parts = ours.dealt_evenly([BATCH], world_size)

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), reduction=reduction)
        state, step = af.build(recipe(plan), state)
        with pytest.raises(af.errors.LossError, match=words):
            step(state, parts[state.rank][0])

    simulate(run, world_size=world_size)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        (af.wrap_fsdp(), [[0, 1, 1]]),
        (af.wrap_ddp(), [[1, 1, 1]]),
        (af.wrap_ddp(), [[0, 1, 0], [1, 0, 0], [0, 2, 1]]),
    ],
    ids=str,
)
def test_the_first_global_batch_of_two_samples_is_compared(recipe, sizes):
    """No rank has two samples in some; a batch of one sample is cut nowhere, so it trains right."""

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(summed, model, ours.sgd(model.parameters()))
        state, step = af.build(recipe(plan), state)
        for size in sizes[:-1]:
            state, _ = step(state, ours.rows(BATCH, 0, size[state.rank]))
        with pytest.raises(af.errors.LossError, match=r"return the mean .* got a sum"):
            step(state, ours.rows(BATCH, 0, sizes[-1][state.rank]))

    simulate(run, world_size=3)


def test_parts_without_items_are_left_out():
    """Their mean is that of nothing; the comparison waits for a batch with items in two parts."""

    def loss_fn(model, batch):
        labels = batch[1][:, 0] > 0
        return (model(batch[0])[:, 0] * labels).sum() / labels.sum().clamp_min(1)

    inputs = torch.ones(4, 3, dtype=torch.float64)
    batches = [
        (inputs, torch.tensor(counts, dtype=torch.float64)[:, None])
        for counts in ([1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0])
    ]
    model = ours.regression_model()
    plan = af.Plan(
        loss_fn, model, ours.sgd(model.parameters()), weight_fn=lambda batch: batch[1].sum()
    )
    state, step = af.build(af.accumulate(2)(plan), af.DistState())
    for batch in batches:
        state, _ = step(state, batch)
        if batch is not batches[-1]:
            assert "all but one part of each batch weigh nothing" in af.explain(step, state)
    assert "is a mean over the items of batch 3" in af.explain(step, state)


@pytest.mark.parametrize(("recipe", "world_size"), CUT)
def test_what_is_neither_is_warned_of_on_the_main_rank(recipe, world_size):
    """A loss over pairs of samples is such a case; a line of `explain` reports it."""

    def loss_fn(model, batch):
        outputs = model(batch[0])
        return (outputs - outputs.T).square().sum() + 1.0

    parts = ours.dealt_evenly([BATCH], world_size)

    def run(state):
        model = ours.regression_model()
        state, step = af.build(recipe(af.Plan(loss_fn, model, ours.sgd(model.parameters()))), state)
        step(state, parts[state.rank][0])
        return af.explain(step, state).splitlines()[-1]

    words = r"step: loss_fn should return the mean .* got one in batch 1 that is neither a mean nor"
    with pytest.warns(UserWarning, match=words) as warned:
        lines = simulate(run, world_size=world_size)
    assert [each.filename for each in warned] == [__file__]
    for line in lines:
        assert "check      the loss is neither a mean nor a sum over the items of batch 1" in line


def test_a_loss_whose_batches_the_user_cuts_is_described_without_a_warning():
    """The parts of the user's own cut may agree where those of others do not."""

    def loss_fn(model, batch):
        outputs = model(batch[0])
        return (outputs - outputs.T).square().sum() + 1.0

    model = ours.regression_model()
    plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
    state, step = af.build(af.accumulate(split=lambda batch: [batch])(plan), af.DistState())
    step(state, BATCH)  # a warning would be an error
    assert "is neither a mean nor a sum" in af.explain(step, state)


def test_a_batch_that_is_never_cut_is_not_compared():
    calls = []

    def loss_fn(model, batch):
        calls.append(len(batch[0]))
        return summed(model, batch)

    trained([[BATCH, BATCH]], af.clip(1.0), loss_fn)
    assert calls == [8, 8]


@pytest.mark.parametrize(
    ("recipe", "batch"),
    [
        (af.accumulate(2), [*BATCH]),
        (af.accumulate("auto"), [*BATCH]),
        (af.accumulate(2, split=None), [ours.rows(BATCH, 0, 4), ours.rows(BATCH, 4, 8)]),
    ],
    ids=["a pair as torch collates it", "the same, auto", "micro-batches"],
)
def test_a_list_is_a_batch_or_holds_microbatches(recipe, batch):
    model = ours.regression_model()
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
    state, step = af.build(recipe(plan), af.DistState())
    step(state, batch)
    assert "check      the loss is a mean over the items" in af.explain(step, state)


def test_batches_1_2_10_and_100_are_compared():
    calls = []

    def loss_fn(model, batch):
        calls.append(len(batch[0]))
        return ours.mse(model, batch)

    trained([[BATCH] * 101], af.accumulate(2), loss_fn)
    halves, in_turn, thirds, unequal, steps = [4, 4], [4, 4], [3, 3, 2], [6, 2], [4, 4]
    cuts = {1: thirds + in_turn, 2: halves + unequal, 10: in_turn + thirds, 100: unequal + halves}
    with_comparison = [
        [8, *cuts[number], 8, *steps] if number in cuts else steps for number in range(1, 102)
    ]
    assert calls == [size for sizes in with_comparison for size in sizes]


def causal_loss(model, batch):
    """A mean over labels without the first of each row, as in transformers' language models."""
    logits = model(batch["inputs"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten())


def causal_batch():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, ours.NUM_CLASSES, (6, 5), generator=generator)
    for row, length in enumerate((5, 2, 3, 4, 2, 5)):
        labels[row, length:] = -100
    inputs = torch.randn(6, 5, ours.NUM_FEATURES, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "labels": labels}


CLASS_WEIGHT = torch.linspace(0, 3, ours.NUM_CLASSES, dtype=torch.float64)


def weighted_loss(model, batch):
    logits = model(batch["inputs"])[:, batch["shift"] :].flatten(0, 1)
    labels = batch["labels"][:, batch["shift"] :].flatten()
    return F.cross_entropy(logits, labels, weight=CLASS_WEIGHT)


@pytest.mark.parametrize(("world_size", "num_microbatches", "shift"), [(1, 3, 1), (3, 2, 0)])
def test_labels_count_as_much_as_their_classes_weigh(world_size, num_microbatches, shift):
    batch = causal_batch() | {"shift": shift}
    losses, expected = ours.trained_by_hand(
        ours.token_model(), [batch] * 2, loss_fn=weighted_loss, optimizer=ours.sgd
    )

    def run(state):
        model = ours.token_model()
        weight_fn = af.count_labels("labels", shift=shift, class_weight=CLASS_WEIGHT)
        plan = af.Plan(weighted_loss, model, ours.sgd(model.parameters()), weight_fn)
        recipe = af.compose(af.wrap_ddp(), af.accumulate(num_microbatches))
        state, step = af.build(recipe(plan), state)
        rows = torch.arange(6).tensor_split(world_size)[state.rank]
        mine = {name: batch[name][rows] for name in ("inputs", "labels")} | {"shift": shift}
        for _ in range(2):
            state, report = step(state, mine)
        return float(report.loss), model.state_dict()

    for loss, parameters in simulate(run, world_size=world_size):
        assert loss == pytest.approx(losses[-1], rel=1e-12)
        ours.assert_close(parameters, expected)


@pytest.mark.parametrize(
    ("loss_fn", "shift", "words"),
    [
        (causal_loss, 0, r"got count_labels\(shift=0\) where shift=1 fits"),
        (ours.token_loss, 1, r"got count_labels\(shift=1\) where shift=0 fits"),
    ],
)
def test_another_shift_is_refused(loss_fn, shift, words):
    model = ours.token_model()
    weight_fn = af.count_labels("labels", shift=shift)
    plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), weight_fn)
    state, step = af.build(af.accumulate(2)(plan), af.DistState())
    with pytest.raises(af.errors.LossError, match=words):
        step(state, causal_batch())


@pytest.mark.parametrize("metric_fn", [None, lambda model, batch: (summed(model, batch), {})])
def test_evaluate_gives_the_mean_over_items_of_a_sum(metric_fn):
    model = ours.regression_model()
    plan = af.Plan(summed, model, ours.sgd(model.parameters()), reduction="sum")
    state, step = af.build(plan, af.DistState())
    found = af.evaluate(step, state, [BATCH, ours.rows(BATCH, 0, 3)], metric_fn)
    total = summed(model, BATCH) + summed(model, ours.rows(BATCH, 0, 3))
    assert found["loss"] == pytest.approx(float(total.detach()) / 11, rel=1e-12)


def test_bad_arguments_are_refused():
    model = ours.regression_model()
    with pytest.raises(af.AccelError, match='reduction must be "mean" or "sum", got \'none\''):
        af.Plan(ours.mse, model, ours.sgd(model.parameters()), reduction="none")
    with pytest.raises(af.AccelError, match="shift must be an integer >= 0, got -1"):
        af.count_labels("labels", shift=-1)
    with pytest.raises(af.AccelError, match="shift must be an integer >= 0, got True"):
        af.count_labels("labels", shift=True)
    with pytest.raises(af.AccelError, match=r"lead to labels \[num_samples, length, ...\]"):
        af.count_labels("labels", shift=1)({"labels": torch.ones(3)})
    with pytest.raises(af.errors.PlanError, match="local_sgd must train on a mean"):
        trained([[BATCH], [BATCH]], af.local_sgd(2), reduction="sum")


def stepped(loss_fn, recipe, parts, num_steps=1, **options):
    """Return the last line of `explain` after some steps over the same batch, of each rank."""

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), **options)
        state, step = af.build(recipe(plan), state)
        for _ in range(num_steps):
            state, _ = step(state, parts[state.rank][0])
        return af.explain(step, state).splitlines()[-1]

    return simulate(run, world_size=len(parts))


STATE = (
    r"step: loss_fn should return the same loss for the same batch, got .*: it keeps state outside"
)


@pytest.mark.parametrize("recipe", [af.accumulate(2), af.reproducible(1)])
def test_a_loss_that_keeps_state_is_warned_of_and_not_judged(recipe):
    past = []

    def loss_fn(model, batch):
        past.append(len(batch[0]))
        return summed(model, batch) + sum(past)

    with pytest.warns(UserWarning, match=STATE) as warned:
        (line,) = stepped(loss_fn, recipe, [[BATCH]], num_steps=3)
    assert len(warned) == 1
    assert "the loss differs from run to run" in line


def noise(shape, generator=None):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn_weight(shape, generator=None):
    """As many numbers as rows, by which the loss divides."""
    return torch.rand(shape[0], generator=generator, dtype=torch.float64)


DRAWING = {
    "noise": lambda model, batch: ours.mse(model, (batch[0] + noise(batch[0].shape), batch[1])),
    "dropout": lambda model, batch: ours.mse(model, (F.dropout(batch[0]), batch[1])),
    "rows behind each other": lambda model, batch: (
        model(torch.cat([batch[0], -batch[0]]) + noise((2 * len(batch[0]), 3))) ** 2
    ).mean(),
    "a mask of chances": lambda model, batch: ours.mse(
        model, (batch[0] * torch.bernoulli(batch[0].sigmoid()), batch[1])
    ),
    "a scale for the batch": lambda model, batch: ours.mse(model, batch) * torch.rand(()).double(),
}


@pytest.mark.parametrize(
    ("recipe", "world_size", "name"),
    [(af.accumulate(2), 1, "noise"), *((af.wrap_ddp(), 2, name) for name in DRAWING)],
)
def test_a_loss_that_draws_is_compared_with_the_same_draws_for_every_row(recipe, world_size, name):
    parts = ours.dealt_evenly([BATCH], world_size)
    for line in stepped(DRAWING[name], recipe, parts, num_steps=2):
        assert "is a mean over the items of batches 1 and 2: those of its parts agree" in line


def test_a_weight_that_is_drawn_is_found_by_draws_of_each_row():
    def loss_fn(model, batch):
        weight = drawn_weight(batch[0].shape)
        return ((model(batch[0]) - batch[1]).square().squeeze(1) * weight).sum() / weight.sum()

    with pytest.warns(UserWarning, match="neither a mean nor a sum"):
        stepped(loss_fn, af.accumulate(2), [[BATCH]])


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda rows: torch.randperm(len(rows)), "their number or their range depends on the rows"),
        (lambda rows: torch.poisson(rows.abs()), "poisson draws random numbers that depend on the"),
        (
            lambda rows: torch.cat([noise((1, 1)) for _ in range(len(rows))]),
            "their number or their range depends on the rows",
        ),
    ],
    ids=["a permutation", "poisson", "a draw a row"],
)
def test_draws_that_depend_on_the_rows_are_not_compared(draw, words):
    def loss_fn(model, batch):
        return ours.mse(model, batch) + 0 * draw(batch[0]).sum()

    (line,) = stepped(loss_fn, af.accumulate(2), [[BATCH]])
    assert "could not be compared" in line
    assert words in line


@pytest.mark.parametrize("wrapped", [True, False], ids=["checkpointed", "plain"])
def test_recomputed_blocks_get_the_draws_of_their_forward(wrapped):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()).double()

        def forward(self, inputs):
            if wrapped:
                return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=False)
            return self.inner(inputs)

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(3, 1).double())
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
    state, step = af.build(af.accumulate(2)(plan), af.DistState())
    step(state, BATCH)
    assert "those of its parts agree, and their gradients" in af.explain(step, state)


def test_a_loss_of_the_whole_batch_by_collectives_is_not_warned_of():
    def run(state):
        def loss_fn(model, batch):
            outputs = af.gather(model(batch[0]), state)
            return (outputs - outputs.T).square().sum() + 1.0

        model = ours.regression_model()
        plan = af.wrap_ddp()(af.Plan(loss_fn, model, ours.sgd(model.parameters())))
        state, step = af.build(plan, state)
        step(state, ours.dealt_evenly([BATCH], 2)[state.rank][0])
        return af.explain(step, state).splitlines()[-1]

    for line in simulate(run, world_size=2):
        assert "it calls collectives, and is the same however rows are dealt to ranks" in line


def test_each_term_is_compared():
    def loss_fn(model, batch):
        return {"good": ours.mse(model, batch), "bad": summed(model, batch)}

    weight_fn = dict.fromkeys(("good", "bad"), af.count_samples)
    with pytest.warns(UserWarning, match="neither.*of the term 'bad' parts give"):
        stepped(loss_fn, af.accumulate(2), [[BATCH]], weight_fn=weight_fn)


def test_a_cut_with_a_part_that_is_not_finite_is_left_out():
    """The spread of one row is not a number; thirds and every second row have more of them."""

    def loss_fn(model, batch):
        outputs = model(batch[0])
        unknown = outputs.new_tensor(math.nan if len(outputs) == 3 else 0.0)
        return ours.mse(model, batch) + unknown

    (line,) = stepped(loss_fn, af.accumulate(2), [[BATCH]])
    assert "is a mean over the items of batch 1" in line
