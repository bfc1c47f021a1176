"""What `migrate` reads of a loop: what enters backward, and what it leaves to do by hand, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import command

HEAD = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
net, other = Net(), Net()
loader = DataLoader(data, batch_size=8)
"""


def found(folder: Path, loop: str, before: str = "", head: str = HEAD) -> dict[str, Any]:
    """What is found in a script with these lines before prepare, and with this body of its loop."""
    path = folder / "script.py"
    body = "\n".join(f"        {line}" for line in loop.splitlines())
    path.write_text(
        f"{head}optimizer = SGD(net.parameters(), 0.1)\n{before}\n"
        "net, optimizer, loader = accelerator.prepare(net, optimizer, loader)\n"
        f"for epoch in range(3):\n    for i, batch in enumerate(loader):\n{body}\n"
    )
    done = command(folder, "migrate", path, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


EACH_FOURTH = "if i % 4 == 3:\n    optimizer.step()"
END = "\naccelerator.backward(loss)\noptimizer.step()"


def one_loop(folder: Path, loop: str, before: str = "") -> dict[str, Any]:
    [only] = found(folder, loop + END, before)["loops"]
    return only


BY_HAND = [
    ("loss = net(batch).mean() * i", "the loss reads `i`, which the loop changes"),
    ("loss = net(batch).mean() + last\nlast = 3", "the loss reads `last`, which the loop changes"),
    ("x = vae(batch).sample()\nloss = net(x).mean()", "`vae(batch).sample()` draws in the loss"),
    ("loss = noisy(net, batch)", "`noisy` draws random numbers in the loss"),
    ("z = torch.randn(net(batch).shape)\nloss = (net(batch) - z).mean()", "that only the loss knows"),
    ("loss = net(batch).sum() / count", "`loss = net(batch).sum() / count` divides by another"),
    ("loss = (net(batch) - mean_net(batch)).mean()", "`mean_net`, an average of parameters"),
    ("loss = net(batch).mean()\nif loss > 0:\n    accelerator.backward(loss)", "under `if loss > 0`"),
    ("loss = accelerator.reduce(net(batch).mean())", "the loss uses `accelerator.reduce`"),
    ("out = net(batch)\nloss = out.mean()\naccelerator.backward(loss)\nprint(out)", "`out` is a value"),
    ("loss = F.cross_entropy(net(batch[0]), batch[1], ignore_index=0)", "af.count_labels(KEY, ign"),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "reason"), BY_HAND)
def test_what_a_loss_function_does_not_have_is_left_with_its_reason(loop, reason, tmp_path):
    before = (
        "def noisy(net, x):\n    return (net(x) + torch.randn(3)).mean()\n"
        "mean_net = EMA(net)\nvae.requires_grad_(False)\n"
    )
    given = loop if "backward" in loop else loop + "\naccelerator.backward(loss)"
    [only] = found(tmp_path, given + "\noptimizer.step()", before)["loops"]
    reasons = [each for each in only["by_hand"] if reason in each]
    assert len(reasons) == 1, only["by_hand"]


OUTER = """
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for update in range(9):
    batches = [next(batches_of_all) for _ in range(4)]
    count = len(batches)
    for batch in batches:
        loss = net(batch).sum() * weight / count
        accelerator.backward(loss)
    optimizer.step()
"""


def test_batches_of_an_update_in_a_list_are_left_with_the_reason(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HEAD + "optimizer = SGD(net.parameters(), 0.1)\n" + OUTER)
    [loop] = json.loads(command(tmp_path, "migrate", path, "--json").stdout)["loops"]
    text = "\n".join(loop["by_hand"])
    assert "the loss reads `count`, which the loop changes" in text
    assert "`weight`" not in text
    assert "the optimizer steps below the loop" in text


def test_a_plain_loss_leaves_nothing(tmp_path):
    loop = one_loop(
        tmp_path, "x, y = batch\nscale = 2 * size\nloss = scale * F.mse_loss(net(x), y)"
    )
    assert loop["by_hand"] == []
    assert loop["program"].split("\n\n")[0].splitlines() == [
        "def loss_fn(model, batch):",
        "    x, y = batch",
        "    scale = 2 * size",
        "    return scale * F.mse_loss(model(x), y)",
    ]
    assert loop["in_loop"] == "state, report = step(state, batch)"


def test_lines_that_the_loss_does_not_need_stay_outside(tmp_path):
    loop = one_loop(tmp_path, "seen += 1\nprint(seen)\nloss = net(batch).mean()")
    assert "seen" not in loop["program"]
    assert loop["by_hand"] == []


@pytest.mark.parametrize("divided", ["loss = loss / 4", "loss /= 4"])
def test_the_number_of_batches_of_an_update_is_taken_out(divided, tmp_path):
    text = f"loss = net(batch).mean()\n{divided}\naccelerator.backward(loss)\n{EACH_FOURTH}"
    result = found(tmp_path, text)
    assert "return model(batch).mean()" in result["loops"][0]["program"]
    assert "af.accumulate(4)" in result["recipe"]
    assert [line["goes"] for line in result["lines"] if line["source"] == divided] == [True]


def test_a_division_in_the_call_of_backward_is_taken_out(tmp_path):
    text = f"loss = net(batch).mean()\naccelerator.backward(loss / 4)\n{EACH_FOURTH}"
    [loop] = found(tmp_path, text)["loops"]
    assert "return model(batch).mean()" in loop["program"]


def test_draws_of_rows_stand_in_the_loop(tmp_path):
    loop = one_loop(
        tmp_path,
        "x = batch[0]\nt = torch.randint(0, 9, (x.shape[0],), device=x.device).long()\n"
        "noise = torch.rand_like(x)\nloss = net(x + noise, t).mean()",
    )
    assert loop["by_hand"] == []
    assert "t = t_drawn.long()" in loop["program"]
    assert "batch, t_drawn, noise = batch" in loop["program"]
    assert "torch.randint(0, 9, (n,), generator=generator)" in loop["in_loop"]
    assert "torch.rand(n, *x.shape[1:], dtype=x.dtype, generator=generator)" in loop["in_loop"]
    assert loop["in_loop"].startswith("x = batch[0]\nt_drawn = af.draw(\n")
    assert loop["in_loop"].endswith("state, report = step(state, (batch, t_drawn, noise))")


def test_a_frozen_model_stands_in_the_plan_and_a_pipeline_does_not(tmp_path):
    before = (
        "vae.to(accelerator.device, dtype=half)\nteacher.requires_grad_(False)\n"
        "pipeline = pipeline.to(accelerator.device)"
    )
    result = found(
        tmp_path, "x = vae(batch)\nloss = net(x).mean() - teacher(x).mean()" + END, before
    )
    [loop] = result["loops"]
    for name in ("vae", "teacher"):
        assert f'"{name}": {name}' in loop["program"]
    assert 'x = frozen["vae"](batch)' in loop["program"]
    texts = {line["source"]: line["uses"][0]["replacement"] for line in result["lines"]}
    assert texts["vae.to(accelerator.device, dtype=half)"] == "vae.to(dtype=half)"
    assert texts["pipeline = pipeline.to(accelerator.device)"] == "state.device"


def test_a_batch_that_its_loop_moves_is_no_frozen_model(tmp_path):
    loop = one_loop(tmp_path, "batch.to(accelerator.device)\nloss = net(batch).mean()")
    assert loop["program"].startswith(
        "def loss_fn(model, batch):\n    return model(batch).mean()\n"
    )


FACTORS = [
    ("warmup_steps = 10 * accelerator.num_processes", "warmup_steps = 10"),
    ("total_batch_size = 4 * accelerator.num_processes * k", "total_batch_size = 4 * k"),
    ("lr = lr / accelerator.num_processes", "lr = lr"),
    ("n = math.ceil(len(loader) / accelerator.num_processes)", "n = math.ceil(len(loader))"),
    ("images = 100 // accelerator.num_processes", "state.world_size"),
    ("sched = get(optimizer, num_training_steps=9 * accelerator.num_processes)", "num_training_steps=9"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), FACTORS)
def test_factors_of_lengths_and_sizes_go(line, expected, tmp_path):
    result = found(tmp_path, "loss = net(batch).mean()" + END, line)
    uses = [use for each in result["lines"] if each["source"] == line for use in each["uses"]]
    replaced = [use["replacement"] for use in uses if use["name"] != "scheduler"]
    assert replaced == [expected]


def test_each_optimizer_that_steps_after_a_backward_of_its_own_has_a_plan(tmp_path):
    before = (
        "other_optimizer = SGD(other.parameters(), 1.0)\n"
        "other, other_optimizer = accelerator.prepare(other, other_optimizer)"
    )
    text = (
        "a = net(batch).mean()\naccelerator.backward(a)\n"
        "accelerator.clip_grad_norm_(net.parameters(), 1.0)\noptimizer.step()\n"
        "b = other(batch).mean()\naccelerator.backward(b)\nother_optimizer.step()\nprint(a, b)"
    )
    result = found(tmp_path, text, before)
    first, second = result["loops"]
    assert "af.Plan(loss_fn_net, net, optimizer)" in first["program"]
    assert "af.Plan(loss_fn_other, other, other_optimizer)" in second["program"]
    assert ("af.clip(1.0)" in first["program"], "af.clip(1.0)" in second["program"]) == (
        True,
        False,
    )
    assert first["in_loop"].endswith("step_net(state, batch, advance=False)")
    assert second["in_loop"].endswith("step_other(state, batch)")
    [shown] = [line for line in result["lines"] if line["source"] == "print(a, b)"]
    assert [use["replacement"] for use in shown["uses"]] == ["report_net.loss", "report_other.loss"]


def test_two_backwards_of_one_update_are_one_loss(tmp_path):
    text = "a = net(batch).mean()\naccelerator.backward(a)\nloss = net(batch).std()" + END
    [loop] = found(tmp_path, text)["loops"]
    assert any("return the sum of the losses" in each for each in loop["by_hand"])


def test_two_optimizers_of_one_loss_are_one_plan(tmp_path):
    text = (
        "loss = net(batch).mean()\naccelerator.backward(loss)\noptimizer.step()\noptimizer_2.step()"
    )
    before = "optimizer_2 = SGD(net.b, 1.0)\noptimizer_2 = accelerator.prepare(optimizer_2)"
    [loop] = found(tmp_path, text, before)["loops"]
    assert '{"optimizer": optimizer, "optimizer_2": optimizer_2}' in loop["program"]


def test_an_average_stays_below_the_step(tmp_path):
    result = found(
        tmp_path,
        "loss = net(batch).mean()" + END + "\nema.step(net.parameters())",
        "ema = EMAModel(net)",
    )
    [line] = [each for each in result["lines"] if each["source"].startswith("ema.step")]
    assert not line["goes"]
    assert "It stays, below the step" in line["uses"][0]["why"]


SHARDED = [
    ("if accelerator.state.fsdp_plugin is not None:\n    pass", "af.wrap_as_launched()"),
    ("x = accelerator.distributed_type == DistributedType.FSDP", "af.wrap_as_launched()"),
    ("plugin = FullyShardedDataParallelPlugin()", "af.wrap_fsdp()"),
]


@pytest.mark.parametrize(("line", "expected"), SHARDED)
def test_a_plugin_that_the_script_names_is_in_the_recipe(line, expected, tmp_path):
    head = "from accelerate import DistributedType, FullyShardedDataParallelPlugin" + HEAD
    result = found(tmp_path, "loss = net(batch).mean()" + END, line, head)
    assert expected in result["recipe"]
    assert "af.wrap_ddp()" not in result["recipe"]


def test_a_loader_that_another_function_makes_is_grouped(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=4)\n"
        "net, optimizer, loader = accelerator.prepare(net, optimizer, make_loader())\n"
        "for batch in loader:\n    with accelerator.accumulate(net):\n        loss = net(batch).mean()\n"
        "        accelerator.backward(loss)\n        optimizer.step()\n"
    )
    result = json.loads(command(tmp_path, "migrate", path, "--json").stdout)
    assert "af.accumulate(4, split=None)" in result["recipe"]


FIRST = [
    ("if i % 4 == 0:", True),
    ("if i % k == 0 and i >= 0:", True),
    ("if (i + 1) % 4 == 0:", False),
    ("if i % 4 == 3:", False),
]


@pytest.mark.parametrize(("test", "is_shifted"), FIRST)
def test_a_window_that_ends_with_the_first_batch_is_named(test, is_shifted, tmp_path):
    text = f"loss = net(batch).mean()\naccelerator.backward(loss)\n{test}\n    optimizer.step()"
    [loop] = found(tmp_path, text)["loops"]
    assert (
        any("first update has this batch alone" in each for each in loop["by_hand"]) == is_shifted
    )


BELOW = """
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
steps = len(loader) * 3
sched = get_schedule(optimizer, steps)
for epoch in range(3):
    for i, batch in enumerate(loader):
        loss = net(batch).mean()
        accelerator.backward(loss)
        if (i + 1) % 4 == 0:
            optimizer.step()
            sched.step()
    print(f"{epoch}", epoch=epoch)
    accelerator.save_state(f"epoch_{epoch}")
    accelerator.print(f"epoch {epoch}: {loss.item()}")
"""


def moved(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "script.py"
    path.write_text(HEAD + "optimizer = SGD(net.parameters(), 0.1)" + text)
    return json.loads(command(folder, "migrate", path, "--json").stdout)


def test_a_schedule_that_is_made_below_prepare_is_in_the_recipe_below_it(tmp_path):
    result = moved(tmp_path, BELOW)
    assert "af.schedule(sched)" in result["recipe"]
    [loop] = result["loops"]
    texts = {line["source"]: line for line in result["lines"]}
    made = texts["sched = get_schedule(optimizer, steps)"]
    assert (loop["after"], made["goes"], texts["sched.step()"]["goes"]) == (
        made["number"],
        False,
        True,
    )


UNDIVIDED = [
    ("sched.step()", "sched.step()", True),
    ("steps = len(loader) * 3", "steps = len(loader) * 3 // 4", False),
    ("steps = len(loader) * 3", "steps = 30", False),
    ("            sched.step()", "        sched.step()", False),
    ("            sched.step()\n", "    sched.step()\n", False),
]


@pytest.mark.parametrize(("old", "new", "is_shorter"), UNDIVIDED)
def test_a_schedule_that_the_new_batches_make_shorter_is_named(old, new, is_shorter, tmp_path):
    assert old in BELOW
    [loop] = moved(tmp_path, BELOW.replace(old, new))["loops"]
    reasons = [each for each in loop["by_hand"] if "`len(loader)` counts updates now" in each]
    assert len(reasons) == is_shorter


def test_the_number_of_an_epoch_is_its_index(tmp_path):
    lines = moved(tmp_path, BELOW)["lines"]
    shown, saved, printed = ([use["replacement"] for use in line["uses"]] for line in lines[-3:])
    assert shown == ["epoch.index"]
    assert saved == ["af.save(step, state, folder)"]
    assert (
        printed[0] == 'af.print_on_main(f"epoch {epoch.index}: {report.loss.item()}", state=state)'
    )


EVALUATED = """
for batch in test_loader:
    batch.to(accelerator.device)
    with torch.no_grad():
        out = net(batch)
    metric.add_batch(predictions=accelerator.gather(out.argmax(-1)), references=accelerator.gather(batch[1]))
"""


def evaluated(folder: Path, text: str) -> dict[str, Any]:
    """What is found of a loop that evaluates, by the source of its lines."""
    before = "test_loader = DataLoader(data)\naccelerator.prepare(test_loader)"
    script = BELOW.replace("\nfor epoch", f"\n{before}\nfor epoch") + text
    return {line["source"]: line for line in moved(folder, script)["lines"]}


def test_rows_that_a_loop_gathers_are_those_of_predict(tmp_path):
    lines = evaluated(tmp_path, EVALUATED)
    [use] = lines["for batch in test_loader:"]["uses"]
    assert use["replacement"].splitlines() == [
        "def predict_fn(model, batch):",
        "    out = model(batch)",
        "    return out.argmax(-1), batch[1]",
        "predictions, references = af.predict(step, state, test_loader, predict_fn)",
    ]
    [added] = [line for source, line in lines.items() if source.startswith("metric")]
    assert [each["replacement"] for each in added["uses"]] == ["predictions", "references"]


NOT_ROWS = [
    ("    metric", "    if batch:\n        metric"),
    ("gather(batch[1])", "gather(accelerator.pad_across_processes(batch[1]))"),
    ("out.argmax(-1)", "loss"),
    ("out.argmax(-1)", "out + seen"),
    ("references=accelerator.gather(batch[1])", "predictions=accelerator.gather(batch[1])"),
]


@pytest.mark.parametrize(("old", "new"), NOT_ROWS)
def test_a_loop_that_does_more_than_gather_rows_is_left_with_a_hint(old, new, tmp_path):
    assert old in EVALUATED
    text = EVALUATED.replace(old, new) + "    seen = 1\n"
    [use] = evaluated(tmp_path, text)["for batch in test_loader:"]["uses"]
    assert use["replacement"] == "metrics = af.evaluate(step, state, test_loader, metric_fn)"
    assert "write af.predict" in use["why"]
