"""The compiler pass that keeps the factor of an addition: what it rewrites, and what it leaves
alone."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from accel_fn.core.add_alpha import Addends
from accel_fn.core.torch_compile import compile_function, options_of
from tests.support.compilers import compiles


def decayed(left, right, weight):
    """Add a weight decay to a gradient, as an optimizer does."""
    return (left @ right).add(weight, alpha=0.1)


def passed(fn, *inputs):
    traced = make_fx(fn, tracing_mode="fake")(*inputs)
    Addends()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator).double() for _ in range(3)]


def test_a_number_beside_an_addend_becomes_a_product():
    traced = passed(decayed, *matrices())
    assert not any("alpha" in node.kwargs for node in traced.graph.nodes)
    product = next(n for n in traced.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    assert product.meta["val"].shape == (4, 4)
    torch.testing.assert_close(traced(*matrices()), decayed(*matrices()))


@pytest.mark.parametrize("fn", [torch.add, lambda a, b: a.add(2, alpha=3)])
def test_other_sums_are_left_alone(fn):
    first, second, _ = matrices()
    before = [node.target for node in make_fx(fn)(first, second).graph.nodes]
    assert [node.target for node in passed(fn, first, second).graph.nodes] == before


@compiles
def test_what_is_added_to_a_matrix_product_keeps_its_number():
    compiled = compile_function(decayed, fullgraph=True, options=options_of("default"))
    torch.testing.assert_close(compiled(*matrices()), decayed(*matrices()))


def test_a_pass_of_the_user_s_stays():
    own = Addends()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=own):
        assert "post_grad_custom_pre_pass" not in options_of("default")
