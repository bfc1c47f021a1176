"""The compiler pass that keeps numbers in memory: where it applies, and that it changes nothing
else."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from accel_fn.transforms.compile.pass_hoist_scalars import Hoisting
from tests.support.compilers import compiles

KEPT = torch.ops.aten.as_strided.default


def decayed(tensor, count):
    """Compute from the step count what Adam computes."""
    return tensor / (1 - 0.9**count) + 1.0


def passed(fn, *inputs, mode="real"):
    traced = make_fx(fn, tracing_mode=mode)(*inputs)
    Hoisting()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def kept(traced):
    return [node for node in traced.graph.nodes if node.target is KEPT]


@pytest.mark.parametrize(("size", "count"), [(1024, 1), (1023, 0)])
def test_numbers_of_large_tensors_are_kept(size, count):
    inputs = torch.randn(size), torch.tensor(3.0, dtype=torch.float64)
    traced = passed(decayed, *inputs)
    assert len(kept(traced)) == count
    assert torch.equal(traced(*inputs), decayed(*inputs))


def test_only_the_last_number_before_a_large_tensor_is_kept():
    traced = passed(decayed, torch.randn(2048), torch.tensor(3.0))
    [node] = kept(traced)
    [user] = node.users
    assert user.target is torch.ops.aten.div.Tensor


def test_inputs_and_constants_are_not_kept():
    def fn(tensor, number):
        return tensor * number + torch.full((), 2.0)

    assert not kept(passed(fn, torch.randn(2048), torch.tensor(3.0)))


def test_a_size_that_is_not_settled_is_left_alone():
    traced = passed(decayed, torch.randn(2048), torch.tensor(3.0), mode="symbolic")
    assert not kept(traced)


def test_the_pass_has_a_name_for_caches():
    assert Hoisting().uuid() == Hoisting().uuid() is not None


@compiles
def test_a_kept_number_leaves_the_loop():
    """With the pass, the power is computed before the loop over the tensor."""
    inputs = torch.randn(2048), torch.tensor(3.0, dtype=torch.float64)
    in_loop = []
    for own in ({}, {"post_grad_custom_post_pass": Hoisting()}):
        options = {"fx_graph_cache": False, **own}
        compiled = torch.compile(decayed, fullgraph=True, options=options)
        result, [code] = run_and_get_code(compiled, *inputs)
        assert torch.allclose(result, decayed(*inputs))
        _, loop = code.split("2048L); x0+=", 1)
        in_loop.append("pow(" in loop)
    assert in_loop == [True, False]
