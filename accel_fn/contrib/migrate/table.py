"""The replacement of each name of accelerate, the reason, and known differences in results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The replacement of a name of accelerate; `{name}` in it is the argument `name`."""

    replacement: str | None
    """The code to write instead. None: delete the name. Empty: keep it."""
    why: str = ""
    differences: tuple[int, ...] = ()
    """Numbers of rows in docs/differences.md."""
    arguments: str = ""
    """Names of the positional arguments of a call."""
    transform: str = ""
    """The transform that the name adds to the recipe; empty if it adds none."""


@dataclass(frozen=True)
class Difference:
    """A measured case in which accelerate's result differs from one process."""

    what: str
    measured: str
    only_if: str = ""
    """The trait of scripts with this difference; empty if any script may have it."""


NONE = "(no counterpart)"
_SHARDS = "FSDP2 alone: the units, offloading and dtypes are arguments of wrap_fsdp."
_CHOSEN = (
    "af.wrap_as_launched() in the recipe: the settings of the launch choose wrap_ddp, wrap_fsdp or "
    "wrap_deepspeed."
)
_DEEPSPEED = "wrap_deepspeed takes DeepSpeed's configuration; its engine stays inside of the step."
_MESH = (
    "Replicas and shards are both along dp: wrap_fsdp(replicate=r). wrap_tp() splits along tp, wrap_cp(dims) "
    "cuts sequences along cp."
)
_SEQUENCES = (
    "af.wrap_cp cuts sequences along the axis cp of the mesh: dims is such as "
    "dict(input_ids=1, labels=1)."
)
_DISPATCH = "Inference of one model over several devices is transformers' or accelerate's job."
_SEED = (
    "The first weights are then the script's. Below af.build, af.seed_all(state) gives each rank dropout "
    "of its own."
)
_TRAIN = "A step trains and evaluate evaluates: each sets the mode."

TABLE: dict[str, Row] = {
    # The objects that a script prepares.
    "import": Row("import accel_fn as af"),
    "accelerator": Row("state", "A state holds what a process knows; functions take it."),
    "alias": Row(None),
    "annotation": Row("state: af.DistState"),
    "model.train": Row(None, _TRAIN),
    "model.eval": Row(None, _TRAIN),
    "loader": Row(
        "",
        "The batch size counts the samples of an update over all processes: multiply it by their "
        'number, or pass batch="per_rank" to shard_loader.',
    ),
    "loader(accumulated)": Row(
        "batch_size={batch_size} * {k}",
        "An update sees one batch. For the same update on n processes, multiply by n too.",
    ),
    "loader.loop": Row("for {target} in {iter}:"),
    "count loop": Row(None, "One batch has all samples of an update, and af.accumulate cuts it."),
    "loader.epochs": Row(
        "for epoch in {loader}.epochs({num_epochs}):", "Its number is epoch.index."
    ),
    "epoch": Row("epoch.index"),
    "loader.evaluation": Row(
        "metrics = af.evaluate(step, state, {loader}, metric_fn)",
        "It takes the place of the loop: metric_fn(model, batch) returns a dict with one value a "
        "sample, or (sum, count). For a metric of all rows, write af.predict and a function of a batch.",
    ),
    "loader.predictions": Row(
        "{program}",
        "It takes the place of the loop: what reads these rows stands below it, once. af.evaluate computes "
        "means instead.",
    ),
    "loader.dataset": Row("{name}.loader.dataset"),
    "loader.sampler": Row("{name}.loader.sampler"),
    "loader.set_epoch": Row(None, "Each pass over {name} sets it."),
    "optimizer.step": Row(None, "step(state, batch) updates."),
    "loss": Row(None, "In the loss function, below."),
    "loss.read": Row("{report}.loss", "After the step: the mean over the samples of the update."),
    "factor": Row(
        "{new}",
        "A schedule counts updates, and a batch is that of all processes and micro-batches: no such factor.",
        (10,),
    ),
    "average.step": Row(
        "",
        "It stays, below the step: the parameters are whole and equal on all processes. Or "
        "af.ema(decay) in the recipe, which checkpoints hold, and which shards need.",
    ),
    "move(frozen)": Row(
        None, "In the plan: frozen. af.place() moves it, and evaluation mode is set."
    ),
    "move(cast)": Row(
        "{name}.to({cast})", "In the plan: frozen. af.place() moves it, and evaluation mode is set."
    ),
    "count": Row(
        None,
        "af.accumulate counts: what else stood in this if stands after step.",
        (1, 5),
    ),
    "divide": Row(None, "af.accumulate weighs the losses of micro-batches."),
    "optimizer.zero_grad": Row(None, "A step has gradients of its own.", (6,)),
    "model.zero_grad": Row(None, "A step has gradients of its own.", (6,)),
    "optimizer.step_was_skipped": Row("not report.applied"),
    "scheduler": Row(
        "",
        "It stays: af.schedule({scheduler}{every}) in the recipe steps it.",
        transform="af.schedule({scheduler}{every})",
    ),
    "scheduler.step": Row(None, "af.schedule steps it after each applied update.", (9, 10)),
    "scheduler.step(epoch)": Row(
        None, "af.schedule(..., every={loader}) steps it in an epoch's last batch.", (10,)
    ),
    "move": Row(None, "af.place() moves the model and the batches."),
    # The constructor of an accelerator.
    "Accelerator": Row("state = af.init({init})", differences=(17, 22)),
    "Accelerator(device_placement)": Row("", "Without af.place() nothing is moved."),
    "Accelerator(split_batches)": Row(None, "A batch is that of all processes, always."),
    "Accelerator(mixed_precision)": Row(
        "af.with_amp({mixed_precision}) in the recipe",
        "Outputs keep their dtype, and fp16 computes in fp16 on a CPU too.",
        (8, 9, 18),
        transform="af.with_amp({mixed_precision})",
    ),
    "Accelerator(gradient_accumulation_steps)": Row(
        "af.accumulate in the recipe",
        "It splits one batch; accelerate joins several.",
    ),
    "Accelerator(cpu)": Row(None, "af.init has it, or accel-fn launch --cpu.", (17,)),
    "Accelerator(dataloader_config)": Row(None, "shard_loader needs no settings."),
    "Accelerator(deepspeed_plugin)": Row(
        "af.wrap_deepspeed() in the recipe", _DEEPSPEED, transform="af.wrap_deepspeed()"
    ),
    "Accelerator(deepspeed_plugins)": Row(NONE, _DEEPSPEED),
    "Accelerator(fsdp_plugin)": Row(
        "af.wrap_fsdp() in the recipe", _SHARDS, transform="af.wrap_fsdp()"
    ),
    "Accelerator(torch_tp_plugin)": Row(
        "af.wrap_tp() in the recipe", _MESH, transform="af.wrap_tp()"
    ),
    "Accelerator(megatron_lm_plugin)": Row(NONE, "Megatron-LM has a loop of its own."),
    "Accelerator(rng_types)": Row(None, "The order of a loader is computed from the seed."),
    "Accelerator(log_with)": Row(
        "af.log_to(run) in the recipe",
        "run is made by its library, such as wandb.init(...) or SummaryWriter(...).",
        transform="af.log_to(run)",
    ),
    "Accelerator(project_dir)": Row(None, "af.save and af.log_to take folders."),
    "Accelerator(project_config)": Row(
        None, "af.save names checkpoints by step; keep=3 limits their number.", (19,)
    ),
    "Accelerator(gradient_accumulation_plugin)": Row(
        "af.accumulate in the recipe",
        "It splits one batch; accelerate joins several.",
    ),
    "Accelerator(step_scheduler_with_optimizer)": Row(
        None, "af.schedule(..., every=loader) steps once an epoch."
    ),
    "Accelerator(even_batches)": Row(None, "Nothing is padded.", (2,)),
    "Accelerator(dispatch_batches)": Row(None, "shard_loader chooses by the kind of data set."),
    "Accelerator(use_seedable_sampler)": Row(None, "The order is computed from the seed.", (13,)),
    "Accelerator(logging_dir)": Row(None, "af.log_to takes the writer, which has its folder."),
    "Accelerator(kwargs_handlers)": Row(None, "Their fields are arguments of transforms."),
    "Accelerator(dynamo_backend)": Row("af.compiled() in the recipe", transform="af.compiled()"),
    "Accelerator(dynamo_plugin)": Row("af.compiled() in the recipe", transform="af.compiled()"),
    "Accelerator(parallelism_config)": Row("af.init(mesh=dict(dp=-1, tp=n))", _MESH),
    # Methods: the loop.
    "accelerator.prepare": Row("plan, step and loader", differences=(18,)),
    "accelerator.prepare(below)": Row(
        "(below)", "The plan and the step; nothing wraps the model.", (18, 21)
    ),
    "accelerator.prepare(renamed)": Row("{to} = {name}"),
    "accelerator.prepare(model)": Row(
        "plan = recipe(af.Plan(loss_fn, {model}, {optimizer}))\n"
        "state, step = af.build(plan, state)",
        "Nothing wraps the model.",
        (18, 21),
    ),
    "accelerator.prepare(models)": Row(
        "",
        "Each further model that trains, with its optimizer, is a plan of its own; a frozen one "
        "stands in the plan of the first: af.Plan(..., frozen=dict(teacher=teacher)).",
        (21,),
    ),
    "accelerator.prepare(loader)": Row(
        "{to} = af.shard_loader({loader}, state{order})", "", (2, 13)
    ),
    "accelerator.prepare(grouped loader)": Row(
        "{to} = af.group_batches(af.shard_loader({loader}, state{order}), {k})",
        "A step takes a list of batches; len counts lists.",
        (2, 13),
    ),
    "accelerator.prepare(scheduler)": Row(
        "af.schedule({scheduler}{every}) in the recipe",
        "It counts updates, or epochs with every=, on any number of processes.",
        (10,),
        transform="af.schedule({scheduler}{every})",
    ),
    "accelerator.prepare_model": Row(
        "af.Plan(loss_fn, model, optimizer, frozen=dict({model}={model}))",
        "A frozen model stands beside the trained one in the plan, and loss_fn has a parameter frozen; "
        "af.place(frozen_dtype=torch.bfloat16) moves and casts it.",
        arguments="model",
    ),
    "accelerator.prepare_data_loader": Row(
        "af.shard_loader({data_loader}, state)", "", (2, 13), "data_loader"
    ),
    "accelerator.prepare_optimizer": Row(None, "The plan takes your optimizer as it is."),
    "accelerator.prepare_scheduler": Row(
        "af.schedule({scheduler}) in the recipe", "", (10,), "scheduler", "af.schedule({scheduler})"
    ),
    "accelerator.accumulate": Row(
        None, "One step is one update: af.accumulate splits its batch.", (1, 4, 5, 21), "model"
    ),
    "accelerator.no_sync": Row(None, "A step averages gradients once, at its end."),
    "accelerator.trigger_sync_in_backward": Row(None, "A step averages gradients once."),
    "accelerator.join_uneven_inputs": Row(
        None, "shard_loader gives all ranks equally many batches.", (3,)
    ),
    "accelerator.backward": Row("state, report = step(state, {batch})", "", (4,), "loss"),
    "accelerator.backward(below)": Row("(the step, below)", "", (4,)),
    "accelerator.lomo_backward": Row(NONE, "An update within the backward is no step."),
    "accelerator.clip_grad_norm_": Row(
        "af.clip({max_norm}) in the recipe",
        "The norm is report.grad_norm.",
        (7,),
        "parameters max_norm norm_type",
        "af.clip({max_norm})",
    ),
    "accelerator.clip_grad_value_": Row(
        "af.clip_value({clip_value}) in the recipe",
        "",
        (7,),
        "parameters clip_value",
        "af.clip_value({clip_value})",
    ),
    "accelerator.unscale_gradients": Row(None, "Gradients are unscaled before transforms run."),
    "accelerator.sync_gradients": Row(
        None, "Every step is an update: what stood in this if stands after step."
    ),
    "accelerator.gradient_accumulation_steps": Row(
        None, "The number stands in af.accumulate(k); no line divides or counts by it."
    ),
    "accelerator.optimizer_step_was_skipped": Row("not report.applied", "", (9,)),
    "accelerator.autocast": Row(
        "af.autocast(step, state)", "A loss_fn needs none; this is for code outside of a step."
    ),
    "accelerator.autocast(in a loop)": Row(None, "A loss_fn runs in the precision of the plan."),
    "accelerator.profile": Row(
        "af.profile(folder) in the recipe",
        "The loop stays as it is; steps=range(11, 14) are recorded.",
        transform="af.profile(folder)",
    ),
    "accelerator.skip_first_batches": Row(
        "{dataloader}.epochs(num_epochs, since=state)",
        "state.step is the position: no count of steps of your own.",
        (11, 14),
        "dataloader num_batches",
    ),
    "accelerator.set_trigger": Row(
        "stop = True", "A flag of your own, which af.any_rank reads on all ranks."
    ),
    "accelerator.check_trigger": Row("af.any_rank(stop, state)"),
    # Methods: checkpoints and weights.
    "accelerator.save_state": Row(
        "af.save(step, state, folder)",
        "On every rank, into one folder for the run: checkpoints are named by step.",
        (12, 19, 20),
    ),
    "accelerator.load_state": Row(
        "state = af.resume(step, state, folder)",
        "It loads the newest, if there is one. af.checkpoint.load_accelerate reads an old run.",
        (12, 20),
    ),
    "accelerator.register_for_checkpointing": Row(
        'extras={{"name": {object}}} of af.save and af.resume', arguments="object"
    ),
    "accelerator.register_save_state_pre_hook": Row(
        "af.save(folder=..., beside=write_files)",
        'For adapters alone: af.save(folder=..., only="trained").',
    ),
    "accelerator.register_load_state_pre_hook": Row(
        "extras= of af.resume", 'For adapters alone, af.save(folder=..., only="trained") suffices.'
    ),
    "accelerator.save_model": Row(
        "af.save_model({model}, {save_directory})",
        "On every rank, outside of an if is_main_process.",
        (),
        "model save_directory",
    ),
    "accelerator.get_state_dict": Row(
        "af.checkpoint.whole_state_dict({model}, state)", "On every rank.", arguments="model"
    ),
    "accelerator.unwrap_model": Row("{model}", "The model is not wrapped.", arguments="model"),
    "accelerator.save": Row("af.on_main(lambda: torch.save({obj}, {f}), state)", arguments="obj f"),
    "accelerator.save_iteration": Row("state.step"),
    "accelerator.project_dir": Row("the folder that you pass to af.save"),
    "accelerator.logging_dir": Row("the folder that you pass to the tracker"),
    "accelerator.should_save_model": Row(None, "af.save and af.save_model decide."),
    # Methods: collectives and metrics.
    "accelerator.gather": Row(
        "af.gather({tensor}, state)",
        "Rows come in the order of the data, once each.",
        (14, 15),
        "tensor",
    ),
    "accelerator.gather(loss)": Row(
        "report.loss", "It is the mean over all processes and micro-batches."
    ),
    "accelerator.gather(grad_norm)": Row("report.grad_norm", "It is that of the global batch."),
    "accelerator.gather_for_metrics": Row(
        "af.evaluate(step, state, loader, metric_fn)",
        "It takes the place of a loop over batches; af.gather(rows, state) is for other rows.",
        (14,),
    ),
    "accelerator.gather_for_metrics(in a loop)": Row(None, "", (14,)),
    "accelerator.gather_for_metrics(named)": Row("{name}", "", (14,)),
    "accelerator.reduce": Row("af.reduce_sum({tensor}, state)", arguments="tensor reduction"),
    "accelerator.reduce(mean)": Row(
        "af.reduce_mean({tensor}, state)",
        "weight= is the number of this rank's items.",
        (3,),
        "tensor reduction",
    ),
    "accelerator.pad_across_processes": Row(
        None, "af.gather(list(rows), state) takes rows of unequal lengths.", (15,)
    ),
    "accelerator.split_between_processes": Row(
        "af.shard_batch({inputs}, state)", arguments="inputs"
    ),
    "accelerator.wait_for_everyone": Row("af.barrier(state)", "", (23,)),
    "accelerator.main_process_first": Row("af.main_first(state)"),
    "accelerator.local_main_process_first": Row("af.main_first(state, local=True)"),
    "accelerator.on_main_process": Row("af.on_main(fn, state)", "Every rank gets the result."),
    "accelerator.on_local_main_process": Row("if state.local_rank == 0:"),
    "accelerator.on_last_process": Row("if state.rank == state.world_size - 1:"),
    "accelerator.on_process": Row("if state.rank == i:"),
    "accelerator.on_local_process": Row("if state.local_rank == i:"),
    # Methods: output.
    "accelerator.print": Row("af.print_on_main({all}, state=state)"),
    "accelerator.init_trackers": Row(
        "run = wandb.init(...), before the recipe", "The run is yours, as its library makes it."
    ),
    "accelerator.log": Row(
        "af.log_values(step, state, {values})",
        "af.log_to writes loss, learning rate and speed; this is for values of your own.",
        arguments="values",
    ),
    "accelerator.get_tracker": Row("the run that af.log_to was given"),
    "accelerator.trackers": Row("the runs that af.log_to was given"),
    "accelerator.log_with": Row("the runs that af.log_to was given"),
    "accelerator.end_training": Row(None, "Loggers and the group close at the end of the process."),
    "accelerator.free_memory": Row("del step, state, plan", "Nothing else holds them.", (22,)),
    "accelerator.clear": Row("del step, state, plan", "Nothing else holds them."),
    "accelerator.verify_device_map": Row(None),
    "accelerator.maybe_context_parallel": Row(None, _SEQUENCES, transform="af.wrap_cp(dims)"),
    "accelerator.deepspeed_ulysses_dl_adapter": Row(NONE, _DEEPSPEED),
    # Properties.
    "accelerator.device": Row("state.device"),
    "accelerator.is_main_process": Row(
        "state.is_main", "af.save, af.evaluate and collectives stand outside of such an if.", (23,)
    ),
    "accelerator.is_local_main_process": Row("state.local_rank == 0"),
    "accelerator.is_last_process": Row("state.rank == state.world_size - 1"),
    "accelerator.process_index": Row("state.rank"),
    "accelerator.local_process_index": Row("state.local_rank"),
    "accelerator.num_processes": Row(
        "state.world_size", "Rates, schedules and batch sizes need no such factor.", (10,)
    ),
    "accelerator.use_distributed": Row("state.world_size > 1"),
    "accelerator.multi_device": Row('state.world_size > 1 and state.device.type != "cpu"'),
    "accelerator.mixed_precision": Row(
        '(af.launcher.launch_options().mixed_precision or "no")',
        "The launch's; if the script gives one to Accelerator, this one. Of a plan, "
        "af.extend.compute_dtype(plan) is the dtype.",
    ),
    "accelerator.distributed_type": Row(None, "One recipe: no code branches on it."),
    "accelerator.state": Row("state", "What the recipe sets stands in the recipe."),
    "accelerator.state.fsdp_plugin": Row("None", _CHOSEN, transform="af.wrap_as_launched()"),
    "accelerator.state.deepspeed_plugin": Row("None", _CHOSEN, transform="af.wrap_as_launched()"),
    "accelerator.split_batches": Row(None, "A batch is that of all processes, always."),
    "accelerator.dispatch_batches": Row(None, "shard_loader chooses by the kind of data set."),
    "accelerator.even_batches": Row(None, "Nothing is padded.", (2,)),
    "accelerator.use_seedable_sampler": Row(None, "The order is computed from the seed.", (13,)),
    "accelerator.non_blocking": Row(None, "af.place() copies pinned batches asynchronously."),
    "accelerator.use_stateful_dataloader": Row(None, 'extras={{"data": loader}} of af.save.'),
    "accelerator.scaler": Row("state.scaler", "af.save and af.resume have it."),
    "accelerator.native_amp": Row(None, "The precision stands in af.with_amp."),
    "accelerator.gradient_state": Row(None, "Every step is an update, and nothing is padded."),
    "accelerator.dataloader_config": Row(None, "shard_loader needs no settings."),
    "accelerator.project_configuration": Row(None, "af.save takes a folder, and keep=3."),
    "accelerator.deepspeed_plugin": Row("None", _CHOSEN, transform="af.wrap_as_launched()"),
    "accelerator.fp8_backend": Row(None, 'af.with_amp("fp8") uses torchao.'),
    "accelerator.is_fsdp2": Row(None, _SHARDS),
    "accelerator.is_composable_parallelism_enabled": Row(None, "One recipe."),
    "accelerator.parallelism_config": Row(
        "state.axes", "The axes of the mesh that init was given."
    ),
    "accelerator.torch_device_mesh": Row("af.device_mesh(state)"),
    "accelerator.tensor_parallel_rank": Row('state.along("tp").rank'),
    "accelerator.pipeline_parallel_rank": Row(NONE, "Pipelines are not here."),
    "accelerator.context_parallel_rank": Row('state.along("cp").rank'),
    "accelerator.data_parallel_rank": Row("state.data.rank"),
    "accelerator.data_parallel_shard_rank": Row("state.data.rank"),
    # State without an Accelerator.
    "PartialState": Row(
        "state = af.init({init})", "Once; functions take the state as an argument."
    ),
    "AcceleratorState": Row("state", "There is no global state: pass it."),
    "GradientState": Row(None, "Every step is an update, and nothing is padded."),
    "DistributedType": Row(None, "One recipe: no code branches on it."),
    "DistributedType(sharded)": Row(None, _CHOSEN, transform="af.wrap_as_launched()"),
    "accelerator.destroy_process_group": Row(None, "with af.distributed() as state: ends it."),
    "accelerator.set_device": Row("af.init(device=...)"),
    "accelerator.default_device": Row("state.device"),
    "accelerator.initialized": Row(None, "A state is an argument."),
    # Classes of settings.
    "DataLoaderConfiguration": Row(
        None, "shard_loader: every sample once, in an order computed from the seed.", (2, 13)
    ),
    "DistributedDataParallelKwargs": Row(
        "arguments of af.wrap_ddp, by their names", 'comm_hook="bf16", "fp16" or "powersgd".'
    ),
    "DDPCommunicationHookType": Row('af.wrap_ddp(comm_hook="bf16")'),
    "GradScalerKwargs": Row('af.with_amp("fp16", init_scale=...), by their names', "", (8,)),
    "AutocastKwargs": Row("torch.autocast(...) in loss_fn"),
    "InitProcessGroupKwargs": Row("af.init(timeout_s=...)", "Or accel-fn launch --timeout-s."),
    "GradientAccumulationPlugin": Row("af.accumulate(k) in the recipe", "", (1,)),
    "FullyShardedDataParallelPlugin": Row("af.wrap_fsdp(...)", _SHARDS, transform="af.wrap_fsdp()"),
    "ProjectConfiguration": Row("af.save(step, state, folder, keep=3)", "", (19,)),
    "ProfileKwargs": Row("af.profile(folder, steps=range(11, 14))"),
    "TorchDynamoPlugin": Row("af.compiled(mode=..., fullgraph=..., dynamic=...)"),
    "DynamoBackend": Row("af.compiled()", "Inductor alone."),
    "ParallelismConfig": Row("af.init(mesh=dict(dp=-1, tp=n))", _MESH),
    "TorchTensorParallelPlugin": Row("af.wrap_tp()", _MESH),
    "MegatronLMPlugin": Row(NONE, "Megatron-LM has a loop of its own."),
    "DeepSpeedPlugin": Row(
        "af.wrap_deepspeed(stage=...)", _DEEPSPEED, transform="af.wrap_deepspeed()"
    ),
    "DummyOptim": Row("an optimizer of torch", _DEEPSPEED),
    "DummyScheduler": Row("a scheduler of torch", _DEEPSPEED),
    "AORecipeKwargs": Row('af.with_amp("fp8", skip=...)'),
    "TERecipeKwargs": Row('af.with_amp("fp8")', "By torchao."),
    "MSAMPRecipeKwargs": Row('af.with_amp("fp8")', "By torchao."),
    "FP8RecipeKwargs": Row('af.with_amp("fp8")', "By torchao."),
    "BnbQuantizationConfig": Row(NONE, "quantization_config of transformers, then adapters."),
    # Functions.
    "set_seed": Row("torch.manual_seed({seed})", _SEED, (16,)),
    "set_seed(of transformers)": Row("", _SEED, (16,)),
    "get_logger": Row(
        "af.main_logger(logging.getLogger({name}), state)", arguments="name log_level"
    ),
    "get_logger(module)": Row(
        "logging.getLogger({name})",
        "There is no state yet: below af.init, af.main_logger(logger, state).",
        arguments="name log_level",
    ),
    "logger(main_process_only=False)": Row("extra=dict(all_ranks=True)"),
    "logger(main_process_only=True)": Row(None),
    "MultiProcessAdapter": Row("af.main_logger(logger, state)"),
    "find_executable_batch_size": Row(
        'af.accumulate("auto") in the recipe',
        "It keeps the batch, so the result is the same; the function around the training goes.",
        transform='af.accumulate("auto")',
    ),
    "gather": Row("af.gather({tensor}, state)", "", (14, 15), "tensor"),
    "gather_object": Row("af.gather({object}, state)", "", (), "object"),
    "broadcast": Row("af.broadcast({tensor}, state)", "", (), "tensor"),
    "broadcast_object_list": Row("af.broadcast({object_list}, state)", "", (), "object_list"),
    "reduce": Row("af.reduce_mean({tensor}, state)", "Or af.reduce_sum.", (3,), "tensor"),
    "pad_across_processes": Row(
        None, "af.gather(list(rows), state) takes rows of unequal lengths.", (15,)
    ),
    "send_to_device": Row("af.extend.to_device({tensor}, state)", "", (), "tensor device"),
    "find_batch_size": Row("af.count_samples({data})", "", (), "data"),
    "wait_for_everyone": Row("af.barrier(state)", "", (23,)),
    "synchronize_rng_states": Row(None, "Orders are computed from the seed.", (13,)),
    "synchronize_rng_state": Row(None, "Orders are computed from the seed.", (13,)),
    "skip_first_batches": Row(
        "{dataloader}.epochs(num_epochs, since=state)",
        "state.step is the position: no count of steps of your own.",
        (11, 14),
        "dataloader num_batches",
    ),
    "prepare_data_loader": Row("af.shard_loader({dataloader}, state)", "", (2,), "dataloader"),
    "tqdm": Row("af.progress(loader.epochs(...), state)"),
    "LocalSGD": Row(
        "af.local_sgd({local_sgd_steps}) in the recipe, not af.wrap_ddp()",
        "It averages the optimizer's state too; the with and its step go.",
        arguments="accelerator model local_sgd_steps",
        transform="af.local_sgd({local_sgd_steps})",
    ),
    "notebook_launcher": Row("af.launch({function}, num_processes=2)", arguments="function"),
    "debug_launcher": Row("af.launch({function}, cpu=True)", arguments="function"),
    "release_memory": Row("del step, state, plan"),
    "clear_device_cache": Row("torch.cuda.empty_cache()"),
    "extract_model_from_parallel": Row("{model}", "The model is not wrapped.", (), "model"),
    "compile_regions": Row('af.compiled(scope="blocks")', transform='af.compiled(scope="blocks")'),
    "save": Row("af.on_main(lambda: torch.save({obj}, {f}), state)", arguments="obj f"),
    "load": Row("torch.load({f})", arguments="f"),
    "save_fsdp_model": Row("af.save(step, state, folder)"),
    "load_fsdp_model": Row("af.load(step, state, folder)"),
    "save_fsdp_optimizer": Row(None, "af.save has the optimizer."),
    "load_fsdp_optimizer": Row(None, "af.load has the optimizer."),
    "merge_fsdp_weights": Row("accel-fn export CHECKPOINT FOLDER"),
    "load_checkpoint_in_model": Row(
        "af.load_model({model}, {checkpoint})", "", (), "model checkpoint"
    ),
    "is_peft_model": Row(None, "A PEFT model is a module like others."),
    "calculate_maximum_sizes": Row("af.contrib.estimate.estimate_memory(...)", "Of a whole step."),
    "compute_module_sizes": Row("af.contrib.estimate.estimate_memory(...)", "Of a whole step."),
    "write_basic_config": Row("accel-fn config --default"),
    "DeepSpeedEngineWrapper": Row(NONE, _DEEPSPEED),
    "HfDeepSpeedConfig": Row(NONE, _DEEPSPEED),
    "get_active_deepspeed_plugin": Row(NONE, _DEEPSPEED),
    "init_empty_weights": Row(
        "af.empty(...)", "It takes what makes the model. af.load_model fills it after build."
    ),
    "init_on_device": Row("with torch.device(...):"),
    "load_checkpoint_and_dispatch": Row(NONE, _DISPATCH),
    "dispatch_model": Row(NONE, _DISPATCH),
    "infer_auto_device_map": Row(NONE, _DISPATCH),
    "cpu_offload": Row(NONE, _DISPATCH),
    "disk_offload": Row(NONE, _DISPATCH),
    "prepare_pippy": Row(NONE, _DISPATCH),
    "load_and_quantize_model": Row(NONE, "quantization_config of transformers."),
    "GeneralTracker": Row("any writer of af.log_to", "A function is one."),
    "is_torch_version": Row("torch.__version__"),
    "is_*_available": Row("importlib.util.find_spec(...)"),
}
"""Rows by name in accelerate. Names of methods begin with `accelerator.`; arguments are written
as `Accelerator(argument)`."""

DIFFERENCES: dict[int, Difference] = {
    1: Difference(
        "the last accumulation window is divided by the full count",
        "gradient x0.5 for 1 of 2, x0.5 for 2 of 4",
        "accumulates",
    ),
    2: Difference(
        "the tail of an epoch is filled with its first samples",
        "last gradient of 9 samples 264% off; 1 sample becomes 8 copies",
    ),
    3: Difference(
        "without filling: mean of per-rank means",
        "12% off for 9 and 6 samples; unequal batch counts hang (seen once, not tested)",
    ),
    4: Difference(
        "mean of means over tokens", "55% off for 15 and 3 valid tokens", "counts tokens"
    ),
    5: Difference(
        "103 samples, batch 4, accumulate 4, 2 ranks, 3 epochs of AdamW",
        "a parameter 0.11 from the single-process run",
        "accumulates",
    ),
    6: Difference(
        "`zero_grad()` at the top of the loop body",
        "all but the last micro-batch lost, and that x0.5",
        "zero_grad before backward",
    ),
    7: Difference(
        "clipping inside accumulation",
        "clips partial gradients, different on each rank: 18% off",
        "accumulates",
    ),
    8: Difference(
        "one loss scaler, two optimizers",
        "second update x0.5 when the scale grows, x2 after an overflow of the first",
        "several optimizers",
    ),
    9: Difference(
        "fp16 with `AdamW(fused=True)`",
        "the skipped step is not noticed: the schedule advances",
        "fused",
    ),
    10: Difference(
        "schedulers are stepped world-size times per update",
        "StepLR(2) on 2 ranks decays every update; a cosine over all updates ends where it began",
        "schedules",
    ),
    11: Difference("documented mid-epoch resume", "10 of 64 samples repeated, 10 never seen"),
    12: Difference(
        "checkpoint inside an accumulation window",
        "counter restored, gradients not",
        "accumulates",
    ),
    13: Difference(
        "seedable sampler without a common seed; a custom sampler and one draw on rank 0",
        "4 of 16 samples missing; 9 of 32 doubled",
        "samples in its own order",
    ),
    14: Difference("gather for metrics", "8 rows for 5 samples after a skip, 12 for 9 of a stream"),
    15: Difference(
        "gather of unequal shapes on Gloo",
        "one rank returns memory garbage and continues (seen once, not tested)",
    ),
    16: Difference(
        "same seed on all ranks", "identical dropout masks and augmentation", "equal seeds"
    ),
    17: Difference(
        "two processes on the CPU",
        "`launch --cpu --num_processes 2` is 1 process; under torchrun, `Accelerator()` makes "
        "worlds of 1 and 1, `Accelerator(cpu=True)` a world of 2",
        "on the CPU",
    ),
    18: Difference(
        "`prepare`",
        "patches `model.forward`, upcasts outputs; fp16 on the CPU trains in float32",
    ),
    19: Difference(
        "automatic checkpoint names after a restart",
        "an error with advice that cannot be followed; with a limit, new ones are deleted and a "
        "stale one is loaded",
        "automatic names",
    ),
    20: Difference("incomplete newest checkpoint", "loaded, then FileNotFoundError"),
    21: Difference(
        "two models in one loop, accumulate 2",
        "one shared counter: in 8 batches the first syncs 1x, the second 8x",
        "several models",
    ),
    22: Difference(
        "a second `Accelerator`",
        "resets the first one's accumulation from 4 to 1",
        "several accelerators",
    ),
    23: Difference(
        "a rank-0-only collective, a missing step, a skipped backward",
        'after minutes, "timed out" on every rank, without a line (seen once, not tested)',
    ),
}
"""Differences by their row number in docs/differences.md."""
