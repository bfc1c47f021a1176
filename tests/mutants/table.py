"""The bugs: where each is planted, and the tests nearest to it. The replaced text occurs once in
its file, which a test in this folder checks."""

from __future__ import annotations

from dataclasses import dataclass

LAWS = "tests/laws/test_"


@dataclass(frozen=True)
class Mutant:
    """A bug by name: in `file` of accel_fn, `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Arguments of pytest for the tests that notice the bug soonest."""


STRATEGY, MEAN, UPDATE = "step/strategy.py", "step/global_mean.py", "step/update.py"
GRADS, STATE = "step/grads.py", "base/state.py"
DDP, FSDP = "transforms/ddp/ddp.py", "transforms/fsdp/fsdp.py"
ADVANCE, AVERAGE = "transforms/schedule/advance.py", "transforms/average.py"
ORDER, SOURCE = "data/order.py", "data/indexed/indexed_source.py"
WORLDS, SCALING = f"{LAWS}worlds.py", f"{LAWS}scaling.py"
SHARE = "return shares(weight, total, self._num_ranks)"
FINITE = "finite = None if state.scaler is None else torch.isfinite(grads.norm())"

MUTANTS = [
    Mutant(
        "gradients are never averaged over the ranks",
        DDP,
        "    return DDP(state, module, plan, inner, **options)",
        "    return Strategy(state, module, plan, inner)",
        WORLDS,
    ),
    Mutant(
        "the last micro-batch is accumulated without averaging",
        STRATEGY,
        "local.close()  # this backward averages the gradients of all",
        "pass",
        WORLDS,
    ),
    Mutant(
        "every micro-batch is averaged, and the sum again",
        STRATEGY,
        "local.enter_context(self.no_sync())",
        "pass",
        f"{LAWS}fsdp.py {WORLDS}",
    ),
    Mutant(
        "gradients are summed over ranks instead of averaged",
        MEAN,
        "self._num_ranks = state.data.world_size",
        "self._num_ranks = state.data.world_size ** 2",
        WORLDS,
    ),
    Mutant(
        "gradients are divided by the number of ranks twice",
        MEAN,
        "self._num_ranks = state.data.world_size",
        "self._num_ranks = 1",
        WORLDS,
    ),
    Mutant(
        "a mean of the means of ranks",
        MEAN,
        SHARE,
        "return weight / self.own_weight if total and self.own_weight else 0.0",
        WORLDS,
    ),
    Mutant(
        "micro-batches are summed, not averaged",
        MEAN,
        SHARE,
        "return float(self._num_ranks * weight > 0) if total else 0.0",
        f"{LAWS}accumulation.py",
    ),
    Mutant(
        "the tail is divided by the full count",
        MEAN,
        SHARE,
        "return weight * self._num_ranks / max(total, 8) if total else 0.0",
        f"{LAWS}accumulation.py",
    ),
    Mutant(
        "the reported loss is that of one rank",
        MEAN,
        "        if self._state.world_size > 1:\n            self._pending.append(self._sum(self._sums,",
        "        if self._state.world_size > 99:\n            self._pending.append(self._sum(self._sums,",
        WORLDS,
    ),
    Mutant(
        "the reported loss counts its micro-batches alike",
        MEAN,
        "self.add_scaled(loss, metrics, shares(weight, self.total()))",
        "self.add_scaled(loss, metrics, 0.5)",
        f"{LAWS}accumulation.py",
    ),
    Mutant(
        "terms share the denominator of the first one",
        "base/weights.py",
        "return tuple([part * factor / whole if part else 0.0 for part, whole in pairs])",
        "return tuple([part * factor / total[0] if part else 0.0 for part, whole in pairs])",
        f"{LAWS}several_terms.py",
    ),
    Mutant(
        "a term without items adds the gradient of its 0/0",
        "step/loss_terms.py",
        "node.register_hook(_zeros)",
        "node.name()",
        f"{LAWS}several_terms.py",
    ),
    Mutant(
        "what .grad held before counts",
        STRATEGY,
        "            for parameter in self._reachable:\n                parameter.grad = None",
        "            pass",
        "tests/step/test_step.py",
    ),
    Mutant(
        "gradients stay for the next step",
        STRATEGY,
        "        for parameter in self._reachable:\n            parameter.grad = None\n        if state",
        "        if state",
        "tests/step/test_step.py",
    ),
    Mutant(
        "weights of padding: labels that are ignored count",
        "base/weights.py",
        "int(torch.count_nonzero(counted != ignore_index))",
        "counted.numel()",
        f"{LAWS}accumulation.py",
    ),
    Mutant(
        "one layer, the head, is not synchronised",
        DDP,
        "        ddp = DistributedDataParallel(module, **options)",
        "        module._ddp_params_and_buffers_to_ignore = [n for n, _ in module.named_parameters()][-1:]\n"
        "        ddp = DistributedDataParallel(module, **options)",
        WORLDS,
    ),
    Mutant(
        "ranks keep their own first parameters",
        DDP,
        'options = {"gradient_as_bucket_view": True, **ddp_options}',
        'options = {"gradient_as_bucket_view": True, "init_sync": False, **ddp_options}',
        "tests/transforms/test_ddp.py tests/cli/test_test.py",
    ),
    Mutant(
        "buffers are not broadcast",
        DDP,
        'options = {"gradient_as_bucket_view": True, **ddp_options}',
        'options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, **ddp_options}',
        "tests/transforms/test_ddp.py tests/step/test_step.py",
    ),
    Mutant(
        "the loss scale is not undone",
        STRATEGY,
        "state.scaler.scale.to(dtype).reciprocal()",
        "torch.ones((), dtype=dtype)",
        SCALING,
    ),
    Mutant(
        "the loss scale is not applied",
        MEAN,
        "(scale * share).to(loss.dtype)",
        "loss.new_full((), share)",
        SCALING,
    ),
    Mutant(
        "shares are lost under a loss scale",
        MEAN,
        "(scale * share).to(loss.dtype)",
        "scale.to(loss.dtype)",
        f"{SCALING} tests/cli/test_test.py",
    ),
    Mutant(
        "each rank decides about an overflow alone",
        UPDATE,
        FINITE,
        f"{FINITE} | torch.tensor(state.rank > 0)",
        SCALING,
    ),
    Mutant(
        "an overflow is not looked for",
        UPDATE,
        FINITE,
        "finite = None if state.scaler is None else torch.tensor(True)",
        SCALING,
    ),
    Mutant(
        "an update that was refused is applied",
        UPDATE,
        "apply_update(optimizer, parameters, Grads(own, grads.factor), accepted)",
        "apply_update(optimizer, parameters, Grads(own, grads.factor), None)",
        SCALING,
    ),
    Mutant(
        "the loss scale grows after an overflow",
        STATE,
        "scale=torch.where(ok, risen, fallen)",
        "scale=torch.where(ok, fallen, risen)",
        SCALING,
    ),
    Mutant(
        "steps count towards growth for ever",
        STATE,
        "good_steps=torch.where(ok & ~grows, good_steps, 0)",
        "good_steps=good_steps",
        SCALING,
    ),
    Mutant(
        "clipping before unscaling",
        GRADS,
        "norm = raw if self.factor is None else raw * self.factor.abs()",
        "norm = raw",
        f"tests/step/test_grads.py {SCALING}",
    ),
    Mutant(
        "clipping by a bound of each rank's own",
        "transforms/clip.py",
        "grads.scaled((max_norm / (grads.norm()",
        "grads.scaled((max_norm / (1 + state.rank) / (grads.norm()",
        WORLDS,
    ),
    Mutant(
        "clipping by the norm of the own shard",
        GRADS,
        "norm = norm_over_shards(global_norm([local(each) for each in sharded]), sharded)",
        "norm = global_norm([local(each) for each in sharded])",
        f"{LAWS}fsdp.py",
    ),
    Mutant(
        "the norm is a sum of the norms of tensors",
        GRADS,
        "torch.linalg.vector_norm(torch.stack(norms))",
        "torch.stack(norms).sum()",
        f"{LAWS}clipping.py {WORLDS}",
    ),
    Mutant(
        "clipping also enlarges small gradients",
        "transforms/clip.py",
        ".clamp(max=1.0))",
        ".clamp(max=1e9))",
        f"{LAWS}clipping.py",
    ),
    Mutant(
        "elements are clipped on one side",
        "transforms/clip.py",
        "value.clamp(-max_value, max_value)",
        "value.clamp(max=max_value)",
        f"{LAWS}clipping.py",
    ),
    Mutant(
        "a norm of float64 gradients in float32",
        GRADS,
        "dtype = torch.float32 if dtypes.isdisjoint(_DOUBLE) else torch.float64\n    if torch.c",
        "dtype = torch.float32\n    if torch.c",
        "tests/step/test_grads.py",
    ),
    Mutant(
        "rows of a sparse gradient count twice in the norm",
        GRADS,
        "t.coalesce().values() if t.is_sparse",
        "t._values() if t.is_sparse",
        "tests/step/test_grads.py",
    ),
    Mutant(
        "a fused kernel multiplies by the scale",
        UPDATE,
        "optimizer.grad_scale = factor.reciprocal()",
        "optimizer.grad_scale = factor",
        "tests/step/test_update.py",
    ),
    Mutant(
        "the schedule is stepped once for each rank",
        ADVANCE,
        "            self._advance()\n        return state",
        "            [self._advance() for _ in range(state.world_size)]\n        return state",
        f"{LAWS}schedule.py",
    ),
    Mutant(
        "the schedule counts updates that were skipped",
        ADVANCE,
        "if self._always or report.applied:",
        "if True:",
        f"{LAWS}schedule.py",
    ),
    Mutant(
        "the average counts updates that were skipped",
        AVERAGE,
        "elif self._always or applied:",
        "else:",
        f"{LAWS}averaging.py",
    ),
    Mutant(
        "the average moves by its decay",
        AVERAGE,
        "return 1 - decay if num_updates else 1.0",
        "return decay if num_updates else 1.0",
        f"{LAWS}averaging.py",
    ),
    Mutant(
        "after an evaluation of the average, training goes on from it",
        AVERAGE,
        "            _copy(kept, there)",
        "            pass",
        f"{LAWS}averaging.py",
    ),
    Mutant(
        "an average that is loaded starts anew",
        AVERAGE,
        'self._num_updates = saved["num_updates"]',
        "self._num_updates = 0",
        f"{LAWS}averaging.py",
    ),
    Mutant(
        "the sampler is not agreed on by the ranks",
        SOURCE,
        "yield from order.samples(epoch, places.flatten())",
        "yield from order.samples(epoch + rank, places.flatten())",
        f"{LAWS}sharding.py",
    ),
    Mutant(
        "every epoch has the same order",
        ORDER,
        "key=mix(mix(self.seed) + epoch)",
        "key=mix(mix(self.seed))",
        f"tests/data/test_order.py {LAWS}sharding.py",
    ),
    Mutant(
        "every rank reads the whole batch",
        ORDER,
        "return start + first, start + last",
        "return start, stop",
        f"{LAWS}sharding.py",
    ),
    Mutant(
        "the tail of an epoch is dropped",
        ORDER,
        "stop = self.num_samples if last and not self.drop_last else start + self.batch_size",
        "stop = min(start + self.batch_size, self.num_samples)",
        f"{LAWS}sharding.py",
    ),
    Mutant(
        "a rank's part loses its last row",
        "base/split_batch.py",
        "return start, start + size + (index < extra)",
        "return start, start + size",
        f"tests/base {LAWS}sharding.py",
    ),
    Mutant(
        "a resumed run is off by one batch",
        SOURCE,
        "return divmod(step, -(-self.num_batches() // window))",
        "return divmod(step + 1, -(-self.num_batches() // window))",
        f"{LAWS}sharding.py tests/data/test_loader.py",
    ),
    Mutant(
        "a resumed run forgets how many updates it skipped",
        "transforms/skip.py",
        'self._in_a_row = saved["in_a_row"].to(self._in_a_row.device)',
        "self._in_a_row = torch.zeros_like(self._in_a_row)",
        f"{LAWS}skipping.py",
    ),
    Mutant(
        "a resumed run averages ranks at other updates",
        "transforms/local_sgd/local_sgd.py",
        'self._num_updates = saved["num_updates"]',
        "self._num_updates = 1",
        "tests/transforms/test_local_sgd.py",
    ),
    Mutant(
        "ranks that train apart count alike in their mean",
        "transforms/local_sgd/average_ranks.py",
        "each / total if total else 1 / len(weights)",
        "1 / len(weights)",
        f"{LAWS}local_sgd.py",
    ),
    Mutant(
        "rows are gathered in another order",
        "comm/gather.py",
        "torch.cat([next(part).to(device) for part in parts]).view(leaf.dtype)",
        "torch.cat([next(part).to(device) for part in reversed(parts)]).view(leaf.dtype)",
        f"tests/comm/test_gather.py {LAWS}evaluation.py",
    ),
    Mutant(
        "a mean over ranks without their weights",
        "comm/reduce.py",
        "return [each / total for each in weights]",
        "return [1 / len(weights) for each in weights]",
        "tests/comm/test_collectives.py",
    ),
    Mutant(
        "dropout is on in an evaluation",
        "observe/evaluate.py",
        "        model.eval()",
        "        pass",
        "tests/observe/test_evaluate.py",
    ),
    Mutant(
        "augmentation is the same in every epoch",
        "data/seed_samples.py",
        "seed = _seed(self._run_seed, epoch, place)",
        "seed = _seed(self._run_seed, 0, place)",
        f"{LAWS}seeding.py",
    ),
    Mutant(
        "augmentation is not seeded in NumPy",
        "data/seed_samples.py",
        "        np.random.seed((seed & 0xFFFFFFFF, seed >> 32))\n",
        "",
        f"{LAWS}seeding.py",
    ),
    Mutant(
        "weight decay moves frozen parameters",
        "transforms/freeze.py",
        "None if place in self._places else each for place, each",
        "each * 0 if place in self._places else each for place, each",
        f"{LAWS}freezing.py",
    ),
    Mutant(
        "a frozen layer thaws one update late",
        "transforms/freeze.py",
        "each.closed = number + 1 < self._until",
        "each.closed = number < self._until",
        f"{LAWS}freezing.py",
    ),
    Mutant(
        "micro-batches that only keep shards together count",
        FSDP,
        "[*weights, *[0] * lacking]",
        "[*weights, *[1] * lacking]",
        f"{LAWS}fsdp.py",
    ),
]
