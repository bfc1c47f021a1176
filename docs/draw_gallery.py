"""Draws docs/_static/gallery: what each program of docs/gallery.md printed or made.

`python docs/draw_gallery.py` runs the programs in runs/gallery, for minutes each, and draws. A run
that is there is not repeated. `python docs/draw_gallery.py gan ppo` draws two of them anew.
`text_to_image` needs diffusers, and `deepspeed_zero` deepspeed.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import torch

import accel_fn as af

ROOT = Path(__file__).resolve().parents[1]
PICTURES, RUNS = ROOT / "docs" / "_static" / "gallery", ROOT / "runs" / "gallery"
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 344, 40, 184
BLUE, ORANGE, GREEN, VIOLET = "#3f7ec2", "#c8731a", "#2a9a68", "#8274e0"
STYLE = (
    "<style>.card{fill:#f5f6f8} .ink{fill:#1d2330} .soft{fill:#556070} "
    ".axis{stroke:#7b8594;fill:none} .dot{fill:#1d2330} "
    "@media (prefers-color-scheme: dark){.card{fill:#1b1f26} .ink{fill:#e8ebf0} "
    ".soft{fill:#a9b3c1} .axis{stroke:#8792a2} .dot{fill:#e8ebf0}}</style>"
)
FIGURE = r"(-?\d+\.\d+)"


def ran(name, *arguments, size=1, launch=(), program=None, **environment):
    """Run an example on so many processes in its own folder, once; return the folder and the lines."""
    environment = {**os.environ, **environment}
    folder = RUNS / name
    printed = folder / "printed.txt"
    if not printed.exists():
        folder.mkdir(parents=True, exist_ok=True)
        start = (sys.executable, "-m", "accel_fn", "launch", "-n", str(size), "--cpu", *launch)
        path = ROOT / "examples" / f"{program or name}.py"
        done = subprocess.run(
            [*start, str(path), *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        printed.write_text(done.stdout)
    return folder, printed.read_text().splitlines()


def found(pattern, lines):
    """The first group of a pattern, in each line that has it, as a number."""
    matches = (re.search(pattern, line) for line in lines)
    return [float(match[1]) for match in matches if match]


def logged(path, name):
    """Pairs (step, value) of a log."""
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def text(x, y, content, ink="ink", anchor="start", more=""):
    """Some words at a place."""
    safe = str(content).replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" class="{ink}" text-anchor="{anchor}" {more}>{safe}</text>'


def legend(names, x=LEFT, y=24):
    """Colours and their names, in a line."""
    drawn = []
    for name, colour in names.items():
        drawn += [f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>']
        drawn += [text(x + 17, y, name)]
        x += 32 + 6.4 * len(name)
    return drawn


def axes(low, high, below, form="{:.1f}"):
    """Two lines, the ends of the values, and what is counted below."""
    return [
        f'<path class="axis" d="M{LEFT} {TOP} V{BOTTOM} H{RIGHT}"/>',
        text(LEFT - 6, TOP + 5, form.format(high), "soft", "end"),
        text(LEFT - 6, BOTTOM + 4, form.format(low), "soft", "end"),
        text((LEFT + RIGHT) / 2, BOTTOM + 20, below, "soft", "middle"),
    ]


def placed(points, low, high, last):
    """Pairs (step, value) as places in the picture."""
    for step, value in points:
        share = min(1, max(0, (value - low) / (high - low)))
        yield LEFT + (RIGHT - LEFT) * step / last, BOTTOM - (BOTTOM - TOP) * share


def curve(points, low, high, last, colour, width=2.0):
    """A line through pairs (step, value)."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed(points, low, high, last))
    line = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
    return [f'<polyline points="{places}" {line}/>']


def dots(points, low, high, last, colour=None, radius=3.0):
    """A dot for each pair (step, value)."""
    ink = f'fill="{colour}"' if colour else 'class="dot"'
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {ink}/>'
        for x, y in placed(points, low, high, last)
    ]


def pixels(images, x, y, side):
    """Draw images [n, 8, 8] of values from 0 to 1 beside each other, in five shades of one ink."""
    levels = (images * 5).round().int().clamp(0, 5)
    drawn = []
    for level in range(1, 6):
        squares = []
        for number, image in enumerate(levels):
            for row, column in (image == level).nonzero().tolist():
                left, top = x + (number * 9 + column) * side, y + row * side
                squares.append(f"M{left:g} {top:g}h{side}v{side}h-{side}z")
        drawn.append(f'<path class="dot" opacity="{level / 5:g}" d="{"".join(squares)}"/>')
    return drawn


def bars(rows, colours, scale, unit):
    """A bar for each pair (name, values), its values one after another."""
    drawn = []
    height = (BOTTOM + 20 - TOP) / len(rows)
    for number, (name, values) in enumerate(rows):
        y, x = TOP + number * height, LEFT + 42
        drawn.append(text(x - 6, y + height / 2 + 2, name, "ink", "end"))
        for value, colour in zip(values, colours, strict=True):
            width = (RIGHT - 34 - LEFT - 42) * value / scale
            shape = f'x="{x:.1f}" y="{y + 2:.1f}" width="{width:.1f}" height="{height - 8:.1f}"'
            drawn.append(f'<rect {shape} fill="{colour}"/>')
            x += width
        drawn.append(text(x + 5, y + height / 2 + 2, f"{sum(values):.0f}{unit}", "soft"))
    return drawn


def digits():
    """The loss of each update on 1, 2 and 3 processes."""
    colours = {1: BLUE, 2: ORANGE, 3: GREEN}
    drawn = legend(
        {f"{size} process{'es' * (size > 1)}": colour for size, colour in colours.items()}
    )
    drawn += axes(0, 2.4, "updates")
    options = ("--epochs", "6", "--precision", "no", "--out", "out")
    for size, colour in colours.items():
        folder, _ = ran(f"digits{size}", *options, size=size, program="digits")
        points = logged(folder / "out" / "log.jsonl", "loss")
        drawn += curve(points, 0, 2.4, points[-1][0], colour, width=7.5 - 2.2 * size)
    return drawn


def resume():
    """The updates of a run that was killed, and of one that was not, with the hashes of the weights."""
    _, whole = ran("resume_whole", "--out", "out", size=2, program="resume")
    killed_at = (17, 40)
    _, killed = ran(
        "resume_killed",
        *("--kill-at", ",".join(map(str, killed_at)), "--out", "out"),
        size=2,
        launch=("--max-restarts", "2"),
        program="resume",
    )
    drawn = legend({"trained": BLUE, "trained again": ORANGE})
    drawn.append(text(RIGHT, 24, "x killed", "ink", "end"))
    for y, name, lines, kills in ((74, "whole", whole, ()), (150, "killed", killed, killed_at)):
        updates, digest = re.match(r"(\d+) updates, weights (\w+)", lines[-1]).groups()
        unit = (RIGHT - LEFT) / int(updates)
        drawn.append(text(LEFT - 6, y + 4, name, "ink", "end", 'font-size="11"'))
        drawn.append(
            f'<rect x="{LEFT}" y="{y - 8}" width="{RIGHT - LEFT}" height="16" fill="{BLUE}"/>'
        )
        for kill in kills:  # a checkpoint every ten updates; the update of the number does not come
            begin, end = LEFT + (kill - 1) // 10 * 10 * unit, LEFT + (kill - 1) * unit
            shape = f'x="{begin:.1f}" y="{y - 8}" width="{end - begin:.1f}" height="16"'
            drawn.append(f'<rect {shape} fill="{ORANGE}"/>')
            drawn.append(text(end, y - 12, "x", "ink", "middle", 'font-weight="bold"'))
        drawn.append(
            text(LEFT, y + 26, f"{updates} updates, weights {digest[:16]}", "soft", more=MONO)
        )
    return drawn


MONO = 'font-family="monospace" font-size="11"'


def gan():
    """Eight of each digit that the generator drew."""
    folder, _ = ran("gan", "--device", "cpu", "--out", "out", size=2)
    images = torch.load(folder / "out" / "digits.pt").view(8, 10, 8, 8)
    drawn = [text(24, 24, "drawn by the generator")]
    for row in range(5):
        drawn += pixels(images[row], 24, 38 + 33 * row, 3.5)
    return drawn


def text_to_image():
    """Ten images of the names of digits, of the averaged denoiser."""
    folder, _ = ran("text_to_image", size=2)
    images = torch.load(folder / "runs" / "text_to_image" / "images.pt").view(10, 10, 8, 8)
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    drawn = []
    for place, name in enumerate(names):
        x, y = 20 + 166 * (place % 2), 24 + 39 * (place // 2)
        drawn.append(text(x, y + 19, name))
        drawn += pixels((images[:4, place] + 1) / 2, x + 42, y, 3.2)
    return drawn


def nanogpt():
    """The losses of both splits, and the beginning of what the model wrote."""
    folder, lines = ran("nanogpt", size=2)
    path = folder / "runs" / "nanogpt" / "log.jsonl"
    points = {name: logged(path, name) for name in ("loss", "loss/train", "loss/val")}
    last, high = points["loss"][-1][0], points["loss"][0][1]
    drawn = legend({"batch": BLUE, "estimate, train": ORANGE, "estimate, val": GREEN})
    drawn += axes(1.5, high, f"{last} updates")
    drawn += curve(points["loss"], 1.5, high, last, BLUE)
    for name, colour in (("loss/train", ORANGE), ("loss/val", GREEN)):
        drawn += dots(points[name], 1.5, high, last, colour, radius=4.5)
    written = " ".join(lines[-2].split())
    for row in range(3):
        line = written[26 * row : 26 * (row + 1)]
        drawn.append(text(RIGHT, 58 + 17 * row, line, "ink", "end", MONO))
    return drawn


def ppo():
    """How long the pole stands."""
    _, lines = ran("ppo", size=2)
    lengths = found(rf"moves a game {FIGURE}", lines)
    points = [*enumerate(lengths)]
    drawn = [text(LEFT, 24, "moves until the pole falls")]
    drawn += axes(0, max(lengths), f"{len(lengths)} rounds", "{:.0f}")
    scale = 0, max(lengths), len(lengths) - 1
    return [*drawn, *curve(points, *scale, VIOLET), *dots(points, *scale, VIOLET)]


def tensor_parallel():
    """The loss of each epoch on one process, and on two meshes of four."""
    kinds = {
        "1 process": (1, (), (), BLUE),
        "dp 2 x tp 2": (4, ("--mesh", "dp=-1,tp=2"), (), ORANGE),
        "with FSDP": (4, ("--mesh", "dp=-1,tp=2"), ("--fsdp",), GREEN),
    }
    drawn = legend({name: kind[-1] for name, kind in kinds.items()})
    drawn += axes(1, 1.8, "epochs")
    for number, (size, launch, options, colour) in enumerate(kinds.values()):
        _, lines = ran(
            f"tensor_parallel{number}",
            *options,
            size=size,
            launch=launch,
            program="tensor_parallel",
        )
        points = [*enumerate(found(rf"loss {FIGURE}", lines))]
        drawn += curve(points, 1, 1.8, len(points) - 1, colour, width=8 - 3 * number)
    return drawn


def larger_model():
    """The most memory that a rank takes while a Llama loads, trains one step and saves."""
    rows = {}
    for size in (1, 2):
        _, lines = ran(
            *(f"larger_model{size}", "--folder", str(RUNS / "larger_model")),  # one model for both
            size=size,
            program="larger_model",
            MALLOC_MMAP_THRESHOLD_="262144",
        )
        for name in ("build", "load_model", "a step", "save_model"):
            [line] = [line for line in lines if line.startswith(f"{name} ")]
            rows.setdefault(name, []).append(max(map(float, re.findall(r"(\d+) MB", line))))
    scale = max(max(values) for values in rows.values())
    drawn = legend({"1 process": BLUE, "each of 2": ORANGE}, x=LEFT)
    drawn.append(text(RIGHT, 24, "MB", "soft", "end"))
    height = (BOTTOM + 20 - TOP) / len(rows)
    for number, (name, values) in enumerate(rows.items()):
        y = TOP + number * height
        drawn.append(text(86, y + height / 2 + 1, name, "ink", "end"))
        for place, (value, colour) in enumerate(zip(values, (BLUE, ORANGE), strict=True)):
            width, top = 210 * value / scale, y + 3 + place * (height / 2 - 3)
            shape = f'x="94" y="{top:.1f}" width="{width:.1f}" height="{height / 2 - 5:.1f}"'
            drawn.append(f'<rect {shape} fill="{colour}"/>')
            drawn.append(text(99 + width, top + height / 2 - 8, f"{value:.0f}", "soft"))
    return drawn


def deepspeed_zero():
    """The loss after each epoch, on one process and by the stages of ZeRO on two."""
    _, one = ran("deepspeed_zero1", program="deepspeed_zero")
    _, two = ran("deepspeed_zero2", size=2, program="deepspeed_zero")
    colours = {1: BLUE, 2: ORANGE, 3: GREEN}
    drawn = legend({f"stage {stage}": colour for stage, colour in colours.items()})
    drawn += axes(0, 0.3, "epochs; dots: 1 process", "{:.1f}")
    for lines, is_alone in ((two, False), (one, True)):
        first = [found(rf"stage {stage} .*loss {FIGURE}", lines)[:2] for stage in colours]
        resumed = found(rf"stage 1 .*loss {FIGURE}", lines)[2:]
        for stage, losses in enumerate([*first, [first[2][1], *resumed]], 1):
            points = [*enumerate(losses, 0 if stage < 4 else 1)]
            if is_alone:
                drawn += dots(points, 0, 0.3, 3)
            else:
                drawn += curve(points, 0, 0.3, 3, colours.get(stage, BLUE), 11 - 3 * min(stage, 3))
    return drawn


def local_sgd():
    """How far the parameters of two ranks are apart after each update."""
    points = [*enumerate(apart_on_two(), 1)][:72]
    high = max(value for _, value in points)
    drawn = [text(LEFT, 24, "local_sgd(every=8) on two ranks: ranks apart by")]
    drawn += axes(0, high, f"{len(points)} updates", "{:.2f}")
    return [*drawn, *curve(points, 0, high, len(points), VIOLET)]


def apart_on_two():
    """Train as the example does; not repeated once the figures are in a file."""
    path = RUNS / "local_sgd.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(af.launch(train_apart, num_processes=2, cpu=True)[0]))
    return json.loads(path.read_text())


def train_apart():
    """One rank of that run."""
    module = runpy.run_path(str(ROOT / "examples" / "local_sgd.py"))
    return module["train"](af.local_sgd(every=8), af.init(seed=0))[2]


def trackers():
    """The loss as TensorBoard stored it, on the line of the log."""
    _, lines = ran("trackers", "--epochs", "8", size=2)
    drawn = legend({"loss": BLUE, "test loss": ORANGE})
    drawn += axes(0, 1.4, "updates; lines: log.jsonl, dots: TensorBoard")
    for name, colour in (("  loss", BLUE), ("test/loss", ORANGE)):
        for place, draw_points in (("log.jsonl", curve), ("TensorBoard", dots)):
            own = [line for line in lines if line.startswith(place)]
            points = [*zip(found(r"step (\d+)", own), found(f"{name} {FIGURE}", own), strict=True)]
            ink = (colour,) if place == "log.jsonl" else ()
            drawn += draw_points(points, 0, 1.4, points[-1][0], *ink)
    return drawn


def profiling():
    """The phases of a step on each rank, of which the last one loads slowly."""
    _, lines = ran("profiling", size=2)
    names = ("data", "forward", "backward", "collectives", "update", "checks", "rest")
    rows = [
        (name.strip(), list(map(float, figures.split()))[: len(names)])
        for name, figures in re.findall(r"^(rank \d+) +([\d. ]+)$", "\n".join(lines), re.MULTILINE)
    ]
    shown = {"data": ORANGE, "collectives": VIOLET, "the rest": BLUE}
    rows = [
        (name, [values[0], values[3], sum(values) - values[0] - values[3]]) for name, values in rows
    ]
    drawn = legend(shown)
    return [*drawn, *bars(rows, [*shown.values()], max(sum(each) for _, each in rows), " ms")]


DRAWN = (
    *(digits, resume, text_to_image, nanogpt, gan, ppo),
    *(tensor_parallel, larger_model, deepspeed_zero, local_sgd, trackers, profiling),
)


def write(draw_one):
    """Run what a picture is of, and write it."""
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" font-family="system-ui, sans-serif" font-size="12">',
        STYLE,
        f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        *draw_one(),
        "</svg>\n",
    ]
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{draw_one.__name__}.svg").write_text("\n".join(body))


if __name__ == "__main__":
    for each in DRAWN:
        if not sys.argv[1:] or each.__name__ in sys.argv[1:]:
            write(each)
