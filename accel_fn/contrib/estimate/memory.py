"""estimate_memory: compute the memory of one training step with tensors that have no data."""

from __future__ import annotations

import difflib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from accel_fn import DistState, Plan, Transform, count_samples, shard_batch
from accel_fn.cli.targets import loss_of_outputs
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, message
from accel_fn.extend import (
    SlotFunction,
    describe,
    is_sharded,
    map_tensors,
    mesh_shape,
    silent_meshes,
    tensors_of,
)

__all__ = ["MemoryEstimate", "estimate_memory"]

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_HALF = (torch.bfloat16, torch.float16)
_FUNCTION = "estimate_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one rank holds, for a number of ranks and of micro-batches.

    Attributes:
        world_size: number of ranks, which share the global batch; on a mesh, those along `dp` do.
        num_microbatches: parts in which each rank computes its share.
        parameters: this rank's part of those of the model, each storage once.
        buffers: those of the model, each storage once.
        gradients: those of the parameters that require one, and with micro-batches their sums in
            float32 where parameters are in half precision. FSDP holds whole sums until the last micro-batch.
        optimizer: the optimizer's state after a step, with ZeRO's copy of parameters.
        batch: the micro-batch; None without a batch.
        activations: tensors alive between forward and backward besides all of the above; None
            without a batch. With FSDP, also parameters that are whole there.
        peak: the most that is alive at once in a step; None without a batch.
        frozen: parameters and buffers of frozen models, which every rank holds.
    """

    world_size: int
    num_microbatches: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    batch: int | None
    activations: int | None
    peak: int | None
    frozen: int = 0


def estimate_memory(
    make_model: Callable[[], Any],
    *,
    make_batch: Callable[[], Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: str | None = None,
    precision: str = "no",
    world_sizes: Iterable[int] = (1,),
    num_microbatches: Iterable[int] = (1,),
    mesh: Mapping[str, int] | None = None,
    device: torch.device | str | None = None,
    make_frozen: Callable[[], Mapping[str, nn.Module]] | None = None,
    frozen_dtype: torch.dtype | None = None,
    shard: Transform | None = None,
) -> list[MemoryEstimate]:
    """Estimate the memory of one training step, without using it: tensors have shapes and no data.

    The step runs on torch's fake tensors: forward, backward and optimizer, and every tensor
    that they make is counted while it lives. Scratch space of kernels, memory of torch
    and the driver, and fragmentation are not included.

    A plan's transforms, and `shard`, give the way in which ranks share the model. The figures are those
    of the first rank, whose part is the largest.

    - Without them, or with `wrap_ddp`: replicas. More ranks, or more micro-batches, make activations
      smaller and nothing else. A rank that accumulates gradients, or averages them by DDP, holds them through
      the whole step.
    - `wrap_fsdp`, `wrap_tp`: the model is divided by torch's own code, over ranks that send nothing. So
      parameters, gradients and optimizer state are to the byte those of a rank, and the peak has the blocks,
      and the parameters outside of them, that are whole in the step. With micro-batches, FSDP keeps whole
      gradients until the last one. The copies that Gloo makes are not included: on two processes, a step by
      FSDP took 4 to 14% more.
    - `wrap_deepspeed`: by the stages of ZeRO, without DeepSpeed. Stage 1 divides the optimizer's state and
      its float32 copy of the parameters, stage 2 gradients too, stage 3 also parameters. To the peak, the
      largest module's parameters and gradients are added where they are divided. DeepSpeed's
      buckets (`reduce_bucket_size`) are not included.

    On a mesh, a rank has a part of the batch for its place along `dp`. Of sequences that `wrap_cp` cuts,
    the longest block counts, without the keys and values that it gathers. Memory of `offload` counts, too.

    Args:
        make_model: returns the model, a model and a batch, a plan, or a plan and a state. Called
            without memory, once, or once for each number of ranks that divide the model. Of a plan, the
            model, loss, optimizers and frozen models count, and the transforms that divide the model.
        make_batch: returns a global batch, a tree of tensors [num_samples, ...].
        loss_fn: `(model, batch) -> loss` or `(loss, metrics)`; default: the plan's, else call the model
            with the batch (first element of a tuple; a dict by name), and take its `loss`, or the sum of
            its outputs.
        optimizer: a name in `torch.optim`; default: the plan's optimizers, else AdamW.
        precision: "no", "bf16" or "fp16", as for `with_amp`.
        world_sizes: numbers of ranks to estimate for.
        num_microbatches: numbers of micro-batches to estimate for.
        mesh: axes that each number of ranks forms and their sizes, as for `init`; default: all ranks share
            the batch.
        device: which device's kernels to run; default: the accelerator of this
            machine, or the CPU.
        make_frozen: returns the frozen models by name, as for `Plan`; `loss_fn` gets them by a parameter
            named `frozen`. They are whole on every rank, as without `wrap_fsdp(frozen=True)`.
        frozen_dtype: their dtype, as for `place`.
        shard: a transform that divides the model, such as `wrap_fsdp()`, `wrap_deepspeed(stage=2)`, or
            `compose(wrap_tp(), wrap_fsdp())` on a mesh.

    Returns:
        One estimate for each number of ranks and of micro-batches.

    Raises:
        ValueError: an argument is outside its range, the model reads its data in the forward, a plan with
            a strategy gets another by `shard`, there is `wrap_tp` without a mesh, or, as in
            `build`, the model cannot be divided so.

    Cost: no memory of the model's size; the host runs one step for each size of micro-batch.

    >>> import accel_fn as af
    >>> from torch import nn
    >>> [found] = af.contrib.estimate.estimate_memory(lambda: nn.Linear(1000, 1000))
    >>> found.parameters, found.gradients, found.optimizer
    (4004000, 4004000, 8008008)
    >>> [found] = af.contrib.estimate.estimate_memory(
    ...     lambda: nn.Linear(1000, 1000), shard=af.wrap_fsdp(), world_sizes=[4]
    ... )
    >>> found.parameters, found.gradients, found.optimizer
    (1001000, 1001000, 2002008)
    """
    return [
        *estimates(
            make_model,
            make_batch=make_batch,
            loss_fn=loss_fn,
            optimizer=optimizer,
            precision=precision,
            world_sizes=world_sizes,
            num_microbatches=num_microbatches,
            mesh=mesh,
            device=device,
            make_frozen=make_frozen,
            frozen_dtype=frozen_dtype,
            shard=shard,
        )
    ]


def estimates(
    make_model: Callable[[], Any],
    *,
    make_batch: Callable[[], Any] | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: str | None,
    precision: str,
    world_sizes: Iterable[int],
    num_microbatches: Iterable[int],
    mesh: Mapping[str, int] | None,
    device: torch.device | str | None,
    make_frozen: Callable[[], Mapping[str, nn.Module]] | None = None,
    frozen_dtype: torch.dtype | None = None,
    shard: Transform | None = None,
) -> Iterator[MemoryEstimate]:
    """Yield the estimates of `estimate_memory`, each as soon as it is known."""
    if precision not in _AUTOCAST:
        raise ArgumentError(message(_FUNCTION, "precision", 'be "no", "bf16" or "fp16"', precision))
    sizes = [check_count(_FUNCTION, "world_sizes", each) for each in world_sizes]
    shapes = {
        size: {"dp": size} if mesh is None else mesh_shape(_FUNCTION, mesh, size) for size in sizes
    }
    counts = [check_count(_FUNCTION, "num_microbatches", each) for each in num_microbatches]
    kind = None if optimizer is None else _optimizer_class(optimizer)
    here = torch.accelerator.current_accelerator(check_available=True)
    place = torch.device(device or here or "cpu")
    mode = _NoData(allow_non_fake_inputs=True)

    def make() -> tuple[Plan, Any]:
        with mode, place:
            model, batch, plan = _made(make_model, make_batch, place)
            given = make_frozen or (None if plan is None else partial(getattr, plan, "frozen"))
            frozen = _made_frozen(given, place, frozen_dtype)
            optimizers = _optimizers(model, kind, plan)
            loss_of = loss_fn or (plan.loss_fn if plan else loss_of_outputs)
            plan = replace(plan or Plan(loss_of, model, optimizers), optimizer=optimizers)
            plan = replace(plan, loss_fn=loss_of, frozen=frozen)
        return plan if shard is None else shard(plan), batch

    plan, batch = make()
    strategies = [each for each in plan.strategy if each not in plan.having("cuts_sequences")]
    if len(strategies) > 1:
        given = " and ".join(map(describe, strategies))
        raise ArgumentError(
            message(_FUNCTION, "shard", "be left out of a plan with a strategy", given)
        )
    if plan.shard_model and mesh is None and max(sizes, default=1) > 1:
        rule = f"name the axis of {describe(plan.shard_model[0])}"
        raise ArgumentError(message(_FUNCTION, "mesh", rule, mesh, 'such as {"dp": -1, "tp": 2}'))
    runs: dict[Any, _Run] = {}
    for size, count in product(sizes, counts):
        shape = shapes[size]
        # If `wrap_tp` splits the model, ranks along dp shard it. Otherwise, all ranks do.
        parts = _parts(plan, shape["dp"] if plan.shard_model else size)
        # If ranks divide nothing, they hold replicas. A replica does not depend on the number of
        # ranks, so one `_Run` serves every number.
        key = size if parts or plan.shard_model else None
        if key not in runs:
            mine = make()[0] if runs else plan
            runs[key] = _run(mine, shape, parts, mode, place, _AUTOCAST[precision])
        try:
            with mode, place:
                found = runs[key].estimate(_block(plan, batch, shape), size, shape["dp"], count)
        except DataDependentOutputException as error:
            rule = "not read the values of its tensors"
            raise ArgumentError(message(_FUNCTION, "the step", rule, str(error))) from error
        yield found


def _slots(plan: Plan) -> list[SlotFunction]:
    """Return the slot functions that may divide the model, in the order in which `build` calls them."""
    given = (*plan.shard_model, *plan.strategy)
    return [each for each in given if isinstance(each, SlotFunction)]


def _parts(plan: Plan, size: int) -> dict[str, int]:
    """Return the number of parts into which `size` ranks divide each kind of memory; omit undivided kinds."""
    found = {name: num for each in _slots(plan) for name, num in each.num_parts(size).items()}
    return {name: num for name, num in found.items() if num > 1}


def _run(
    plan: Plan,
    shape: Mapping[str, int],
    parts: dict[str, int],
    mode: _NoData,
    device: torch.device,
    autocast: torch.dtype | None,
) -> _Run:
    """Divide the model as the plan does on a mesh of this shape, and step the plan's optimizers once."""
    # In these meshes, this process is the first rank, which has the largest part. Make them outside
    # of `mode`, since torch makes a mesh from a tensor with data.
    meshes = silent_meshes(device, {**shape, "dp": max(parts.values(), default=1)})
    module = None
    model, optimizers, frozen = plan.model, plan.optimizers, plan.frozen
    with mode, device:
        whole: list[Tensor] = [*model.parameters()]
        for each in _slots(plan):
            whole = [_local(p) for p in model.parameters()]
            found = each.share(plan, meshes)
            module = module if found is None else found
        _step_once(optimizers.values())
        loss_of: Callable[..., Any] = plan.loss_fn
        if frozen and "frozen" in inspect.signature(loss_of).parameters:
            loss_of = partial(loss_of, frozen=frozen)
        held = [each for one in frozen.values() for each in (*one.parameters(), *one.buffers())]
    parts = parts if module is None else {}
    return _Run(
        model, [*optimizers.values()], loss_of, device, autocast, held, parts, module, whole
    )


def _optimizer_class(name: str) -> type[Optimizer]:
    known = {
        each: found
        for each, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
    }
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    repair = f"did you mean {near[0]}?" if near else ""
    raise ArgumentError(message(_FUNCTION, "optimizer", "be one of torch.optim", name, repair))


class _NoData(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors have shapes and devices, but no data.

    A deep copy of a tensor also copies its mode, and torch refuses operations on tensors of two
    modes. So a copy of this mode is the mode itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoData:
        return self


def _made(
    make_model: Callable[[], Any], make_batch: Callable[[], Any] | None, device: torch.device
) -> tuple[nn.Module, Any, Plan | None]:
    """Call the user's functions for the model, batch and plan; move the model off the meta device."""
    with warnings.catch_warnings():
        # `deepcopy` in the user's function may cause this warning.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            made = make_model()
        except RuntimeError as error:
            # To cast a module, torch swaps its parameters for new ones, which fake tensors do not
            # support.
            if "Couldn't swap" not in str(error):
                raise
            rule, got = "make the model in its dtype, and not cast it", str(error)
            repair = "leave .half() or .to(dtype) out and call torch.set_default_dtype(dtype) first"
            raise ArgumentError(message(_FUNCTION, "make_model", rule, got, repair)) from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    plan = None
    if isinstance(model, Plan):
        plan, model = model, model.model
        batch = None if isinstance(batch, DistState) else batch
    if not isinstance(model, nn.Module):
        rule = "give an nn.Module, or one and a batch, or a Plan"
        raise ArgumentTypeError(message(_FUNCTION, "make_model", rule, type(model).__name__))
    _leave_meta(model, device)
    if make_batch is not None:
        batch = make_batch()
    return model.train(), batch, plan


def _made_frozen(
    make_frozen: Callable[[], Mapping[str, nn.Module]] | None,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Mapping[str, nn.Module]:
    """Make the frozen models, in evaluation mode and without gradients, as `build` leaves them."""
    made = {} if make_frozen is None else make_frozen()
    are_models = isinstance(made, Mapping) and all(isinstance(m, nn.Module) for m in made.values())
    if not are_models:
        rule = "give a mapping of names to models"
        raise ArgumentTypeError(message(_FUNCTION, "make_frozen", rule, type(made).__name__))
    for model in made.values():
        _leave_meta(model, device, dtype)
        model.eval().requires_grad_(False)
    return made


def _leave_meta(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace meta tensors, and floating-point tensors to be cast, by empty ones; tied tensors stay tied."""
    moved: dict[Tensor, Tensor] = {}
    slots: list[dict[str, Any]] = []
    for module in model.modules():
        slots += [module._parameters, module._buffers]
    for held in slots:
        for name, tensor in held.items():
            if tensor is None:
                continue
            is_cast = dtype not in (None, tensor.dtype) and tensor.is_floating_point()
            if tensor.is_meta or is_cast:
                moved.setdefault(tensor, _emptied(tensor, device, dtype if is_cast else None))
                held[name] = moved[tensor]


def _emptied(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    empty = torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def _optimizers(
    model: nn.Module, kind: type[Optimizer] | None, plan: Plan | None
) -> Mapping[str, Optimizer]:
    """Make an optimizer of `kind`. Without `kind`, return the plan's, or make AdamW if there is no plan."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        rule = "have parameters that require a gradient"
        raise ArgumentError(message(_FUNCTION, "model", rule, type(model).__name__))
    if kind is None and plan is not None:
        return plan.optimizers
    kind = kind or torch.optim.AdamW
    try:
        return {"optimizer": kind(trained)}  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refused(kind, error) from error


def _step_once(optimizers: Iterable[Optimizer]) -> None:
    """Run the first step of each optimizer with zero gradients, so that all of its state exists."""
    for each in optimizers:
        for parameter in _given(each):
            parameter.grad = torch.zeros_like(parameter)
        try:
            each.step()
        except (DataDependentOutputException, RuntimeError, TypeError, ValueError) as error:
            raise _refused(type(each), error) from error


def _refused(kind: type[Optimizer], error: Exception) -> ArgumentError:
    rule = f"take such parameters and step without their values ({error})"
    return ArgumentError(message(_FUNCTION, "optimizer", rule, kind.__name__))


def _given(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or a whole tensor unchanged; copy no data."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs steps of one model, and measures their memory for micro-batches of any size."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss_fn: Callable[[Any, Any], Any]
    device: torch.device
    autocast: torch.dtype | None
    frozen: Sequence[Tensor]
    """Parameters and buffers of frozen models."""
    parts: Mapping[str, int]
    """The number of parts into which ranks would divide each kind of memory, such as "gradients",
    that this model holds whole. Only `wrap_deepspeed` has such kinds."""
    sharded: nn.Module | None
    """The module of `wrap_fsdp`, which gathers parameters and computes the loss; None without
    `wrap_fsdp`."""
    whole: Sequence[Tensor]
    """The parameters that a forward uses after `wrap_fsdp` has gathered them."""

    def estimate(
        self, batch: Any, world_size: int, num_places: int, num_microbatches: int
    ) -> MemoryEstimate:
        parameters, buffers = list(self.model.parameters()), list(self.model.buffers())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        frozen = [*map(_local, self.frozen)]
        state = [
            _local(each)
            for one in self.optimizers
            for held in one.state.values()
            for each in tensors_of(held)
        ]
        own = {each for one in self.optimizers for each in _given(one)} - {*trained}
        part = None
        if batch is not None:
            part = _microbatch(batch, num_places, num_microbatches)
        several = num_microbatches > 1
        # Gradients stay allocated in DDP's buckets, and while a rank sums micro-batches. Otherwise,
        # the backward allocates them and the update frees them.
        is_split = any(map(is_sharded, trained))
        kept = self.sharded is None and (several or (num_places > 1 and not is_split))
        gradients = [torch.zeros_like(each) for each in trained]
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient if kept else None
        gradients = [*map(_local, gradients)]
        if several and self.sharded is not None:
            shapes = [w for w, p in zip(self.whole, parameters, strict=True) if p.requires_grad]
            gradients = [torch.zeros_like(each, dtype=_summed(each.dtype)) for each in shapes]
        elif several:
            halves = [each for each in gradients if each.dtype in _HALF]
            gradients += [torch.zeros_like(each, dtype=torch.float32) for each in halves]
        fixed = {"parameters": [*map(_local, parameters)], "gradients": gradients}
        sizes = {name: _bytes(each) for name, each in fixed.items()}
        # While a module computes, its parameters and gradients are whole. So the peak has those of
        # the largest module.
        most = max(_bytes(module.parameters(recurse=False)) for module in self.model.modules())
        beside = 0
        for name in self.parts.keys() & fixed.keys():
            num, whole = self.parts[name], sizes[name]
            sizes[name] = sum(-(-each.numel() // num) * each.element_size() for each in fixed[name])
            beside += sizes[name] + most - whole
        fixed["gradients"] = gradients if kept else []
        held = [*buffers, *frozen, *state, *own, *tensors_of(part)]
        held += [each for kind in fixed.values() for each in kind]
        summed = sizes["gradients"] if several and self.sharded is not None else 0
        alive, peak = (None, None) if batch is None else self._step(part, held, several)
        return MemoryEstimate(
            world_size=world_size,
            num_microbatches=num_microbatches,
            parameters=sizes["parameters"],
            buffers=_bytes(buffers),
            gradients=sizes["gradients"],
            optimizer=_bytes([*state, *own]),
            batch=None if batch is None else _bytes(tensors_of(part)),
            activations=None if alive is None else alive - _bytes(held) - summed,
            peak=None if peak is None else peak + beside,
            frozen=_bytes(frozen),
        )

    def _step(self, part: Any, held: Sequence[Tensor], several: bool) -> tuple[int, int]:
        """Run a step; return the bytes alive between forward and backward, and the most alive at once."""
        with _Ledger(held) as ledger:
            if self.sharded is not None and several:
                # Before the last micro-batch, gradients are not sharded yet.
                with self.sharded.no_sync():  # type: ignore[operator]
                    self._loss(part).backward()  # type: ignore[no-untyped-call]
            loss = self._loss(part)
            alive = ledger.alive
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            for each in self.optimizers:
                each.step()
        return alive, ledger.peak

    def _loss(self, part: Any) -> Tensor:
        casting = nullcontext()
        if self.autocast is not None:
            casting = torch.autocast(self.device.type, self.autocast)  # type: ignore[assignment]
        with casting:
            run = self.sharded or partial(self.loss_fn, self.model)
            found = run(part)
            # A loss may be a vector of terms, and a backward needs one number.
            loss: Tensor = found[0] if isinstance(found, tuple) else found
            return loss.sum()


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _block(plan: Plan, batch: Any, shape: Mapping[str, int]) -> Any:
    """If the plan has `wrap_cp`, cut sequences to the most tokens that a rank computes."""
    for each in plan.having("cuts_sequences") if batch is not None else ():
        dims, num_blocks = each.keywords["dims"], shape.get(each.keywords["axis"], 1)
        lengths = {batch[name].shape[dim] for name, dim in dims.items() if name in batch}
        for length in lengths:
            to = -(-length // num_blocks)
            batch = map_tensors(partial(_shortened, length=length, to=to), batch)
    return batch


def _shortened(tensor: Tensor, length: int, to: int) -> Tensor:
    for dim in range(1, tensor.ndim):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, to)
    return tensor


def _microbatch(batch: Any, num_parts: int, num_microbatches: int) -> Any:
    """Return a copy of the largest micro-batch that a rank computes."""
    if num_parts > count_samples(batch):
        rule = f"make at most {count_samples(batch)} parts of the global batch, of a sample each"
        raise ArgumentError(message(_FUNCTION, "world_sizes", rule, num_parts))
    part = shard_batch(batch, DistState(world_size=num_parts))
    counted = DistState(world_size=min(num_microbatches, count_samples(part)))
    return map_tensors(Tensor.clone, shard_batch(part, counted))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the bytes of the tensors' storages; count a shared storage once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages: those of the given tensors, and those that operations make."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known: dict[int, int] = {}
        for tensor in held:
            self._note(tensor)

    def __enter__(self) -> Any:
        # Watch `resize_` too. FSDP frees whole parameters by it, and it does not call
        # `__torch_dispatch__`.
        storages: Any = torch.UntypedStorage
        self._resize = storages.resize_
        storages.resize_ = lambda storage, size: self._resized(storage, size)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        storages: Any = torch.UntypedStorage
        storages.resize_ = self._resize
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _resized(self, storage: Any, size: int) -> Any:
        found, key = self._resize(storage, size), storage._cdata
        if key in self._known:
            self.alive += size - self._known[key]
            self._known[key] = size
            self.peak = max(self.peak, self.alive)
        return found

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = size
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.alive -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            # Let torch call the sharded tensor's own dispatch first. The ledger then sees the
            # operations on this rank's shard.
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        for each in tensors_of(found):
            if not hasattr(each, "__tensor_flatten__"):
                self._note(each)
        return found
