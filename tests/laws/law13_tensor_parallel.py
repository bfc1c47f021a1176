"""Law 13: a model that `wrap_tp` splits over an axis, on any mesh, is one process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import language_model as lm
from tests.support import strategies as ours
from tests.support.runs_on_meshes import assert_one_process, train, train_by_hand

SQUARE = {"dp": 2, "tp": 2}
NORMS = {"blocks.*.first_norm": "sequence", "norm": "sequence"}
HEAD = {"head": ColwiseParallel(output_layouts=Replicate())}  # of a number of tokens that is odd
TABLE = {"embedding": "rowwise"}
PERCEPTRONS = {name: lm.STYLES[name] for name in ("blocks.*.up", "blocks.*.down")}
ATTENTION = {name: style for name, style in lm.STYLES.items() if name not in PERCEPTRONS}
MESHES = (
    SQUARE,
    {"dp": 1, "tp": 2},
    {"dp": 1, "tp": 4},
    {"dp": 1, "tp": 3},
    {"dp": 3, "tp": 2},
    {"dp": 2, "tp": 3},
    {"dp": 4, "tp": 2},
    {"dp": 2, "tp": 4},
    {"tp": 2, "dp": 3},  # of other groups
    {"tp": 4, "dp": 2},
)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views


@st.composite
def runs(draw):
    """Draw a model, a mesh, batches of masked tokens, and any split over `dp`, also empty parts."""
    mesh = draw(st.sampled_from(MESHES))
    is_tied = draw(st.booleans())
    options = {
        "num_heads": mesh["tp"] * draw(st.integers(1, 4 // mesh["tp"])),
        "depth": draw(st.integers(1, 2)),
        "is_tied": is_tied,
    }
    more = draw(st.sampled_from([NORMS, HEAD | TABLE] if is_tied else [NORMS, HEAD, TABLE]))
    styles = draw(st.sampled_from([lm.STYLES, ATTENTION, PERCEPTRONS])) | draw(
        st.sampled_from([{}, more])
    )
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=2))
    batches = lm.batches(*sizes, seed=draw(st.integers(0, 9)))
    parts = [draw(strategies.uneven_parts(size, mesh["dp"])) for size in sizes]
    return lm.language_model(**options), styles, mesh, batches, parts


UNEVEN = (
    lm.language_model(is_tied=False, depth=1),
    lm.STYLES | HEAD | TABLE | NORMS,
    SQUARE,
    lm.batches(5, 6, 3),
    [[2, 3], [0, 6], [3, 0]],
)


BOTH = pytest.mark.parametrize(
    "wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["wrap_ddp", "wrap_fsdp"]
)


def check(wrap, run, num_microbatches, make_optimizer=ours.sgd):
    # AdamW turns the rounding of a drawn gradient near zero into 1e-12 of the rate.
    model, styles, mesh, batches, sizes = run
    recipe = af.compose(wrap, af.wrap_tp(styles), af.accumulate(num_microbatches), af.clip(0.5))
    parts = ours.dealt(batches, sizes)
    options = {"loss_fn": lm.token_loss, "optimizer": make_optimizer}
    ranks = simulate(lambda state: train(state, model, parts, recipe, **options), mesh=mesh)
    assert_one_process(ranks, train_by_hand(model, batches, max_norm=0.5, **options))


@pytest.mark.parametrize(
    ("wrap", "make_optimizer"),
    [
        (af.wrap_ddp(), ours.adamw),
        pytest.param(af.wrap_fsdp(), ours.sgd, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_is_one_rank(wrap, make_optimizer):
    check(wrap, UNEVEN, num_microbatches=2, make_optimizer=make_optimizer)


@pytest.mark.slow
@BOTH
@ours.share(0.7)
@given(run=runs(), num_microbatches=st.integers(1, 4))
def test_any_mesh_of_two_to_eight_ranks_is_one_rank(wrap, run, num_microbatches):
    check(wrap, run, num_microbatches)
