"""The comparison on real models, in three precisions: no alarm, and a planted term is found."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.layers = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.layers(self.table(ids))[0][:, -1])


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ids():
    return torch.randint(3, 60, (8, 10), generator=torch.Generator().manual_seed(0))


def language(config, kind, **options):
    return lambda: getattr(tf, kind)(getattr(tf, config)(**options)), "text", ids


def classifier(make, inputs):
    return make, "classes", inputs


class Lazy:
    """transformers, whose import takes seconds: with the first model, not where tests are collected."""

    def __getattr__(self, name):
        import transformers

        return getattr(transformers, name)


tf = Lazy()
MODELS = {
    "BERT": classifier(
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**SMALL, num_labels=3)), ids
    ),
    "GPT-2": language(
        "GPT2Config", "GPT2LMHeadModel", vocab_size=64, n_embd=16, n_layer=2, n_head=2
    ),
    "T5": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=64,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        "all of the text",
        ids,
    ),
    "ResNet": classifier(
        lambda: tf.ResNetForImageClassification(
            tf.ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 1],
                layer_type="basic",
                num_labels=3,
            )
        ),
        lambda: drawn(8, 3, 32, 32),
    ),
    "Mixtral": language(
        "MixtralConfig", "MixtralForCausalLM", **SMALL, num_key_value_heads=1, num_local_experts=4
    ),
    "LSTM": classifier(Recurrent, ids),
}
DTYPES = [torch.float32, torch.bfloat16]


def trained(name, dtype, loss_of):
    """Train two steps in micro-batches; return what was warned of, and the verdict."""
    make, kind, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    batch = {"x": inputs(), "y": torch.arange(8) % 3}

    def plain(model, batch):
        if kind == "classes":
            found = model(batch["x"])
            return F.cross_entropy(getattr(found, "logits", found), batch["y"])
        return model(input_ids=batch["x"], labels=batch["x"]).loss

    weights = {"text": af.count_labels("x", shift=1), "all of the text": af.count_labels("x")}
    plan = af.Plan(
        loss_of(plain),
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        weights.get(kind, af.count_samples),
    )
    recipe = af.accumulate(2)
    if dtype == torch.bfloat16:
        recipe = af.compose(recipe, af.with_amp("bf16"))
    state, step = af.build(recipe(plan), af.DistState())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            state, _ = step(state, batch)
    texts = [str(each.message) for each in found]
    texts = [each for each in texts if each.startswith("step:") and "BatchNorm" not in each]
    return texts, af.explain(step, state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_raises_no_alarm(name, dtype):
    texts, verdict = trained(name, dtype, lambda loss_fn: loss_fn)
    assert texts == []
    assert "agree, and their gradients" in verdict
    assert ("half precision" in verdict) is (dtype == torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_that_is_divided_by_itself_is_found(name):
    def planted(loss_fn):
        def divided(model, batch):
            loss = loss_fn(model, batch)
            return loss / loss.detach()

        return divided

    (text, *_), _ = trained(name, torch.float32, planted)
    assert "the gradient of" in text


def test_the_balance_of_experts_is_found_in_float32():
    """Its share of the loss is a thousandth."""

    def balanced(loss_fn):
        def loss(model, batch):
            model.config.output_router_logits = True
            model.router_aux_loss_coef = 0.001
            return loss_fn(model, batch)

        return loss

    (text, *_), _ = trained("Mixtral", torch.float32, balanced)
    assert "differs by" in text or "neither a mean" in text
