"""Refuse a model whose code computes something else after its layers are split over ranks.

A layer with a part of its columns returns a plain tensor of fewer features, and code may take this
tensor for a whole output: `q.view(b, t, num_heads, -1)` then makes as many heads as before, each
with fewer features. No shape is wrong, but the result differs.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from accel_fn.core.batch import map_tensors, tensors_of
from accel_fn.core.dtensor import is_sharded, whole
from accel_fn.core.primitives import exchange
from accel_fn.core.restored import restored_random
from accel_fn.core.state import DistState
from accel_fn.core.torch_internals import gradients_of
from accel_fn.core.warn import warn_user
from accel_fn.errors import PlanError
from accel_fn.parallel.same_on_all_ranks import fingerprints
from accel_fn.parallel.tp.patterns import starred

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_NEVER = ("torch.distributed.fsdp", "accel_fn.parallel.fsdp", __name__)
"""Packages whose hooks are off in the split and in the unsplit run. FSDP has nothing to gather
there, and the hooks of this module must not record these runs."""
_STYLES = ("torch.distributed.tensor", "accel_fn.parallel.tp", "transformers.distributed")
"""Packages whose hooks and replaced forwards belong to split layers, and are off in the unsplit
run."""
_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-3}
_BOUND_OF_HALVES = 0.05
"""How far outputs may differ, as a fraction of the largest output, for each dtype of a run.
Wrong heads may change little: with small inputs, every head attends to all tokens almost
equally. So blocks are compared in float64. There a sum in another order differs by 1e-15, and a
softmax or a norm that the code computes in float32 by 1e-7. Code that fails in float64 runs in
the dtype of the model. There the bounds allow the rounding of products in TF32, with 10 bits,
and in bfloat16, with 8 bits. Autocast does not convert float64."""
_REPAIR = (
    "take sizes from the tensors, as in q.view(b, t, -1, head_dim), follow each colwise layer by a "
    "rowwise one"
)
_REPAIR_OF_GRADIENTS = (
    "split what is used between a colwise layer and the rowwise one after it, give a norm of heads there "
    "SequenceParallel(use_local_output=True)"
)
_Convert = Callable[[Tensor], Tensor]
_SPREAD = 0.05
"""The relative size of the changes that `_varied` makes to vectors. It is small, since variances,
for example, must stay positive."""


def compare_blocks(
    model: nn.Module, styled: Collection[str], state: DistState, axis: str = "tp"
) -> None:
    """In the first forward, compare each kind of block with split layers to the unsplit block.

    A block is the smallest module around a split layer whose inputs are equal on all ranks along
    the axis, and whose output has the same shape as with whole layers. Among blocks of one class
    with parameters of the same shapes, the first one is compared, in evaluation mode: by the first
    floating-point tensor that it returns, and by the gradients of a sum of its elements. A block
    that draws random numbers in evaluation mode, or that cannot run a second time, is not compared,
    and the main rank warns about it.

    Args:
        model: its layers are split; compiled modules inside it have not run yet.
        styled: the names of the modules that have a parallel style.
        state: the state of all ranks.
        axis: the axis that the layers are split over.

    Raises:
        PlanError: from the forward, on all ranks along the axis, if a block has another output or
            other gradients than with whole layers.

    Cost: for each kind of block, once, two forwards and backwards, and twice the memory and the
    gather of the block's parameters in float64. Layers that no smaller block holds are compared in
    the whole model. Later steps cost nothing.
    """
    if styled and state.along(axis).world_size > 1:
        _Comparison(model, styled, state, axis)


class _Comparison:
    """Compares blocks in the first forward, by hooks, until every split layer is in a compared block."""

    def __init__(
        self, model: nn.Module, styled: Collection[str], state: DistState, axis: str
    ) -> None:
        self._model, self._open = model, set(styled)
        self._state, self._axis, self._along = state, axis, state.along(axis)
        self._kinds: dict[object, bool] = {}
        """Whether modules of a kind are blocks; a kind is added when its first module has run."""
        self._handles: list[RemovableHandle] = []
        for name in dict.fromkeys(outer for each in styled for outer in _outward(each)):
            self._watch(name, model.get_submodule(name))

    def _watch(self, name: str, module: nn.Module) -> None:
        calls: list[Any] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Copy the containers of the call too: the block may change them, as attention changes a
            # cache of keys.
            is_due = self._layers(name) and _kind(name, module) not in self._kinds
            calls[:] = [_copied((args, kwargs), _detached)] if is_due else []

        def after(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            kind = _kind(name, module)
            for call in calls:
                # Look at the output of a split layer too. If it is only a part of the features, the
                # layer is not a block, and needs no second run.
                seen = (call, output if name in self._open else ())
                is_new = bool(self._layers(name)) and self._are_whole(module, tensors_of(seen))
                self._kinds[kind] = is_new and self._is_block(name, module, call)
            if self._kinds.get(kind):
                self._open -= self._layers(name)
            # Keep the hooks of a block that differs: if the program catches the error and
            # continues, the next forward raises again.
            for handle in handles if self._open else self._handles:
                handle.remove()
            calls.clear()

        handles = (
            # This hook runs before the hooks of styles, which change the input.
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
        self._handles += handles

    def _layers(self, name: str) -> set[str]:
        """Return the split layers inside a module that no comparison has covered yet."""
        return {each for each in self._open if name in _outward(each)}

    def _are_whole(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors are equal on all ranks, and not constant.

        Constant tensors may be equal although each is only a part of a tensor.
        """
        values = [whole(each) for each in tensors]
        is_constant = module is not self._model and _is_constant(values)
        own = fingerprints(values) if values else [], is_constant
        return _are_equal(exchange(own, self._along, "wrap_tp")) and not is_constant

    def _is_block(self, name: str, module: nn.Module, call: Any) -> bool:
        """Return whether the module is a block; if so, raise unless its unsplit run agrees."""
        found = self._compared(module, call, torch.float64)
        if any(each.failure for each in found):
            found = self._compared(module, call, None)
        failures = [each.failure for each in found if each.failure]
        if failures:
            self._warn(name, module, failures[0])
            return True
        if module is not self._model and not all(each.is_of_size for each in found):
            return False
        worst = max(found, key=lambda each: each.difference / each.bound)
        if worst.difference > worst.bound:
            self._refuse(name, module, worst)
        return True

    def _compared(self, module: nn.Module, call: Any, dtype: torch.dtype | None) -> list[_Outcome]:
        """Run a module with split and with whole layers; return the outcome of each rank of the axis."""
        try:
            own = _compare(module, call, dtype, self._axis, self._state.device)
        except Exception as error:
            # Catch every error that the user's code may raise: otherwise the other ranks would wait
            # for this rank in the exchange below.
            own = _Outcome(failure=f"{type(error).__name__}: {error}")
        return exchange(own, self._along, "wrap_tp")

    def _warn(self, name: str, module: nn.Module, failure: str) -> None:
        if self._state.is_main:
            warn_user(
                f"wrap_tp: {_called(name, module)} should run a second time in evaluation mode, to be "
                f"compared with its layers unsplit, got {failure[:300]}; train a few steps with and "
                "without wrap_tp and compare the losses"
            )

    def _refuse(self, name: str, module: nn.Module, worst: _Outcome) -> None:
        layers = sorted(self._layers(name))
        names = ", ".join(layers[:4]) + (", ..." if len(layers) > 4 else "")
        rule, repair = (
            ("have the same gradients", _REPAIR_OF_GRADIENTS)
            if worst.is_gradient
            else ("return the same", _REPAIR)
        )
        raise PlanError(
            f"wrap_tp: {_called(name, module)} must {rule} with its layers split over "
            f"{self._along.world_size} ranks as with whole ones, got {worst.text}; {repair}, or "
            f"leave out the styles of {names}"
        )


class _Outcome(NamedTuple):
    """The result of one comparison on one rank."""

    is_of_size: bool = True
    """Whether the outputs of the split and the unsplit block have the same shape."""
    difference: float = 0.0
    bound: float = 1.0
    text: str = ""
    failure: str = ""
    is_gradient: bool = False
    """Whether gradients differ, while the outputs agree."""


def _compare(
    module: nn.Module, call: Any, dtype: torch.dtype | None, axis: str, device: torch.device
) -> _Outcome:
    """Run a block split and unsplit, and return how much the results differ.

    If a dtype is given, parameters and inputs are converted to it.
    """

    def converted(tensor: Tensor) -> Tensor:
        is_moved = dtype is not None and tensor.is_floating_point()
        return tensor.detach().to(dtype if is_moved else tensor.dtype, copy=True)

    def run(
        values: Mapping[str, Tensor], packages: tuple[str, ...], take: _Convert
    ) -> list[Tensor]:
        leaves = [each for each in values.values() if each.requires_grad]

        def given(tensor: Tensor) -> Tensor:
            leaf = take(converted(tensor)).requires_grad_(tensor.requires_grad)
            if leaf.requires_grad:
                leaves.append(leaf)
            # Pass a copy, since code may write to its input.
            return leaf.clone()

        with torch.enable_grad(), _without_hooks(module, packages):
            named = {f"block.{name}": each for name, each in values.items()}
            found: list[Tensor] = functional_call(
                _Block(module, leaves), named, _copied(call, given)
            )
        return [whole(each) for each in found]

    def unsplit_run() -> list[Tensor]:
        values = {name: each.requires_grad_(is_trained[name]) for name, each in parameters.items()}
        values |= {name: whole(converted(each)) for name, each in buffers.items()}
        return run(values, _NEVER + _STYLES, whole)

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(restored_random(device))
        stack.enter_context(_evaluated(module))
        buffers = dict(module.named_buffers())
        own = dict(module.named_parameters())
        is_trained = {name: each.requires_grad for name, each in own.items()}
        drawn = torch.Generator(device).manual_seed(0)
        parameters = {n: _varied(whole(converted(each)), drawn) for n, each in own.items()}
        cut = {n: _cut_like(each, own[n], axis) for n, each in parameters.items()}
        cut = {n: each.detach().requires_grad_(is_trained[n]) for n, each in cut.items()}
        cut |= {name: converted(each) for name, each in buffers.items()}
        split, unsplit = run(cut, _NEVER, lambda each: each), unsplit_run()
        bound = _bound([split[0], unsplit[0], *parameters.values()], dtype, device)
        if split[0].shape != unsplit[0].shape:
            text = f"the shape {[*split[0].shape]} instead of {[*unsplit[0].shape]}"
            return _Outcome(False, float("inf"), bound, text)
        found = _differences(split, unsplit)
        if max(found) > bound and max(_differences(unsplit_run(), unsplit)) > bound:
            return _Outcome(failure="another output each time")
    trained = [name for name in parameters if is_trained[name]]
    return _worst(found, bound, trained)


def _worst(found: Sequence[float], bound: float, trained: Sequence[str]) -> _Outcome:
    """Return the difference of the outputs if it is too large, else the largest one of a gradient."""
    if found[0] > bound or len(found) == 1:
        text = f"outputs that differ by {found[0]:.2g} of the largest"
        return _Outcome(True, found[0], bound, text)
    worst = max(found[1:])
    of = [*trained, *["its input"] * len(found)][found.index(worst, 1) - 1]
    text = f"gradients of {of} that differ by {worst:.2g} of the largest"
    return _Outcome(True, worst, bound, text, is_gradient=True)


def _bound(tensors: Iterable[Tensor], dtype: torch.dtype | None, device: torch.device) -> float:
    dtypes = {dtype} if dtype else {each.dtype for each in tensors if each.is_floating_point()}
    if dtype is None and torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max(_BOUNDS.get(each, _BOUND_OF_HALVES) for each in dtypes)


def _differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the largest relative difference of the outputs, and of each gradient."""
    # All gradients share one scale. Some of them are zero except for rounding, such as the gradient
    # of a key's bias, and have no useful scale.
    scales = [_largest(expected[:1])] + [_largest(expected[1:])] * (len(expected) - 1)
    return [
        _difference(each, other, scale)
        for each, other, scale in zip(found, expected, scales, strict=True)
    ]


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest finite absolute value; a tiny number if all are zero."""
    largest = [float(each.nan_to_num(0, 0, 0).abs().max()) for each in tensors if each.numel()]
    return max([torch.finfo(torch.float64).tiny, *largest])


def _difference(found: Tensor, expected: Tensor, scale: float) -> float:
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    apart = (found - expected).abs().masked_fill(same, 0).nan_to_num(nan=float("inf"))
    return float(apart.max() / scale) if apart.numel() else 0.0


def _varied(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Change the values of a parameter at random, in the same way on all ranks.

    The changes are so small that activations keep their scale.
    """
    # With the initial values, a block may hide its faults: its last layer may be zero, or all
    # weights may be one, or so small that every head attends to all tokens equally.
    if not tensor.is_floating_point():
        return tensor
    drawn: Tensor = torch.empty_like(tensor).normal_(generator=generator)
    if tensor.ndim > 1:
        return tensor + drawn / math.sqrt(tensor.size(-1))
    return torch.where(tensor == 0, _SPREAD * drawn, tensor * (1 + _SPREAD * drawn))


def _is_constant(tensors: Iterable[Tensor]) -> bool:
    """Return whether each element of the first floating-point tensor equals its first one, or is NaN."""
    first = next((each for each in tensors if each.is_floating_point()), None)
    if first is None:
        return False
    return not first.numel() or bool(((first == first.flatten()[0]) | first.isnan()).all())


def _are_equal(every: Sequence[object]) -> bool:
    return all(each == every[0] for each in every)


def _cut_like(tensor: Tensor, like: Tensor, axis: str) -> Tensor:
    """Cut a whole tensor along one axis of a mesh as `like` is cut, and along no other axis."""
    names = like.device_mesh.mesh_dim_names or () if is_sharded(like) else ()
    if not is_sharded(like) or axis not in names:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    along = like.device_mesh if len(names) == 1 else like.device_mesh[axis]
    placement = like.placements[names.index(axis)]
    return distribute_tensor(tensor, along, [placement], src_data_rank=None)


class _Block(nn.Module):
    """Returns a block's first output, and gradients of a weighted sum of its elements.

    The backward runs inside this forward: checkpoints run the block's forward again in the
    backward, and must see the same parameters.
    """

    def __init__(self, block: nn.Module, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self.block, self.leaves = block, leaves

    def forward(self, args: Any, kwargs: Any) -> list[Tensor]:
        output = _first(tensors_of(self.block(*args, **kwargs)))
        if is_sharded(output):
            output = output.full_tensor()
        if not output.requires_grad:
            return [output]
        drawn = torch.Generator(output.device).manual_seed(0)
        weights = torch.empty_like(output).normal_(generator=drawn)
        found = gradients_of(output, self.leaves, weights)
        pairs = zip(found, self.leaves, strict=True)
        return [output, *(torch.zeros_like(leaf) if each is None else each for each, leaf in pairs)]


def _first(tensors: Iterable[Tensor]) -> Tensor:
    return next((each for each in tensors if each.is_floating_point()), torch.zeros(()))


def _outward(name: str) -> list[str]:
    """Return the names of a module and of the modules around it, from the inside out."""
    parts = name.split(".") if name else []
    return [".".join(parts[:size]) for size in range(len(parts), -1, -1)]


def _kind(name: str, module: nn.Module) -> object:
    """Return a key that is equal for modules of one class at the same place in several blocks."""
    shapes = tuple((path, each.shape) for path, each in module.named_parameters())
    return starred(name), type(module), shapes


def _called(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Put all inner modules in evaluation mode; restore all of their attributes at the end."""
    before = {each: dict(vars(each)) for each in module.modules()}
    try:
        for each in before:
            # Do not call `train`: a user's own `train` method may have other effects.
            each.training = False
        yield
    finally:
        for each, attributes in before.items():
            vars(each).clear()
            vars(each).update(attributes)


@contextmanager
def _without_hooks(module: nn.Module, packages: tuple[str, ...]) -> Iterator[None]:
    """Remove the forward hooks, and replaced forwards, of some packages from all inner modules."""
    before = [(vars(each), dict(vars(each))) for each in module.modules()]
    try:
        for home, _ in before:
            for name in _HOOKS:
                kept = {key: hook for key, hook in home[name].items() if not _is_of(hook, packages)}
                home[name] = OrderedDict(kept)
            if "forward" in home and _is_of(home["forward"], packages):
                del home["forward"]
        yield
    finally:
        for home, attributes in before:
            home |= {name: attributes[name] for name in (*_HOOKS, "forward") if name in attributes}


def _is_of(hook: Callable[..., Any], packages: tuple[str, ...]) -> bool:
    inner = hook.func if isinstance(hook, partial) else hook
    name = str(getattr(inner, "__module__", ""))
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def _copied(tree: Any, convert: _Convert) -> Any:
    """Copy a tree; convert its tensors, and keep its modules."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(tree)
        kept = [convert(each) if isinstance(each, Tensor) else each for each in pickler.kept]
        return _Unpickler(io.BytesIO(file.getvalue()), kept).load()
    except (pickle.PicklingError, TypeError, AttributeError):
        # Closures and objects of local classes cannot be pickled, so copy only the tensors.
        return map_tensors(convert, tree)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Pickler(pickle.Pickler):
    """Pickles everything except tensors and modules, which `kept` lists."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kept: list[Any] = []

    def persistent_id(self, item: Any) -> int | None:
        if not isinstance(item, Tensor | nn.Module):
            return None
        self.kept.append(item)
        return len(self.kept) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, place: int) -> Any:
        return self._kept[place]
