"""whole_state_dict: every tensor of a model, on the host of the main rank, under any strategy."""

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.errors import PeerError
from accel_fn.testing import simulate


class Tied(nn.Module):
    """Two names of one tensor, a buffer, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids):
        rows = self.embedding(ids) * self.scale
        for layer in self.layers:
            rows = layer(rows).tanh()
        return self.head(rows)

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        pass


def loss_fn(model, ids):
    return nn.functional.cross_entropy(model(ids), ids)


def built(state, recipe):
    torch.manual_seed(0)
    model = Tied().double()
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, *af.build(recipe(plan), state)


def trained(state, recipe):
    model, state, step = built(state, recipe)
    state, _ = step(state, af.shard_batch(torch.arange(8) % 7, state))
    return model, state, step


STRATEGIES = {
    "ddp": af.wrap_ddp(),
    "replicated shards": af.wrap_fsdp(replicate=2),
    "reproducible": af.reproducible(num_virtual_ranks=4),
}


@pytest.mark.parametrize("recipe", STRATEGIES.values(), ids=STRATEGIES)
def test_the_main_rank_has_what_one_process_has(recipe):
    expected = trained(af.DistState(), af.compose())[0].state_dict()

    def run(state):
        model, state, _ = trained(state, recipe)
        return af.checkpoint.whole_state_dict(model, state)

    found, *others = simulate(run, world_size=4)
    assert others == [{}] * 3
    assert list(found) == list(expected)
    assert found.pop("_extra_state") == expected.pop("_extra_state") == {"version": 3}
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert found["head.weight"] is found["embedding.weight"]


def test_a_wrapped_model_has_the_keys_of_the_one_inside():
    model = nn.Linear(2, 1)
    found = af.checkpoint.whole_state_dict(nn.DataParallel(model), af.DistState())
    assert list(found) == ["weight", "bias"]


def test_a_model_that_is_none_is_refused_on_all_ranks():
    def run(state):
        error = PeerError if state.is_main else TypeError
        with pytest.raises(error, match=r"model must be a torch\.nn\.Module, got 'str'"):
            af.checkpoint.whole_state_dict(nn.Linear(2, 1) if state.is_main else "model", state)
        return af.reduce_sum(1, state)

    assert simulate(run, world_size=2) == [2, 2]


class Full(torch.Tensor):
    """A tensor that the host has no memory for."""

    def to(self, *args, **kwargs):
        raise MemoryError("no room on the host")


class Unreadable(nn.Linear):
    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return {name: value.as_subclass(Full) for name, value in found.items()}


def test_a_main_rank_out_of_memory_is_an_error_on_all_ranks():
    def run(state):
        with pytest.raises(
            MemoryError if state.is_main else PeerError, match="no room on the host"
        ):
            af.checkpoint.whole_state_dict(Unreadable(2, 1), state)
        return af.reduce_sum(1, state)

    assert simulate(run, world_size=2) == [2, 2]
