"""A loss that is a sum and its count has the mean over the global batch, for every W and k."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.errors import LossError
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

WRAPS = {"wrap_ddp": af.wrap_ddp(), "wrap_fsdp": af.wrap_fsdp(blocks=torch.nn.Linear)}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()


def a_batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator).double()
    return inputs, inputs.sum(1, keepdim=True).sin()


def positives(model, batch):
    """All errors by the number of positives, which the forward decides; it may be 0."""
    out = model(batch[0])
    return (out - batch[1]).square().sum(), (out.detach() > 0.1).sum()


def two(model, batch):
    """Two terms with counts of their own, and a pair of a metric."""
    out = model(batch[0])
    chosen = out.detach() > 0
    terms = {
        "all": ((out - batch[1]).square().sum(), len(out)),
        "some": ((out - 1).abs()[chosen].sum(), chosen.sum()),
    }
    return terms, {"largest": (out.detach().sum(), len(out))}


def mean_of(loss_fn):
    """The loss of one process, written by hand."""

    def by_hand(model, batch):
        found = loss_fn(model, batch)
        found = found[0] if isinstance(found[0], dict) else found
        pairs = found.values() if isinstance(found, dict) else [found]
        return sum(total / count if count else 0 * total for total, count in pairs)

    return by_hand


def trained(state, loss_fn, parts, transform, **options):
    model = network()
    plan = transform(af.Plan(loss_fn, model, ours.sgd(model.parameters()), **options))
    state, step = af.build(plan, state)
    reports = []
    for batch in parts[state.rank]:
        state, report = step(state, batch)
        reports.append(report)
    return reports, ours.whole(model.state_dict())


def by_hand(loss_fn, batches):
    model, losses = network(), []
    optimizer = ours.sgd(model.parameters())
    for batch in batches:
        loss = mean_of(loss_fn)(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("loss_fn", "wrap"), [(positives, "wrap_fsdp"), (two, "wrap_ddp")])
@ours.share(0.1)
@given(data=st.data())
def test_ranks_and_microbatches_are_one_process(wrap, loss_fn, data):
    batches = [a_batch(data.draw(st.integers(2, 7)), seed) for seed in range(5, 8)]
    world_size = data.draw(strategies.world_sizes(3))
    sizes = [data.draw(strategies.uneven_parts(len(each[0]), world_size)) for each in batches]
    k = data.draw(st.integers(1, 3))
    losses, expected = by_hand(loss_fn, batches)
    parts = ours.dealt(batches, sizes)
    transform = af.compose(af.accumulate(k), WRAPS[wrap])
    ranks = simulate(lambda state: trained(state, loss_fn, parts, transform), world_size=world_size)
    for reports, actual in ranks:
        ours.assert_close(actual, expected)
        assert [float(each.loss) for each in reports] == pytest.approx(losses, rel=1e-12, abs=1e-12)


def test_counts_terms_and_metrics_are_reported():
    batch = a_batch(6)
    (report,), _ = trained(af.DistState(), two, [[batch]], af.wrap_ddp())
    out = network()(batch[0]).detach()
    assert report.weight == 6
    assert {name: float(each) for name, each in report.counts.items()} == {
        "all": 6,
        "some": int((out > 0).sum()),
    }
    assert float(report.metrics["largest"]) == pytest.approx(out.mean().item(), rel=1e-12)
    assert float(report.terms["all"] + report.terms["some"]) == pytest.approx(float(report.loss))


@pytest.mark.parametrize("loss_fn", [positives, two])
def test_evaluate_and_forward_divide_over_all_ranks_and_batches(loss_fn):
    batches = [a_batch(5, 1), a_batch(2, 2)]
    whole = tuple(map(torch.cat, zip(*batches, strict=True)))
    expected = mean_of(loss_fn)(network(), whole).item()

    def run(state):
        model = network()
        plan = af.Plan(
            loss_fn,
            model,
            ours.sgd(model.parameters()),
            finish={"perplexity": lambda means: means["loss"].exp()},
        )
        state, step = af.build(af.wrap_ddp()(plan), state)
        one = step.forward(state, af.shard_batch(whole, state))
        found = af.evaluate(step, state, [af.shard_batch(each, state) for each in batches])
        other = af.evaluate(
            step,
            state,
            [af.shard_batch(each, state) for each in batches],
            lambda model, batch: (
                (loss_fn(model, batch), None) if loss_fn is positives else loss_fn(model, batch)
            ),
        )
        return one.item(), found["loss"], other["loss"], found["perplexity"]

    for *losses, perplexity in simulate(run, world_size=3):
        assert losses == pytest.approx([expected] * 3, rel=1e-12)
        assert perplexity == pytest.approx(torch.tensor(expected).double().exp().item())


def test_finish_gives_functions_of_means_with_every_report():
    batch = a_batch(6)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def run(state):
        options = {"finish": {"rmse": lambda means: means["loss"].sqrt()}}
        parts = [[af.shard_batch(batch, state)]] * 3
        (report,), _ = trained(state, loss_fn, parts, af.wrap_ddp(), **options)
        return report.metrics["rmse"].item()

    expected = loss_fn(network(), batch).sqrt().item()
    assert simulate(run, world_size=2) == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("transform", "options", "text"),
    [
        (af.wrap_ddp(), {"weight_fn": lambda batch: 3}, "leave weight_fn out"),
        (af.wrap_ddp(), {"reduction": "sum"}, "leave reduction out"),
        (af.local_sgd(every=2), {}, "use wrap_ddp"),
    ],
)
def test_what_knows_no_counts_refuses_them_on_all_ranks(transform, options, text):
    def run(state):
        model = network()
        plan = af.Plan(positives, model, ours.sgd(model.parameters()), **options)
        state, step = af.build(transform(plan), state, check_loss=False)
        with pytest.raises(LossError, match=text):
            step(state, af.shard_batch(a_batch(6), state))
        return True

    assert simulate(run, world_size=2) == [True, True]


def test_virtual_ranks_divide_one_sum_and_refuse_terms():
    batches = [a_batch(4, seed) for seed in range(3)]
    losses, expected = by_hand(positives, batches)

    def run(state):
        parts = [[af.shard_batch(each, state) for each in batches]] * 2
        with pytest.raises(LossError, match="got 2 terms"):
            trained(state, two, parts, af.reproducible(num_virtual_ranks=2))
        return trained(state, positives, parts, af.reproducible(num_virtual_ranks=2))

    for reports, actual in simulate(run, world_size=2):
        ours.assert_close(actual, expected)
        assert [float(each.loss) for each in reports] == pytest.approx(losses, rel=1e-12)


def test_terms_that_ranks_may_compute_again_are_refused():
    def run(state):
        transform = af.compose(af.accumulate("auto"), af.wrap_ddp())
        with pytest.raises(LossError, match="give accumulate a number"):
            trained(state, two, [[af.shard_batch(a_batch(6), state)]] * 2, transform)

    simulate(run, world_size=2)


def drawn(model, batch):
    """Terms of a model that draws and writes: a forward more must change neither."""
    out = model(batch[0])
    chosen = out.detach() > 0
    return {"all": (out.square().sum(), len(out)), "some": (out[chosen].sum(), chosen.sum())}


@pytest.mark.parametrize(
    ("loss_fn", "num_calls"), [(positives, 3), (two, 3 + 2)], ids=["one term", "several terms"]
)
def test_several_terms_run_all_micro_batches_but_the_first_once_more(loss_fn, num_calls):
    calls = []

    def counted(model, batch):
        calls.append(len(batch[0]))
        return loss_fn(model, batch)

    model = network()
    plan = af.Plan(counted, model, ours.sgd(model.parameters()))
    state, step = af.build(af.accumulate(3)(plan), af.DistState(), checks=())
    state, _ = step(state, a_batch(6))
    calls.clear()
    step(state, a_batch(6))
    assert calls == [2] * num_calls


def test_a_pass_for_counts_leaves_draws_and_buffers_as_they_were():
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Dropout(),
            torch.nn.Linear(4, 1),
        ).double()

    inputs = a_batch(8)[0]
    by_hand = model()
    torch.manual_seed(1)
    found = [drawn(by_hand, (each,)) for each in inputs.split(4)]
    counts = {name: sum(each[name][1] for each in found) for name in ("all", "some")}
    sum(each[name][0] / counts[name] for each in found for name in counts).backward()

    ours_model = model()
    plan = af.Plan(drawn, ours_model, torch.optim.SGD(ours_model.parameters(), lr=0.0))
    state, step = af.build(af.accumulate(2)(plan), af.DistState(), check_loss=False)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="BatchNorm"):  # each micro-batch has its own statistics
        _, grads, _ = step.grads(state, (inputs,))
    for one, other in zip(grads.values(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-12, atol=1e-12)
    for one, other in zip(ours_model.buffers(), by_hand.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_loss_scale_has_its_counts_before_the_backward(wrap):
    scale = 2.0**10

    def scaled(plan):

        def start(state):
            return replace(state, scaler=af.extend.LossScale.start(scale))

        return replace(plan, init_state=(start,))

    batches = [a_batch(5, seed) for seed in range(3)]
    _, expected = by_hand(positives, batches)
    parts = ours.dealt(batches, [[5, 0], [2, 3], [5, 0]])
    recipe = af.compose(scaled, af.accumulate(2), WRAPS[wrap])
    for _, actual in simulate(lambda state: trained(state, positives, parts, recipe), world_size=2):
        ours.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda model, batch: (model(batch[0]).square().sum(), 6), "count of the items"),
        (lambda model, batch: (model(batch[0]).square().sum().sqrt(), len(batch[0])), "add up"),
    ],
)
def test_sums_and_counts_that_do_not_add_up_are_warned_of(loss_fn, text):
    with pytest.warns(UserWarning, match=text):
        trained(af.DistState(), loss_fn, [[a_batch(12)]], af.accumulate(2))


def test_a_mean_beside_a_count_is_refused():
    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1]), len(batch[0])

    with pytest.raises(LossError, match="got a mean"):
        trained(af.DistState(), loss_fn, [[a_batch(12)]], af.accumulate(2))
