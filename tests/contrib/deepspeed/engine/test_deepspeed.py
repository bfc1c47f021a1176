"""wrap_deepspeed on two processes, with the real library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate

ROOT = Path(__file__).parents[4]
RUN = Path(__file__).with_name("run.py")
ROUNDING = 1e-6
"""Of float32, over four updates: sums in another order."""
STAGES = range(4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of all cases, from one launch."""
    folder = tmp_path_factory.mktemp("deepspeed")
    launch = ("-m", "accel_fn", "launch", "-n", "2", "--cpu", "--wrap", "deepspeed")
    command = [sys.executable, *launch, str(RUN), str(folder / "found.json"), str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ACCEL_FN_TIMEOUT_S": "60"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("cut", ["even", "uneven", "empty"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_are_one(found, stage, cut, optimizer):
    assert all(value <= ROUNDING for value in found[f"law {stage} {cut} {optimizer}"].values())


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_on_two_ranks_is_that_of_one_in_a_program(found, stage):
    # A gradient of 1e-9 of either sign would move a parameter by its learning rate.
    assert all(value <= ROUNDING for value in found[f"adamw {stage}"].values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_adam_of_deepspeed_is_adamw(found, stage):
    # Its kernel rounds in another order than torch's.
    assert found[f"cpu adam {stage}"] <= 10 * ROUNDING


@pytest.mark.parametrize("stage", STAGES)
def test_the_smallest_bound_clips(found, stage):
    assert found[f"bound {stage}"] <= ROUNDING


WORKS = [
    *("forward", "evaluate", "predict", "schedule", "activations", "frozen", "weightless"),
    *("terms", "sum", "unreached", "evaluation", "tied", "groups"),
]


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_what_it_is_on_one_rank(found, name, stage):
    assert found[f"{name} {stage}"] <= ROUNDING


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_penalty_is_what_it_is_on_one_rank(found, stage):
    assert found[f"penalty {stage}"] <= ROUNDING


def test_stage_3_notes_that_a_gradient_penalty_needs_a_lower_one(found):
    assert found["penalty 3"] == [
        "wrap_deepspeed(stage=3): if a module returns an object other than a tensor, tuple, list or dict, "
        "such as a dataclass, return one of these; if the loss has gradients of gradients "
        "(torch.autograd.grad with create_graph=True), use a lower stage: their parameters are not whole any "
        "more"
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_changes_nothing(found, stage):
    assert found[f"offload {stage}"] <= ROUNDING


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_autocast(found, stage):
    bf16 = found[f"bf16 {stage}"]
    assert bf16["one process"] <= 2**-8
    assert bf16["float32"] >= 1e-4


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_average_is_that_of_one_rank(found, stage):
    assert found[f"average {stage}"] <= ROUNDING


def test_check_replicas_names_the_parameter_and_the_rank(found):
    rule = (
        "check_replicas: parameters must be equal on all ranks at step 2, 0.bias differs on rank 1"
    )
    assert rule in found["replicas 0"]


@pytest.mark.parametrize("stage", [1, 2])
def test_each_update_writes_equal_parameters(found, stage):
    assert found[f"replicas {stage}"] == "nothing is found"


@pytest.mark.parametrize("stage", STAGES)
def test_explain_counts_parameters_and_names_the_stage(found, stage):
    text = found[f"explain {stage}"]
    assert "SGD(lr=0.1), 6 parameter tensors, 435 numbers" in text
    assert f"by wrap_deepspeed(stage={stage})" in text
    assert (" on this rank)" in text) == (stage == 3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_batch_without_weight_changes_nothing(found, stage):
    assert found[f"no weight {stage}"] == 0


def test_a_batch_without_weight_is_refused_at_stage_3(found):
    assert found["no weight 3"] == (
        "step: wrap_deepspeed(stage=3) must have a batch that weighs something on one rank, got none; "
        "skip such batches on all ranks"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_refused(found, stage):
    for name in ("grads", "update"):
        assert found[f"{name} {stage}"] == (
            f"step.{name}: step must be of a plan without wrap_deepspeed, whose engine keeps gradients and "
            "parameters, got one with it; call the step, or use wrap_fsdp"
        )


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_reaches_no_parameter_is_refused(found, stage):
    assert found[f"nothing {stage}"].startswith(
        "step: loss_fn must reach the model's parameters by the model given to it, got no gradient for "
        "0.weight, "
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_reach_other_parameters_are_refused(found, stage):
    text = found[f"experts {stage}"]
    assert text.startswith(
        "step: wrap_deepspeed must have a loss_fn that reaches the same parameters on every rank, got "
    )
    for rank in range(2):
        assert f"{rank}.weight, {rank}.bias on rank {rank}" in text
    assert text.endswith(
        "; call each part of the model on every rank, with no rows where it has nothing to do, or use stage=0"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_that_reaches_another_engine_is_refused(found, stage):
    assert found[f"two engines {stage}"] == (
        "step: wrap_deepspeed must have a loss_fn that reaches the parameters of one engine, got one that "
        "reaches another plan's, too; call requires_grad_(False) on those before the step, and "
        "requires_grad_(True) after it"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_second_step_for_a_model_is_refused(found, stage):
    assert found[f"in use {stage}"] == (
        "build: model must be a new one after wrap_deepspeed, whose engine holds the parameters, got the "
        "same one; make the model again, and load a checkpoint"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_accelerate_is_refused(found, stage):
    assert found[f"accelerate {stage}"] == (
        "load_accelerate: step must be of a plan without wrap_deepspeed, whose engine keeps gradients and "
        "parameters, got one with it; load it by wrap_ddp, save that, and load this checkpoint"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_layers_in_no_optimizer_do_not_count_in_the_norm(found, stage):
    assert found[f"untrained {stage}"] <= ROUNDING


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_channels_last_train(found, stage):
    assert found[f"layout {stage}"] <= ROUNDING


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_of_no_dimensions_trains_and_is_resumed(found, stage):
    assert found[f"scalar {stage}"] <= ROUNDING


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_that_the_engine_skips_is_reported(found, stage):
    assert found[f"not finite {stage}"] == [True, False, 0.05, 0.0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_is_frozen_after_build_is_refused(found, stage):
    assert found[f"freezes {stage}"] == (
        "step: parameters that required a gradient in build must still do so, got 0.weight; build again with "
        "after=step, or freeze those"
    )


@pytest.mark.parametrize("name", ["clamps 1", "clamps 2", "clamps 3", "gathered"])
def test_parameters_that_the_next_update_would_overwrite_are_refused(found, name):
    assert found[name] == (
        "step: parameters must be written before build under wrap_deepspeed, whose engine writes its own "
        "copy over them in every update, got ones that are written after it; write them first, or use "
        "wrap_fsdp"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_dicts_beside_the_engine_are_refused(found, stage):
    assert found[f"writes model {stage}"] == (
        "load_state_dict: model must be loaded before build under wrap_deepspeed, whose engine would write "
        "its own copy of the parameters over it, got one in use; load first, or use load"
    )
    for name, function in {"reads": "state_dict", "writes": "load_state_dict"}.items():
        assert found[f"{name} optimizer {stage}"] == (
            f"optimizer.{function}: optimizer must be saved and loaded by save and load under "
            "wrap_deepspeed, whose engine keeps its state in shards, got one in use; call those on every rank"
        )


def test_empty_state_dicts_are_refused(found):
    assert found["reads shards"] == (
        "state_dict: model must be whole, got empty tensors by wrap_deepspeed(stage=3), whose ranks hold "
        "shards; call whole_state_dict or save_model on every rank"
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_beside_the_step_is_refused(found, stage):
    assert found[f"backward {stage}"] == (
        "step: wrap_deepspeed must have no backward beside the step, since its engine adds those gradients "
        "to the batch's, got one; call torch.autograd.grad, or make a copy of the model"
    )


def test_a_penalty_of_empty_parameters_is_refused(found):
    assert found["penalty of shards"] == (
        "step: wrap_deepspeed(stage=3) must have a loss_fn that reaches parameters by their modules, as in "
        "model.head.weight, got one that takes them from model.parameters(), where they are empty; use the "
        "optimizer's weight_decay for a penalty, or a lower stage"
    )


def test_an_error_of_an_empty_parameter_has_a_note(found):
    assert found["another reference"] == [
        "wrap_deepspeed(stage=3): a parameter is empty, of shape (0), outside of the forward of its module; "
        "use it by its module, as in model.head.weight, not by another reference to it"
    ]


def test_a_model_of_zero_init_is_refused(found):
    assert found["zero.Init"] == (
        "build: model must be made outside of deepspeed.zero.Init, got parameters that are in shards "
        "already; leave it out, since wrap_deepspeed(stage=3) shards them"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_one_that_failed_is_refused(found, stage):
    assert found[f"failed {stage}"] == (
        "step: wrap_deepspeed must not go on after a step that failed, whose gradients the engine keeps, "
        "got another step; make the model again, build, and load a checkpoint"
    )


def test_a_launch_chooses_deepspeed(found):
    text, far = found["launch"]
    assert "by wrap_as_launched(), deepspeed from the launch" in text
    assert far <= ROUNDING


def test_the_lock_of_a_build_is_found(found):
    before, _, after = found["lock"].partition("deepspeed_shm_comm/lock; ")
    assert before.startswith(
        "build: wrap_deepspeed must find no lock of a build of DeepSpeed's C++ code, got "
    )
    assert after == "if no other program is building it, delete that file, or else wait for it"


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(found, stage, optimizer):
    assert found[f"resume {stage} {optimizer}"] == [3, True]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_offloads_as_before(found, stage):
    assert found[f"resume {stage} offload"] == [3, True]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_refused_load_changes_nothing(found, stage):
    assert found[f"other program {stage}"] == [True, 0.0]


MOVES = [
    "stage 1 to stage 3",
    "stage 3 to stage 2",
    "stage 2 to wrap_fsdp",
    "wrap_fsdp to stage 3",
    "stage 3 to wrap_ddp",
    "wrap_ddp to stage 1",
    "stage 0 to stage 2",
    "one process 1",
    "one process 2",
    "one process 3",
]


@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_under_another_strategy(found, name):
    assert found[name] <= ROUNDING


@pytest.mark.parametrize("stage", STAGES)
def test_whole_weights_are_written_and_given(found, stage):
    assert found[f"weights {stage}"] is True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_the_engine_would_overwrite_are_refused(found, stage):
    assert found[f"load_model {stage}"] == (
        "load_model: model must be loaded before build under wrap_deepspeed, whose engine would write its "
        "own copy of the parameters over it, got one in use; load first, or use load"
    )


def test_stage_0_takes_weights(found):
    assert found["load_model 0"] == "loaded"


def test_one_count_for_parameters_of_a_group(found):
    assert found["counts"] == (
        "load: wrap_deepspeed must have one 'step' for all parameters of a group, got 1.0 and 2.0; load by "
        "wrap_fsdp"
    )


def test_the_engine_by_hand_differs_as_the_page_on_differences_has_it(found):
    assert found["uneven by hand"] == pytest.approx(0.17, abs=0.005)
    assert found["clipped by hand"] == pytest.approx([4.1, 1.0], abs=0.05)
    assert found["window by hand"] == [1, 3]


def test_the_engine_by_hand_reads_gradients_wrongly_from_files(found, libaio):
    assert found["nvme by hand"] > 0.05


def test_one_process_without_a_launcher_offloads(tmp_path):
    command = [sys.executable, "-m", "tests.contrib.deepspeed.engine.alone", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [equal for _, equal in found.values()] == [True] * 3
    assert all(far <= ROUNDING for far, _ in found.values())


def plan_that_offloads(recipe=None):
    model = nn.Linear(3, 1)
    plan = af.Plan(
        lambda model, x: model(x).mean(), model, torch.optim.SGD(model.parameters(), 0.1)
    )
    return (recipe or af.wrap_deepspeed(stage=1, offload="cpu"))(plan)


@pytest.fixture
def libaio():
    """Skip a test where DeepSpeed cannot compile what reads and writes files."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("libaio-dev is not installed")


def test_offloading_to_files_changes_nothing(found, libaio):
    far, *folders = found["nvme"]
    assert far <= 2 * ROUNDING  # sums of 777 products
    assert folders == [["rank0", "rank1"], []]


def test_offloading_parameters_to_files_changes_nothing(found, libaio):
    far, *folders = found["nvme parameters"]
    assert far <= 2 * ROUNDING
    assert folders == [["rank0", "rank1"]] * 2


def test_parameters_in_files_are_refused_where_they_would_be_rounded(found, libaio):
    assert found["nvme parameters refused"] == (
        'build: wrap_deepspeed\'s offload_param.device must be "cpu" on a device without fp16, where '
        "DeepSpeed's files hold bfloat16, got 'nvme'; leave out offload_param"
    )


@pytest.mark.parametrize("name", ["nvme resume", "nvme parameters resume"])
def test_a_resumed_run_that_offloads_to_files_has_the_same_bits(found, name, libaio):
    assert found[name] is True


def test_a_run_that_offloads_to_files_goes_on_under_another_strategy(found, libaio):
    assert found["nvme moves"] <= ROUNDING


def test_a_missing_libaio_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")  # so that nothing links
    recipe = af.wrap_deepspeed(stage=3, offload="nvme", nvme_path=tmp_path)
    plan = plan_that_offloads(recipe)
    with pytest.raises(ValueError, match="wrap_deepspeed") as found:
        plan.strategy[0].validate(af.DistState(), plan)
    assert str(found.value) == (
        'build: wrap_deepspeed(offload="nvme") must have libaio, got none that links; install libaio-dev, or '
        "set CFLAGS and LDFLAGS to where it is"
    )


def test_ranks_that_are_threads_are_refused():
    def rank(state):
        with pytest.raises(ValueError, match="wrap_deepspeed") as found:
            af.build(plan_that_offloads(), state)
        return str(found.value)

    assert set(simulate(rank, world_size=2)) == {
        "build: wrap_deepspeed must have all ranks of torch's default process group, which are 1, got 2; use "
        "accel-fn launch, not threads"
    }


def test_another_device_than_deepspeed_has_is_refused():
    plan = plan_that_offloads()
    with pytest.raises(ValueError, match="wrap_deepspeed") as found:
        plan.strategy[0].validate(af.DistState(device=torch.device("meta")), plan)
    assert str(found.value) == (
        "build: wrap_deepspeed must train on DeepSpeed's device, cpu, got meta; set DS_ACCELERATOR=meta"
    )
