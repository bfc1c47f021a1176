"""Gradients with a factor that is not applied yet; sums of half-precision gradients in float32."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from accel_fn.core.dtensor import by_axes, is_sharded, local, norm_over_shards
from accel_fn.errors import ArgumentError, ArgumentTypeError, message

_DOUBLE = (torch.float64, torch.complex128)
_PART = 2**18


@dataclass(frozen=True, slots=True, eq=False)
class Grads:
    """Gradients as `(tensors, factor)`; their value is `factor * tensors`.

    Unscaling, averaging and clipping change the factor only, so they neither read nor write the
    gradients again. The step applies the factor once: inside a fused optimizer, else by one
    multiply in place.

    Attributes:
        tensors: one per parameter of the optimizer that requires a gradient, in the order of its
            groups, shaped as the parameter; None if the loss does not reach the parameter.
        factor: [], the dtype of the gradients but at least float32, on their device; None means
            exactly 1 and costs nothing.
        norm_read: the norm as it was first read, before later changes to the gradients; None if it
            was never read.
        norm_fn: computes the norm of the tensors. The strategy gives it, since it knows what other
            ranks hold. Default: the norm of these tensors, including all shards of a DTensor.
        owners: name and parameter of each tensor; None if no step has made the gradients.

    >>> import torch, accel_fn as af
    >>> grads = af.Grads((torch.tensor([3.0, 4.0]), None))
    >>> float(grads.norm()), float(grads.scaled(0.5).norm())
    (5.0, 2.5)
    """

    tensors: Sequence[Tensor | None]
    factor: Tensor | None = None
    _raw_norm: Tensor | None = field(default=None, repr=False)
    norm_read: Tensor | None = field(default=None, repr=False)
    norm_fn: Callable[[Sequence[Tensor]], Tensor] | None = field(default=None, repr=False)
    owners: Sequence[tuple[str, Tensor]] | None = field(default=None, repr=False)

    def present(self) -> list[Tensor]:
        """Return the gradients that are not None."""
        return [tensor for tensor in self.tensors if tensor is not None]

    def norm(self) -> Tensor:
        """Return the global L2 norm of the value, over all parameters.

        The tensors are read once: a later call, also after `scaled`, costs one multiply.

        Returns:
            [], float32, or float64 if a gradient is. Not finite if a gradient is not finite; 0
            without gradients.

        Cost: one read of the gradients at the first call; no host synchronisation.
        """
        raw = self._raw_norm
        if raw is None:
            raw = (self.norm_fn or global_norm)(self.present())
            # Cache the norm: the fields are frozen, so it cannot change.
            object.__setattr__(self, "_raw_norm", raw)
        norm = raw if self.factor is None else raw * self.factor.abs()
        if self.norm_read is None:
            object.__setattr__(self, "norm_read", norm)
        return norm

    def scaled(self, factor: float | Tensor) -> Grads:
        """Return the same gradients times `factor`. Pure; no read.

        Args:
            factor: a finite number, or a real tensor [] on their device; the host does not wait for it.

        Returns:
            New `Grads` over the same tensors.

        Raises:
            ValueError: `factor` is neither; for a wrong type, the error is a TypeError too.
        """
        if not isinstance(factor, Tensor):
            factor = self._as_tensor(factor)
        elif factor.ndim or factor.dtype == torch.bool or factor.is_complex():
            got = f"{factor.dtype} {list(factor.shape)}"
            raise ArgumentError(f"Grads.scaled: factor must be a real 0-dim tensor, got {got}")
        total = factor if self.factor is None else self.factor * factor
        return Grads(self.tensors, total, self._raw_norm, self.norm_read, self.norm_fn, self.owners)

    def _as_tensor(self, factor: object) -> Tensor:
        """Return a number on the gradients' device: float64 if a gradient is, otherwise float32."""
        rule = "be a finite number or a 0-dim tensor"
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
            raise ArgumentTypeError(message("Grads.scaled", "factor", rule, factor))
        if not math.isfinite(factor):
            raise ArgumentError(message("Grads.scaled", "factor", rule, factor))
        present = self.present()
        double = any(tensor.dtype in _DOUBLE for tensor in present)
        dtype = torch.float64 if double else torch.float32
        device = present[0].device if present else None
        # `torch.full` runs a kernel on the device; copying a new host tensor would make the host
        # wait.
        return torch.full((), float(factor), dtype=dtype, device=device)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Grads:
        """Apply `fn` to the value of each gradient; shapes stay. Pure.

        Cost: the cost of `fn`, and one read and write of the gradients if a factor is open.
        """
        values = self.values()
        mapped = tuple([None if value is None else fn(value) for value in values])
        return Grads(mapped, None, None, self.norm_read, self.norm_fn, self.owners)

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, parameter and the gradient's value, in the order of `map`.

        Parameters without a gradient are left out: frozen ones, and those that the loss does not
        reach. Under `wrap_fsdp`, parameters and gradients are shards.

        Yields:
            The name in the model, the parameter, and `factor * tensor`.

        Raises:
            ValueError: no step has made these gradients, so their parameters are not known.

        Cost: one read and write of the gradients if a factor is open.
        """
        if self.owners is None:
            raise ArgumentError("Grads.named: gradients must be of a step, got Grads made by hand")
        for (name, parameter), value in zip(self.owners, self.values(), strict=True):
            if value is not None:
                yield name, parameter, value

    def values(self) -> tuple[Tensor | None, ...]:
        """Return `factor * tensors`, as new tensors unless the factor is None."""
        if self.factor is None:
            return tuple(self.tensors)
        factor = self.factor
        return tuple(
            [None if t is None else (t * factor.to(t.device)).to(t.dtype) for t in self.tensors]
        )


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the L2 norm over all tensors, including all shards of DTensors, in at least float32."""
    sharded = [each for each in tensors if is_sharded(each)]
    if sharded:
        whole = [each for each in tensors if not is_sharded(each)]
        parts = [
            norm_over_shards(global_norm([local(each) for each in same]), groups)
            for groups, same in by_axes(sharded).items()
        ]
        parts += [global_norm(whole)] if whole else []
        return torch.linalg.vector_norm(torch.stack(parts)) if len(parts) > 1 else parts[0]
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if not dense:
        return torch.zeros(())
    dtypes = {t.dtype for t in dense}
    if any(dtype.is_complex for dtype in dtypes):
        dense = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
    dtype = torch.float32 if dtypes.isdisjoint(_DOUBLE) else torch.float64
    if torch.compiler.is_compiling():
        # The compiler cannot trace into `torch._foreach_norm`, so compute the norms one by one.
        norms = tuple([torch.linalg.vector_norm(each, dtype=dtype) for each in dense])
    else:
        norms = torch._foreach_norm([part for each in dense for part in _parts(each)], 2.0, dtype)
    if any(norm.device != norms[0].device for norm in norms):
        norms = tuple(norm.to(norms[0].device) for norm in norms)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Cut a large host tensor into parts, since torch adds up its squares one after another.

    In float32, the norm of 2**25 elements would be off by more than 1e-4. Shards of these elements
    have a smaller error, so the result would depend on the number of ranks.
    """
    if tensor.numel() <= _PART or not tensor.is_cpu or not tensor.is_contiguous():
        return (tensor,)
    return torch.split(tensor.view(-1), _PART)


HALF = (torch.float16, torch.bfloat16)
Backward = Callable[[Tensor, Tensor | None], None]


class WideBackward:
    """Runs the backwards of micro-batches, and sums half-precision gradients in float32.

    Before the last backward, the sum so far becomes each parameter's `.grad`, in the dtype of the
    parameter.
    """

    # A bfloat16 sum stops growing once a term is below half a unit in the last place of the sum:
    # over 1024 micro-batches, the sum was 36% off.

    def __init__(self, backward: Backward, halves: Sequence[nn.Parameter], count: int) -> None:
        self._backward = backward
        self._halves = halves
        self._num_left = count
        """The number of backwards that are still to come."""
        self._sums: list[Tensor | None] = [None] * len(halves)

    def __call__(self, loss: Tensor, seed: Tensor | None) -> None:
        """Add the previous micro-batch's gradients to the sums, then run the backward of `seed * loss`."""
        # Take the gradients of the previous micro-batch only now. If it had weight 0, the loop has
        # zeroed them after its backward.
        self._take()
        self._num_left -= 1
        if not self._num_left:
            self._put_back()
        self._backward(loss, seed)

    def _take(self) -> None:
        for index, parameter in enumerate(self._halves):
            grad = parameter.grad
            if grad is not None and not grad.is_sparse:
                wide = self._sums[index]
                self._sums[index] = grad.float() if wide is None else wide.add_(grad)
                parameter.grad = None

    def _put_back(self) -> None:
        for parameter, wide in zip(self._halves, self._sums, strict=True):
            if wide is not None:
                parameter.grad = wide.to(parameter.dtype)
        self._sums = []


def wide_backward(
    backward: Backward, halves: Sequence[nn.Parameter], num_microbatches: int
) -> Backward:
    """Wrap a backward, so that it sums half-precision gradients of micro-batches in float32.

    Without several micro-batches and parameters in half precision, return the backward itself.
    """
    if halves and num_microbatches > 1:
        return WideBackward(backward, halves, num_microbatches)
    return backward


def half_of(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Select the parameters in half precision."""
    return [each for each in parameters if each.dtype in HALF]
