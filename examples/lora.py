"""Fine-tune a causal language model by LoRA, and keep checkpoints of the adapters alone.

    pip install peft
    python examples/lora.py
    accel-fn launch -n 2 --cpu examples/lora.py
    python examples/lora.py --model HuggingFaceTB/SmolLM2-135M

It learns to answer sums such as 7+5=12. By default a small model with random weights, whose tokens
are bytes, stands in for a pretrained one. A run that was stopped resumes.
"""

import argparse
import random
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import accel_fn as af


def load_model(name):
    """A frozen base with adapters, and a function from text to tokens.

    A base with random weights needs its embedding and its head trained too.
    """
    if name:
        base, whole = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train(), None
        encode = partial(AutoTokenizer.from_pretrained(name).encode, add_special_tokens=False)
    else:
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=128, num_attention_heads=4, **size)
        base, whole = AutoModelForCausalLM.from_config(config), ["lm_head", "embed_tokens"]
        encode = to_bytes
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=whole)
    return get_peft_model(base, lora), encode


def to_bytes(text):
    return list(text.encode())


def make_sums(num_sums, seed):
    draw = random.Random(seed)
    sums = [(draw.randrange(10), draw.randrange(10)) for _ in range(num_sums)]
    return [(f"{a}+{b}=", f"{a + b}\n") for a, b in sums]


def collate(rows, encode):
    """Tokens, padded on the right; only those of answers are labels."""
    rows = [(encode(question), encode(answer)) for question, answer in rows]
    tokens = [torch.tensor(question + answer) for question, answer in rows]
    labels = [torch.tensor([-100] * len(question) + answer) for question, answer in rows]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def loss_fn(model, batch):
    return model(**batch).loss


def main(args):
    state = af.init()
    torch.manual_seed(0)
    if not args.model:
        af.print_on_main(
            "a small model with random weights stands in for a pretrained one", state=state
        )
    model, encode = load_model(args.model)
    pad = partial(collate, encode=encode)
    train = DataLoader(make_sums(1024, seed=0), 64, shuffle=True, collate_fn=pad)
    train_loader = af.shard_loader(train, state)
    test_loader = af.shard_loader(DataLoader(make_sums(256, seed=1), 64, collate_fn=pad), state)

    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    answers = af.count_labels("labels", shift=1)  # the loss is a mean over tokens of answers
    plan = af.Plan(loss_fn, model, optimizer, weight_fn=answers)
    log = af.log_to(f"{args.out}/log.jsonl")
    recipe = af.compose(af.place(), af.wrap_ddp(), af.with_amp(), af.clip(1.0), log)
    state, step = af.build(recipe(plan), state)
    state = af.resume(step, state, args.out, extras={"data": train_loader})

    for epoch in af.progress(train_loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = step(state, batch)
            epoch.show(report)
        found = af.evaluate(step, state, test_loader)
        af.log_values(step, state, found, prefix="test/")
        af.print_on_main(f"epoch {epoch.index} loss {found['loss']:.4f}", state=state)
        extras = {"data": train_loader}
        af.save(step, state, args.out, extras=extras, only="trained", keep=1)

    af.on_main(lambda: model.save_pretrained(f"{args.out}/adapter"), state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model by LoRA.")
    parser.add_argument("--model", help="of the Hub, or a folder (default: a small one)")
    parser.add_argument("--out", default="runs/lora")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    main(parser.parse_args())
