"""Attention of this rank's queries over the keys and values of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from accel_fn.core import primitives
from accel_fn.core.state import DistState
from accel_fn.errors import LossError
from accel_fn.parallel.cp.blocks import Blocks

_ROWS = 256
"""The number of queries for which a causal mask is made at once, if the kernel needs a mask."""


class WholeAttention(TorchFunctionMode):
    """A mode in which `F.scaled_dot_product_attention` uses the keys and values of all ranks.

    Enter it for a forward, and for the engine's call of the backward, in which activation
    checkpoints run forwards again.
    """

    def __init__(self, cp: DistState, *, by_heads: bool = False) -> None:
        super().__init__()
        self._cp = cp
        self.by_heads = by_heads
        """Whether each rank attends for some heads over all tokens, as with attention="ulysses"."""
        self.blocks = Blocks(0, 1, 0)
        """The blocks into which the current sequences are cut."""
        self.documents: Tensor | None = None
        """For masks of transformers: the position of each token in its packed document.

        None if no sequence packs several documents.
        """
        self._is_inside = False
        """Whether the call of attention comes from this mode itself."""

    def over(self, blocks: Blocks) -> WholeAttention:
        """Set this mode to sequences that are cut into these blocks, and return the mode."""
        self.blocks, self.documents = blocks, None
        return self

    def __torch_function__(
        self, fn: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if fn is F.scaled_dot_product_attention and not self._is_inside:
            return self.attend(*args, **kwargs)
        if fn is F.multi_head_attention_forward:
            # Torch switches this mode off inside of a torch function that is written in Python. So
            # the mode could not replace the attention there.
            raise LossError(
                "step: wrap_cp must have attention by F.scaled_dot_product_attention, got "
                "F.multi_head_attention_forward, which does not let it through; call it in a layer of yours"
            )
        return fn(*args, **kwargs)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter a context in which attention is torch's own."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        has_own_rows: bool = False,
        **options: Any,
    ) -> Tensor:
        """Attend like `F.scaled_dot_product_attention` on whole sequences; return this rank's rows.

        With `has_own_rows`, the mask has only this rank's rows.
        """
        blocks = self.blocks
        _check_lengths(query, key, blocks)
        if dropout_p:
            raise LossError(
                f"step: wrap_cp must have attention without dropout, got dropout_p={dropout_p:g}; set it "
                "to 0, as by attention_dropout=0, and keep dropout outside of attention"
            )
        if attn_mask is not None and is_causal:
            raise LossError(
                "step: wrap_cp must have attention with a mask or is_causal, got both; put one into the other"
            )
        mask = attn_mask
        if attn_mask is not None and not has_own_rows:
            _check_mask(attn_mask, blocks)
            mask = attn_mask if self.by_heads else _own_rows(attn_mask, blocks)
        tensors = _as_autocast(query, key, value, mask)
        if self.by_heads:
            return self._attend_by_heads(*tensors, is_causal=is_causal, **options)
        call = _Call(self, self._cp, blocks, is_causal, options)
        found: Tensor = _Attention.apply(*tensors, call)  # type: ignore[no-untyped-call]
        return found

    def _attend_by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Get all tokens of some heads from the other ranks, attend, and exchange back."""
        place, num_ranks = self._cp.rank, self._cp.world_size
        for each in (query, key):
            if each.ndim < 3 or each.shape[-3] % num_ranks:
                got = each.shape[-3] if each.ndim > 2 else 1
                raise LossError(
                    f'step: wrap_cp(attention="ulysses") must have heads that {num_ranks} ranks divide, got '
                    f'{got}; use attention="gather"'
                )
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(num_ranks, -3)[place]
        query, key, value = (_to_heads(each, self._cp, self.blocks) for each in (query, key, value))
        with self.inside(), torch.autocast(query.device.type, enabled=False):
            found = F.scaled_dot_product_attention(query, key, value, mask, **options)
        return _to_tokens(found, self._cp, self.blocks)


def _check_lengths(query: Tensor, key: Tensor, blocks: Blocks) -> None:
    lengths = query.shape[-2], key.shape[-2]
    if lengths != (blocks.own, blocks.own):
        raise LossError(
            f"step: wrap_cp must have attention among the {blocks.own} tokens of this rank's block, got "
            f"{lengths[0]} queries and {lengths[1]} keys; windows and pooling of the model's own, caches and "
            "attention to another sequence are not cut"
        )


def _check_mask(mask: Tensor, blocks: Blocks) -> None:
    """Refuse a mask that does not cover the whole sequence."""
    whole = blocks.num_tokens
    rows = mask.shape[-2] if mask.ndim > 1 else 1
    if mask.shape[-1] != whole or rows not in (1, whole):
        raise LossError(
            f"step: wrap_cp must have attention masks over the whole sequence, [..., {whole}, {whole}] or "
            f"[..., 1, {whole}], got {list(mask.shape)}; make it of entries that dims leave whole"
        )


def _own_rows(mask: Tensor, blocks: Blocks) -> Tensor:
    """Return this rank's rows of a mask over the whole sequence."""
    if mask.ndim == 1 or mask.shape[-2] == 1:
        return mask
    return blocks.take(mask, -2)


def _as_autocast(*tensors: Any) -> list[Any]:
    """Cast tensors as autocast casts the inputs of attention, before they are sent."""
    query = tensors[0]
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return [*tensors]
    dtype = torch.get_autocast_dtype(device)
    return [
        each.to(dtype) if each is not None and each.is_floating_point() else each
        for each in tensors
    ]


@dataclass(frozen=True, slots=True)
class _Call:
    """The data of one call of attention that forward and backward both need."""

    mode: WholeAttention
    cp: DistState
    blocks: Blocks
    is_causal: bool
    options: Mapping[str, Any]

    def pieces(self, query: Tensor) -> Iterator[tuple[slice, int]]:
        """Yield slices of queries, and the number of keys that each slice attends to."""
        if not self.is_causal:
            yield slice(0, self.blocks.own), self.blocks.num_tokens
            return
        step = self.blocks.own if _has_causal_kernel(query) else _ROWS
        before = 0
        for span in self.blocks.spans:
            for start in range(span.start, span.stop, step):
                stop = min(start + step, span.stop)
                yield slice(before, before + stop - start), stop
                before += stop - start

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend for consecutive queries of this rank; the last query attends up to the last of `keys`."""
        if self.is_causal:
            mask = _causal_mask(query, keys.shape[-2])
        with self.mode.inside(), torch.autocast(query.device.type, enabled=False):
            return F.scaled_dot_product_attention(query, keys, values, mask, **self.options)

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of the whole sequence, by one collective."""
        most = max(self.blocks.sizes)
        sent = torch.cat([_padded(each, most).reshape(-1) for each in (key, value)])
        received = primitives.all_gather(sent, self.cp, "step")
        sizes = [_padded_numel(each, most) for each in (key, value)]
        parts = [torch.split(each, sizes) for each in received]
        keys, values = (
            self.blocks.join([_viewed(part[place], like, most) for part in parts], -2)
            for place, like in enumerate((key, value))
        )
        return keys, values

    def summed(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum gradients of whole keys and values over the ranks; return this rank's blocks."""
        most = max(self.blocks.sizes)
        blocks = [self.blocks.split(each, -2) for each in (keys, values)]
        sent = torch.stack(
            [
                torch.cat([_padded(each, most).reshape(-1) for each in pair])
                for pair in zip(*blocks, strict=True)
            ]
        )
        total = primitives.all_to_all(sent, self.cp, "step").sum(0)
        sizes = [_padded_numel(each, most) for each in (keys, values)]
        of_key, of_value = (
            _viewed(part, like, most).narrow(-2, 0, self.blocks.own)
            for part, like in zip(torch.split(total, sizes), (keys, values), strict=True)
        )
        return of_key, of_value


def _has_causal_kernel(query: Tensor) -> bool:
    """Return whether torch has a kernel that is causal for the last queries only, without a mask."""
    # The kernel takes its bias as an object of a subclass of tensor. No code can make such an
    # object while a dispatch mode is on, as in the checks.
    return query.is_cuda and _get_current_dispatch_mode() is None


def _causal_mask(query: Tensor, num_keys: int) -> Tensor:
    """Return a causal mask, or a bias for the causal kernel; the last query attends to all keys."""
    num_queries = query.shape[-2]
    if _has_causal_kernel(query):
        # Import the bias here, since its module imports torch's compiler.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(num_queries, num_keys)
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    return ones.tril(num_keys - num_queries)


def _padded(tensor: Tensor, length: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, length - tensor.shape[-2]))


def _padded_numel(tensor: Tensor, length: int) -> int:
    return tensor.numel() // tensor.shape[-2] * length


def _viewed(flat: Tensor, like: Tensor, length: int) -> Tensor:
    return flat.view(*like.shape[:-2], length, like.shape[-1])


class _Attention(torch.autograd.Function):
    """Attention that keeps only this rank's tensors: the backward gathers and attends again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: _Call
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(query, key, value, mask)
        keys, values = call.gathered(key, value)
        found = [
            call.attend(query[..., rows, :], keys[..., :seen, :], values[..., :seen, :], mask)
            for rows, seen in call.pieces(query)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        query, key, value, mask = ctx.saved_tensors
        keys, values = call.gathered(key, value)
        of_query = torch.empty_like(query)
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        of_mask: list[Tensor] = []
        for rows, seen in call.pieces(query):
            every = (query[..., rows, :], keys[..., :seen, :], values[..., :seen, :])
            leaves = [each.detach().requires_grad_() for each in every]
            if ctx.needs_input_grad[3]:
                mask = mask.detach().requires_grad_()
                leaves.append(mask)
            with torch.enable_grad():
                found = call.attend(leaves[0], leaves[1], leaves[2], mask)
            own, some_keys, some_values, *of_mask = torch.autograd.grad(
                found, leaves, gradient[..., rows, :]
            )
            of_query[..., rows, :] = own
            of_keys[..., :seen, :] += some_keys
            of_values[..., :seen, :] += some_values
        return of_query, *call.summed(of_keys, of_values), of_mask[0] if of_mask else None, None


class _Swap(torch.autograd.Function):
    """Exchanges the tokens of a block, of all heads, for all tokens of some heads; or the reverse.

    The backward exchanges gradients in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp: DistState, blocks: Blocks, by_heads: bool) -> Tensor:
        ctx.settings = cp, blocks, by_heads
        most = max(blocks.sizes)
        if by_heads:
            parts = _padded(tensor, most).chunk(cp.world_size, -3)
        else:
            parts = tuple([_padded(each, most) for each in blocks.split(tensor, -2)])
        received = primitives.all_to_all(torch.stack(parts), cp, "step").unbind()
        if not by_heads:
            return torch.cat([each.narrow(-2, 0, blocks.own) for each in received], -3)
        return blocks.join(received, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cp, blocks, by_heads = ctx.settings
        found = _to_tokens(gradient, cp, blocks) if by_heads else _to_heads(gradient, cp, blocks)
        return found, None, None, None


def _to_heads(tensor: Tensor, cp: DistState, blocks: Blocks) -> Tensor:
    """Return all tokens of this rank's heads, from the tokens of its block."""
    found: Tensor = _Swap.apply(tensor, cp, blocks, True)  # type: ignore[no-untyped-call]
    return found


def _to_tokens(tensor: Tensor, cp: DistState, blocks: Blocks) -> Tensor:
    """Return the tokens of this rank's block, of all heads."""
    found: Tensor = _Swap.apply(tensor, cp, blocks, False)  # type: ignore[no-untyped-call]
    return found
