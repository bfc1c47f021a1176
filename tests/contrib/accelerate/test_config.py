"""Files of accelerate: the entries that are used, ignored with a warning, or refused."""

import dataclasses
import re
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import SageMakerConfig

from accel_fn.contrib.accelerate import config
from accel_fn.contrib.accelerate.config import (
    SECTIONS,
    UnusedSettingsWarning,
    spelled_today,
)
from tests.support.launch_settings import PLAIN, TWO_GPUS, Machine, refused, resolved, written

WRITTEN = Path(__file__).with_name("files")
"""Files of accelerate 1.15, each as accelerate itself wrote it."""

EIGHT = Machine(num_cores=8, kind="CUDA", num_installed=8, num_devices=8)
ONE = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "rdzv_backend": "static"}
TWO = {**ONE, "num_processes": 2}
USED = {
    "basic": {**ONE, "cpu": True, "mixed_precision": "no"},
    "no": {**ONE, "mixed_precision": "no"},
    "multi_cpu": {**TWO, "cpu": True, "mixed_precision": "no"},
    "multi_cpu_mpirun": {**TWO, "cpu": True, "mixed_precision": "bf16"},
    "multi_gpu": {**TWO, "gpu_ids": (0, 1), "mixed_precision": "bf16"},
    "multi_gpu_machines": {
        "num_processes": 4,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "mixed_precision": "fp16",
    },
    "multi_npu": {**TWO, "mixed_precision": "bf16"},
    "fsdp": {**TWO, "mixed_precision": "bf16", "wrap": "fsdp"},
    "deepspeed": {
        **TWO,
        "mixed_precision": "bf16",
        "num_microbatches": 4,
        "wrap": "deepspeed",
    },
    "deepspeed_file": {**TWO, "wrap": "deepspeed"},
    "megatron_lm": {**TWO, "num_processes": 4, "mixed_precision": "bf16", "num_microbatches": 2},
    "xla": {**TWO, "num_processes": 8, "mixed_precision": "no"},
    "fp8_dynamo": {**TWO, "mixed_precision": "fp8"},
    "sagemaker": {"num_machines": 2, "mixed_precision": "bf16"},
}
IN_SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
IN_SCRIPT = {
    "fsdp": "fsdp_transformer_layer_cls_to_wrap is wrap_fsdp(blocks=[BertLayer])",
    "deepspeed": "gradient_clipping is clip(1.0)",
    "deepspeed_file": 'deepspeed_config_file is wrap_deepspeed("ds.json")',
    "megatron_lm": "megatron_lm_gradient_clipping is clip(1.0), "
    "megatron_lm_recompute_activations is checkpoint_activations()",
    "fp8_dynamo": "dynamo_backend is compiled()",
}
LEFT_OUT = {
    "multi_cpu_mpirun": "mpirun_config (mpirun_hostfile)",
    "multi_gpu": "enable_cpu_affinity",
    "fsdp": "fsdp_config (fsdp_cpu_ram_efficient_loading, fsdp_state_dict_type)",
    "deepspeed_file": "deepspeed_config (zero3_init_flag)",
    "megatron_lm": "distributed_type MEGATRON_LM, megatron_lm_config (megatron_lm_pp_degree, "
    "megatron_lm_sequence_parallelism, megatron_lm_tp_degree, "
    "megatron_lm_use_distributed_optimizer)",
    "xla": "distributed_type XLA",
    "fp8_dynamo": "fp8_config (amax_compute_algorithm, amax_history_length, backend, fp8_format)",
}


def parallel(**sizes):
    """Lines of a file of accelerate with such sizes."""
    lines = [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
    return "\n".join(["distributed_type: FSDP", "use_cpu: true", "parallelism_config:", *lines, ""])


def used(name, **context):
    """Return the settings of a file that differ from the defaults."""
    found = resolved(config=WRITTEN / f"{name}.yaml", **context)
    values = asdict(found.settings)
    given = {name: values[name] for name in values if found.is_given(name)}
    empty = {"gpu_ids": None, "cpu": False}
    return {name: value for name, value in given.items() if value != empty.get(name, ())}


def test_a_null_is_a_question_that_was_left_open(tmp_path):
    """accelerate's dialogue writes some; `fsdp_ignored_modules` is one that a later version has."""
    lines = [f"{name}: null" for name in {*config._KNOWN} - {"distributed_type", *SECTIONS}]
    for section, names in SECTIONS.items():
        lines += [f"{section}:", *(f"  {name}: null" for name in (*names, "fsdp_ignored_modules"))]
    text = "\n".join(["distributed_type: MULTI_CPU", "of_a_later_version: null", *lines])
    found = resolved(config=written(tmp_path, text))
    assert (found.settings.cpu, found.settings.num_processes) == (True, 1)


def test_there_is_a_case_for_every_file():
    assert {path.stem for path in WRITTEN.iterdir()} == set(USED)


@pytest.mark.parametrize("name", sorted(set(USED) - set(LEFT_OUT) - set(IN_SCRIPT)))
def test_a_file_that_maps_is_used_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment = IN_SAGEMAKER if name == "sagemaker" else {}
        found = used(name, machine=EIGHT, environment=environment)
    assert found == USED[name]


def test_every_kind_of_accelerator_is_known(tmp_path):
    text = (WRITTEN / "multi_npu.yaml").read_text()
    for kind in ("XPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON"):
        file = written(tmp_path, text.replace("MULTI_NPU", f"MULTI_{kind}"))
        assert resolved(config=file, machine=EIGHT).settings.num_processes == 2


def test_every_key_of_a_job_of_sagemaker_is_known():
    fields = {each.name for each in dataclasses.fields(SageMakerConfig)}
    assert fields <= {*config._KNOWN, *config._SAGEMAKER_JOB}


def test_a_file_for_sagemaker_is_refused_outside_of_its_jobs():
    file = WRITTEN / "sagemaker.yaml"
    assert refused(config=file, machine=EIGHT) == (
        f"{file}:2: compute_environment must be LOCAL_MACHINE outside of a job of SageMaker, got "
        "'AMAZON_SAGEMAKER'; accel_fn starts no job: give its estimator an entry point that calls "
        "accel-fn launch, which reads this file there"
    )


def test_a_file_for_sagemaker_without_machines_takes_those_of_the_job(tmp_path):
    file = written(
        tmp_path, "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
    )
    found = resolved(config=file, machine=EIGHT, environment=IN_SAGEMAKER)
    assert (found.settings.num_machines, found.settings.num_processes) == (None, 8)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (
            "MODEL_PARALLEL",
            ":2: distributed_type must be one of NO, DATA_PARALLEL, got 'MODEL_PARALLEL'",
        ),
        ("NO\nnum_machines: 2", ":2: num_processes must be a multiple of num_machines=2, got 1"),
        ("NO\nregions: x", ":3: key must be a setting, got regions: did you mean region?"),
    ],
)
def test_a_file_for_sagemaker_that_does_not_fit_is_refused(tmp_path, lines, shown):
    text = f"compute_environment: AMAZON_SAGEMAKER\ndistributed_type: {lines}\n"
    file = written(tmp_path, text)
    assert f"{file}{shown}" in refused(config=file, machine=EIGHT, environment=IN_SAGEMAKER)


@pytest.mark.parametrize("name", sorted({*LEFT_OUT, *IN_SCRIPT}))
def test_what_is_not_read_from_the_file_is_named_in_one_warning(name):
    with pytest.warns(UnusedSettingsWarning) as caught:
        assert used(name, machine=EIGHT) == USED[name]
    (warning,) = caught
    parts = []
    if name in IN_SCRIPT:
        parts.append(f"not read from this file: in the script, {IN_SCRIPT[name]}")
    if name in LEFT_OUT:
        parts.append(f"accel_fn has no counterpart yet for {LEFT_OUT[name]}; left out")
    assert str(warning.message) == f"{WRITTEN / name}.yaml: {'; '.join(parts)}"


COUNTERPARTS = """
fsdp_config fsdp_offload_params true wrap_fsdp(offload=True)
fsdp_config fsdp_reshard_after_forward false wrap_fsdp(reshard_after_forward=False)
fsdp_config fsdp_transformer_layer_cls_to_wrap A,B wrap_fsdp(blocks=[A,B])
fsdp_config fsdp_sharding_strategy 3 wrap_ddp()
fsdp_config fsdp_activation_checkpointing 'true' checkpoint_activations()
deepspeed_config gradient_clipping 0.5 clip(0.5)
deepspeed_config zero_stage 0 wrap_deepspeed(stage=0)
deepspeed_config zero_stage 3 wrap_deepspeed(stage=3)
deepspeed_config zero3_save_16bit_model true save_model
deepspeed_config offload_param_device cpu wrap_deepspeed(offload="cpu")
deepspeed_config offload_optimizer_device cpu wrap_deepspeed(offload="cpu")
deepspeed_config offload_optimizer_device nvme wrap_deepspeed(offload="nvme")
deepspeed_config offload_optimizer_nvme_path /disk wrap_deepspeed(nvme_path="/disk")
deepspeed_config offload_param_device nvme wrap_deepspeed(zero_optimization={"offload_param": {"device": "nvme"}})
deepspeed_config offload_param_nvme_path /d wrap_deepspeed(zero_optimization={"offload_param": {"nvme_path": "/d"}})
dynamo_config dynamo_backend INDUCTOR compiled()
dynamo_config dynamo_use_fullgraph true compiled(fullgraph=True)
"""  # noqa: E501


def test_the_warning_names_the_counterpart_in_the_script(tmp_path):
    for row in COUNTERPARTS.strip().splitlines():
        section, key, value, shown = row.split(" ", 3)
        head = "distributed_type: FSDP\nuse_cpu: true\n"
        file = written(tmp_path, f"{head}{section}:\n  {key.removeprefix('fsdp_')}: {value}\n")
        with pytest.warns(UnusedSettingsWarning) as caught:
            resolved(config=file)
        (warning,) = caught
        text = f"{file}: not read from this file: in the script, {key} is {shown}"
        assert str(warning.message) == text


@pytest.mark.parametrize(
    "lines",
    [
        "dynamo_config: {dynamo_backend: 'NO', dynamo_mode: max-autotune}",
        "dynamo_backend: 'no'",
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}",
        "fsdp_config: {fsdp_offload_params: 'False', fsdp_sharding_strategy: FULL_SHARD}",
        "parallelism_config: {parallelism_config_tp_size: 1, parallelism_config_cp_size: 1}",
        "deepspeed_config: {gradient_accumulation_steps: auto, gradient_clipping: auto}",
        "deepspeed_config: {offload_optimizer_device: none, deepspeed_multinode_launcher: standard}",
        "megatron_lm_config: {megatron_lm_tp_degree: 1, megatron_lm_gradient_clipping: 0}",
        "enable_cpu_affinity: true\nsame_network: 'no'\ndebug: 'yes'",
    ],
)
def test_what_happens_anyway_is_no_news(tmp_path, lines):
    file = written(tmp_path, f"distributed_type: FSDP\nuse_cpu: true\n{lines}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolved(config=file).settings
    assert (found.wrap, found.mesh) == ("fsdp", None)


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({"tp": 2}, "dp=-1,tp=2"),
        ({"cp": 2, "tp": 1}, "dp=-1,cp=2"),
        ({"tp": 4, "dp_shard": 2, "cp": 2}, "dp=-1,cp=2,tp=4"),
    ],
)
def test_sizes_of_axes_are_the_mesh_and_the_warning_names_what_splits_along_them(
    tmp_path, sizes, mesh
):
    file = written(tmp_path, parallel(**sizes) + "num_processes: 16\n")
    splits = {
        "cp": "in the script, wrap_cp(dims) cuts sequences along it",
        "tp": "in the script, wrap_tp() splits the model along it",
    }
    lines = [f"the mesh has the axis {axis}: {splits[axis]}" for axis in splits if axis in mesh]
    with pytest.warns(UnusedSettingsWarning) as caught:
        found = resolved(config=file)
    (warning,) = caught
    assert str(warning.message) == f"{file}: {'; '.join(lines)}"
    assert found.settings.mesh == mesh
    assert found.sources["mesh"] == str(file)


def test_replicas_and_shards_are_ranks_along_dp_and_a_flag_goes_before_the_mesh_of_the_file(
    tmp_path,
):
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    file = written(tmp_path, parallel(**sizes) + "num_processes: 8\n")
    text = re.escape(
        "parallelism_config_dp_replicate_size is wrap_fsdp(replicate=2); the mesh has the a"
    )
    with pytest.warns(UnusedSettingsWarning, match=text):
        assert resolved({"mesh": "dp=8"}, config=file).settings.mesh == "dp=8"


def test_every_key_that_accelerate_writes_is_known():
    (folder,) = find_spec("accelerate").submodule_search_locations
    asking, launching = (
        (Path(folder) / "commands" / name).read_text(encoding="utf-8")
        for name in ("config/cluster.py", "launch.py")
    )
    prefixes = {"dynamo_config": "dynamo_", "parallelism_config": "parallelism_config_"}
    prefixes |= {"megatron_lm_config": "megatron_lm_"}
    asked = {
        (section, prefixes[section] + key if prefix else key)
        for section, prefix, key in re.findall(r'(\w+_config)\[(prefix \+ )?"(\w+)"\] = ', asking)
    }
    options = {
        (f"{start}_config", option)
        for option, start in re.findall(
            r'"--((fsdp|megatron_lm|fp8|dynamo|parallelism)_\w+)"', launching
        )
    }
    assert {section for section, _ in asked | options} <= set(SECTIONS)
    assert len(asked) > 50
    unknown = {
        key
        for section, key in asked | options
        if spelled_today(section, key) not in SECTIONS[section]
    }
    assert not unknown


def test_a_flag_goes_before_the_file():
    found = resolved({"num_processes": 3}, config=WRITTEN / "multi_cpu.yaml", machine=TWO_GPUS)
    assert (found.settings.num_processes, found.settings.cpu) == (3, True)
    assert found.sources["cpu"] == str(WRITTEN / "multi_cpu.yaml")


@pytest.mark.parametrize("name", ["multi_gpu_machines", "multi_npu"])
def test_a_file_for_accelerators_is_refused_where_there_are_none(name):
    text = refused(config=WRITTEN / f"{name}.yaml", machine=PLAIN)
    assert "distributed_type must fit a machine without accelerators, got 'MULTI_" in text
    assert text.endswith("launch with --cpu to train on the CPU")
    assert resolved({"cpu": True}, config=WRITTEN / f"{name}.yaml").settings.cpu


@pytest.mark.filterwarnings("ignore::accel_fn.contrib.accelerate.config.UnusedSettingsWarning")
def test_the_repair_for_named_devices_works_too():
    text = refused(config=WRITTEN / "multi_gpu.yaml", machine=PLAIN)
    assert text == (
        f"{WRITTEN / 'multi_gpu.yaml'}:6: gpu_ids must be devices of this machine, "
        "which has none, got (0, 1); launch with --cpu to train on the CPU"
    )
    found = resolved({"cpu": True}, config=WRITTEN / "multi_gpu.yaml", machine=PLAIN)
    assert (found.settings.cpu, found.settings.num_processes) == (True, 2)


def test_an_old_file_is_read_as_well(tmp_path):
    file = written(
        tmp_path,
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp16: true\n"
        "num_processes: -1\ndynamo_backend: 'NO'\ntpu_env: []\nipex_config: {}\n",
    )
    found = resolved(config=file, machine=TWO_GPUS)
    assert (found.settings.mixed_precision, found.settings.num_processes) == ("fp16", 2)
    assert found.sources["num_processes"] == "detected: 2 CUDA devices"


MISTAKES = """
 | compute_environment: LOCAL_MACHINE | : distributed_type must be given
NO | compute_environment: MARS | :2: compute_environment must be LOCAL_MACHINE or AMAZON_SAGEMAKER, got 'MARS'
MULTI_GPUS | debug: true | did you mean MULTI_GPU?
TPU | debug: true | did you mean XLA?
3 | debug: true | :1: distributed_type must be one of NO, MULTI_CPU, MULTI_GPU,
NO | num_proceses: 2 | :2: key must be a setting, got num_proceses: did you mean num_processes?
NO | fsdp_confg: {} | fsdp_confg: did you mean fsdp_config?
NO | num_processes: 2 | :2: num_processes must be 1 where distributed_type is NO, got 2; set distributed_type
MULTI_GPU | use_cpu: true | :2: use_cpu must be false where distributed_type is MULTI_GPU, got True
MULTI_CPU | num_processes: two | :2: num_processes must be an integer
FSDP | use_cpu: maybe | :2: cpu must be true or false, got 'maybe'
NO | rdzv_backend: zeus | :2: rdzv_backend must be one of static,
MULTI_CPU | gpu_ids: 0,1 | :2: gpu_ids must be left out where distributed_type is MULTI_CPU, got '0,1'
FSDP | fsdp_config: {fsdp_sharding_strategi: 1} | :2: fsdp_config: key must be a setting, got fsdp_sharding_str
DEEPSPEED | deepspeed_config: {gradient_accumulation_stepss: 4} | did you mean gradient_accumulation_steps?
DEEPSPEED | deepspeed_config: {gradient_accumulation_steps: 0} | :2: num_microbatches must be an integer >= 1, got 0
NO | fsdp_config: yes | :2: fsdp_config must be a section, got True
NO | same_network: maybe | :2: same_network must be true or false, got 'maybe'
NO | debug: 7 | :2: debug must be true or false, got 7
FSDP | parallelism_config: {parallelism_config_tp_size: two} | _tp_size must be an integer >= 1, got 'two'
FSDP | parallelism_config: {parallelism_config_tp_size: -1} | _tp_size must be an integer >= 1, got -1
"""  # noqa: E501


@pytest.mark.filterwarnings("ignore::accel_fn.contrib.accelerate.config.UnusedSettingsWarning")
def test_the_error_names_the_place_of_a_mistake(tmp_path):
    for row in MISTAKES.strip("\n").splitlines():
        kind, line, shown = row.split(" | ") if row[0] != " " else ("", *row[3:].split(" | "))
        text = f"distributed_type: {kind}\n{line}\n" if kind else f"{line}\n"
        file = written(tmp_path, text)
        message = refused(config=file, machine=TWO_GPUS)
        assert message.startswith(str(file)), row
        assert shown in message, row


@pytest.mark.parametrize(
    "line",
    [
        *("downcast_bf16: 'yes'", "main_training_function: train", "tpu_name: pod"),
        *("tpu_use_cluster: true", "commands: [ls]", "tp_config: {tp_size: 2}"),
    ],
)
def test_keys_that_are_left_out_are_named(tmp_path, line):
    file = written(tmp_path, f"distributed_type: NO\n{line}\n")
    with pytest.warns(UnusedSettingsWarning, match=re.escape(line.split(":")[0])):
        resolved(config=file)


def test_keys_of_deepspeed_that_are_left_out_are_named(tmp_path):
    keys = "zero3_init_flag: true, deepspeed_moe_layer_cls_names: Experts, "
    keys += "deepspeed_multinode_launcher: pdsh, deepspeed_hostfile: hosts"
    lines = f"distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config: {{{keys}}}\n"
    with pytest.warns(UnusedSettingsWarning) as caught:
        resolved(config=written(tmp_path, lines))
    assert str(caught[0].message).endswith(
        "accel_fn has no counterpart yet for deepspeed_config (zero3_init_flag, "
        "deepspeed_moe_layer_cls_names, deepspeed_multinode_launcher, deepspeed_hostfile); left out"
    )
