"""Fine-tune BERT to decide whether two sentences mean the same, as on GLUE's MRPC.

    python examples/nlp.py
    accel-fn launch -n 2 --cpu examples/nlp.py
    python examples/nlp.py --data nyu-mll/glue --model google-bert/bert-base-cased

By default nothing is downloaded: sentences that the program makes, with the columns of MRPC, stand
in for it, and a small BERT without pretrained weights for the large one.
"""

import argparse
import random

import torch
import transformers
from datasets import Dataset, DatasetDict, load_dataset
from torch.utils.data import DataLoader

import accel_fn as af

WHO, DOES = ["the cat", "the dog", "a king", "a child"], ["sees", "loves", "meets"]
JUDGEMENT = {1: ["true", "certain"], 0: ["false", "untrue"]}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # draws by split


def make_pairs(num_pairs, seed):
    """The second sentence confirms the first, or denies it, which does not mean the same."""
    draw, pairs = random.Random(seed), []
    for idx in range(num_pairs):
        first = f"{draw.choice(WHO)} {draw.choice(DOES)} {' and '.join(draw.sample(WHO, 2))}"
        label = int(draw.random() < 2 / 3)
        second = f"it is {draw.choice(JUDGEMENT[label])} that {first}"
        pairs.append({"sentence1": first, "sentence2": second, "label": label, "idx": idx})
    return Dataset.from_list(pairs)


def load_data(name):
    if name:
        return load_dataset(name, "mrpc")
    return DatasetDict(train=make_pairs(480, seed=0), validation=make_pairs(120, seed=1))


def load_model(name, splits):
    kind = transformers.AutoModelForSequenceClassification
    if name:
        model = kind.from_pretrained(name, **NO_DROPOUT).train()
        return transformers.AutoTokenizer.from_pretrained(name), model
    words = {word for sentence in splits["train"]["sentence2"] for word in sentence.split()}
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]
    tokenizer = transformers.BertTokenizer(vocab={each: i for i, each in enumerate(tokens)})
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(tokens), **size, **NO_DROPOUT)
    return tokenizer, kind.from_config(config)


def loss_fn(model, batch):
    outputs, labels = model(**batch), batch["labels"]
    found = outputs.logits.argmax(dim=-1)
    f1 = 2 * (found * labels).sum(), found.sum() + labels.sum()
    return outputs.loss, {"accuracy": ((found == labels).sum(), len(labels)), "f1": f1}


def main(args):
    state = af.init()
    torch.manual_seed(args.seed)
    if not args.data:
        af.print_on_main("600 pairs made by this program stand in for MRPC", state=state)
    with af.main_first(state):
        splits = load_data(args.data)
        tokenizer, model = load_model(args.model, splits)
        splits = splits.map(
            lambda row: tokenizer(row["sentence1"], row["sentence2"], truncation=True),
            remove_columns=["sentence1", "sentence2", "idx"],
        )
    collate = transformers.DataCollatorWithPadding(tokenizer)
    train = DataLoader(splits["train"], args.batch_size, shuffle=True, collate_fn=collate)
    train_loader = af.shard_loader(train, state)
    validation = DataLoader(splits["validation"], 32, collate_fn=collate)
    validation_loader = af.shard_loader(validation, state)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(train_loader)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, total // 10, total)
    log = af.log_to("runs/nlp/log.jsonl")
    launched = af.compose(af.wrap_as_launched(), af.with_amp(), af.accumulate())
    recipe = af.compose(af.place(), launched, af.schedule(schedule), log)
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    for epoch in af.progress(train_loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = step(state, batch)
            epoch.show(report)
        found = af.evaluate(step, state, validation_loader)
        af.log_values(step, state, found, prefix="validation/")
        figures = (f"{name} {value:.4f}" for name, value in found.items())
        af.print_on_main("epoch", epoch.index, *figures, state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune BERT on pairs of sentences.")
    parser.add_argument("--data", help="such as nyu-mll/glue (default: pairs that are made here)")
    parser.add_argument("--model", help="such as bert-base-cased (default: a small BERT)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3, help="2e-5 for a pretrained model")
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())
