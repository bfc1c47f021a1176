"""`accel-fn migrate`: the lines that it prints, and that the programs that follow from them train."""

from __future__ import annotations

import ast
import inspect
import json
import operator
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from accelerate import Accelerator, PartialState

import accel_fn as af
from accel_fn.contrib.migrate.table import DIFFERENCES, TABLE
from tests.cli.commands import ROOT, command, run_command, run_python

SCRIPTS = Path(__file__).with_name("scripts")
MOVED = ("accumulation", "checkpointing", "metrics", "early_stopping")


def printed(*arguments: object) -> str:
    with tempfile.TemporaryDirectory() as folder:
        done = command(Path(folder), "migrate", *arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def script_with(folder: Path, text: str, accelerator: str = "Accelerator()") -> Path:
    """A script that makes an accelerator and goes on with this text."""
    path = folder / "script.py"
    path.write_text(f"from accelerate import Accelerator\naccelerator = {accelerator}\n{text}\n")
    return path


def lines_of(folder: Path, text: str) -> str:
    """What is printed for a script that makes an accelerator and goes on with this text."""
    return printed(script_with(folder, text))


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def run(folder: Path, script: str, *arguments: str) -> str:
    folder.mkdir(exist_ok=True)
    done = run_python(folder, str(SCRIPTS / script), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVED)
def test_the_program_that_follows_equals_the_original_on_one_process(name, tmp_path):
    original = numbers(run(tmp_path / "original", f"{name}.py"))
    moved = numbers(run(tmp_path / "moved", f"{name}_moved.py"))
    assert len(original) > 2
    assert moved == pytest.approx(original, rel=0, abs=1e-12)


@pytest.mark.slow
def test_both_programs_resume_from_their_checkpoints(tmp_path):
    whole = numbers(run(tmp_path / "whole", "checkpointing.py"))
    run(tmp_path / "original", "checkpointing.py", "--stop-after", "2")
    original = run(tmp_path / "original", "checkpointing.py", "--resume", "runs/epoch_1")
    run(tmp_path / "moved", "checkpointing_moved.py", "--stop-after", "2")
    moved = run(tmp_path / "moved", "checkpointing_moved.py")
    assert numbers(original) == pytest.approx(whole, rel=0, abs=1e-12)
    assert numbers(moved) == pytest.approx(whole, rel=0, abs=1e-12)


@pytest.mark.parametrize("name", MOVED)
def test_what_is_printed_stands_in_the_program_that_follows(name):
    found = json.loads(printed(SCRIPTS / f"{name}.py", "--json"))
    moved = (SCRIPTS / f"{name}_moved.py").read_text().replace("state, _ =", "state, report =")
    for line in found["lines"]:
        if line["goes"]:
            assert line["source"] not in moved
        for use in line["uses"]:
            text = (use["replacement"] or "").removesuffix(" in the recipe")
            is_text = "..." in text or text.startswith("(")
            assert is_text or all(each in moved for each in text.splitlines()), use
    for loop in found["loops"]:
        assert not loop["by_hand"]
        for text in (*loop["program"].splitlines(), *loop["in_loop"].splitlines()):
            assert text in moved
    assert "accelerate" not in moved
    assert max(map(len, printed(SCRIPTS / f"{name}.py").splitlines())) <= 80


def test_every_name_of_an_accelerator_has_a_row():
    members = {f"accelerator.{name}" for name in dir(Accelerator) if not name.startswith("_")}
    arguments = {f"Accelerator({name})" for name in inspect.signature(Accelerator).parameters}
    states = {f"accelerator.{name}" for name in dir(PartialState) if not name.startswith("_")}
    assert {*members, *arguments, *states} - TABLE.keys() == set()


def test_rows_name_what_accel_fn_has():
    for name in re.findall(r"\baf((?:\.\w+)+)", " ".join(texts_of_rows())):
        assert operator.attrgetter(name[1:])(af)


def texts_of_rows():
    return [
        text for row in TABLE.values() for text in (row.replacement or "", row.why, row.transform)
    ]


def test_texts_of_rows_can_be_filled():
    for text in texts_of_rows():
        assert "{" not in text.format_map(defaultdict(str)).replace("extras={", "")


def test_calls_of_rows_fit_the_signatures():
    """Calls of accel_fn in the table whose arguments are written out."""
    for text in texts_of_rows():
        for name, arguments in re.findall(r"\baf\.(\w+)\(([^()]*)\)", text):
            if "..." not in arguments:
                filled = re.sub(r"{\w+}", "x", arguments.replace("{init}", ""))
                call = ast.parse(f"{name}({filled})", mode="eval").body
                keywords = {each.arg: None for each in call.keywords}
                inspect.signature(getattr(af, name)).bind(*call.args, **keywords)


def test_differences_are_those_of_the_page():
    page = (ROOT / "docs" / "differences.md").read_text()
    section = page.split("## From accelerate")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \| ([^|]*) \|", section, re.MULTILINE)
    assert {int(number): (what, measured) for number, what, measured in rows} == {
        number: (each.what, each.measured) for number, each in DIFFERENCES.items()
    }


def test_every_difference_belongs_to_a_row():
    assert {number for row in TABLE.values() for number in row.differences} == DIFFERENCES.keys()


LINES = r"""
accelerator.log({"loss": 1.0}, step=3) ==> -> af.log_values(step, state, {"loss": 1.0})
accelerator.init_trackers("run", config) ==> -> run = wandb.init(...), before the recipe
with accelerator.profile() as prof:\n    pass ==> accelerator.profile() -> af.profile(folder)
mean = accelerator.gather(loss).mean() ==> accelerator.gather(...) -> report.loss
norm = accelerator.gather(grad_norm) ==> -> report.grad_norm
with accelerator.autocast():\n    pass ==> -> af.autocast(step, state)
from accelerate.utils import set_seed\nset_seed(3 + accelerator.process_index) ==> init(seed=3)
from accelerate.utils import set_seed\nset_seed(3 + acc.local_process_index) ==> seed(3 + state.local_rank)
rows = accelerator.gather(rows) ==> -> af.gather(rows, state)
figure = accelerator.gather_for_metrics(x) ==> -> af.evaluate(step, state, loader, metric_fn)
if accelerator.is_main_process:\n    pass ==> accelerator.is_main_process -> state.is_main
accelerator.load_state(path) ==> -> state = af.resume(step, state, folder)
dl = accelerator.skip_first_batches(dl, 3) ==> -> dl.epochs(num_epochs, since=state)
accelerator.free_memory() ==> -> del step, state, plan
with accelerator.main_process_first():\n    pass ==> -> af.main_first(state)
accelerator.reduce(x) ==> -> af.reduce_sum(x, state)
accelerator.reduce(x, reduction='mean') ==> -> af.reduce_mean(x, state)
weights = accelerator.get_state_dict(net) ==> -> af.checkpoint.whole_state_dict(net, state)
model, optimizer = accelerator.prepare(a, b, optimizer) ==> is a plan of its own
(x, y) = accelerator.prepare(x, optim) ==> -> plan = recipe(af.Plan(loss_fn, x, optim))
from accelerate.utils import DistributedDataParallelKwargs as K\nK(a=b) ==> -> arguments of af.wrap_ddp
from accelerate.local_sgd import LocalSGD\nwith LocalSGD(accelerator, net, 8): pass ==> af.local_sgd(8)
from accelerate import FullyShardedDataParallelPlugin as F\nF() ==> -> af.wrap_fsdp(...)
from accelerate.logging import get_logger\ndef f():\n    get_logger("a") ==> -> af.main_logger(logging.
from accelerate.logging import get_logger\nlog = get_logger("a") ==> -> logging.getLogger("a")
log.info(1, main_process_only=False) ==> main_process_only=False -> extra=dict(all_ranks=True)
x = accelerator.mixed_precision == "fp16" ==> (af.launcher.launch_options().mixed_precision or "no")
x = x.to(accelerator.device) ==> accelerator.device -> state.device
x = y.to(accelerator.device) ==> accelerator.device -> state.device
net = accelerator.unwrap_model(net) ==> -> net
accelerator.wait_for_everyone() ==> -> af.barrier(state)
with accelerator.split_between_processes(xs) as x:\n    pass ==> -> af.shard_batch(xs, state)
accelerator.clip_grad_value_(net.parameters(), 0.5) ==> -> af.clip_value(0.5) in the recipe
accelerator.register_for_checkpointing(ema) ==> -> extras={"name": ema} of af.save
accelerator.save_model(net, folder) ==> -> af.save_model(net, folder)
def load(accelerator: Accelerator):\n    pass ==> accelerator: Accelerator -> state: af.DistState
data = load(accelerator, 16) ==> accelerator -> state
self.accelerator.print('x') ==> -> af.print_on_main('x', state=state)
with accelerator.maybe_context_parallel():\n    pass ==> -> (goes)
x = accelerator.context_parallel_rank ==> -> state.along("cp").rank
from accelerate import init_empty_weights\nwith init_empty_weights():\n    pass ==> -> af.empty(...)
from accelerate import notebook_launcher as go\ngo(train, (1, 2)) ==> -> af.launch(train,
import accelerate.utils\naccelerate.utils.set_seed(3) ==> -> torch.manual_seed(3)
from accelerate.utils import set_seed\nset_seed(3, device_specific=True) ==> manual_seed(3 + state.rank)
accelerator.state.fsdp_plugin ==> -> None
from transformers import set_seed\nset_seed(3) ==> -> state = af.init(seed=3)
from accelerate.utils import set_seed\nseed = int(x)\nset_seed(seed) ==> state = af.init(seed=int(x))
from accelerate.utils import set_seed\nif a.seed:\n    set_seed(a.seed) ==> init(seed=a.seed or 0)
from accelerate.utils import is_wandb_available\nis_wandb_available() ==> -> importlib.util
acc = Accelerator(mixed_precision='fp16')\nacc.print(1) ==> -> af.print_on_main(1, state=state)
"""
"""What stands in a script, and a part of what is printed for it; \\n ends a line of the script."""


def test_a_line_is_followed_by_what_takes_its_place(tmp_path):
    rows = [row.split(" ==> ") for row in LINES.strip().splitlines()]
    wrong = [
        (text, expected)
        for text, expected in rows
        if expected not in lines_of(tmp_path, text.replace(r"\n", "\n"))
    ]
    assert (wrong, len(rows)) == ([], 50)


RECIPES = [
    ("Accelerator(mixed_precision='bf16')", "", "af.with_amp('bf16')"),
    ("Accelerator(fsdp_plugin=plugin)", "", "af.wrap_fsdp()"),
    ("Accelerator(log_with='wandb')", "", "af.log_to(run)"),
    ("Accelerator(dynamo_backend='inductor')", "", "af.compiled()"),
    ("Accelerator(**given)", "given = {'dynamo_backend': 'inductor'}", "af.compiled()"),
    (
        "Accelerator(**given)",
        "given = {'gradient_accumulation_steps': 4}",
        "af.accumulate(4, split=None)",
    ),
    (
        "Accelerator(**given)",
        "if track:\n    given['log_with'] = 'all'",
        "af.log_to(run) if track else af.compose()",
    ),
    (
        "Accelerator(log_with='all') if track else Accelerator()",
        "",
        "af.log_to(run) if track else af.compose()",
    ),
    (
        "Accelerator(cpu=True) if quick else Accelerator(log_with='all')",
        "",
        "af.log_to(run) if not (quick) else af.compose()",
    ),
    (
        "Accelerator(log_with='all') if quick else Accelerator(cpu=True, log_with='all')",
        "",
        "af.log_to(run)",
    ),
    (
        "Accelerator()",
        "from accelerate.local_sgd import LocalSGD\nwith LocalSGD(accelerator, net, 8):\n    pass",
        "af.local_sgd(8)",
    ),
    ("Accelerator()", "with accelerator.maybe_context_parallel():\n    pass", "af.wrap_cp(dims)"),
    (
        "Accelerator()",
        "from accelerate.utils import find_executable_batch_size\n"
        "@find_executable_batch_size(starting_batch_size=64)\ndef train(batch_size):\n    pass",
        'af.accumulate("auto")',
    ),
]


@pytest.mark.parametrize(("made", "text", "expected"), RECIPES)
def test_the_recipe_has_what_the_script_uses(made, text, expected, tmp_path):
    recipe = json.loads(printed(script_with(tmp_path, text, made), "--json"))["recipe"]
    assert expected in recipe
    assert recipe[0] == "af.place()"
    assert ("af.wrap_ddp()" in recipe) != bool({"af.wrap_fsdp()", "af.local_sgd(8)"} & {*recipe})


BY_HAND = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
opt, loader, sched = accelerator.prepare(opt, loader, sched)
for epoch in range(3):
    for i, batch in enumerate(loader):
        opt.zero_grad()
        loss = net(batch).mean()
        loss = loss / 4
        accelerator.backward(loss)
        if i % 4 == 0:
            opt.step()
    sched.step()
"""


def test_accumulation_by_hand_and_a_schedule_of_epochs_are_read(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BY_HAND)
    found = json.loads(printed(path, "--json"))
    assert [line["number"] for line in found["lines"] if line["goes"]] == [9, 10, 11, 13, 14, 15]
    assert {"af.accumulate(4, split=None)", "af.schedule(sched, every=loader)"} <= {
        *found["recipe"]
    }
    rows = {
        number for line in found["lines"] for use in line["uses"] for number in use["differences"]
    }
    assert rows >= {1, 5, 6, 10}
    assert found["loops"][0]["program"].startswith(
        "def loss_fn(model, batch):\n    return net(batch).mean()\n"
    )


@pytest.mark.parametrize(
    ("precision", "fused", "differs"),
    [("fp16", "True", True), ("fp16", "False", False), ("bf16", "True", False)],
)
def test_a_fused_optimizer_differs_under_fp16_alone(tmp_path, precision, fused, differs):
    path = tmp_path / "script.py"
    accelerator = f"Accelerator(mixed_precision={precision!r})"
    optimizer = f"torch.optim.AdamW(net.parameters(), fused={fused})"
    path.write_text(
        BY_HAND.replace("Accelerator()", accelerator).replace(
            "opt, loader", f"opt = {optimizer}\nopt, loader", 1
        )
    )
    found = json.loads(printed(path, "--json"))
    rows = {
        number for line in found["lines"] for use in line["uses"] for number in use["differences"]
    }
    assert (9 in rows) == differs


def test_imports_but_the_first_go(tmp_path):
    text = lines_of(tmp_path, "from accelerate.utils import set_seed")
    assert text.count("-> import accel_fn as af") == 1
    assert "3  from accelerate.utils import set_seed\n      -> (goes)" in text


def test_a_comparison_is_one_replacement(tmp_path):
    text = lines_of(
        tmp_path,
        "from accelerate import DistributedType\n"
        "x = 1 if accelerator.distributed_type == DistributedType.XLA else 2",
    )
    assert "accelerator.distributed_type -> (goes)" in text
    assert "XLA -> (goes)" not in text


def test_what_takes_the_result_of_prepare_is_known(tmp_path):
    text = lines_of(tmp_path, "a, b = accelerator.prepare(net, optimizer)\nb.step()\na.eval()")
    assert "4  b.step()\n      -> (goes)" in text
    assert "5  a.eval()\n      -> (goes)" in text


def test_gradients_that_the_model_clears_go_too(tmp_path):
    text = lines_of(tmp_path, "net, optim = accelerator.prepare(net, optim)\nnet.zero_grad()")
    assert "4  net.zero_grad()\n      -> (goes)" in text


def test_a_loop_over_another_name_of_the_loader_goes_over_the_epoch(tmp_path):
    text = "loader = accelerator.prepare(loader)\nfor e in range(3):\n    other = loader\n"
    loop = "    for i, x in enumerate(tqdm(other)):\n        accelerator.backward(net(x))"
    assert "-> for i, x in enumerate(tqdm(epoch)):" in lines_of(tmp_path, text + loop)


def test_batches_are_skipped_by_the_epochs_alone(tmp_path):
    text = "loader = accelerator.prepare(loader)\nfor e in range(3):\n"
    skips = "    rest = accelerator.skip_first_batches(loader, 2)\n"
    loop = "    for x in rest:\n        accelerator.backward(net(x))"
    printed = lines_of(tmp_path, text + skips + loop)
    assert "5  rest = accelerator.skip_first_batches(loader, 2)\n      -> (goes)" in printed
    assert "-> for x in epoch:" in printed


def test_a_loader_of_a_script_that_accumulates_gets_a_larger_batch():
    assert "-> batch_size=4 * 4\n" in printed(SCRIPTS / "accumulation.py")
    assert "multiply it by their number" in printed(SCRIPTS / "metrics.py")


def test_one_batch_an_update_is_no_accumulation(tmp_path):
    path = tmp_path / "script.py"
    text = (SCRIPTS / "accumulation.py").read_text()
    path.write_text(text.replace("gradient_accumulation_steps=4", "gradient_accumulation_steps=1"))
    assert not re.search(r"row [1567]:|batch_size=4 \* ", printed(path))


def test_a_division_by_another_number_is_pointed_at(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BY_HAND.replace("loss / 4", "loss / n"))
    found = json.loads(printed(path, "--json"))
    [line] = [each for each in found["lines"] if each["number"] == 11]
    assert [use["name"] for use in line["uses"]] == ["loss"]
    [reason] = [each for each in found["loops"][0]["by_hand"] if "line 11" in each]
    assert "divides by another number than the batches of an update" in reason
    assert "return loss / n" in found["loops"][0]["program"]


def test_autocast_in_a_loop_that_trains_goes(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BY_HAND.replace("opt.zero_grad()", "with accelerator.autocast(): pass"))
    assert "autocast():" in printed(path)
    assert "af.autocast" not in printed(path)


def test_rows_that_need_accumulation_are_not_printed_without_it(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BY_HAND.replace("if i % 4 == 0", "if True").replace(" / 4", ""))
    assert not re.search(r"row [1567]:", printed(path))


MET = r"""
yes 22 other = Accelerator()
no 22 from accelerate import PartialState\nother = PartialState()
no 22 accelerator = Accelerator()
yes 10 m, o = accelerator.prepare(m, sched)\nn = accelerator.num_processes
no 10 n = accelerator.num_processes
yes 23 x = accelerator.wait_for_everyone()
yes 16 from accelerate.utils import set_seed\nset_seed(3)
no 16 from accelerate.utils import set_seed\nset_seed(3, device_specific=True)
no 16 from accelerate.utils import set_seed\nset_seed(3 + accelerator.process_index)
"""


def test_a_row_is_printed_where_the_script_meets_it(tmp_path):
    for row in MET.strip().splitlines():
        is_met, number, text = row.split(" ", 2)
        printed = lines_of(tmp_path, text.replace(r"\n", "\n"))
        assert (f"row {number}:" in printed) == (is_met == "yes"), text


def test_reasons_and_rows_are_printed_where_they_come_first(tmp_path):
    text = lines_of(tmp_path, "accelerator.save_state('a')\naccelerator.save_state('b')")
    assert text.count("-> af.save(step, state, folder)") == 2
    assert text.count("into one folder") == text.count("row 20:") == 1


def test_an_unknown_call_is_listed(tmp_path):
    text = lines_of(tmp_path, "accelerator.fly(accelerator.fly)\nAccelerator(**options)")
    assert "accelerator.fly(...) -> (not known)" in text
    assert "Not known, so look them up: accelerator.fly (line 3), Accelerator(**options)" in text


def test_lines_are_counted(tmp_path):
    text = lines_of(tmp_path, "accelerator.end_training()\nprint(1)")
    assert "\n1 of 4 lines go, 2 are replaced.\n" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"import torch\naccelerator = torch.device('cpu')\n", r"import accelerate, got .*; .*from-ddp\.md"),
        (b"import accelerate\ndef (:\n", r"be Python, got .*script\.py, whose line 2 is not"),
        (b"import accelerate\nx = '\xff'\n", r"be text, got .*script\.py: .*decode"),
        (b"# coding: none\nimport accelerate\n", r"be text, got .*script\.py: unknown enc"),
    ],
)  # fmt: skip
def test_what_cannot_be_migrated_is_refused(source, expected, tmp_path):
    (tmp_path / "script.py").write_bytes(source)
    done = command(tmp_path, "migrate", "script.py")
    assert done.exit_code == 1
    assert re.search(f"^Error: migrate: script must {expected}", done.stderr)


def test_without_libcst_the_extra_is_named(tmp_path):
    (tmp_path / "libcst.py").write_text("raise ModuleNotFoundError(name='libcst')\n")
    (tmp_path / "script.py").touch()
    done = run_command(tmp_path, "migrate", "script.py", PYTHONPATH=f"{tmp_path}:{ROOT}")
    words = r'^Error: migrate: libcst must be installed .* pip install "\.\[migrate\]"$'
    assert re.search(words, done.stderr, re.MULTILINE)
