"""wrap_tp on models of transformers, on 2 x 2 ranks, against one process."""

import copy

import pytest
import torch
import transformers

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import language_model as lm
from tests.support import strategies as ours

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

SMALL = {
    "vocab_size": lm.NUM_TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
}


def llama(**options):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def bert():
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **options))


def gpt2():
    config = transformers.GPT2Config(vocab_size=lm.NUM_TOKENS, n_embd=16, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


LAYER = "bert.encoder.layer.*"
SIX = {
    f"{LAYER}.attention.self.query": "colwise",
    f"{LAYER}.attention.self.key": "colwise",
    f"{LAYER}.attention.self.value": "colwise",
    f"{LAYER}.attention.output.dense": "rowwise",
    f"{LAYER}.intermediate.dense": "colwise",
    f"{LAYER}.output.dense": "rowwise",
}


def token_loss(model, batch):
    logits = model(input_ids=batch["tokens"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def train(state, model, parts, recipe):
    """Return losses, norms, weights and parameters of a rank."""
    mine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(state.rank)  # the values of rank 0 are everyone's
    # A bias of keys has a gradient of rounding alone, which AdamW would turn into whole updates.
    optimizer = ours.sgd(mine.parameters())
    plan = af.Plan(token_loss, mine, optimizer, af.num_labels("labels"))
    state, step = af.build(state, recipe(plan))
    found = []
    for part in parts[state.data.rank]:
        state, report = step(state, part)
        found.append((float(report.loss), float(report.grad_norm), report.weight))
    return found, ours.whole(mine.state_dict())


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["wrap_ddp", "wrap_fsdp"])
@pytest.mark.parametrize(
    ("make", "styles"),
    [(llama, "auto"), (lambda: llama(tie_word_embeddings=True), "auto"), (bert, SIX)],
    ids=["llama", "tied llama", "bert"],
)
def test_a_model_of_transformers_on_a_mesh_is_one_process(make, styles, wrap):
    torch.manual_seed(0)
    model, batches = make().double(), lm.batches(5, 6, 3)
    beside = af.compose(af.accumulate(2), af.clip(0.5))
    (reports, expected), *_ = [train(af.DistState(), model, [batches], beside)]
    recipe = af.compose(wrap, af.wrap_tp(styles), beside)
    parts = ours.dealt(batches, [[2, 3], [0, 6], [3, 0]])
    ranks = simulate(
        lambda state: train(state, model, parts, recipe), mesh={"dp": 2, "tp": 2}, timeout_s=60
    )
    for found, actual in ranks:
        ours.assert_close(actual, expected)
        assert found == [pytest.approx(each, rel=1e-6) for each in reports]


def test_gpt2_is_refused_with_the_class_of_its_layers():
    def run(state):
        model = gpt2()
        plan = af.Plan(token_loss, model, ours.adamw(model.parameters()))
        with pytest.raises(ValueError, match="Conv1D"):
            af.build(state, af.wrap_tp()(plan))
        return True

    assert all(simulate(run, mesh={"dp": 1, "tp": 2}))
