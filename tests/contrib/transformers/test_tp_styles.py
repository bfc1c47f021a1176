"""Tensor-parallel styles of models of transformers: the model's own plan, or a mapping."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import accel_fn as af
from accel_fn.parallel.tp.styles import styles_of
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = "bert.encoder.layer.*"
SIX = {
    f"{BERT}.attention.self.query": "colwise",
    f"{BERT}.attention.self.key": "colwise",
    f"{BERT}.attention.self.value": "colwise",
    f"{BERT}.attention.output.dense": "rowwise",
    f"{BERT}.intermediate.dense": "colwise",
    f"{BERT}.output.dense": "rowwise",
}


TOKENS = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(
        input_ids=tokens, attention_mask=(tokens != 3).long(), labels=tokens
    ).loss
    return loss


def trained(
    state: af.DistState, model: nn.Module, recipe: Any, folder: Path | None = None
) -> tuple[list[float], Any]:
    """Train a few steps, from the weights in a folder; return losses, norms, and whole parameters."""
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state, step = af.build(recipe(af.clip(0.5)(plan)), state)
    if folder is not None:
        af.load_model(model, folder)
    found = []
    for _ in range(3):
        state, report = step(state, af.shard_batch(TOKENS, state))
        found += [float(report.loss), float(report.grad_norm)]
    return found, ours.whole(model.state_dict())


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "config", "styles"),
    [
        (LlamaForCausalLM, LlamaConfig(**GROUPED), "auto"),
        (LlamaForCausalLM, LlamaConfig(**GROUPED, tie_word_embeddings=True), "auto"),
        (LlamaForCausalLM, LlamaConfig(**GROUPED), {"model.layers.*.*norm": "sequence"}),
        (Qwen3ForCausalLM, Qwen3Config(**GROUPED, head_dim=4), "auto"),
        (Phi3ForCausalLM, Phi3Config(**GROUPED, eos_token_id=0), "auto"),
        (BertForMaskedLM, BertConfig(**SIZES, **NO_DROPOUT), SIX),
    ],
    ids=["llama", "llama with a tied head", "llama's norms", "qwen3", "phi3", "bert"],
)
def test_mesh_of_two_by_two_gives_the_result_of_one_process(
    kind: Any, config: Any, styles: Any, wrap: Any
) -> None:
    torch.manual_seed(0)
    model = kind(config).double()
    models = [copy.deepcopy(model) for _ in range(4)]
    found, expected = trained(af.DistState(), model, lambda plan: plan)
    recipe = af.compose(af.wrap_tp(styles), wrap)

    def run(state: af.DistState) -> Any:
        return trained(state, models[state.rank], recipe)

    for reported, parameters in simulate(run, mesh={"dp": 2, "tp": 2}, timeout_s=60):
        ours.assert_close(parameters, expected)
        # These models compute their loss in float32.
        assert reported == pytest.approx(found, rel=1e-6)


SCRIPT = """
import json
import accel_fn as af
import torch
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig
from tests.contrib.transformers.test_tp_styles import trained
from tests.support import strategies as ours

for mesh in ({{"dp": 1, "tp": 4}}, {{"dp": 2, "tp": 2}}):
    with af.distributed(device="cpu", timeout_s=60, mesh=mesh) as state:
        config = DistributedConfig(tp_size=4, tp_plan="auto")
        model = LlamaForCausalLM.from_pretrained({folder!r}, distributed_config=config, dtype=torch.float64)
        try:
            reported, ends = trained(state, model.train(), af.compose(af.wrap_ddp(), af.wrap_tp()))
            say(json.dumps([reported, {{name: each.tolist() for name, each in ends.items()}}]))
        except ValueError as error:
            say(json.dumps(str(error)))
"""


def test_model_that_from_pretrained_splits_is_taken_where_tp_is_the_whole_world(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    model.save_pretrained(tmp_path)
    losses, expected = trained(af.DistState(), model, lambda plan: plan)
    said = launch(SCRIPT.format(folder=str(tmp_path)), num_processes=4).splitlines()
    found = [json.loads(line) for line in said]
    results = [each for each in found if not isinstance(each, str)]
    assert len(results) == 4
    for reported, ends in results:
        ours.assert_close(from_lists(ends), expected)
        assert reported == pytest.approx(losses, rel=1e-6)
    refused = "build: wrap_tp's model must be split over the ranks along tp, [2, 3], got "
    refused += "model.embed_tokens.weight over [0, 1, 2, 3]; give it whole, from from_pretrained"
    assert sum(isinstance(each, str) and each.startswith(refused) for each in found) == 2


def test_every_matrix_of_a_llama_is_sharded() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**GROUPED))
    whole = {
        name for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Embedding)
    }
    assert styles_of(model, "auto", 2).keys() == whole


@pytest.mark.parametrize(
    ("kind", "config", "styles", "words"),
    [
        (
            LlamaForCausalLM,
            LlamaConfig(**GROUPED),
            "auto",
            "must have heads that the number of ranks along the axis, 4, divides, got "
            "config.num_key_value_heads=2 of model.layers.0.self_attn;",
        ),
        (
            BertForMaskedLM,
            BertConfig(**SIZES),
            "auto",
            'must be a mapping for BertForMaskedLM, which has no plan of its own, got "auto"; look at this '
            f"guess before you use it: wrap_tp({str(SIX).replace(chr(39), chr(34))})",
        ),
        (
            GPT2LMHeadModel,
            GPT2Config(n_embd=16, n_head=4, n_layer=2),
            "auto",
            "must be for nn.Linear layers, got GPT2LMHeadModel, whose transformer.h.*.attn.c_attn is a "
            "Conv1D; its weight is transposed, so that torch has no style for it",
        ),
        (
            GPT2LMHeadModel,
            GPT2Config(n_embd=16, n_head=4, n_layer=2),
            {"transformer.h.*.mlp.c_fc": "colwise"},
            'must give "colwise" to nn.Linear and nn.Embedding alone, got transformer.h.0.mlp.c_fc, of '
            "class Conv1D, whose weight is transposed",
        ),
        (
            MixtralForCausalLM,
            MixtralConfig(**GROUPED),
            "auto",
            "must be ones that torch has for modules, got 'packed_colwise' for the parameter "
            "model.layers.*.mlp.experts.gate_up_proj in the plan of MixtralForCausalLM;",
        ),
    ],
    ids=["heads", "bert", "gpt2", "gpt2 by name", "mixtral"],
)
def test_models_and_styles_that_do_not_fit_are_refused(
    kind: Any, config: Any, styles: Any, words: str
) -> None:
    with torch.device("meta"):
        model = kind(config)
    with pytest.raises(af.errors.PlanError, match=f"^build: wrap_tp's styles {re.escape(words)}"):
        styles_of(model, styles, 4)
