"""Models of transformers that are made empty and loaded, or that transformers loads into parts by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.contrib.transformers.test_tp_styles import (
    GROUPED,
    NO_DROPOUT,
    SIX,
    SIZES,
    loss_fn,
    trained,
)
from tests.support import strategies as ours
from tests.support.processes import launch

pytestmark = pytest.mark.slow

GPT2 = GPT2Config(
    vocab_size=20, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
MODELS = {
    "llama, TP": (LlamaForCausalLM, LlamaConfig(**GROUPED), af.wrap_tp()),
    "llama, FSDP": (LlamaForCausalLM, LlamaConfig(**GROUPED), af.wrap_fsdp()),
    "llama with a tied head": (
        LlamaForCausalLM,
        LlamaConfig(**GROUPED, tie_word_embeddings=True),
        af.compose(af.wrap_tp(), af.wrap_fsdp()),
    ),
    "gpt2": (GPT2LMHeadModel, GPT2, af.wrap_fsdp()),
    "bert": (BertForMaskedLM, BertConfig(**SIZES, **NO_DROPOUT), af.wrap_tp(SIX)),
}


@pytest.mark.parametrize(("kind", "config", "wrap"), MODELS.values(), ids=MODELS)
def test_a_model_that_is_made_empty_and_loaded_trains_as_one_process(
    kind: Any, config: Any, wrap: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = kind(config).double()
    model.save_pretrained(tmp_path)
    found, expected = trained(af.DistState(), copy.deepcopy(model), lambda plan: plan)
    is_split = "wrap_tp" in repr(wrap)
    averaging = wrap if "wrap_fsdp" in repr(wrap) else af.compose(af.wrap_ddp(), wrap)
    mesh = {"dp": 2, "tp": 2} if is_split else {"dp": 2}

    def run(state: af.DistState) -> Any:
        return trained(state, af.empty(lambda: kind(config).double()), averaging, tmp_path)

    for reported, parameters in simulate(run, mesh=mesh, timeout_s=60):
        ours.assert_close(parameters, expected)
        assert reported == pytest.approx(found, rel=1e-6)


SCRIPT = """
import accel_fn as af
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig
from tests.contrib.transformers.test_tp_styles import trained

state = af.init(device="cpu", timeout_s=60)
model = LlamaForCausalLM.from_pretrained({folder!r}, distributed_config=DistributedConfig({size}=2))
try:
    trained(state, model, {wrap})
except ValueError as error:
    say(error)
"""
REFUSED = {
    "fsdp_size": (
        "af.wrap_fsdp()",
        "build: wrap_fsdp's model must hold parameters whole, got model.embed_tokens.weight; leave out "
        "fully_shard, or DistributedConfig(fsdp_size=) of transformers: make the model by "
        "af.empty(AutoModelForCausalLM.from_config, config), and call load_model(model, folder) after build",
    ),
    "pp_size": (
        "af.wrap_ddp()",
        "build: model must have all of its layers on every rank, got one that transformers has cut into "
        "stages; leave out DistributedConfig(pp_size=), and use wrap_fsdp or wrap_tp",
    ),
}


@pytest.mark.parametrize(
    ("size", "wrap", "words"), [(k, *each) for k, each in REFUSED.items()], ids=REFUSED
)
def test_shards_and_stages_of_transformers_are_refused_with_the_form_that_works(
    size: str, wrap: str, words: str, tmp_path: Path
) -> None:
    LlamaForCausalLM(LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    launch(SCRIPT.format(folder=str(tmp_path), size=size, wrap=wrap), expect=[words] * 2)


def test_a_new_head_is_filled_as_transformers_would(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)).bert
    body.save_pretrained(tmp_path)
    config = BertConfig(**SIZES, **NO_DROPOUT, num_labels=3)

    def run(state: af.DistState) -> Any:
        model = af.empty(BertForSequenceClassification, config)
        plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters()))
        af.build(af.wrap_fsdp()(plan), state)
        af.load_model(model, tmp_path, rename=lambda name: f"bert.{name}", init=model._init_weights)
        return ours.whole(model.state_dict())

    alone = run(af.DistState())
    ours.assert_identical(alone, {f"bert.{name}": each for name, each in body.state_dict().items()})
    assert 0 < alone["classifier.weight"].std() < 0.1
    assert not alone["classifier.bias"].any()
    for found in simulate(run, world_size=2):
        ours.assert_identical(found, alone)
