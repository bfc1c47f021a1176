"""Balance a pole on a cart by PPO: advantages are normalised before the batch is cut.

    python examples/ppo.py
    accel-fn launch -n 2 --cpu examples/ppo.py

Each rank plays its part of 16 games, and `gather` joins the moves of all. Numbers are float64:
then rounding, which differs between numbers of ranks, practically never changes a drawn action.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af

NUM_GAMES, NUM_MOVES, ROUNDS, EPOCHS, BATCH = 16, 128, 20, 4, 256


class Carts:
    """The cart and pole of Barto, Sutton and Anderson (1983), many at a time."""

    def __init__(self, start):
        self.at = start  # [n, 4]: position and speed of the cart, angle and speed of the pole

    def move(self, action, restart):
        """Push to the left (0) or right (1); return which games ended, and start those anew."""
        _, v, angle, turn = self.at.unbind(dim=1)
        sin, cos = angle.sin(), angle.cos()
        push = (20 * action - 10 + 0.05 * turn**2 * sin) / 1.1
        spin = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = push - 0.05 * spin * cos / 1.1
        self.at = self.at + 0.02 * torch.stack([v, pull, turn, spin], dim=1)
        ended = (self.at[:, 0].abs() > 2.4) | (self.at[:, 2].abs() > math.radians(12))
        self.at = torch.where(ended.unsqueeze(1), restart, self.at)
        return ended


def play(model, carts, state):
    """Play NUM_MOVES in each of this rank's games; return rows [games, moves, ...]."""
    moves = []
    for number in range(NUM_MOVES):
        # For all games, so that a game does not depend on the number of ranks.
        chance = af.draw(lambda g: torch.rand(NUM_GAMES, 5, generator=g), state, f"move {number}")
        logit, value = model(carts.at).unbind(dim=1)
        action = (chance[:, 0] < logit.sigmoid()).double()
        move = {"seen": carts.at, "action": action, "value": value}
        move["log_prob"] = -F.softplus(logit * (1 - 2 * action))
        move["ended"] = carts.move(action, 0.1 * chance[:, 1:] - 0.05).double()
        moves.append(move)
    rows = {name: torch.stack([move[name] for move in moves], dim=1) for name in moves[0]}
    return rows | {"last": model(carts.at)[:, 1]}


def advantages(rows, discount=0.99, decay=0.95):
    """Generalised advantage estimates (Schulman et al. 2015); each move that is made earns 1."""
    values = torch.cat([rows["value"], rows["last"].unsqueeze(1)], dim=1)
    found, after = [], 0
    for number in reversed(range(NUM_MOVES)):
        goes_on = 1 - rows["ended"][:, number]
        error = 1 + discount * goes_on * values[:, number + 1] - values[:, number]
        after = error + discount * decay * goes_on * after
        found.insert(0, after)
    return torch.stack(found, dim=1)


def shuffle(generator):
    """The rows of all batches: [BATCH, batches], so that each rank gets its part of each batch."""
    return torch.randperm(NUM_GAMES * NUM_MOVES, generator=generator).view(BATCH, -1)


def loss_fn(model, batch):
    logit, value = model(batch["seen"]).unbind(dim=1)
    log_prob = -F.softplus(logit * (1 - 2 * batch["action"]))
    ratio = (log_prob - batch["log_prob"]).exp()
    gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
    return 0.5 * F.mse_loss(value, batch["return"]) - gain.mean()


def main():
    torch.set_default_dtype(torch.float64)
    state = af.init(device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))  # a logit and a value
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    recipe = af.compose(af.wrap_ddp(), af.clip(0.5), af.log_to("runs/ppo/log.jsonl"))
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    start = af.draw(lambda g: torch.rand(NUM_GAMES, 4, generator=g), state, "start")
    carts = Carts(0.1 * start - 0.05)
    for number in range(ROUNDS):
        with torch.no_grad():
            rows = af.gather(play(model, carts, state), state)  # the games of all ranks
        length = NUM_GAMES * NUM_MOVES / rows["ended"].sum()
        rows["advantage"] = advantages(rows)
        rows["return"] = rows["advantage"] + rows["value"]
        rows = {name: rows[name].flatten(0, 1) for name in rows if name != "last"}
        # Over all moves of all ranks; in the loss, each micro-batch would have another mean.
        rows["advantage"] = F.layer_norm(rows["advantage"], rows["advantage"].shape)
        for _ in range(EPOCHS):
            order = af.draw(shuffle, state)
            for chosen in order.T:  # this rank's rows of a batch
                state, report = step(state, {name: rows[name][chosen] for name in rows})
        if state.is_main:
            print(f"round {number}  loss {report.loss:.4f}  moves a game {length:.1f}")


if __name__ == "__main__":
    main()
