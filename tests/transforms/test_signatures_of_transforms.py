"""The parameters of the transforms; each docstring states a law and a cost."""

import inspect
import operator

import pytest

import accel_fn as af

SIGNATURES = {
    "place": "(*, frozen_dtype=None)",
    "wrap_as_launched": "()",
    "wrap_ddp": "(*, comm_hook=None, sync_batchnorm=False, **ddp_options)",
    "wrap_fsdp": (
        "(*, blocks=None, ignore=None, replicate=1, reshard_after_forward=True, param_dtype=None, "
        "reduce_dtype=torch.float32, offload=False, sync_batchnorm=False, frozen=False)"
    ),
    "wrap_cp": "(dims, *, axis='cp', attention='gather')",
    "wrap_tp": "(styles='auto', *, axis='tp')",
    "wrap_deepspeed": "(config=None, *, stage=None, offload=None, nvme_path=None, **settings)",
    "local_sgd": "(every)",
    "reproducible": "(num_virtual_ranks=8)",
    "with_amp": (
        "(precision=None, *, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=2000, skip=None)"
    ),
    "accumulate": "(num_microbatches=None, *, split='rows')",
    "clip": "(max_norm)",
    "clip_value": "(max_value)",
    "compiled": "(*, scope='loss', mode='default', fullgraph=False, dynamic=None)",
    "checkpoint_activations": "(*, blocks=None, offload=False)",
    "schedule": "(scheduler_or_fn, *, every=None, metric=None, optimizer=None)",
    "ema": "(decay, *, num_warmup=0)",
    "swa": "(*, num_warmup=0)",
    "when": "(condition, then)",
    "freeze": "(names, *, until=None)",
    "check_replicas": "(every)",
    "log_to": "(*writers, every=10, prefix='')",
    "skip_nonfinite": "(max_consecutive=10)",
    "skip_spikes": "(num_sigmas=6.0, *, window=128, max_consecutive=10)",
}


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items(), ids=SIGNATURES)
def test_a_transform_takes_what_it_has_always_taken(name, expected):
    found = inspect.signature(operator.attrgetter(name)(af))
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    assert str(inspect.Signature(bare)) == expected


def test_no_transform_is_left_out():
    functions = filter(inspect.isfunction, (getattr(af, name) for name in af.__all__))
    returned = {each.__name__: inspect.signature(each).return_annotation for each in functions}
    found = {name for name, kind in returned.items() if kind == "Transform"}
    assert found - {"compose", "profile"} == SIGNATURES.keys()
