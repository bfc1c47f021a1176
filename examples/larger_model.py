"""What each rank holds of a Llama: in memory while it loads, trains one step, and saves.

    pip install "transformers>=5"
    export MALLOC_MMAP_THRESHOLD_=262144
    python examples/larger_model.py
    accel-fn launch -n 2 --cpu examples/larger_model.py
    accel-fn launch -n 2 --cpu --mesh dp=1,tp=2 examples/larger_model.py --tp

The first run writes a model of 100 million random weights into runs/larger_model. The setting of the
allocator gives memory back as soon as it is free, so that the peaks are those of the program. Linux
alone counts them.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel_fn as af

MILLION = 10**6


def config_of(width):
    """About 100 million parameters for a width of 768."""
    return LlamaConfig(
        vocab_size=32 * width,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
    )


def loss_fn(model, batch):
    return model(**batch, use_cache=False).loss


def measured(what, fn, state):
    """Run a function, and print for each rank the most memory that it took beyond what there was."""
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak from here on
    before = number(status, "VmRSS")
    found = fn()
    peaks = af.gather(torch.tensor([number(status, "VmHWM") - before]), state)
    held = "  ".join(f"{peak / MILLION:7.0f} MB" for peak in peaks.tolist())
    af.print_on_main(f"{what:12} {held}", state=state)
    return found


def number(status, name):
    """A number of bytes that the kernel counts."""
    [line] = [each for each in status.read_text().splitlines() if each.startswith(name)]
    return float(line.split()[1]) * 1024


def main(args):
    state = af.init(seed=0)
    config = config_of(args.width)
    if state.is_main and not (args.folder / "config.json").exists():
        af.save_model(LlamaForCausalLM(config), args.folder, max_shard_size="100MB")
        config.save_pretrained(args.folder)
    af.barrier(state)

    model = af.empty(LlamaForCausalLM, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    split = af.wrap_tp() if args.tp else af.compose()
    recipe = af.compose(af.place(), af.wrap_fsdp(), split)
    plan = af.Plan(loss_fn, model, optimizer, weight_fn=af.count_labels("labels", shift=1))
    state, step = measured("build", lambda: af.build(recipe(plan), state), state)

    whole = sum(each.numel() * each.element_size() for each in model.parameters())
    own = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in model.parameters())
    af.print_on_main(
        f"the model {whole / MILLION:.0f} MB, a rank's part {own / MILLION:.0f} MB", state=state
    )
    measured("load_model", lambda: af.load_model(model, args.folder), state)
    tokens = torch.randint(config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = af.shard_batch({"input_ids": tokens, "labels": tokens}, state)
    state, report = measured("a step", lambda: step(state, batch), state)
    af.print_on_main(f"loss {report.loss:.5f}", state=state)
    measured(
        "save_model",
        lambda: af.save_model(model, args.folder / "trained", max_shard_size="100MB"),
        state,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what each rank holds of a Llama.")
    parser.add_argument("--folder", type=Path, default=Path("runs/larger_model"))
    parser.add_argument("--tp", action="store_true", help="split layers along the mesh's axis tp")
    parser.add_argument("--width", type=int, default=768, help="a multiple of 24")
    main(parser.parse_args())
