"""Tensor-parallel styles of models of transformers: the model's own plan, or a mapping."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
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
from accel_fn.comm.mesh import make_mesh
from accel_fn.testing import simulate
from accel_fn.transforms.tp.styles import styles_of

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 3}
BERT = "bert.encoder.layer.*"
SIX = {
    f"{BERT}.attention.self.query": "colwise",
    f"{BERT}.attention.self.key": "colwise",
    f"{BERT}.attention.self.value": "colwise",
    f"{BERT}.attention.output.dense": "rowwise",
    f"{BERT}.intermediate.dense": "colwise",
    f"{BERT}.output.dense": "rowwise",
}


def loss_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    tokens = torch.tensor([[1, 4, 9, 19, 5], [7, 7, 2, 3, 3]])
    loss = model(input_ids=tokens, attention_mask=(tokens != 3).long(), labels=tokens).loss
    loss.backward()
    grads: list[Any] = [each.grad for each in model.parameters()]
    return [
        loss.detach(),
        *(getattr(each, "full_tensor", lambda each=each: each)() for each in grads),
    ]


@pytest.mark.parametrize(
    ("kind", "config", "styles"),
    [
        (LlamaForCausalLM, LlamaConfig(**GROUPED), "auto"),
        (LlamaForCausalLM, LlamaConfig(**GROUPED, tie_word_embeddings=True), "auto"),
        (Qwen3ForCausalLM, Qwen3Config(**GROUPED, head_dim=4), "auto"),
        (Phi3ForCausalLM, Phi3Config(**GROUPED, eos_token_id=0), "auto"),
        (BertForMaskedLM, BertConfig(**SIZES), SIX),
    ],
    ids=["llama", "llama with a tied head", "qwen3", "phi3", "bert"],
)
def test_sharded_model_has_the_loss_and_the_gradients_of_one_process(
    kind: Any, config: Any, styles: Any
) -> None:
    torch.manual_seed(0)
    model = kind(config).double().eval()
    models = [copy.deepcopy(model) for _ in range(2)]
    expected = loss_and_gradients(model)

    def run(state: af.DistState) -> list[torch.Tensor]:
        mine, mesh = models[state.rank], make_mesh(state, 1)
        tied = mine.get_output_embeddings().weight is mine.get_input_embeddings().weight
        for name, style in styles_of(mine, styles, state.world_size).items():
            parallelize_module(mine.get_submodule(name), mesh, style, src_data_rank=None)
        if tied:
            mine.get_output_embeddings().weight = mine.get_input_embeddings().weight
        return loss_and_gradients(mine)

    for results in simulate(run, world_size=2):
        torch.testing.assert_close(results, expected, rtol=0, atol=1e-12)


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
