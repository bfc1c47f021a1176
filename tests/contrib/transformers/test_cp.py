"""Law 13 for models of transformers, whose sequences `wrap_cp` cuts: any mesh is one process."""

import copy

import pytest
import torch
import torch.nn.functional as F

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

transformers = pytest.importorskip("transformers")

LENGTH = 14
CUT = af.wrap_cp({"input_ids": 1, "labels": 1, "position_ids": 1})
CUT_SHIFTED = af.wrap_cp({"input_ids": 1, "labels": 1, "shift_labels": 1, "position_ids": 1})
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=4)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GROUPED, sliding_window=4)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, attn_pdrop=0.0)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
    ),
}
KINDS = ("plain", "padded", "packed")

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views


def model_of(name, **options):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    model.config.use_cache = False
    for key, value in options.items():
        setattr(model.config, key, value)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def batches(kind, num=2, rows=4):
    """Return batches; half of the rows have labels in the first half of the tokens alone."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num):
        tokens, labels = torch.randint(0, 50, (2, rows, LENGTH), generator=generator)
        labels[torch.rand(rows, LENGTH, generator=generator) < 0.3] = -100
        labels[:2, LENGTH // 2 :] = -100
        labels[:, 1], labels[-1, -1] = 1, 2
        batch = {"input_ids": tokens, "labels": labels}
        if kind == "padded":
            lengths = torch.tensor([LENGTH, LENGTH - 5, LENGTH - 1, LENGTH])
            batch["attention_mask"] = (torch.arange(LENGTH) < lengths[:, None]).long()
            labels[batch["attention_mask"] == 0] = -100
        if kind == "packed":
            starts = torch.rand(rows, LENGTH, generator=generator) < 0.2
            starts[:, 0] = True
            places = torch.arange(LENGTH).expand(rows, LENGTH)
            batch["position_ids"] = places - (places * starts).cummax(1).values
        found.append(batch)
    return found


def own_loss(model, batch):
    return model(**batch).loss


def wide_loss(model, batch):
    """Return the loss in float64; the models' own is in float32."""
    names = ("input_ids", "attention_mask", "position_ids")
    logits = model(**{name: batch[name] for name in names if name in batch}).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def train(state, model, given, recipe, loss_fn, *, shift=0, optimizer=ours.sgd):
    mine = copy.deepcopy(model)
    weight_fn = af.count_labels("labels", shift=shift)
    plan = af.Plan(loss_fn, mine, optimizer(mine.parameters()), weight_fn)
    state, step = af.build(recipe(plan), state)
    losses = []
    for batch in given:
        state, report = step(state, af.shard_batch(batch, state))
        losses.append((float(report.loss), report.weight))
    assert mine.config._attn_implementation == model.config._attn_implementation
    return losses, ours.whole(mine.state_dict())


def check(model, given, recipe, mesh, loss_fn=wide_loss, *, rel=1e-12, atol=1e-12, **options):
    one = simulate(
        lambda state: train(state, model, given, af.compose(), loss_fn, **options), world_size=1
    )
    ((losses, expected),) = one
    for found, actual in simulate(
        lambda state: train(state, model, given, recipe, loss_fn, **options), mesh=mesh
    ):
        ours.assert_close(actual, expected, rtol=0, atol=atol)
        assert found == [pytest.approx(each, rel=rel) for each in losses]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_any_cut_is_one_process(name, kind):
    check(model_of(name), batches(kind), af.compose(af.wrap_ddp(), CUT), {"cp": 4})


PADDED = {"pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "v_head_dim": 4}
FAMILIES = {
    "Qwen2": {},
    "Gemma": {"head_dim": 4},
    "Gemma3Text": {"head_dim": 4, "sliding_window": 4},
    "Phi": {},
    "Phi3": PADDED,
    "Olmo2": PADDED,
    "GPTNeoX": {},
    "SmolLM3": PADDED,
    "Granite": {},
    "Starcoder2": {"sliding_window": 4},
    "Cohere2": {**PADDED, "sliding_window": 4},
    "Llama4Text": {"head_dim": 4, "attention_chunk_size": 4, "num_local_experts": 2},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**EXPERTS, "head_dim": 4, "num_experts": 4},
    "DeepseekV3": {**EXPERTS, **LATENT, **ROUTED, "num_key_value_heads": 4},
}
"""Further causal models, by the names of their configurations, and their settings."""


def model_of_family(name, **settings):
    config = getattr(transformers, f"{name}Config")(**{**GROUPED, **settings})
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = kind(config).double()
    model.config.use_cache = False
    model.config._experts_implementation = "eager"  # the others have no float64
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_other_families_are_one_process(name, kind):
    recipe = af.compose(af.wrap_ddp(), CUT)
    model = model_of_family(name, **FAMILIES[name])
    # Some norms and rotations compute in float32.
    check(model, batches(kind), recipe, {"cp": 2}, rel=1e-9, atol=1e-9)


def test_layers_with_a_recurrence_are_refused_by_name():
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 4}
    sizes = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "num_experts": 4}
    shared = {"shared_expert_intermediate_size": 16}
    model = model_of_family("Qwen3Next", **EXPERTS, **heads, **sizes, **shared)
    refused(r"got model\.layers\.0\.linear_attn", model, batches("plain")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_attend_for_some_heads_are_one_process(kind):
    cut = af.wrap_cp({"input_ids": 1, "labels": 1, "position_ids": 1}, attention="ulysses")
    check(model_of("mistral"), batches(kind), af.compose(af.wrap_ddp(), cut), {"cp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_shards_along_two_axes_are_one_process(name, kind):
    recipe = af.compose(af.wrap_fsdp(), CUT, af.accumulate(2))
    check(model_of(name), batches(kind), recipe, {"dp": 2, "cp": 2})


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_causal_model_with_its_own_loss_works_as_it_is(name):
    recipe = af.compose(af.wrap_ddp(), CUT)
    # The loss itself is computed in float32.
    options = {"rel": 1e-6, "atol": 1e-8, "shift": 1}
    check(model_of(name), batches("plain"), recipe, {"dp": 2, "cp": 2}, own_loss, **options)


def test_labels_that_are_shifted_before_are_counted_as_they_are():
    given = batches("plain")
    for batch in given:
        batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    recipe = af.compose(af.wrap_ddp(), CUT_SHIFTED)
    options = {"rel": 1e-6, "atol": 1e-8, "shift": 1}
    check(model_of("llama"), given, recipe, {"cp": 2}, own_loss, **options)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_attends_to_the_whole_sequence(reentrant):
    model = model_of("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    recipe = af.compose(af.wrap_ddp(), CUT)
    if reentrant:
        with pytest.raises(ValueError, match=r"must not use torch\.utils\.checkpoint with"):
            check(model, batches("plain"), recipe, {"cp": 2})
        return
    check(model, batches("packed"), recipe, {"cp": 2})


def test_a_llama_that_is_split_too_is_one_process():
    recipe = af.compose(af.wrap_fsdp(), CUT, af.wrap_tp())
    # Its norms compute in float32, where sums of split layers are rounded in another order; AdamW divides
    # by roots of squares.
    options = {"optimizer": ours.adamw, "rel": 1e-9, "atol": 1e-9}
    check(model_of("llama"), batches("padded"), recipe, {"dp": 1, "cp": 2, "tp": 2}, **options)


def refused(match, model, batch, dims=("input_ids", "labels", "position_ids"), loss_fn=wide_loss):
    recipe = af.compose(af.wrap_ddp(), af.wrap_cp(dict.fromkeys(dims, 1)))
    with pytest.raises(ValueError, match=match):
        simulate(lambda state: train(state, model, [batch], recipe, loss_fn), mesh={"cp": 2})


def test_attention_of_another_kind_is_refused():
    model = model_of("llama")
    model.set_attn_implementation("eager")
    match = """wrap_cp's model must have attn_implementation="sdpa", got 'eager'"""
    refused(match, model, batches("plain")[0])


def test_dropout_inside_of_attention_is_refused():
    model = model_of("gpt2", attn_pdrop=0.1)
    match = "have no dropout inside of attention, got 'attn_pdrop=0.1'; set attn_pdrop=0"
    refused(match, model, batches("plain")[0])


def test_a_model_without_position_ids_is_refused():
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=50
    )
    model = transformers.T5ForConditionalGeneration(config).double()
    refused(
        "wrap_cp's model must (take position_ids|reach attention|have attn)",
        model,
        batches("plain")[0],
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_length_are_refused(kind):
    """Each rank would see another longest position, and so rotate by other angles."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0, 1.0],
            "long_factor": [2.0, 2.0],
            "original_max_position_embeddings": 8,
        }
    config = transformers.LlamaConfig(**GROUPED, rope_parameters=rope)
    match = f"rotary positions that do not depend.*got 'LlamaForCausalLM, {kind}'"
    refused(match, transformers.LlamaForCausalLM(config).double(), batches("plain")[0])


def test_a_mask_that_is_cut_is_refused():
    names = ("input_ids", "labels", "attention_mask")
    match = r"wrap_cp\(dims\) must leave attention_mask whole for a model of transformers"
    refused(match, model_of("llama"), batches("padded")[0], names)


def test_a_mask_of_four_dimensions_is_refused():
    batch = batches("plain")[0]
    batch["attention_mask"] = torch.ones(4, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    refused(r"be of the whole sequence, \[4, 14\]", model_of("llama"), batch)


def test_packed_documents_with_a_cache_are_refused():
    match = "must have no cache for packed documents.*set model.config.use_cache = False"
    refused(match, model_of("llama", use_cache=True), batches("packed")[0])


def test_positions_that_the_batch_leaves_whole_are_refused():
    names = ("input_ids", "labels")
    refused(
        "position_ids must be in the batch and in dims",
        model_of("llama"),
        batches("packed")[0],
        names,
    )
