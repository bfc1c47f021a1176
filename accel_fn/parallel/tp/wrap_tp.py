"""wrap_tp: split the layers of a model over an axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from accel_fn.core.dtensor import is_sharded
from accel_fn.core.empty import move_values
from accel_fn.core.loss import sparse_tables
from accel_fn.core.mesh_axes import AXES
from accel_fn.core.plan import Plan, SlotFunction, describe
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.core.update import follow_shards
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, message
from accel_fn.parallel.axis_size import axis_size
from accel_fn.parallel.blocks import repeated
from accel_fn.parallel.sharded_optimizers import check_updates_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    Styles = str | Mapping[str, str | ParallelStyle]


@transform
def wrap_tp(styles: Styles = "auto", *, axis: str = "tp") -> Transform:
    """Split layers over the ranks of an axis: each holds a part of their weights and of their activations.

    The ranks along the axis get the same batch. A column-wise layer computes some of its outputs on
    each rank, and the row-wise layer after it adds up the ranks' results. To share batches over
    `dp`, add `wrap_ddp` or `wrap_fsdp`; a mesh whose `dp` is one rank needs neither.

    The user's model keeps its class and its `state_dict` keys; its parameters, and those that the
    optimizer holds, become tensors of class `DTensor` on the axis in `build`. Layers without a
    style are whole on every rank. All parameters start from rank 0's values, except in a model that
    `empty` made, which `load_model` fills after `build`.

    After `seed_all`, ranks along the axis draw one dropout mask of activations that all of them hold. Between
    a column-wise layer and the row-wise one after it, each rank draws a different mask for its
    part. A model has dropout if, in `build`, a module or its `config` has a number > 0 under a name
    with "drop".

    Law: any mesh gives the result of one rank, for uneven parts, any weights, an empty rank.
    Tests: `tests/laws/law13_tensor_parallel.py`.

    Args:
        styles: by name of a module, with `*` for one part of a name, `"colwise"` or `"rowwise"` for
            a linear layer or an embedding, `"sequence"` for a norm, which then computes a part of
            the sequence on each rank, or a `ParallelStyle` of torch. `"auto"`: the model's own
            plan, as models of transformers have one. A model that was split before, by
            `parallelize_module` on `device_mesh(state)[axis]`, or by
            `from_pretrained(distributed_config=DistributedConfig( tp_size=2, tp_plan="auto"))` of
            transformers if the axis is the whole world, is used unchanged.
        axis: "tp", or another axis of the mesh than `dp`. In a mesh without it, `wrap_tp` is a no-op.

    Returns:
        A transform.

    Raises:
        ValueError: `styles` or `axis` is not one of these. In `build`, on all ranks: several ranks
            without a mesh; a style fits no module, or one that cannot be split so; the axis does not
            divide a number of heads or features; `"auto"` and a model without a plan; an optimizer
            that cannot update shards; a model that is split over other ranks, or
            sharded by FSDP; dropout in graphs of `compiled(fullgraph=True)`, which would have to
            break. In the first forward, on the ranks along the axis: a block that returns something
            else than with whole layers. In a step: gradients of gradients, or, in the first one, a
            loss or a metric of a part of a layer's features.
        TypeError: `styles` is of another type.

    Cost: one all-reduce of an activation for each row-wise layer in the forward, and for each input of
        column-wise layers in the backward, over the axis; with `wrap_ddp`, one all-reduce of the gradients
        over `dp`, after the last backward. Weights, gradients and optimizer state of split layers take
        the memory of one part. Ranks wait for one small exchange before the first forward, so that all
        know of a failure. In the first forward, each kind of block that holds split layers runs twice more
        in float64, with a backward each: split, and with its whole weights.

    Source: Shoeybi et al. 2019, arXiv:1909.08053.

    >>> import accel_fn as af
    >>> styles = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    >>> af.wrap_tp(styles)
    wrap_tp({'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})
    """
    if not (isinstance(styles, str | Mapping) and all(isinstance(name, str) for name in styles)):
        rule = 'be "auto" or map names of modules to styles'
        raise ArgumentTypeError(message("wrap_tp", "styles", rule, styles))
    if isinstance(styles, str) and styles != "auto":
        rule = 'be "auto" or a dict'
        repair = 'such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        raise ArgumentError(message("wrap_tp", "styles", rule, styles, repair))
    others = [name for name in AXES if name != "dp"]
    if axis not in others:
        raise ArgumentError(message("wrap_tp", "axis", f"be one of {', '.join(others)}", axis))
    return fill(shard_model=TPSlot(split_over_axis, styles=styles, axis=axis))


class TPSlot(SlotFunction):
    """The slot function of wrap_tp: it calls `split_over_axis` with its settings."""

    traits = frozenset({"shards", "takes_empty"})

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a model that cannot be split, before any tensor is moved."""
        _check_not_sharded(plan.model)
        size = axis_size("wrap_tp", state, self.keywords["axis"])
        if size == 1:
            return
        for name in sparse_tables(plan.model):
            rule, repair = "have dense gradients", "use sparse=False, or wrap_ddp alone"
            raise PlanError(message("build", "wrap_tp's model", rule, name, repair))
        if plan.having("retries"):
            raise PlanError(
                'build: accumulate("auto") must not be used with wrap_tp, since a rank that is out of '
                "memory cannot join the collectives of the others; give a number of micro-batches"
            )
        for compiled in (*plan.compile_step, *plan.having("compiles_loss")):
            raise PlanError(
                f"build: wrap_tp must not be used with {describe(compiled)}, whose graph cannot hold what "
                'splits layers; use compiled(scope="blocks")'
            )
        _check_graphs(plan)
        _check_compiled_blocks(plan)
        for optimizer in plan.optimizers.values():
            check_updates_shards(optimizer, "wrap_tp")
        _check_mesh(plan.model, state, self.keywords["axis"])
        _styles(plan.model, self.keywords["styles"], size)

    def share(self, plan: Plan, meshes: Mapping[str, DeviceMesh]) -> None:
        """Split the layers that have a style; do nothing without a mesh of the axis."""
        from accel_fn.parallel.tp.split import cut_layers

        mesh, model = meshes.get(self.keywords["axis"]), plan.model
        if mesh is not None:
            before = dict(model.named_parameters())
            cut_layers(model, _styles(model, self.keywords["styles"], mesh.size()), mesh)
            for optimizer in plan.optimizers.values():
                follow_shards(optimizer, before, model)


def split_over_axis(state: DistState, model: nn.Module, *, styles: Styles, axis: str) -> nn.Module:
    """Split a model over an axis, in place, and return it. `wrap_tp` fills the slot `shard_model` with it."""
    from accel_fn.parallel.tp.split import split_model

    size = axis_size("wrap_tp", state, axis)
    if size > 1:
        move_values(model, state.device)
        split_model(state, model, _styles(model, styles, size), axis)
    return model


def _check_not_sharded(model: nn.Module) -> None:
    """Refuse a model that FSDP has sharded, for example for an earlier step."""
    hooks = [each for module in model.modules() for each in module._forward_pre_hooks.values()]
    is_of_fsdp = any(str(each.__module__).startswith("torch.distributed.fsdp") for each in hooks)
    for name, each in model.named_parameters() if is_of_fsdp else ():
        if is_sharded(each):
            rule = "not be sharded by FSDP before"
            repair = "build once, with one loss_fn that chooses by the batch"
            raise PlanError(message("build", "wrap_tp's model", rule, name, repair))


def _check_mesh(model: nn.Module, state: DistState, axis: str) -> None:
    """Refuse a model that is split over ranks other than those along the axis."""
    from accel_fn.parallel.mesh import device_mesh

    wanted = device_mesh(state)[axis].mesh.tolist()
    for name, each in model.named_parameters():
        if is_sharded(each) and (ranks := each.device_mesh.mesh.tolist()) != wanted:
            raise PlanError(
                f"build: wrap_tp's model must be split over the ranks along {axis}, {wanted}, got {name} "
                f"over {ranks}; give it whole, from from_pretrained without distributed_config for example: "
                "wrap_tp() splits it by the same plan"
            )


def _check_graphs(plan: Plan) -> None:
    """Refuse `fullgraph=True` together with dropout: seeding the generator breaks graphs."""
    from accel_fn.parallel.tp.draws import may_draw

    if (whole := plan.having("full_graph")) and may_draw(plan.model):
        raise PlanError(
            f"build: {describe(whole[0])} must not be used with wrap_tp and dropout, whose draws break "
            "graphs; leave fullgraph out"
        )


def _check_compiled_blocks(plan: Plan) -> None:
    """Refuse compiled blocks in which a module uses its own parameters beside the layers inside it.

    The parameters are DTensors in the graph, but the outputs of the layers are plain tensors.
    """
    from accel_fn.parallel.tp.model_plan import PARAMETER_LISTS, READS_WEIGHTS

    for compiled in plan.having("torch_compile"):
        blocks = repeated(plan.model).items()
        modules = [each for outer, block in blocks for each in block.named_modules(prefix=outer)]
        for name, module in modules:
            layers = [each for each in module.children() if not isinstance(each, PARAMETER_LISTS)]
            of_layers = {parameter for layer in layers for parameter in layer.parameters()}
            own = [its for its, each in module.named_parameters() if each not in of_layers]
            if own and of_layers and not isinstance(module, READS_WEIGHTS):
                raise PlanError(
                    f"build: {describe(compiled)} must not be used with wrap_tp and a block that uses "
                    "parameters of its own beside layers, which no graph takes as plain tensors, got "
                    f"{name}.{own[0]}; put it into a module that the block calls, or leave compiled out"
                )


def _styles(model: nn.Module, styles: Styles, size: int) -> Mapping[str, ParallelStyle]:
    """Return the style of each module that has one; an empty dict if the model is split already."""
    from accel_fn.parallel.tp.styles import styles_of

    is_split = any(map(is_sharded, model.parameters()))
    return {} if is_split else styles_of(model, styles, size)
