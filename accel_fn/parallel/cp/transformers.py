"""Split sequences in models of transformers, through its registries of attention and masks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from accel_fn.errors import BatchError, LossError, PlanError, message
from accel_fn.parallel.cp.attention import WholeAttention
from accel_fn.parallel.cp.blocks import Blocks

_NAME = "accel_fn_wrap_cp"
"""The name of our attention and masks in the registries."""
_IGNORED = -100


def models_of_transformers(model: nn.Module) -> list[Any]:
    """Return the outermost models of transformers in a model; none if no code imported transformers."""
    library = sys.modules.get("transformers")
    if library is None:
        return []
    found: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, library.PreTrainedModel) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def check_models(model: nn.Module, dims: Mapping[str, int]) -> None:
    """Refuse models of transformers whose attention or masks cannot use whole sequences."""
    for each in models_of_transformers(model):
        kind = type(each).__name__
        if not each._can_set_attn_implementation():
            rule, repair = "reach attention by AttentionInterface", "use another model"
            raise PlanError(message("build", "wrap_cp's model", rule, kind, repair))
        if (found := each.config._attn_implementation) != "sdpa":
            rule, repair = (
                'have attn_implementation="sdpa"',
                'model.set_attn_implementation("sdpa")',
            )
            raise PlanError(message("build", "wrap_cp's model", rule, found, repair))
        if "position_ids" not in inspect.signature(each.forward).parameters:
            rule, repair = "take position_ids", "use another model"
            raise PlanError(message("build", "wrap_cp's model", rule, kind, repair))
        for module in each.modules():
            found = getattr(module, "rope_type", "")
            for rope in found.values() if isinstance(found, dict) else [found]:
                if rope == "longrope" or "dynamic" in rope:
                    rule = "have rotary positions that do not depend on the longest one of a call"
                    raise PlanError(message("build", "wrap_cp's model", rule, f"{kind}, {rope}"))
        if "attention_mask" in dims:
            rule = "leave attention_mask whole for a model of transformers"
            raise PlanError(message("build", "wrap_cp(dims)", rule, dict(dims), "leave it out"))


class ModelsOfTransformers:
    """Lets models of transformers run blocks of sequences."""

    def __init__(self, model: nn.Module, dims: Mapping[str, int]) -> None:
        self._models = models_of_transformers(model)
        self._dims = dims
        inside = [part for each in self._models for part in each.modules()]
        configs = [each.config for each in inside if hasattr(each, "config")]
        self._configs = [*{id(each): each for each in configs}.values()]
        self.shifts = any(map(_is_causal, self._models)) and "labels" in dims
        """Whether a model computes a causal loss, which shifts labels."""
        if self._models:
            _register()

    def with_shifted(self, part: Any) -> Any:
        """Return a micro-batch with the shifted labels to which a causal loss compares outputs."""
        if not self.shifts or "labels" not in part or "shift_labels" in part:
            return part
        return {**part, "shift_labels": _shifted(part["labels"], self._dims["labels"])}

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Enter a context for a forward or backward, in which models use our attention and masks."""
        before = [each._attn_implementation_internal for each in self._configs]
        for each in self._configs:
            each._attn_implementation_internal = _NAME
        try:
            yield
        finally:
            for each, name in zip(self._configs, before, strict=True):
                each._attn_implementation_internal = name

    @contextmanager
    def given(self, part: Any, blocks: Blocks) -> Iterator[None]:
        """Enter a context for the forward of a block, in which models get more arguments.

        These are the global positions, the mask of the whole sequence and the shifted labels.
        """
        with ExitStack() as stack:
            for each in self._models:
                hook = partial(self._complete, part=part, blocks=blocks)
                handle = each.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _complete(
        self, model: Any, args: Any, kwargs: Mapping[str, Any], *, part: Any, blocks: Blocks
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Add global positions, the mask of the whole sequence and shifted labels to a call."""
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        given.pop("kwargs", None)
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.shape[1] != blocks.own:
            got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            rule = f"get the {blocks.own} tokens of this rank's block"
            raise BatchError(
                message("step", "wrap_cp's model", rule, got, "name input_ids in dims")
            )
        rows, whole, device = tokens.shape[0], blocks.num_tokens, tokens.device
        positions = given.get("position_ids")
        if positions is None:
            given["position_ids"] = blocks.take(torch.arange(whole, device=device), 0)[None]
        mask, documents = given.get("attention_mask"), None
        if mask is None:
            documents = None if positions is None else self._documents(model, given, part, device)
            given["attention_mask"] = torch.ones(rows, whole, dtype=torch.bool, device=device)
        elif not isinstance(mask, Tensor) or mask.shape != (rows, whole):
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            rule = f"be of the whole sequence, [{rows}, {whole}]"
            repair = "leave attention_mask out of dims, and make no mask of four dimensions"
            raise BatchError(message("step", "batch['attention_mask']", rule, got, repair))
        _mode().documents = documents
        has_labels = given.get("labels") is not None and given.get("shift_labels") is None
        if has_labels and _is_causal(model):
            given["shift_labels"] = self._own_labels(part, blocks, given["labels"])
        return (), given

    def _documents(
        self, model: Any, given: Mapping[str, Any], part: Any, device: torch.device
    ) -> Tensor | None:
        """Return each token's position in its packed document, for whole sequences.

        Return None if each row is one document.
        """
        from transformers.masking_utils import find_packed_sequence_indices

        whole = part.get("position_ids")
        if whole is None or "position_ids" not in self._dims:
            rule = "be in the batch and in dims of wrap_cp"
            raise BatchError(message("step", "position_ids", rule, "positions made in the loss"))
        whole = cast("Tensor", whole).to(device)
        if find_packed_sequence_indices(whole) is None:
            return None
        uses_cache = given.get("use_cache")
        if model.config.use_cache if uses_cache is None else uses_cache:
            raise BatchError(
                "step: wrap_cp's model must have no cache for packed documents, which transformers does not "
                "see with one, got use_cache=True; set model.config.use_cache = False"
            )
        return whole

    def _own_labels(self, part: Any, blocks: Blocks, labels: Tensor) -> Tensor:
        dim = self._dims.get("labels")
        if dim is None or "labels" not in part or labels.shape[dim] != blocks.own:
            rule = "be an entry of the batch, named in dims of wrap_cp"
            raise BatchError(message("step", "labels of a causal loss", rule, list(labels.shape)))
        shifted = _shifted(part["labels"], dim)
        return blocks.take(shifted, dim).to(labels.device)


def _is_causal(model: Any) -> bool:
    """Return whether a model computes the causal loss of transformers from labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    takes = inspect.signature(model.forward).parameters
    return {"labels", "kwargs"} <= takes.keys() and model.loss_function is ForCausalLMLoss


def _shifted(labels: Tensor, dim: int) -> Tensor:
    """Return the next label of each token; for the last token, the ignored label."""
    last = labels.narrow(dim, labels.shape[dim] - 1, 1)
    rest = labels.narrow(dim, 1, labels.shape[dim] - 1)
    return torch.cat([rest, torch.full_like(last, _IGNORED)], dim)


def _mode() -> WholeAttention:
    """Return the `WholeAttention` that is on in this thread, which may be an autograd thread."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next(each for each in reversed(stack) if isinstance(each, WholeAttention))


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' `sdpa_attention_forward` does, over the keys of the whole sequence."""
    for name in ("position_bias", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise LossError(
                f"step: wrap_cp must have attention by queries, keys and a mask alone, got {name}; use "
                "another model"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    found = _mode().attend(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal and attention_mask is None,
        has_own_rows=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).contiguous(), None


def _mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Make this rank's rows of the mask for the whole sequence, or all rows with "ulysses".

    Return None if attention needs no mask, except that it may be causal.
    """
    from transformers import masking_utils as masks

    mode = _mode()
    blocks, documents = mode.blocks, mode.documents
    whole = blocks.num_tokens
    if q_length != blocks.own or kv_length not in (blocks.own, whole):
        rule = f"be for {blocks.own} tokens"
        raise LossError(message("step", "wrap_cp's masks", rule, f"{q_length} x {kv_length}"))
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    if documents is None:
        is_whole = local_size is None or whole < local_size
        if allow_is_causal_skip and is_whole and not is_padded:
            return None
    else:
        indices = masks.find_packed_sequence_indices(documents)
        mask_function = masks.remap_positions_for_packed_sequence(mask_function, documents)
        of_documents = masks.packed_sequence_mask_function(indices)
        mask_function = masks.and_masks(mask_function, of_documents)
    kwargs |= {
        "mask_function": mask_function,
        "attention_mask": attention_mask if is_padded else None,
        "local_size": local_size,
        "allow_is_causal_skip": False,
        "kv_length": whole,
        "kv_offset": 0,
    }
    rows = [
        masks.sdpa_mask(**kwargs | {"q_length": span.stop - span.start, "q_offset": span.start})
        for span in ([slice(0, whole)] if mode.by_heads else blocks.spans)
        if span.stop > span.start
    ]
    return None if rows[0] is None else torch.cat(rows, -2)  # None if all tokens see each other
