"""draw: a rank's rows of random numbers for a global batch."""

from dataclasses import replace

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate

HERE = af.DistState(seed=3, step=5)


def normal(generator):
    return torch.randn(4, 2, generator=generator)


@pytest.mark.parametrize("other", [{"seed": 4}, {"step": 6}, {"call": 1}], ids=str)
def test_every_part_of_a_position_gives_numbers_of_its_own(other):
    assert not torch.equal(af.draw(normal, HERE), af.draw(normal, replace(HERE, **other)))


def test_a_name_gives_numbers_of_its_own():
    assert not torch.equal(af.draw(normal, HERE), af.draw(normal, HERE, "noise"))
    assert not torch.equal(af.draw(normal, HERE, "a"), af.draw(normal, HERE, "b"))


def test_a_draw_repeats_and_leaves_the_generators_of_the_process_alone():
    before = torch.get_rng_state()
    first = af.draw(normal, HERE, "noise")
    assert torch.equal(first, af.draw(normal, HERE, "noise"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_of_the_usual_loop_draws_the_numbers_that_it_drew_before():
    """Runs resume with them, so the seed of a draw must not change."""
    drawn = af.draw(lambda g: torch.randint(1000, (4,), generator=g), HERE, "noise")
    assert drawn.tolist() == [635, 950, 920, 903]


def test_a_tree_is_cut_with_the_tensors_in_it():
    def pair(generator):
        return {"noise": normal(generator), "time": torch.rand(4, generator=generator)}

    state = replace(HERE, rank=1, world_size=3)
    (whole, part) = (af.draw(pair, each) for each in (HERE, state))
    for name, rows in part.items():
        assert torch.equal(rows, whole[name][2:3])


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows_may_need_no_numbers(num_rows):
    drawn = af.draw(lambda generator: torch.randperm(num_rows, generator=generator), HERE)
    assert len(drawn) == num_rows


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (3, TypeError, r"fn must be a function of a generator, got 'int'; such as lambda g: "),
        (
            lambda _: None,
            ValueError,
            "fn must return tensors of one number of rows, got 'NoneType'",
        ),
        (
            lambda g: (torch.rand(3, generator=g), torch.rand(2, 1, generator=g)),
            ValueError,
            r"fn must return tensors of one number of rows, got \[\(3,\), \(2, 1\)\]",
        ),
        (
            lambda _: torch.randn(4, 2),
            ValueError,
            "fn must draw from the generator that it is given, got 'none of its numbers'; "
            r"torch.randn\(..., generator=g\)",
        ),
    ],
    ids=["no function", "no rows", "two numbers of rows", "a generator of its own"],
)
def test_a_function_that_does_not_draw_rows_is_refused(fn, error, text):
    with pytest.raises(error, match=f"^draw: {text}"):
        af.draw(fn, HERE)


def test_arguments_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match=r"^draw: name must be a string, got 3$"):
        af.draw(normal, HERE, 3)
    with pytest.raises(TypeError, match=r"^draw: state must be a DistState, got 'function'"):
        af.draw(HERE, normal)


def noise_of(generator, num_rows):
    return {"noise": torch.randn(num_rows, 2, generator=generator), "scale": torch.tensor(2.0)}


@pytest.mark.parametrize("sizes", [[3, 2], [0, 1, 4], [2, None], [5]])
def test_ranks_draw_as_many_rows_as_their_batches_have(sizes):
    num_rows = sum(each or 0 for each in sizes)
    whole = af.draw(lambda generator: noise_of(generator, num_rows), HERE, "n")["noise"]

    def run(state):
        size = sizes[state.rank]
        rows = None if size is None else (torch.zeros(size, 3), torch.zeros(size))
        state = replace(state, seed=HERE.seed, step=HERE.step)
        return af.draw(noise_of, state, "n", rows=rows)["noise"]

    found = simulate(run, world_size=len(sizes))
    assert [len(each) for each in found] == [each or 0 for each in sizes]
    assert torch.cat(found).equal(whole)


def test_rows_that_cannot_be_counted_are_refused_on_every_rank():
    def run(state):
        with pytest.raises(ValueError, match=r"count_samples: batch|got others on another rank"):
            af.draw(noise_of, state, rows={"size": 3} if state.is_main else torch.zeros(2, 3))

    simulate(run, world_size=2)


def test_another_number_of_rows_than_the_batch_has_is_refused():
    with pytest.raises(ValueError, match="return as many rows as it is given, 3, got '4 rows'"):
        af.draw(lambda generator, _: normal(generator), HERE, rows=torch.zeros(3))
