"""Trainer: the loop and arguments of transformers' Trainer around the step of accel_fn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.data_loader import SeedableRandomSampler
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from accel_fn import (
    DistState,
    Grads,
    Plan,
    Report,
    Step,
    accumulate,
    autocast,
    broadcast,
    build,
    clip,
    compose,
    count_samples,
    gather,
    init,
    load,
    load_model,
    place,
    reduce_sum,
    save,
    with_amp,
    wrap_ddp,
)
from accel_fn.checkpoint import whole_state_dict
from accel_fn.errors import ArgumentError, ArgumentTypeError
from accel_fn.extend import fill, is_sharded

if TYPE_CHECKING:
    from accel_fn import Transform

PRIVATE_NAMES = (
    "_build_accelerator_args",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_load_best_model",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_loss_shifts_labels",
    "_prepare_for_training",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
)
"""Undocumented names of transformers' Trainer that this file overrides or reads."""
_FOLDER = "accel_fn"
"""The folder in a checkpoint of the Trainer that holds the state of the step."""
_IS_STAND_IN = "_accel_fn_is_stand_in"
"""The key that marks a stand-in: the batch of a rank without samples, which counts nothing."""
_KEPT_OPTIONS = (
    *("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor"),
    *("persistent_workers", "pin_memory", "in_order"),
)


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """The Trainer of transformers, whose gradients, updates and evaluation are accel_fn's.

    Use it instead of `transformers.Trainer`. Arguments, callbacks, logs, schedules and folders are
    those of transformers. One step does the batches, loss, gradients, clipping, precision and
    optimizer. So W processes with `gradient_accumulation_steps=k` train as one process does with
    the same number of samples per step. This includes the last batch of an epoch, which accelerate
    fills up with samples from the beginning of the epoch. The logged loss is the mean over the
    items of the global batch, and `eval_loss` is the mean over the items of the whole data set.
    Items are labels that are not -100 if a batch has `labels`, else samples.

    A checkpoint holds the weights as transformers writes them, and, in its folder `accel_fn`, the
    files of `save`: the optimizer, shards, averages and loss scale, for any number of processes. It
    also resumes from a checkpoint of the plain Trainer.

    Args:
        *args: as for `transformers.Trainer`.
        recipe: more transforms for the step, such as `ema(0.999)` or `wrap_fsdp()`; a strategy in
            it replaces `wrap_ddp()`.
        **options: as for `transformers.Trainer`.

    Raises:
        ValueError: an argument that it does not support is set; the message has the reason.

    Cost: the cost of the step; in an evaluation that collects predictions, three small collectives
    per batch.

    >>> from accel_fn.contrib.transformers import Trainer
    >>> Trainer.__mro__[1].__module__
    'transformers.trainer'
    """

    args: Any
    control: Any

    def __init__(self, *args: Any, recipe: Transform | None = None, **options: Any) -> None:
        self._recipe = recipe or compose()
        self._step: Step | None = None
        self._report: Report | None = None
        self._parts: list[Any] = []
        self._checkpoint: Path | None = None
        super().__init__(*args, **options)

    # Construction

    def create_accelerator_and_postprocess(self) -> None:
        """Keep accelerate from wrapping the model, and from splitting batches and scaling losses."""
        self.args = copy.copy(self.args)
        # The step counts the items of all ranks, so a loss must be the mean over its micro-batch.
        self.args.average_tokens_across_devices = False
        _check(self.args)
        super().create_accelerator_and_postprocess()
        self._state = init(device=self.args.device, seed=self.args.data_seed or self.args.seed)
        _check_mesh(self._state)
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, **_: model.to(self.args.device)
        accelerator.prepare_data_loader = lambda loader, **_: self._part_of(loader)
        accelerator.prepare_optimizer = self._wrap_optimizer

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**options)
        return {**found, "mixed_precision": "no"}

    def _part_of(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of this rank's part of each global batch."""
        if isinstance(loader.dataset, IterableDataset):
            if self._state.world_size > 1:
                raise ArgumentTypeError(
                    "Trainer: train_dataset and eval_dataset must have numbered samples on several "
                    f"ranks, got a {type(loader.dataset).__name__}; give a map-style data set"
                )
            return loader
        # A loader without a batch size has a batch sampler, whose batches cannot be divided here.
        if loader.batch_size is None:
            if self._state.world_size > 1:
                raise ArgumentTypeError(
                    "Trainer: a DataLoader that accelerator.prepare takes must have a batch_size on several "
                    f"ranks, got a batch_sampler {type(loader.batch_sampler).__name__}; give a sampler of "
                    "single samples, and the batch size"
                )
            return loader
        options: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT_OPTIONS}
        return DataLoader(
            _Samples(loader.dataset),
            batch_sampler=RankBatches(loader, self._state, self.args.data_seed),
            collate_fn=_Collate(loader.collate_fn),
            **options,
        )

    def _wrap_optimizer(self, optimizer: Any, **_: Any) -> AcceleratedOptimizer:
        found = optimizer if isinstance(optimizer, _Optimizer) else _Optimizer(optimizer)
        self.accelerator._optimizers.append(found)
        return found

    # Training

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, checkpoint: Any) -> Any:
        self._checkpoint = None
        prepared = super()._prepare_for_training(max_steps, train_dataloader, checkpoint)
        args = self.args
        parts = [place(), accumulate(args.gradient_accumulation_steps, split=None), self._recipe]
        parts += [with_amp("bf16")] if args.bf16 else [with_amp("fp16")] if args.fp16 else []
        clipped = args.max_grad_norm and args.max_grad_norm > 0
        parts += [clip(args.max_grad_norm)] if clipped else []
        plan: Plan[Any] = compose(*parts)(
            Plan(self._loss, self.model, self.optimizer.optimizer, weight_fn=self._num_items)
        )
        # Compute the gradient norm for the log, unless `clip` does so, or DeepSpeed keeps the
        # gradients.
        if not clipped and not plan.having("collectives_in_apply"):
            plan = fill(gradients=_read_norm)(plan)
        if not plan.strategy:
            unused = bool(args.ddp_find_unused_parameters)
            plan = wrap_ddp(find_unused_parameters=unused)(plan)
        self._state, self._step = build(plan, replace(self._state, step=0, call=0, scaler=None))
        if getattr(args, "predict_with_generate", False) and self._is_sharded():
            raise ArgumentError(
                "Trainer: args.predict_with_generate must not be set with shards, got True; generate from "
                "what save_model wrote, since ranks that generate run unequal numbers of forwards"
            )
        if self._checkpoint is not None:
            self._state = load(self._step, self._state, self._checkpoint)
        self._state = replace(self._state, step=self.state.global_step)
        return prepared

    def _loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        number = self._get_num_items_in_batch([batch], self.args.device)
        loss: Tensor = self.compute_loss(model, dict(batch), num_items_in_batch=number)
        return loss

    def _num_items(self, batch: Mapping[str, Any]) -> float | Tensor:
        """Return the number of items over which a loss is the mean: labels other than -100, else samples."""
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor):
            return count_samples(batch)
        shifts = self._loss_shifts_labels and "shift_labels" not in batch
        return (labels[..., 1:] if shifts else labels).ne(-100).sum()

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Keep a micro-batch and return 0. At the last one of an update, run the step and return its loss."""
        assert self._step is not None
        model.train()
        if inputs.pop(_IS_STAND_IN, False):
            # Cut all rows off a stand-in, since the Trainer counts the tokens and operations of
            # each batch.
            inputs.update(pytree.tree_map_only(Tensor, lambda each: each[:0], dict(inputs)))
        else:
            self._parts.append(dict(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._parts = self._parts, []
        self._state, self._report = self._step(self._state, parts)
        if not self._step.plan.always_applies(self._state):
            self.optimizer.was_skipped = not self._report.applied
        return self._report.loss.float()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        assert self._report is not None
        return self._report.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self._report is not None
        return self._report.grad_norm

    # Evaluation

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        """Return an autocast context with the precision of the step, or of the arguments without a step."""
        if self._step is not None:
            return autocast(self._step, self._state)
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16
        enabled = self.args.bf16 or self.args.fp16
        return torch.autocast(self.args.device.type, dtype) if enabled else nullcontext()

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run `prediction_step` on every batch, and collect its results in order of the samples."""
        args = self.args
        loss_only = (
            args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        )
        by_batch = args.batch_eval_metrics and self.compute_metrics is not None
        self.callback_handler.eval_dataloader = dataloader
        names = ("losses", "inputs", "predictions", "label_ids")
        found = {
            name: EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100)
            for name in names
        }
        metrics: dict[str, Any] = {}
        # This rank's sums of losses, items and samples.
        sums = torch.zeros(3, dtype=torch.float64)
        with self._evaluating() as model:
            for number, batch in enumerate(dataloader, 1):
                rows, parts = self._predict(model, batch, loss_only, ignore_keys)
                sums += rows
                whole = self._gathered(parts)
                if not by_batch or description == "Prediction":
                    for name, each in whole.items():
                        found[name].add(each)
                self.control = self.callback_handler.on_prediction_step(
                    args, self.state, self.control
                )
                if by_batch and "predictions" in whole and "label_ids" in whole:
                    metrics = self.compute_metrics(
                        _prediction(whole, args), compute_result=number == len(dataloader)
                    )
                if args.eval_accumulation_steps and number % args.eval_accumulation_steps == 0:
                    for each in found.values():
                        each.to_cpu_and_numpy()
        arrays = {name: each.get_arrays() for name, each in found.items()}
        there = arrays["predictions"] is not None and arrays["label_ids"] is not None
        if self.compute_metrics is not None and there and not by_batch:
            metrics = self.compute_metrics(_prediction(arrays, args))
        metrics = denumpify_detensorize(metrics)
        loss, items, samples = reduce_sum(sums, self._state).tolist()
        if items:
            metrics[f"{metric_key_prefix}_loss"] = loss / items
        prefixed = {
            name
            if name.startswith(f"{metric_key_prefix}_")
            else f"{metric_key_prefix}_{name}": each
            for name, each in metrics.items()
        }
        return EvalLoopOutput(arrays["predictions"], arrays["label_ids"], prefixed, int(samples))

    @contextmanager
    def _evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode. If there is a step, every rank has the buffers of rank 0."""
        args, model = self.args, self.model
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            model = model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16)
        model.eval()
        step = self._step
        same = (
            step.strategy.evaluating(step.plan, self._state, "Trainer") if step else nullcontext()
        )
        with _in_eval_mode(self.optimizer), same:
            yield model

    def _predict(
        self, model: nn.Module, batch: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return sums of losses, items and samples over this rank's rows of a batch, and outputs by name."""
        num_rows = 0 if batch.pop(_IS_STAND_IN, False) else count_samples(batch)
        items = float(self._num_items(batch)) if num_rows else 0.0
        # Set the precision here, so that a `prediction_step` that the user overrides computes in it
        # too.
        with self.autocast_smart_context_manager():
            loss, logits, labels = self.prediction_step(
                model, batch, loss_only, ignore_keys=ignore_keys
            )
        sums = torch.tensor([0.0, 0.0, num_rows], dtype=torch.float64)
        if loss is not None and items:
            sums[0], sums[1] = loss.double().item() * items, items
        found = {"predictions": logits, "label_ids": labels}
        if loss is not None and "loss" in self.args.include_for_metrics:
            found["losses"] = loss.repeat(num_rows or 1)
        if "inputs" in self.args.include_for_metrics:
            name = getattr(self.model, "main_input_name", "input_ids")
            found["inputs"] = self._prepare_input(batch[name])
        found = {name: each for name, each in found.items() if each is not None}
        if self.preprocess_logits_for_metrics is not None and "predictions" in found:
            padded = self._padded(found["predictions"]), self._padded(found.get("label_ids"))
            found["predictions"] = self.preprocess_logits_for_metrics(*padded)
        rows = pytree.tree_map_only(Tensor, lambda each: _wide(each[:num_rows]), found)
        return sums, rows

    def _padded(self, tree: Any) -> Any:
        """Pad rows to the length of the longest row on any rank."""
        return self.accelerator.pad_across_processes(tree, dim=1, pad_index=-100)

    def _gathered(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of all ranks, in the order of the samples."""
        return gather(self._padded(rows), self._state) if self._state.world_size > 1 else rows

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights for `from_pretrained`, gathered from shards. Call it on every rank."""
        if not self._is_sharded():
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir, state_dict=whole_state_dict(self.model, self._state))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._step is not None
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))
        save(self._step, self._state, Path(output_dir, _FOLDER))
        # Release the folder's lock, which the step would keep. The next save goes to another folder.
        self._step.notes.pop("locks", None)

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: `save` has written the loss scale."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, _FOLDER).is_dir():
            # There is no checkpoint, or a plain Trainer wrote it.
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(saved)
        # Load this folder later, when the step is built.
        self._checkpoint = Path(checkpoint, _FOLDER)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: `load` reads the loss scale."""

    def _load_best_model(self) -> None:
        if any(map(is_sharded, self.model.parameters())):
            load_model(self.model, self.state.best_model_checkpoint)
        else:
            whole = self._step.strategy.whole(writes=True) if self._step else nullcontext()
            with whole:
                super()._load_best_model()

    def _is_sharded(self) -> bool:
        # DeepSpeed's ZeRO adds `ds_id` to the parameters that it shards.
        parameters = self.model.parameters()
        return any(is_sharded(each) or hasattr(each, "ds_id") for each in parameters)


class RankBatches:
    """A batch sampler that yields the numbers of this rank's samples in each global batch.

    A global batch has `world_size` times the batch size of the loader. Its samples are in the order
    in which the plain Trainer reads them on one process. If a last batch has fewer samples than ranks, a
    rank without a sample reads the first sample of the batch, marked as a stand-in.
    """

    def __init__(self, loader: DataLoader[Any], state: DistState, seed: int | None) -> None:
        self._state = state
        self._batch_size = (loader.batch_size or 1) * state.world_size
        self._drop_last = loader.drop_last
        self._num_samples = len(loader.sampler)  # type: ignore[arg-type]
        self.sampler = _repeatable(loader.sampler, seed)
        # The Trainer calls `set_epoch` of `.batch_sampler.batch_sampler`, so make that this object.
        self.batch_sampler = self
        self.batch_size = loader.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, if it has one."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(self._num_samples, self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        order = [*self.sampler]
        state = self._state
        # These two samplers give equal orders on all ranks. Any other sampler may draw from a
        # generator that differs between ranks, so use the order of rank 0.
        if not isinstance(self.sampler, SeedableRandomSampler | SequentialSampler):
            order = broadcast(order, state)
        for number in range(len(self)):
            batch = order[number * self._batch_size :][: self._batch_size]
            size, extra = divmod(len(batch), state.world_size)
            begin = state.rank * size + min(state.rank, extra)
            yield batch[begin:][: size + (state.rank < extra)] or [_StandIn(batch[0])]


class _StandIn(int):
    """The number of a stand-in: a sample that a rank without samples reads, and that another rank counts."""


class _Marked(list[Any]):
    """A list with the sample of a stand-in. `_Collate` recognises such a list by its class."""


@dataclass(frozen=True, slots=True)
class _Samples(Dataset[Any]):
    """The user's data set; it returns a stand-in's sample in a `_Marked` list."""

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> Any:
        return self.data[number]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        read = getattr(self.data, "__getitems__", None)
        found = read(numbers) if read else [self.data[number] for number in numbers]
        return _Marked(found) if isinstance(numbers[0], _StandIn) else found


@dataclass(frozen=True, slots=True)
class _Collate:
    """Calls the user's collate function; marks a batch that was made from a `_Marked` list."""

    fn: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.fn(samples)
        if isinstance(samples, _Marked):
            batch[_IS_STAND_IN] = True
        return batch


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that the Trainer calls, after the step has made the update."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False)
        self.was_skipped = False

    def step(self, closure: Any = None) -> None:
        """Do nothing: the step has made the update already."""

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last update was skipped. If so, the Trainer does not advance its schedule."""
        return self.was_skipped


def _repeatable(sampler: Any, seed: int | None) -> Any:
    """Replace a random sampler by one with the plain Trainer's order, equal on all ranks."""
    if not isinstance(sampler, RandomSampler):
        return sampler
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )


def _read_norm(state: DistState, grads: Grads) -> Grads:
    """Compute the gradient norm for the log, in a plan without clipping."""
    grads.norm()
    return grads


@contextmanager
def _in_eval_mode(optimizer: Any) -> Iterator[None]:
    """A context that puts an optimizer with modes, such as a schedule-free one, into eval mode."""
    has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    switches = has_modes and all(each.get("train_mode", True) for each in optimizer.param_groups)
    if switches:
        optimizer.eval()
    try:
        yield
    finally:
        if switches:
            optimizer.train()


def _wide(tensor: Tensor) -> Tensor:
    """Widen half precision, as accelerate does for the outputs of a model."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _prediction(found: Mapping[str, Any], args: Any) -> EvalPrediction:
    """Make the argument of `compute_metrics`, with losses and inputs if `include_for_metrics` has them."""
    included = {"losses": "loss", "inputs": "inputs"}
    more = {
        name: found.get(name) for name, kind in included.items() if kind in args.include_for_metrics
    }
    return EvalPrediction(found["predictions"], found["label_ids"], **more)


_REASONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fsdp": (lambda args: args.fsdp, "shard by recipe=wrap_fsdp()"),
    "deepspeed": (lambda args: args.deepspeed, "give it as recipe=wrap_deepspeed(...)"),
    "torch_compile": (lambda args: args.torch_compile, "compile by recipe=compiled()"),
    "auto_find_batch_size": (
        lambda args: args.auto_find_batch_size,
        "the batch size is part of the result; a smaller one with more "
        "gradient_accumulation_steps gives the same",
    ),
    "train_sampling_strategy": (
        lambda args: args.train_sampling_strategy == "batch_rebalance",
        "it shares out samples by their lengths, so that other ranks would get other batches",
    ),
    "parallelism_config": (
        lambda args: args.parallelism_config,
        "ranks are replicas or shards here",
    ),
    "ddp_static_graph": (
        lambda args: args.ddp_static_graph,
        "give recipe=wrap_ddp(static_graph=True)",
    ),
    "ddp_bucket_cap_mb": (
        lambda args: args.ddp_bucket_cap_mb,
        "give recipe=wrap_ddp(bucket_cap_mb=...)",
    ),
    "ddp_broadcast_buffers": (
        lambda args: args.ddp_broadcast_buffers,
        "give recipe=wrap_ddp(broadcast_buffers=True)",
    ),
    "accelerator_config": (
        lambda args: (
            args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches
        ),
        "batches are split over the ranks by their samples",
    ),
    "optim": (
        lambda args: "lomo" in args.optim or "layerwise" in args.optim,
        "it updates parameters in the backward, before gradients are averaged",
    ),
    "torch_empty_cache_steps": (lambda args: args.torch_empty_cache_steps, "call it in a callback"),
}
"""Refused arguments by name: a test whether the argument is set, and the reason or the repair."""


def _check_mesh(state: DistState) -> None:
    """Refuse ranks that hold the same rows: the Trainer gives each rank different rows."""
    if state.data.world_size < state.world_size:
        mesh = {each.name: each.world_size for each in state.axes}
        raise ArgumentError(f"Trainer: mesh must have dp alone, got {mesh}; leave out --mesh")


def _check(args: Any) -> None:
    """Refuse arguments that this Trainer does not support."""
    for name, (is_set, reason) in _REASONS.items():
        if is_set(args):
            raise ArgumentError(
                f"Trainer: args.{name} must not be set, got {getattr(args, name)}; {reason}"
            )
    if args.n_gpu > 1:
        rule = "see one GPU a process"
        raise ArgumentError(f"Trainer: args must {rule}, got {args.n_gpu}; use accel-fn launch")
