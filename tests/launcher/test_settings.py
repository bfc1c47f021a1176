"""The values and combinations of settings that are refused, and the texts of the errors."""

import pytest

from tests.cli.commands import SRUN
from tests.support.launch_settings import (
    SETTINGS,
    TWO_GPUS,
    Machine,
    refused,
    resolved,
    written,
)

WRONG = [
    ("num_processes", 0, "be an integer >= 1"),
    ("num_processes", "two", "be an integer >= 1"),
    ("num_processes", True, "be an integer >= 1"),
    ("num_processes", 1.5, "be an integer >= 1"),
    ("num_machines", 0, "be an integer >= 1"),
    ("machine_rank", -1, "be an integer >= 0"),
    ("main_process_ip", "node0:29500", "be a host name or an IP address, without a port"),
    ("main_process_ip", "", "be a host name or an IP address, without a port"),
    ("main_process_ip", 10, "be a host name or an IP address, without a port"),
    ("main_process_port", 65536, "be an integer in 0 .. 65535"),
    ("cpu", "maybe", "be true or false"),
    ("gpu_ids", "", "be 'all' or indices of devices, each once, such as 0,1"),
    ("gpu_ids", "0,zero", "be 'all' or indices of devices, each once, such as 0,1"),
    ("gpu_ids", [0, 0], "be 'all' or indices of devices, each once, such as 0,1"),
    ("gpu_ids", [], "be 'all' or indices of devices, each once, such as 0,1"),
    ("gpu_ids", -1, "be 'all' or indices of devices, each once, such as 0,1"),
    ("mixed_precision", "fp32", "be one of no, fp16, bf16, fp8"),
    ("mixed_precision", True, "be one of no, fp16, bf16, fp8"),
    ("num_microbatches", 0, "be an integer >= 1"),
    ("wrap", "dpp", "be one of ddp, fsdp, deepspeed"),
    ("max_restarts", -1, "be an integer >= 0"),
    ("rdzv_backend", "etcd", "be one of static, c10d, etcd-v2"),
    ("timeout_s", 0, "be a finite number > 0"),
    ("timeout_s", float("inf"), "be a finite number > 0"),
    ("timeout_s", float("nan"), "be a finite number > 0"),
    ("timeout_s", True, "be a finite number > 0"),
    ("mesh", "ep=2", "be axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2"),
    ("mesh", "tp=0", "be axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2"),
    ("mesh", "tp=2,tp=2", "be axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2"),
    ("mesh", "dp=-1,tp=-1", "be axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2"),
    ("mesh", 2, "be axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2"),
    ("log_dir", "", "be a path"),
    ("log_dir", 3, "be a path"),
    ("tee", 2, "be true or false"),
    ("full_traceback", "all", "be true or false"),
    ("threads_per_process", 0, "be an integer >= 1"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_the_error_of_a_wrong_value_names_source_rule_and_value(name, value, words):
    flag = f"flag --{name.replace('_', '-')}"
    assert refused({name: value}) == f"{flag}: {name} must {words}, got {value!r}"


def test_every_setting_has_a_wrong_value_above():
    assert {name for name, *_ in WRONG} == set(SETTINGS)


def test_all_wrong_values_are_in_one_error():
    lines = refused({"num_processes": 0, "max_restarts": -1, "tee": True}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["flag --num-processes", "flag --max-restarts"]


@pytest.mark.parametrize(
    ("value", "meant"), [("all", None), ("0,1", (0, 1)), (" 1 , 0", (1, 0)), (1, (1,)), ([0], (0,))]
)
def test_gpu_ids_are_read_as_people_write_them(value, meant):
    assert resolved({"gpu_ids": value}, machine=TWO_GPUS).settings.gpu_ids == meant


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"cpu": True, "gpu_ids": "0,1"}, "--cpu: cpu must be false with gpu_ids=0,1, got True"),
        (
            {"num_machines": 2, "machine_rank": 2, "main_process_ip": "a"},
            "--machine-rank: machine_rank must be below num_machines=2, got 2",
        ),
        ({"machine_rank": 1}, "machine_rank must be below num_machines=1, got 1"),
        (
            {"num_machines": 2, "main_process_ip": "a", "num_processes": 3},
            "num_processes must be a multiple of num_machines=2, got 3",
        ),
        (
            {"gpu_ids": "1", "num_processes": 2},
            "num_processes must be at most one for each of gpu_ids=1 of this machine, got 2",
        ),
        (
            {"num_machines": 2},
            "num_machines must be 1 without an address of machine 0, got 2",
        ),
        (
            {"num_processes": 3},
            "num_processes must be at most one for each of the 2 CUDA devices of this machine, "
            "got 3; launch with --cpu",
        ),
        (
            {"num_machines": 2, "main_process_ip": "a", "num_processes": 6},
            "at most one for each of the 2 CUDA devices of each of 2 machines, got 6",
        ),
        ({"gpu_ids": "2"}, "gpu_ids must be devices of this machine, which has 2, got (2,)"),
    ],
)
def test_values_that_conflict_are_refused(flags, text):
    assert text in refused(flags, machine=TWO_GPUS)


def test_a_conflict_names_the_source_of_the_value(tmp_path):
    file = written(tmp_path, "gpu_ids: [0]\ncpu: true\n")
    text = refused(folder=tmp_path, machine=TWO_GPUS)
    assert text.startswith(f"{file}:2: cpu must be false with gpu_ids=0")


POD = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "node0"}
HOST = {"SM_HOSTS": '["node0", "node1"]', "SM_CURRENT_HOST": "node1"}


@pytest.mark.parametrize("environment", [SRUN, POD, HOST], ids=["srun", "torchrun", "SageMaker"])
def test_a_cluster_may_give_the_number_of_machines(environment):
    assert resolved({"num_processes": 4}, environment=environment, machine=TWO_GPUS)
    text = refused({"num_processes": 6}, environment=environment, machine=TWO_GPUS)
    assert "of each of 2 machines, got 6" in text


@pytest.mark.parametrize(
    ("variable", "ids", "fits"),
    [
        ("0,1", "0", True),
        ("1,0", "0,1", True),
        ("1", "0", False),
        ("1", "0,1", False),
        ("", "0", False),
        ("GPU-1234", "0", False),
    ],
)
def test_gpu_ids_must_be_among_the_visible_devices(variable, ids, fits):
    environment = {"CUDA_VISIBLE_DEVICES": variable}
    if fits:
        found = resolved({"gpu_ids": ids}, environment=environment, machine=TWO_GPUS)
        assert found.settings.num_processes == len(ids.split(","))
    else:
        text = refused({"gpu_ids": ids}, environment=environment, machine=TWO_GPUS)
        assert f"gpu_ids must be among CUDA_VISIBLE_DEVICES={variable!r}, got" in text


def test_gpu_ids_are_refused_where_they_would_choose_nothing():
    machine = Machine(num_cores=4, kind="XPU", num_installed=2, num_devices=2)
    text = refused({"gpu_ids": "1"}, machine=machine)
    rule = "gpu_ids must be left out where the devices are XPU, got (1,)"
    assert text == f"flag --gpu-ids: {rule}; set the variable of their driver"
    assert resolved({"gpu_ids": "all"}, machine=machine).settings.num_processes == 2
    assert resolved({"cpu": True}, machine=machine).settings.num_processes == 1
