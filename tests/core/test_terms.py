"""Terms of a loss with weights of their own: what a plan, a loss and a transform may be given."""

import re

import pytest
from torch import nn

import accel_fn as af
from accel_fn.errors import ArgumentError, ArgumentTypeError, BatchError, LossError, PlanError
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.several_terms import FIXED, WEIGHTS, Detector, a_batch, terms

NAMES = r"step: loss_fn must return terms ['box', 'cls'], as weight_fn names them, got "


def plan(loss_fn=terms, weight_fn=WEIGHTS, **options):
    model = Detector()
    return af.Plan(loss_fn, model, ours.sgd(model.parameters()), weight_fn, **options)


def trained(state, loss_fn, *transforms, weight_fn=WEIGHTS):
    """Train on one batch of four samples a rank; return the report."""
    state, step = af.build(af.compose(*transforms)(plan(loss_fn, weight_fn)), state)
    return step(state, a_batch([1, 0, 2, 0], [0, 1, 1, 0]))[1]


@pytest.mark.parametrize(
    ("weight_fn", "error", "text"),
    [
        (
            {},
            ArgumentError,
            'must name at least one term, and none "loss", which is their sum, got []',
        ),
        ({"loss": len}, ArgumentError, "none \"loss\", which is their sum, got ['loss']"),
        ({1: len}, ArgumentTypeError, "weight_fn must name terms by strings, got 1"),
        (
            {"cls": 1},
            ArgumentTypeError,
            "or a mapping of such by the names of terms, got {'cls': 1}",
        ),
    ],
)
def test_a_plan_refuses_other_mappings(weight_fn, error, text):
    with pytest.raises(error, match=re.escape(text)):
        plan(weight_fn=weight_fn)


def test_a_plan_refuses_a_sum_of_terms():
    text = "reduction must be \"mean\" where weight_fn is a mapping, got 'sum'; return the mean of each"
    with pytest.raises(ArgumentError, match=text):
        plan(reduction="sum")


def test_a_plan_copies_the_mapping_and_prints_it():
    given = {"cls": af.count_labels("labels"), "box": af.count_samples}
    made = plan(weight_fn=given)
    given.clear()
    assert made.terms == ("cls", "box")
    assert "weight_fn={'cls': count_labels(path=('labels',)" in repr(made)
    assert "'box': count_samples}" in repr(made)


def test_a_weight_is_refused_by_the_name_of_its_term():
    text = re.escape("Plan: weight_fn['box'] must return a finite count >= 0, got -1")
    with pytest.raises(BatchError, match=text):
        trained(af.DistState(), terms, weight_fn={**WEIGHTS, "box": lambda batch: -1})


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.reproducible(2)])
def test_a_batch_that_one_rank_cannot_count_is_refused_on_all(wrap):
    texts = {}

    def run(state):
        def boxes(batch):
            return -1 if state.rank else batch[2].sum()

        with pytest.raises(BatchError) as raised:
            trained(state, terms, wrap, weight_fn={**WEIGHTS, "box": boxes})
        texts[state.rank] = str(raised.value)

    simulate(run, world_size=2)
    assert "must return a finite count" in texts[1]
    assert "must be able to count its batch" in texts[0]


class Output(dict):
    """As a model of transformers returns it: a dict with attributes."""

    __getattr__ = dict.__getitem__


def missing(model, batch):
    return {"cls": terms(model, batch)["cls"]}


def other(model, batch):
    found = terms(model, batch)
    return {**found, "mask": found["cls"]}


def one(model, batch):
    return terms(model, batch)["cls"]


def number(model, batch):
    return {**terms(model, batch), "box": 0.0}


def rows(model, batch):
    return {**terms(model, batch), "box": model(batch[0])[1]}


def output(model, batch):
    return Output(loss=terms(model, batch)["cls"], logits=model(batch[0])[0])


BROKEN = [
    (missing, f"{NAMES}['cls']; return all for every batch"),
    (other, f"{NAMES}['box', 'cls', 'mask']; return all for every batch"),
    (one, f"{NAMES}torch.float64 []; return a dict of these, or give one weight_fn"),
    (output, f"{NAMES}['logits', 'loss']; give its .loss a name"),
    (
        number,
        "return term 'box' as a 0-dim floating-point tensor, the mean over its items, got float",
    ),
    (
        rows,
        "return term 'box' as a 0-dim floating-point tensor, the mean over its items, got torch",
    ),
]


@pytest.mark.parametrize(("loss_fn", "text"), BROKEN)
def test_a_loss_of_other_terms_is_refused(loss_fn, text):
    with pytest.raises(LossError, match=re.escape(text)):
        trained(af.DistState(), loss_fn)


def refused(loss_fn, wrap, first=0):
    """Return the error of each of two ranks, of which one has other terms from a step on."""
    errors = {}

    def run(state):
        steps = []

        def of_rank(model, batch):
            steps.append(True)
            is_broken = state.rank == 1 and sum(steps) > first
            return (loss_fn if is_broken else terms)(model, batch)

        state, step = af.build(wrap(plan(of_rank)), state, check_loss=False)
        for _ in range(first):
            state, _ = step(state, a_batch([1, 2], [1, 1]))
        with pytest.raises(LossError) as raised:
            step(state, a_batch([1, 2], [1, 1]))
        errors[state.rank] = str(raised.value)

    simulate(run, world_size=2)
    return errors


@pytest.mark.parametrize(
    ("loss_fn", "first", "wrap"),
    [
        (missing, 0, af.wrap_ddp()),
        (one, 1, af.wrap_ddp()),
        (number, 0, af.reproducible(2)),
        (output, 1, af.reproducible(2)),
    ],
)
def test_terms_that_are_other_on_one_rank_are_refused_on_all(loss_fn, first, wrap):
    errors = refused(loss_fn, wrap, first)
    assert "step: loss_fn must return term" in errors[1]
    others = "must return the same terms and metrics in every step and on every rank, got others on"
    assert (others if first else errors[1]) in errors[0]


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (other, "step: loss_fn must return terms"),
        (missing, "let every rank's loss reach the same parameters"),
    ],
)
def test_wrap_fsdp_refuses_terms_that_are_other_on_one_rank_on_all(loss_fn, text):
    errors = refused(loss_fn, af.wrap_fsdp(blocks=nn.Linear))
    assert all(text in errors[rank] for rank in range(2))


def test_a_dict_without_a_mapping_of_weights_is_refused():
    text = "0-dim floating-point tensor, got dict; give a weight_fn for each, Plan(..., weight_fn={name: "
    with pytest.raises(LossError, match=re.escape(text)):
        trained(af.DistState(), terms, weight_fn=af.count_samples)


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (
            {"error": 0.5},
            "return metric 'error' as a pair (sum, count), since terms are means over ",
        ),
        ({"box": (1.0, 2)}, "name metrics by strings other than \"loss\" and the terms, got 'box'"),
    ],
)
def test_metrics_beside_terms_are_pairs_with_names_of_their_own(metrics, text):
    with pytest.raises(LossError, match=re.escape(text)):
        trained(af.DistState(), lambda model, batch: (terms(model, batch), metrics))


def test_evaluate_refuses_other_terms():
    state, step = af.build(plan(missing), af.DistState())
    with pytest.raises(
        LossError, match=re.escape("evaluate: loss_fn must return terms ['box', 'cls']")
    ):
        af.evaluate(step, state, [FIXED[0]])
    with pytest.raises(
        LossError, match=re.escape("evaluate: metric_fn must return terms ['box', ")
    ):
        af.evaluate(step, state, [FIXED[0]], lambda model, batch: (missing(model, batch), {}))
    with pytest.raises(LossError, match="evaluate: metric_fn must return metric 'error' as a pair"):
        af.evaluate(
            step, state, [FIXED[0]], lambda model, batch: (terms(model, batch), {"error": 1.0})
        )


@pytest.mark.parametrize(
    ("transform", "world_size", "text"),
    [
        (
            af.local_sgd(1),
            2,
            "local_sgd must train on one mean, by whose items it averages ranks, got cls and",
        ),
        (
            af.wrap_ddp(static_graph=True),
            2,
            "static_graph=True) must not be combined with a weight_fn of sev",
        ),
        (
            af.compiled(scope="step"),
            1,
            'compiled(scope="step") must have one mean loss, since its graph can',
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_in_build(transform, world_size, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        simulate(lambda state: af.build(transform(plan()), state), world_size=world_size)


def test_ranks_with_other_terms_are_refused():
    def run(state):
        names = {"cls": len, "mask" if state.rank else "box": len}
        af.build(af.wrap_ddp()(plan(weight_fn=names)), state)

    with pytest.raises(RuntimeError, match="build: plan must be the same on every rank"):
        simulate(run, world_size=2)
