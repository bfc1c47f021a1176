"""transformers' Mixtral with a balance loss over the global batch, on one to three ranks."""

import pytest
import torch
import torch.nn.functional as F

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(1))


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
    )
    config._experts_implementation = "eager"  # the grouped product of torch knows no float64
    return transformers.MixtralForCausalLM(config).double()


def loss_by(mean):
    """The loss of the model as transformers has it, with the means of the balance loss by `mean`."""

    def loss_fn(model, ids):
        config = model.config
        out = model(input_ids=ids, output_router_logits=True)
        routed = torch.cat(out.router_logits).double().softmax(dim=1)
        chosen = routed.topk(config.num_experts_per_tok).indices
        chosen = F.one_hot(chosen, config.num_local_experts).to(routed)
        shares = mean(chosen, "load") * mean(routed, "probability")
        balance = config.num_local_experts * shares.sum()
        tokens = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return tokens + config.router_aux_loss_coef * balance

    return loss_fn


def by_hand():
    model, loss_fn = mixtral(), loss_by(lambda rows, name: rows.mean(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = loss_fn(model, IDS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
def test_the_balance_loss_is_over_the_rows_of_all_ranks(wrap):
    losses, expected = by_hand()

    def run(state):
        model = mixtral()
        loss_fn = loss_by(lambda rows, name: af.batch_mean(rows, state, name))
        plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(wrap(plan), state)
        found = []
        for _ in range(3):
            state, report = step(state, af.shard_batch(IDS, state))
            found.append(report.loss.item())
        return found, ours.whole(model.state_dict())

    for world_size in (1, 2, 3):
        for found, actual in simulate(run, world_size=world_size, timeout_s=60):
            # transformers' router is in float32.
            assert found == pytest.approx(losses, rel=1e-8)
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_a_balance_loss_by_rank_is_as_far_off_as_the_docs_say():
    losses, _ = by_hand()

    def run(state):
        model = mixtral()
        loss_fn = loss_by(lambda rows, name: rows.mean(0))
        plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(af.wrap_ddp()(plan), state, checks=())
        return step(state, af.shard_batch(IDS, state))[1].loss.item()

    for found in simulate(run, world_size=2):
        assert found / losses[0] - 1 == pytest.approx(5e-5, abs=0.5e-5)


def test_the_loss_is_that_of_transformers():
    model = mixtral()
    found = loss_by(lambda rows, name: rows.mean(0))(model, IDS)
    with torch.no_grad():
        expected = model(input_ids=IDS, labels=IDS, output_router_logits=True).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # theirs is float32
