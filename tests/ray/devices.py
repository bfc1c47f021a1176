"""Prints the device of each worker: `devices.py GPUS_OF_A_WORKER`. Ray counts GPUs that it is told of."""

import json
import os
import sys
from pathlib import Path

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

import accel_fn as af
from accel_fn.parallel.world import ray_device


def work(config):
    if not config["gpus"]:
        # What Ray sets on a machine with GPUs.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda:0"
    found = [ray_device(os.environ), os.environ.get("CUDA_VISIBLE_DEVICES")]
    if not config["gpus"]:
        found.append(str(af.init().device))
    Path(config["out"], os.environ["LOCAL_RANK"]).write_text(json.dumps(found))


gpus, out = int(sys.argv[1]), os.getcwd()
ray.init(num_cpus=2, num_gpus=4)
TorchTrainer(
    work,
    train_loop_config={"gpus": gpus, "out": out},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ray.train.ScalingConfig(
        num_workers=2, use_gpu=gpus > 0, resources_per_worker={"CPU": 1, "GPU": gpus}
    ),
    run_config=ray.train.RunConfig(storage_path=out),
).fit()
