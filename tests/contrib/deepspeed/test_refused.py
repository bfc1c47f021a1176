"""What wrap_deepspeed refuses, in words, without DeepSpeed."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.contrib.deepspeed.settings import engine_config, read_settings
from accel_fn.contrib.deepspeed.wrap_deepspeed import check_lock
from accel_fn.errors import ArgumentError, ExtraError, PlanError
from accel_fn.testing import simulate


def loss_fn(model, batch):
    return model(batch).square().mean()


def plan_of(*transforms, model=None, optimizer=None):
    model = nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if optimizer is None else optimizer
    return af.compose(*transforms)(af.Plan(loss_fn, model, optimizer))


def refusal(*transforms, **parts):
    with pytest.raises(PlanError) as found:
        af.build(plan_of(*transforms, **parts), af.DistState())
    return str(found.value)


def test_one_rank_trains_as_without_it_and_clips():
    ends = []
    for transforms in ((af.clip(0.1),), (af.wrap_deepspeed(stage=3), af.clip(0.1), af.clip(0.5))):
        torch.manual_seed(0)
        plan = plan_of(*transforms)
        state, step = af.build(plan, af.DistState())
        state, report = step(state, torch.ones(4, 3))
        ends.append((plan.model.weight.detach(), report.loss, report.grad_norm))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


ZERO = "zero_optimization"
CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"stage": 3, "offload": "nvme", "nvme_path": "swap"}
PARAM = {"stage": 3, "offload_param": {"device": "nvme"}}
NO_PATH = 'nvme_path must be the path of a folder if {}.device is "nvme", got None'
OFFLOAD = "offload (offload_optimizer) must be given once, got {} in config and {} as an"
ARGUMENTS = [
    ({"stage": -1}, "stage must be 0, 1, 2 or 3, got -1"),
    ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
    ({"offload": "disk"}, 'offload must be None, "cpu" or "nvme", got \'disk\''),
    ({"stage": 0, "offload": "cpu"}, "offload must be None at stage 0"),
    ({**NVME, "stage": 2}, "offload must be None or \"cpu\" below stage 3, got 'nvme'"),
    ({ZERO: {"stage": 1}, "stage": 2}, "stage must be given once, got 1 in config and 2 as"),
    ({"config": {"a": 1}, "a": 2}, "a must be given once, got 1 in config and 2 as an"),
    ({ZERO: {"offload_optimizer": {"device": "none"}}, "offload": "cpu"}, OFFLOAD.format("'none'", "'cpu'")),
    ({ZERO: {"stage": 3, **CPU}, **NVME}, OFFLOAD.format("'cpu'", "'nvme'")),
    ({ZERO: {"offload_optimizer": {"nvme_path": "a"}}, **NVME}, "nvme_path must be given once, got 'a'"),
    ({ZERO: {"offload_optimizer": {"device": "disk"}}}, "offload_optimizer.device must be "),
    ({ZERO: PARAM}, NO_PATH.format("offload_param")),
    ({**NVME, "nvme_path": None}, NO_PATH.format("offload_optimizer")),
    ({**NVME, "offload": "cpu"}, "nvme_path must be left out unless offload is \"nvme\", got 'swap'"),
    ({"stage": 3, "overlap_comm": True}, "overlap_comm must be in zero_optimization, got True"),
    ({"train_batch_size": 32}, "train_batch_size must be left out, got 32; the loader"),
    *(
        ({key: value}, f"{key} must be left out")
        for key, value in {
            "train_micro_batch_size_per_gpu": 4,
            "scheduler": {"type": "WarmupLR"},
            "tensor_parallel": {"autotp_size": 2},
            "sequence_parallel_size": 2,
            "gradient_allreduce_op": "sum",
            "managed_gradient_accumulation": False,
            "tensorboard": {"enabled": True},
        }.items()
    ),
    *(
        ({key: 1.0}, f"{key} must be a setting of DeepSpeed, which ignores others, got 1.0; use {near}")
        for key, near in {
            "gradient_cliping": "gradient_clipping",
            "zero_optimisation": "zero_optimization",
            "zero_stage": "stage",
            "offload_optimizer_device": "offload_optimizer",
        }.items()
    ),
]  # fmt: skip
TYPES = [
    *(({"stage": each}, "stage must be 0, 1, 2 or 3, got ") for each in (True, "2", 2.0)),
    ({"config": 3}, "config must be a mapping, or the path of a JSON file, got 3"),
    *(
        ({name: True}, f"{name} must be a mapping of settings, got True")
        for name in (ZERO, "bf16", "fp16", "amp", "optimizer")
    ),
    *(
        ({ZERO: {name: True}, "offload": "cpu"}, f"{name} must be a mapping of settings")
        for name in ("offload_optimizer", "offload_param")
    ),
]


@pytest.mark.parametrize(("settings", "text"), [*ARGUMENTS, *TYPES])
def test_settings_that_differ_or_have_no_effect_are_refused(settings, text):
    with pytest.raises(ArgumentError, match=f"^wrap_deepspeed: {re.escape(text)}") as found:
        af.wrap_deepspeed(**settings)
    assert isinstance(found.value, TypeError) == ((settings, text) in TYPES)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_file_holds_a_json_object(text, tmp_path):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        ArgumentError,
        match=r"^wrap_deepspeed: config must be the path of a file with a JSON object, got ",
    ):
        af.wrap_deepspeed(path)


@pytest.mark.filterwarnings("ignore:build. with_amp should have bf16")
def test_a_file_of_transformers_is_read(tmp_path):
    path = tmp_path / "ds.json"
    given = {
        "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0}},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "amp": None,
        "torch_autocast": {"enabled": False},
        "wandb": {"enabled": False},
        "zero_optimization": {"stage": 3, "offload_param": None, "reduce_bucket_size": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    path.write_text(json.dumps(given))
    af.build(plan_of(af.wrap_deepspeed(path), af.clip(0.5), af.with_amp("bf16")), af.DistState())


@pytest.mark.parametrize(
    ("settings", "others", "text"),
    [
        ({"gradient_accumulation_steps": 4}, [af.accumulate(2)], "gradient_accumulation_steps 2 4"),
        ({"gradient_clipping": 1.0}, [], "gradient_clipping 0.0 1.0"),
        ({"gradient_clipping": "1"}, [af.clip(1.0)], "gradient_clipping 1.0 '1'"),
        ({"fp16": {"enabled": True}}, [], "fp16.enabled False True"),
        ({"torch_autocast": {"enabled": True}}, [], "torch_autocast.enabled False True"),
        ({"bf16": {"enabled": False}}, [af.with_amp("bf16")], "bf16.enabled True False"),
        ({"optimizer": {"type": "Adam"}}, [], "optimizer.type 'SGD' 'Adam'"),
        ({"optimizer": {"params": {"lr": 0.2}}}, [], "optimizer.params.lr 0.1 0.2"),
    ],
)
@pytest.mark.filterwarnings("ignore:build. with_amp should have bf16")
def test_settings_that_differ_from_the_plan_are_refused_with_both_values(settings, others, text):
    name, wanted, got = text.split()
    start = (
        f"build: wrap_deepspeed's {name} must be that of the plan, {wanted}, got {got}; leave it"
    )
    assert refusal(af.wrap_deepspeed(**settings), *others).startswith(start)


@pytest.mark.parametrize(
    ("stage", "other", "text"),
    [
        (None, af.clip_value(1.0), "make the update itself, got clip_value(1.0) in gradients"),
        (None, af.skip_nonfinite(), "got skip_nonfinite() in accept"),
        (None, af.freeze("weight", until=3), "got freeze('weight', until=3) in wrap_grad_fn"),
        (None, af.compiled(), "got compiled() in compile_loss"),
        (None, af.compiled(scope="step"), "got compiled(scope='step') in compile_step"),
        (None, af.accumulate("auto"), "got accumulate('auto') in wrap_grad_fn"),
        (3, af.ema(0.9), "must not be combined with what needs whole parameters, got ema"),
        (3, af.check_replicas(every=1), "what needs whole parameters, got check_replicas(every=1)"),
        (None, af.local_sgd(every=2), "local_sgd must be the only strategy"),
        (None, af.reproducible(num_virtual_ranks=2), "at most one function in strategy"),
        (None, af.with_amp("fp16"), "without a loss scale, since the engine has the gradients"),
    ],
)
def test_what_the_engine_does_not_do_is_refused(stage, other, text):
    assert text in refusal(af.wrap_deepspeed(stage=stage), other)


def test_one_optimizer_is_trained():
    model = nn.Linear(3, 2)
    optimizers = {
        "a": torch.optim.SGD([model.weight], 0.1),
        "b": torch.optim.SGD([model.bias], 0.1),
    }
    text = refusal(af.wrap_deepspeed(), model=model, optimizer=optimizers)
    assert text.startswith("build: wrap_deepspeed must have one optimizer, got a and b;")


class Modes(torch.optim.SGD):
    def train(self):
        """Use the parameters of training."""

    def eval(self):
        """Use those of evaluation."""


def with_state(parameters):
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


def with_frozen_group(parameters):
    parameters[0].requires_grad_(False)
    return torch.optim.SGD([{"params": [each]} for each in parameters], 0.1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(Modes, lr=0.1), "have no train and eval modes, got 'Modes'"),
        (with_state, "have no state yet, since the engine starts a new one, got 'SGD'"),
        (torch.optim.Adafactor, "update flat shards element by element, got 'Adafactor'"),
        # has state from the start
        (torch.optim.Adagrad, "update flat shards element by element, got 'Adagrad'"),
        (with_frozen_group, "have a trained parameter in every group, got 'SGD'"),
    ],
)
def test_optimizers_that_the_engine_would_change_are_refused(make, text):
    model = nn.Linear(3, 2)
    optimizer = make([*model.parameters()])
    got = refusal(af.wrap_deepspeed(stage=1), model=model, optimizer=optimizer)
    assert got.startswith(f"build: wrap_deepspeed's optimizer must {text};")


def with_scale():
    model = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


@pytest.mark.parametrize(
    ("stage", "make", "text"),
    [
        (None, lambda: nn.Linear(3, 2).double(), "train float32 parameters, got float64 weight"),
        (None, lambda: nn.Embedding(4, 2, sparse=True), "have dense gradients, got ''"),
        (
            3,
            lambda: torch.compile(nn.Linear(3, 2), backend="eager"),
            "be called without torch.compile",
        ),
        (3, with_scale, "be of one dimension or more, got 'scale'"),
    ],
)
def test_models_that_the_engine_cannot_train_are_refused(stage, make, text):
    assert f"must {text}" in refusal(af.wrap_deepspeed(stage=stage), model=make())


def test_a_missing_deepspeed_is_named_on_all_ranks():
    try:
        import deepspeed  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip("DeepSpeed is installed")

    def rank(state):
        with pytest.raises(ExtraError) as found:
            af.build(plan_of(af.wrap_deepspeed()), state)
        return str(found.value)

    assert (
        simulate(rank, world_size=2)
        == [
            'wrap_deepspeed: deepspeed must be installed; in a clone of accel_fn: pip install ".[deepspeed]"'
        ]
        * 2
    )


def test_ranks_of_a_mesh_are_refused():
    def rank(state):
        with pytest.raises(PlanError) as found:
            af.build(plan_of(af.wrap_deepspeed()), state)
        return str(found.value)

    assert set(simulate(rank, mesh={"dp": 2, "tp": 2})) == {
        "build: wrap_deepspeed() must have a mesh of dp alone, got dp 2 x tp 2; use wrap_ddp, or "
        "leave out mesh"
    }


@pytest.mark.parametrize(
    ("name", "devices"),
    [("deepspeed_shm_comm", ()), ("pin_memory", {"nvme"}), ("async_io", {"nvme"})],
)
def test_the_lock_of_a_build_is_found(name, devices, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    check_lock(af.DistState())
    lock = tmp_path / name / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    with pytest.raises(PlanError) as found:
        check_lock(af.DistState(), devices)
    assert str(found.value) == (
        f"build: wrap_deepspeed must find no lock of a build of DeepSpeed's C++ code, got {lock}; if no "
        "other program is building it, delete that file, or else wait for it"
    )


HIDDEN = [
    SimpleNamespace(hidden_size=8),
    SimpleNamespace(hidden_sizes=[4, 8]),
    SimpleNamespace(text_config=SimpleNamespace(hidden_size=8)),
    SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=[8, 4])),
]
BUCKETS = {"reduce_bucket_size": 64, "stage3_prefetch_bucket_size": 57}
BUCKETS |= {"stage3_param_persistence_threshold": 80}


@pytest.mark.parametrize("config", [*HIDDEN, None, SimpleNamespace(), {"hidden_size": 8}], ids=str)
def test_sizes_that_are_auto_follow_the_hidden_size_or_are_those_of_deepspeed(config):
    expected = BUCKETS if config in HIDDEN else {}
    assert zero_of(config) == {"stage": 3, **expected}


def test_files_set_what_they_need():
    offload = {"offload_param": {"device": "nvme"}, "sub_group_size": 10**9}
    config = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", **offload}}
    settings = read_settings(config, None, "nvme", "swap", {})
    assert engine_config(settings, None, nn.Linear(3, 2))["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "swap", "buffer_count": 5},
        "offload_param": {"device": "nvme", "nvme_path": "swap"},
        "sub_group_size": 1,
        "stage3_prefetch_bucket_size": 0,
    }


def zero_of(config):
    """The section on ZeRO of the engine of a model that has a configuration."""
    model = nn.Linear(3, 2)
    model.config = config
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
    auto = dict.fromkeys((*keys, "stage3_param_persistence_threshold"), "auto")
    settings = read_settings({"zero_optimization": {"stage": 3, **auto}}, None, None, None, {})
    return engine_config(settings, None, model)["zero_optimization"]
