"""What a look at a few rows leaves behind: nothing; what it costs; and the writes that it finds."""

import copy
import random
from collections import UserDict, deque
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(16, 3)
BATCH = (X, X.sum(1, keepdim=True) + 0.5)


def stepped(model, loss_fn=ours.mse, recipe=None, batch=BATCH, num_steps=1, **options):
    """Train some steps in micro-batches; return what `explain` prints of it."""
    trained = [each for each in model.parameters() if each.requires_grad]
    plan = af.Plan(loss_fn, model, torch.optim.SGD(trained, lr=0.1))
    state, step = af.build((recipe or af.accumulate(2))(plan), af.DistState(), **options)
    for _ in range(num_steps):
        state, _ = step(state, batch)
    return af.explain(step, state)


class Writing(nn.Module):
    """A model whose training forward writes whatever a model can hold, and reads none of it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        self.head = nn.Linear(4, 1).double()
        self.register_buffer("shape", torch.empty(0), persistent=False)
        self.number, self.text, self.items, self.queue = 0, "", [], deque(maxlen=3)
        self.table, self.array = {"calls": 0, "inner": [0]}, np.zeros(2)
        self.tensor, self.cache = torch.zeros(2), None

    def forward(self, x):
        if not self.shape.numel():
            self.shape.resize_(x.shape[1:]).fill_(float(x.sum()))
        self.number += 1
        self.text += "a"
        self.items.append(len(x))
        self.queue.append(len(x))
        self.table["calls"] += 1
        self.table["inner"].append(x.detach())
        self.array += 1
        self.tensor += 1
        self.cache = x
        self.late = len(x)
        return self.head(self.net(x))

    def held(self):
        """Return copies of everything."""
        names = ("number", "text", "items", "queue", "table", "array", "tensor", "cache", "late")
        return copy.deepcopy({name: getattr(self, name, None) for name in names})


def same(one, other):
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.filterwarnings("ignore:step. model should")
def test_a_look_leaves_everything_as_it_was():
    """Two steps with looks are two steps without, to the bit, in all that a model and a process hold."""
    ends = []
    for check_loss in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Writing()
        model.net[2].eval()
        text = stepped(model, num_steps=2, check_loss=check_loss)
        modes = [each.training for each in model.modules()]
        grads = [each.grad for each in model.parameters()]
        draws = torch.rand(2), random.random(), np.random.rand()
        ends.append((model.state_dict(), model.shape, model.held(), modes, grads, draws))
        assert ("agree" in text) is check_loss
    for with_looks, without in zip(*ends, strict=True):
        assert same(with_looks, without)


@pytest.mark.filterwarnings("ignore:step. loss_fn should")
@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: float(torch.rand(()))])
def test_a_look_at_a_loss_that_draws_leaves_the_generators_as_they_were(draw):
    """As mixup does; a check must not change what the run draws."""

    def loss_fn(model, batch):
        share = draw()
        return ours.mse(model, (share * batch[0] + (1 - share) * batch[0].flip(0), batch[1]))

    ends = []
    for check_loss in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = ours.regression_model()
        stepped(model, loss_fn, num_steps=3, check_loss=check_loss)
        ends.append((model.state_dict(), (torch.rand(2), random.random(), np.random.rand())))
    assert same(*ends)


class Calls(nn.Module):
    """A layer that counts its calls in a buffer, as parts count more of them than a batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return inputs


def collated(samples):
    """Collate as torch does, in a function of the user."""
    return default_collate(samples)


@pytest.mark.filterwarnings("ignore:step. model should write the same")
@pytest.mark.parametrize(
    ("layers", "collate_fn", "passes"),
    [
        ((), None, (4, 4)),
        ((nn.Dropout(0.5),), None, (7, 8)),
        ((nn.Dropout(0.5), Calls()), None, (10.5, 11.5)),
        ((nn.Dropout(0.5), Calls()), collated, (21, 23)),
    ],
    ids=["plain", "draws", "draws and writes", "and collates"],
)
def test_a_look_costs_as_many_passes_over_its_rows_as_the_docs_say(layers, collate_fn, passes):
    """The batch has 16 samples, of which a look takes 8."""
    rows = []

    def loss_fn(model, batch):
        rows.append(len(batch[0]))
        return ours.mse(model, batch)

    model = nn.Sequential(*layers, nn.Linear(3, 1)).double()
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(af.accumulate(2)(plan), af.DistState())
    loader = DataLoader(TensorDataset(*BATCH), batch_size=16, collate_fn=collate_fn)
    for batch in af.shard_loader(loader, state):
        step(state, batch)
    least, most = passes
    assert least <= (sum(rows) - 16) / 8 <= most


def test_a_hidden_state_that_a_loss_keeps_without_a_graph_is_warned_of():
    """As truncated backpropagation keeps it: the second micro-batch has other rows than the first."""
    model = nn.ModuleDict({"rnn": nn.RNN(3, 4, batch_first=True), "head": nn.Linear(4, 1)}).double()
    kept = {}

    def loss_fn(model, batch):
        hidden = kept.get(len(batch))
        outputs, last = model["rnn"](batch, hidden)
        kept[len(batch)] = last.detach()
        return model["head"](outputs).square().mean()

    batch = X.reshape(8, 2, 3)
    with pytest.warns(UserWarning, match=r"^step: loss_fn should return the "):
        stepped(model, loss_fn, batch=batch)


def test_a_forward_that_fails_in_the_middle_leaves_the_mode_of_the_model():
    def loss_fn(model, batch):
        if len(batch[0]) < 8:
            model.eval()
            raise ValueError("too few rows")
        return ours.mse(model, batch)

    model = ours.regression_model()
    text = stepped(model, loss_fn)
    assert model.training
    assert "ValueError: too few rows" in text


def test_memory_that_runs_out_in_a_look_ends_the_look():
    def loss_fn(model, batch):
        if len(batch[0]) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ours.mse(model, batch)

    text = stepped(ours.regression_model(), loss_fn)
    assert "memory ran out in a forward or backward" in text


def test_an_error_while_everything_is_put_back_is_raised():
    class Locked(nn.Module):
        """Its forward shares a buffer between rows, which cannot be written afterwards."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()
            self.register_buffer("kept", torch.zeros(4), persistent=False)

        def forward(self, x):
            self.kept.data = torch.zeros(1).expand(4)
            return self.layer(x)

    with pytest.raises(
        af.errors.StateError, match=r"put back .* more than one element of the writ"
    ):
        stepped(Locked())


class Keeps(nn.Module):
    """Reads a value that `write(self, x)` changes in each training forward."""

    def __init__(self, value, write, read):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.value, self.write, self.read = value, write, read

    def forward(self, x):
        if self.training:
            self.write(self, x)
        return self.layer(x) * (1 + 0.1 * self.read(self.value))


def count_up(model, x):
    model.value += 1


def count_tensor(model, x):
    model.value.add_(1)


def append(model, x):
    model.value.append(len(x))


def count_key(model, x):
    model.value["calls"] = model.value.get("calls", 0) + 1


def add_rows(model, x):
    model.value = model.value + float(x[:, 0].sum())


COUNTERS = {
    "number": (lambda: 0, count_up, float),
    "tensor": (lambda: torch.zeros(()), count_tensor, float),
    "array": (lambda: np.zeros(1), count_up, lambda value: float(value[0])),
    "list": (list, append, len),
    "deque": (deque, append, len),
    "dict": (dict, count_key, lambda value: value["calls"]),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_count_that_a_forward_reads_is_warned_of_in_micro_batches(name):
    make, write, read = COUNTERS[name]
    with pytest.warns(UserWarning, match=r"should write the same in its forward .* got value"):
        stepped(Keeps(make(), write, read))


@pytest.mark.parametrize("name", ["number", "tensor", "dict"])
def test_a_count_of_updates_is_not_warned_of_on_ranks(name):
    make, write, read = COUNTERS[name]

    def run(state):
        model = Keeps(make(), write, read)
        plan = af.wrap_ddp()(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
        state, step = af.build(plan, state)
        for _ in range(3):
            state, _ = step(state, af.shard_batch(BATCH, state))
        return read(model.value)

    assert simulate(run, world_size=2) == [3, 3]


def test_a_figure_of_its_rows_that_a_forward_reads_is_warned_of_on_ranks():
    def run(state):
        model = Keeps(0.0, add_rows, float)
        plan = af.wrap_ddp()(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
        state, step = af.build(plan, state)
        step(state, af.shard_batch(BATCH, state))

    with pytest.warns(UserWarning, match=r"should write the same in its forward .* got value"):
        simulate(run, world_size=2)


def test_rows_that_only_ranks_count_and_the_loop_leaves_are_warned_of_in_the_second_step():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.seen += x[:, 0].sum()
            return self.layer(x)

    def run(state):
        model = Counting()
        plan = af.wrap_ddp()(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
        state, step = af.build(plan, state)
        for _ in range(3):
            state, _ = step(state, af.shard_batch(BATCH, state))

    with pytest.warns(UserWarning, match=r"should write the same .* got seen") as warned:
        simulate(run, world_size=2)
    assert len(warned) == 1


class Frozen(dict):
    """Refuses writes, as the configuration of a model of diffusers does."""

    def update(self, *args, **kwargs):
        raise TypeError("frozen")

    clear = __setitem__ = update

    def copy(self):
        return Frozen(self)


def test_a_dict_that_refuses_writes_is_left_as_it_is():
    model = nn.Linear(3, 1).double()
    model.config = Frozen(width=3, sizes=(1, 2))
    stepped(model)
    assert model.config == {"width": 3, "sizes": (1, 2)}


@pytest.mark.parametrize(("recipe", "world_size"), [(af.accumulate(2), 1), (af.wrap_ddp(), 2)])
def test_gradients_by_frequency_are_refused_where_a_batch_is_cut(recipe, world_size):
    def run(state):
        model = nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True), nn.Linear(3, 1))
        af.build(recipe(af.Plan(ours.mse, model, ours.sgd(model.parameters()))), state)

    with pytest.raises(af.AccelError, match=r"must not scale gradients by how often .* got 0"):
        simulate(run, world_size=world_size)


def test_gradients_by_frequency_of_the_functional_are_found():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 1).double())

        def forward(self, ids):
            return F.embedding(ids, self.table, scale_grad_by_freq=True)

    ids = torch.tensor([0, 1, 1, 2, 2, 2, 0, 1])
    with pytest.warns(UserWarning, match="the gradient of table differs by"):
        stepped(Table(), batch=(ids, ids[:, None].double()))


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        lengths = [3, 7, 2, 5, 6, 4, 2, 7, 3, 5, 4, 6]
        self.rows = [torch.randint(1, 9, (each,), generator=draw) for each in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def padded(rows):
    return {"ids": nn.utils.rnn.pad_sequence(rows, batch_first=True)}


def masked(rows):
    """Draw masks, as for a masked language model."""
    batch = padded(rows)
    drawn = torch.rand(batch["ids"].shape) < 0.5
    return {**batch, "labels": torch.where(drawn & (batch["ids"] > 0), batch["ids"], -100)}


class Reader(nn.Module):
    def __init__(self, *, sees_padding=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 4).double(), nn.Linear(4, 9).double()
        self.sees_padding = sees_padding

    def forward(self, ids):
        hidden = self.table(ids)
        if self.sees_padding:
            hidden = hidden + hidden.mean(1, keepdim=True)
        return self.head(hidden)


def token_loss(model, batch):
    labels = batch.get("labels", torch.where(batch["ids"] > 0, batch["ids"], -100))
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten())


def trained_on(collate, model, weight_fn, world_size=2):
    def run(state):
        own = copy.deepcopy(model)
        plan = af.wrap_ddp()(af.Plan(token_loss, own, ours.sgd(own.parameters()), weight_fn))
        state, step = af.build(plan, state)
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=12, collate_fn=collate)
        for batch in af.prefetch(af.shard_loader(loader, state), state):
            state, _ = step(state, batch)
        return af.explain(step, state)

    return simulate(run, world_size=world_size)


def count_ids(batch):
    return int((batch["ids"] > 0).sum())


def test_padding_that_a_mask_hides_is_not_warned_of():
    for verdict in trained_on(padded, Reader(), count_ids):
        assert "agree, and their gradients" in verdict


def test_padding_that_the_model_sees_is_warned_of_by_the_name_of_collate_fn():
    with pytest.warns(UserWarning, match=r'collate_fn .* shard_loader\(..., collate="global"\)'):
        trained_on(padded, Reader(sees_padding=True), count_ids)


def counted(rows):
    """Count the tokens, and give the longest length as flash attention takes it."""
    batch = padded(rows)
    count = (batch["ids"] > 0).sum()
    return UserDict({**batch, "num_tokens": count, "max_length": batch["ids"].shape[1]})


def loss_by_count(model, batch):
    ids = batch["ids"][:, : batch["max_length"]]
    labels = torch.where(ids > 0, ids, -100)
    total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / batch["num_tokens"]


@pytest.mark.parametrize(("recipe", "world_size"), [(af.accumulate(2), 1), (af.wrap_fsdp(), 2)])
def test_the_number_that_collate_fn_computes_is_named_in_place_of_a_sum(recipe, world_size):
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=12, collate_fn=counted)

    def run(state, collate, **options):
        model = Reader()
        plan = recipe(af.Plan(loss_by_count, model, ours.sgd(model.parameters()), **options))
        state, step = af.build(plan, state)
        for batch in af.shard_loader(loader, state, collate=collate):
            state, _ = step(state, batch)
        return af.explain(step, state)

    text = (
        r"step: loss_fn must return the mean over the items that weight_fn counts, got one by "
        r"batch\['num_tokens'\], which collate_fn .* shard_loader\(..., collate=\"global\"\) beside "
        r'Plan\(..., reduction="sum"\)'
    )
    with pytest.raises(af.errors.LossError, match=text):
        simulate(lambda state: run(state, "rank"), world_size=world_size)
    summed = partial(run, collate="global", reduction="sum")
    for verdict in simulate(summed, world_size=world_size):
        assert "is a sum" in verdict


def test_a_collate_fn_that_draws_is_compared_by_its_other_tensors():
    for verdict in trained_on(masked, Reader(), af.count_labels("labels")):
        assert "agree, and their gradients" in verdict


TWO_ROWS = (X[:2], torch.tensor([-100, 1]))


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def two_means(model, batch):
    return class_loss(model, batch) + model(batch[0]).square().mean()


def labels_counted(plan):
    return af.accumulate(2)(replace(plan, weight_fn=af.count_labels(1)))


def test_a_mean_over_a_row_without_a_label_is_warned_of_where_one_part_alone_has_labels():
    model = nn.Linear(3, 2).double()
    with pytest.warns(UserWarning, match=r"neither a mean nor a sum: parts give [\d.]+, the batch"):
        stepped(model, two_means, labels_counted, TWO_ROWS)


def test_a_row_without_a_label_that_the_loss_leaves_out_is_not_warned_of():
    stepped(nn.Linear(3, 2).double(), class_loss, labels_counted, TWO_ROWS)
