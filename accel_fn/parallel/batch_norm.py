"""BatchNorm layers that normalize by the statistics of the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm

from accel_fn.core import primitives
from accel_fn.core.state import DistState
from accel_fn.errors import BatchError, LossError, check_equal

_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def batch_norms(model: nn.Module) -> dict[str, Any]:
    """Find the BatchNorm layers of a model, by name."""
    named = model.named_modules()
    return {name or "the model": each for name, each in named if isinstance(each, _BatchNorm)}


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether this BatchNorm has a forward that is not torch's."""
    return "forward" in vars(layer) or type(layer).forward not in _FORWARDS


class SyncedBatchNorm:
    """Forwards for the BatchNorm layers of a model, which normalize by the rows of all ranks.

    Every rank must call the same layers in the same order, in the forward and in the backward. A
    rank may run a copy of another rank's micro-batch only to join the collectives. The rows of such
    a spare micro-batch do not count in the statistics.

    Cost: for each call of a layer, one collective in the forward and one in the backward.
    """

    def __init__(self, model: nn.Module, ranks: DistState, *, is_compiled: bool) -> None:
        self._ranks = ranks
        layers = batch_norms(model)
        self._names = [*layers]
        # Send packets of one size for all layers: if ranks called different layers, a collective
        # with two sizes would abort the process.
        self._width = max([0, *(each.num_features for each in layers.values())])
        # Make the forwards once: if a step made new objects, torch.compile would compile again.
        call = torch.compiler.disable(_forward) if is_compiled else _forward  # type: ignore[no-untyped-call]
        self.forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]] = {
            each: partial(call, self, number, each) for number, each in enumerate(layers.values())
        }
        self.counts = True
        """Whether the rows of the current micro-batch count in the statistics."""
        self.nodes: list[Node | None] = []
        """The autograd nodes of the layers, in the graph of the current micro-batch."""

    def exchange(self, code: int, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks, [ranks, num_numbers].

        `code` identifies the layer, and the forward or the backward. On a CPU, raise an error on
        all ranks if the codes of the ranks differ.
        """
        packet = numbers.new_zeros(1 + 1 + 2 * self._width)
        packet[0] = code
        packet[1 : 1 + len(numbers)] = numbers
        every = torch.stack(primitives.all_gather(packet, self._ranks, "step"))
        # Compare codes on a CPU only: on an accelerator, the host would have to wait for them.
        if every.is_cpu and (every[:, 0] != code).any():
            check_equal(
                [self._described(int(each)) for each in every[:, 0]],
                "step: every rank must use the same BatchNorm layers in the same order",
                "call each layer on every rank, or leave out sync_batchnorm",
                LossError,
            )
        return every[:, 1 : 1 + len(numbers)]

    def _described(self, code: int) -> str:
        return self._names[code] if code >= 0 else f"the backward of {self._names[-1 - code]}"


def _forward(layers: SyncedBatchNorm, number: int, layer: Any, inputs: Tensor) -> Tensor:
    """Normalize as the layer does, but in training mode by the statistics of the rows of all ranks."""
    if not layer.training:
        return type(layer).forward(layer, inputs)  # type: ignore[no-any-return]
    layer._check_input_dim(inputs)
    call = _Call(layers, number, inputs.detach(), layer.eps)
    if layer.track_running_stats and layer.running_mean is not None:
        call.update(layer)
    outputs: Tensor = _Normalized.apply(call, inputs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    if outputs.requires_grad:
        layers.nodes.append(outputs.grad_fn)
    return outputs


class _Call:
    """The statistics of all ranks' rows for one call of a layer."""

    def __init__(self, layers: SyncedBatchNorm, number: int, inputs: Tensor, eps: float) -> None:
        self._exchange = layers.exchange
        self._number = number
        self.counts = layers.counts and inputs.numel() > 0
        # Use at least float32: half precision cannot hold a sum over many rows.
        self.dtype = torch.promote_types(inputs.dtype, torch.float32)
        self._dims = [0, *range(2, inputs.ndim)]
        self._shape = [1, -1] + [1] * (inputs.ndim - 2)
        num_features = inputs.size(1)
        sent = inputs.new_zeros(1 + 2 * num_features, dtype=self.dtype)
        if self.counts:
            variance, mean = torch.var_mean(inputs.to(self.dtype), self._dims, correction=0)
            sent = torch.cat([mean.new_full((1,), inputs.numel() / num_features), mean, variance])
        every = layers.exchange(number, sent)
        counts, means, variances = torch.split(every, [1, num_features, num_features], dim=1)
        self.count = counts.sum()
        if self.count.is_cpu and self.count == 1:
            # Raise the same error as torch on one process. All ranks have the same count, so all
            # raise.
            raise BatchError(
                "Expected more than 1 value per channel when training, got 1 on all ranks"
            )
        # Add up differences from one rank's mean. Sums of squares would lose all digits if the mean
        # is far from 0.
        shares = counts / self.count
        start = means.index_select(0, counts.argmax().reshape(1))
        self.mean = (start + (shares * (means - start)).sum(0))[0]
        self.variance = (shares * (variances + (means - self.mean).square())).sum(0)
        self.factor = (self.variance + eps).rsqrt()

    def update(self, layer: Any) -> None:
        """Move a layer's running statistics towards the statistics of this call."""
        layer.num_batches_tracked.add_(1)
        part = layer.momentum
        if part is None:
            part = 1.0 / float(layer.num_batches_tracked)
        unbiased = self.variance * (self.count / (self.count - 1))
        for running, found in ((layer.running_mean, self.mean), (layer.running_var, unbiased)):
            running.lerp_(found.to(running.dtype), part)

    def normalized(self, inputs: Tensor) -> Tensor:
        """Subtract the mean from the inputs, and divide them by the standard deviation."""
        return (inputs.to(self.dtype) - self.along(self.mean)) * self.along(self.factor)

    def along(self, features: Tensor) -> Tensor:
        """Reshape a tensor of one number per feature so that it broadcasts with the inputs."""
        return features.to(self.dtype).view(self._shape)

    def sums(self, numbers: Tensor) -> Tensor:
        """Add up a tensor of the inputs' shape, feature by feature."""
        return numbers.sum(self._dims)

    def totals(self, sums: Tensor) -> Tensor:
        """Add up the ranks' sums for the backward."""
        return self._exchange(-1 - self._number, sums.flatten()).sum(0).view_as(sums)


class _Normalized(torch.autograd.Function):
    """Batch normalization by the statistics of a `_Call`.

    Source: Ioffe and Szegedy 2015, arXiv:1502.03167, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, inputs: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(inputs, weight)
        outputs = call.normalized(inputs)
        if weight is not None:
            outputs *= call.along(weight)
        if bias is not None:
            outputs += call.along(bias)
        return outputs.to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        inputs, weight = ctx.saved_tensors
        normalized, wide = call.normalized(inputs), gradient.to(call.dtype)
        # Weight and bias get the gradients of this rank's rows, which the strategy averages later.
        own = torch.stack([call.sums(wide), call.sums(wide * normalized)])
        of_bias, of_weight = own.unbind()
        if weight is not None:
            wide = wide * call.along(weight)
            own = own * weight.to(call.dtype)
        total, total_normalized = call.totals(own) / call.count
        if call.counts:
            wide = wide - call.along(total) - normalized * call.along(total_normalized)
        of_inputs = (wide * call.along(call.factor)).to(inputs.dtype)
        needs = ctx.needs_input_grad
        return (
            None,
            of_inputs if needs[1] else None,
            of_weight.to(weight.dtype) if needs[2] else None,
            of_bias.to(weight.dtype if weight is not None else inputs.dtype) if needs[3] else None,
        )
