"""The choices for each field of a random program, as lines of its source.

The first choice of a field is the simplest: a failing program is shrunk towards it.
"""

from __future__ import annotations

PARAMETERS = "model.parameters()"


def module(name: str, layers: str, *forward: str) -> dict[str, str]:
    """Return the source of a model class; `{o}` is the number of outputs."""
    lines = [
        f"class {name}(nn.Module):",
        f"    def __init__(self): super().__init__(); {layers}",
        f"    def forward(self, x): {'; '.join(forward)}",
    ]
    return {"prelude": "\n".join(lines), "model": f"{name}()"}


BLOCK = "self.body, self.head = nn.Linear(4, 4), nn.Linear(4, {o})"


def checkpointed(use_reentrant: bool) -> dict[str, str]:
    run = f"torch.utils.checkpoint.checkpoint(self.body, x.requires_grad_(), use_reentrant={use_reentrant})"
    return module("Block", BLOCK, f"return self.head(torch.tanh({run}))")


MODELS: dict[str, dict[str, str]] = {
    "linear": {"model": "nn.Linear(4, {o})"},
    "two layers": {"model": "nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, {o}))"},
    "layer norm": {"model": "nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, {o}))"},
    "weight norm": {"model": "nn.utils.parametrizations.weight_norm(nn.Linear(4, {o}))"},
    "frozen layer": {
        "model": "nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, {o}))"
    },
    "tied": module(
        "Tied",
        "self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, {o}); "
        "self.b.weight = self.a.weight",
        "return self.head(self.b(torch.tanh(self.a(x))))",
    ),
    "scalar": module(
        "Scaled",
        "self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(4, {o})",
        "return self.head(x) * self.scale",
    ),
    "unused layer": module("Unused", BLOCK, "return self.head(x)"),
    "experts": module(
        "Experts",
        "self.experts, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, {o})",
        "masks = [x[:, 0] > 0, x[:, 0] <= 0]",
        "pairs = [(e, m) for e, m in zip(self.experts, masks) if m.any()]",
        "return self.head(sum(torch.zeros_like(x).masked_scatter(m[:, None], e(x[m])) for e, m in pairs))",
    ),
    "branch": module(
        "Branch",
        BLOCK,
        "rows = (x[:, 0] > 0.5).nonzero()[:, 0]; y = self.head(x)",
        "return y.index_add(0, rows, self.head(self.body(x[rows]))) if len(rows) else y",
    ),
    "recurrent": module(
        "Recurrent",
        "self.cell, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, {o})",
        "return self.head(self.cell(x.unsqueeze(2))[0][:, -1])",
    ),
    "counting": module(
        "Counting",
        "self.head = nn.Linear(4, {o}); self.register_buffer('calls', torch.zeros(()))",
        "self.calls += 1",
        "return self.head(x)",
    ),
    "table": module(
        "Table",
        "self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, {o})",
        "return self.head(self.table((x.abs() * 3).long() % 6).mean(1))",
    ),
    "sparse table": module(
        "Table",
        "self.table = nn.Embedding(6, {o}, sparse=True)",
        "return self.table((x.abs() * 3).long() % 6).mean(1)",
    ),
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant checkpoint": checkpointed(use_reentrant=True),
    "own checkpoints": module(
        "Block",
        "self.blocks, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, {o})",
        "run = torch.utils.checkpoint.checkpoint; first, second = self.blocks",
        "x = run(lambda x: torch.tanh(first(x)), x, use_reentrant=False)",
        "x = run(lambda x: torch.tanh(second(x)), x, use_reentrant=False)",
        "return self.head(x)",
    ),
}

OPTIMIZERS = {
    name: {"optimizer": f"torch.optim.{call}"}
    for name, call in {
        "sgd": "SGD({p}, lr=0.1)",
        "momentum": "SGD({p}, lr=0.1, momentum=0.9)",
        "decay": "SGD({p}, lr=0.1, weight_decay=0.1)",
        "nesterov": "SGD({p}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)",
        "adamw": "AdamW({p}, lr=0.05)",
        "fused adamw": "AdamW({p}, lr=0.05, fused=True)",
        "fused sgd": "SGD({p}, lr=0.1, momentum=0.9, fused=True)",
        "amsgrad": "Adam({p}, lr=0.05, amsgrad=True)",
        "adagrad": "Adagrad({p}, lr=0.1)",
        "rmsprop": "RMSprop({p}, lr=0.01)",
        "groups": "SGD([{'params': [p], 'lr': 0.1 / (i + 1)} for i, p in enumerate({p})], lr=0.1)",
        "a part": "SGD(list({p})[1:], lr=0.1)",
        "sparse adam": "SparseAdam({p}, lr=0.1)",
    }.items()
}
for _each in OPTIMIZERS.values():
    _each["optimizer"] = _each["optimizer"].replace("{p}", PARAMETERS)

FIRST = "next(model.parameters())"
HOOKS = {
    "none": {},
    "linear": {"hooks": f"{FIRST}.register_hook(lambda g: 2 * g)"},
    "clamp": {"hooks": f"{FIRST}.register_hook(lambda g: g.clamp(-0.1, 0.1))"},
    "after a gradient": {
        "hooks": f"{FIRST}.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1])"
    },
    "backward": {
        "hooks": "model.register_full_backward_pre_hook(lambda m, g: tuple(2 * each for each in g))"
    },
    "forward": {"hooks": "model.register_forward_hook(lambda m, given, y: 2 * y)"},
    "optimizer": {
        "hooks": "optimizer.register_step_pre_hook(lambda o, *_: ([p.grad.clamp_(-0.1, 0.1) "
        "for p in model.parameters() if p.grad is not None], None)[1])"
    },
    "own step": {
        "hooks": "own = optimizer.step; optimizer.step = lambda closure=None: (own(), own())[0]"
    },
}

LOSSES = {
    "mean": {"loss": "return F.mse_loss(model(x), y)"},
    "labels": {
        "o": "3",
        "loss": "return F.cross_entropy(model(x), labels)",
        "weight": "af.count_labels({labels})",
    },
    "weighted": {
        "loss": "return ((model(x) - y).square() * w).sum() / w.sum()",
        "weight": "lambda b: {w}.sum()",
    },
    "sum": {"loss": 'return F.mse_loss(model(x), y, reduction="sum") / 8'},
    "declared sum": {
        "loss": 'return F.mse_loss(model(x), y, reduction="sum") / 8',
        "more": ', reduction="sum"',
    },
    "penalty": {
        "loss": "return F.mse_loss(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())"
    },
    "gradient penalty": {
        "loss": "x = x.detach().requires_grad_(); out = model(x)\n"
        "    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
        "    return F.mse_loss(out, y) + slope.square().sum(1).mean()"
    },
    "of one sample": {"loss": "return (model(x) - y).square().flatten().cumsum(0)[-1] / len(x)"},
}

BATCHES = {
    "tuple": {"batch": "(x, y, labels, w)", "unpack": "b", "labels": "2", "w": "b[3]"},
    "dict": {
        "batch": '{"x": x, "y": y, "labels": labels, "w": w}',
        "unpack": "b.values()",
        "labels": '"labels"',
        "w": 'b["w"]',
    },
    "settings": {
        "batch": '{"x": x, "y": y, "labels": labels, "w": w, "s": [0.5, 1.0, 2.0]}',
        "unpack": "(b['x'] * sum(b['s']), b['y'], b['labels'], b['w'])",
        "labels": '"labels"',
        "w": 'b["w"]',
    },
    "nested": {
        "batch": '({"x": x}, [y, labels], w)',
        "unpack": "(b[0]['x'], *b[1], b[2])",
        "labels": "(1, 1)",
        "w": "b[2]",
    },
    "foreign container": {
        "batch": "(UserDict(x=x), y, labels, w)",
        "unpack": "(b[0]['x'], *b[1:])",
        "labels": "2",
        "w": "b[3]",
        "prelude": "from collections import UserDict",
    },
    "one tensor": {
        "batch": "torch.cat([x, y, labels[:, None].double(), w], 1)",
        "unpack": "(b[:, :4], b[:, 4:5], b[:, 5].long(), b[:, 6:])",
        "labels": "()",
        "w": "b[:, 6:]",
    },
}

BETWEEN = {
    "nothing": {},
    "rate": {"between": 'optimizer.param_groups[0]["lr"] *= 0.5'},
    "values": {"between": "[p.data.mul_(0.5) for p in model.parameters()]"},
    "optimizer hook": {
        "between": "optimizer.register_step_pre_hook(lambda o, *_: ([p.grad.mul_(0.5) "
        "for p in model.parameters() if p.grad is not None], None)[1])"
    },
    "forward hook": {"between": "model.register_forward_hook(lambda m, given, y: 2 * y)"},
    "forward": {"between": "own = model.forward; model.forward = lambda x: 2 * own(x)"},
    "freeze": {"between": f"{FIRST}.requires_grad_(False)"},
    "assign": {
        "between": "model.load_state_dict({n: v * 0.5 for n, v in model.state_dict().items()}, assign=True)"
    },
    "reset": {"between": "optimizer.state.clear()"},
    "evaluation": {"between": "model.eval()"},
}

STRATEGIES = {
    "ddp": {"recipe": "af.wrap_ddp(), "},
    "ddp, unused": {"recipe": "af.wrap_ddp(find_unused_parameters=True), "},
    "fsdp": {"recipe": "af.wrap_fsdp(), "},
    "local sgd": {"recipe": "af.local_sgd(1), "},
    "reproducible": {"recipe": "af.reproducible(2), "},
}
MICROBATCHES = {
    "one": {},
    "two": {"recipe": "af.accumulate(2), "},
    "three": {"recipe": "af.accumulate(3), "},
    "auto": {"recipe": 'af.accumulate("auto"), '},
}
CLIPS = {
    "none": {},
    "norm": {
        "recipe": "af.clip(0.1), ",
        "hand": "nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], 0.1)",
    },
    "value": {
        "recipe": "af.clip_value(0.01), ",
        "hand": "nn.utils.clip_grad_value_(model.parameters(), 0.01)",
    },
}
SKIPS = {
    "none": {},
    "nothing to skip": {"recipe": "af.skip_nonfinite(), "},
    "one batch": {
        "recipe": "af.skip_nonfinite(), ",
        "bad": "y = y * torch.inf if i == 1 else y",
        "verdict": "if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None): "
        "model.zero_grad(); continue",
    },
}
SCHEDULES = {
    "none": {},
    "function": {
        "recipe": "af.schedule(lambda n: 1 / (n + 1)), ",
        "start": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))",
    },
    "scheduler": {
        "recipe": "af.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)), ",
        "start": "torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
    },
}
OTHERS = {
    "none": {},
    "average": {"recipe": "af.ema(0.9), "},
    "freeze": {
        "recipe": "af.freeze([n for n, _ in model.named_parameters()][0], until=2), ",
        "frozen": "if updates < 2: next(model.parameters()).grad = None",
    },
    "checkpoint activations": {"recipe": "af.checkpoint_activations(), "},
    "check replicas": {"recipe": "af.check_replicas(1), "},
}
SIZES = {name: {"sizes": name} for name in ("[8, 8, 8]", "[5, 7, 3]", "[2, 1, 6]", "[12, 9, 10]")}
WORLDS = {name: {"world": name} for name in ("1", "2", "3")}
CUTS = {
    "even": {"cut": "[SIZES[i] * r // W for r in range(W + 1)]"},
    "last": {"cut": "[0] * W + [SIZES[i]]"},
    "uneven": {"cut": "[SIZES[i] * r**2 // W**2 for r in range(W + 1)]"},
}
SEEDS = {str(seed): {"seed": str(seed)} for seed in range(10)}

FIELDS = {
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "loss": LOSSES,
    "hook": HOOKS,
    "batch": BATCHES,
    "between": BETWEEN,
    "strategy": STRATEGIES,
    "micro-batches": MICROBATCHES,
    "clip": CLIPS,
    "skip": SKIPS,
    "schedule": SCHEDULES,
    "other": OTHERS,
    "sizes": SIZES,
    "world": WORLDS,
    "cut": CUTS,
    "seed": SEEDS,
}
