"""Kinds of language models whose sequences `wrap_cp` cuts: right as they are, or refused."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import Case, figures, recipe, sgd, train_by_hand

LONG = {"cp": (2, 3, 4), "world_size": (1, 2), "k": (1, 2), "num_samples": (12, 15, 21, 150, 301)}
"""Numbers of programs: `num_samples` is the length of the sequences."""
WIDTH, WORDS = 8, 11


class Attention(nn.Module):
    """Attention over the keys of a context, that of the tokens themselves if none is given."""

    def __init__(self, *, causal=True, by_hand=False):
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.causal, self.by_hand = causal, by_hand

    def forward(self, hidden, mask=None, context=None):
        key, value = self.key_value(hidden if context is None else context).chunk(2, -1)
        query, key, value = (
            each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.query(hidden), key, value)
        )
        if self.by_hand:
            scores = query @ key.transpose(-1, -2) / 2
            earlier = torch.ones_like(scores, dtype=torch.bool).tril()
            mixed = scores.masked_fill(~earlier, -torch.inf).softmax(-1) @ value
        else:
            causal = self.causal and mask is None and context is None
            mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A layer of attention and a perceptron; `mixer` is put between them."""

    def __init__(self, mixer=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH)
        self.attention, self.mixer = Attention(**options), mixer() if mixer else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, batch, mask=None, context=None):
        hidden = self.tokens(batch["tokens"]) + self.positions(batch)
        hidden = hidden + self.attention(hidden, mask, context)
        return self.head(hidden + self.mixer(hidden).tanh())

    def positions(self, batch):
        return self.places(batch["places"])


def texts(case: Case, *, prompt: float = 0.0):
    """Return rows of tokens, labels that are shifted, of which some are ignored, and places."""
    rows, length = 4, case.num_samples
    words = torch.randint(0, WORDS, (rows, length + 1), generator=case.generator())
    labels = words[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=case.generator()) < 0.2] = -100
    labels[:, : int(prompt * length)] = -100
    labels[:, -1] = 1
    places = torch.arange(length).expand(rows, length)
    return {"tokens": words[:, :-1], "labels": labels, "places": places.contiguous()}


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_over_labels(model, batch):
    return cross_entropy(model(batch), batch["labels"])


DIMS = {"tokens": 1, "labels": 1, "places": 1}


def cut_up(case: Case, make, loss_fn, batch, *, weight_fn=None, dims=None, whole=None, **options):
    """Return the loop by hand, and steps on sequences that are cut over `case.cp` ranks."""
    batches = [batch] * 3

    def run(state):
        model = make()
        weigh = weight_fn or af.count_labels("labels")
        plan = af.Plan(loss_fn, model, sgd(model), weigh, **options)
        cut = af.wrap_cp(dims or DIMS) if case.cp > 1 else af.compose()
        state, step = af.build(af.compose(recipe(case), cut)(plan), state)
        losses = []
        for each in batches:
            state, report = step(state, af.shard_batch(each, state))
            losses.append(report.loss)
        return figures(model, losses)

    return lambda: train_by_hand(make(), whole or loss_fn, batches), run


@kind("equal", **LONG)
def language_model(case: Case):
    """Causal attention, places as an entry, labels shifted before, a mean over the labels that count."""
    return cut_up(case, Model, mean_over_labels, texts(case))


@kind("equal", **LONG)
def answers_after_prompts(case: Case):
    """Labels stand in the last part of each sequence alone."""
    return cut_up(case, Model, mean_over_labels, texts(case, prompt=0.8))


@kind("equal", **LONG)
def masked_words(case: Case):
    """Attention in both directions, as BERT has it."""
    return cut_up(case, lambda: Model(causal=False), mean_over_labels, texts(case))


@kind("equal", **LONG)
def padded_rows(case: Case):
    """A mask of the keys that are no padding, [rows, 1, 1, length]."""
    batch = texts(case)
    lengths = torch.tensor([case.num_samples - 3 * row for row in range(4)])
    batch["is_word"] = torch.arange(case.num_samples) < lengths[:, None]
    batch["labels"][~batch["is_word"]] = -100

    def loss_fn(model, batch):
        mask = batch["is_word"][:, None, None]
        return cross_entropy(model(batch, mask), batch["labels"])

    return cut_up(case, Model, loss_fn, batch)


@kind("equal", **LONG)
def packed_documents(case: Case):
    """Attention within documents, by a mask that the loss makes of an entry that stays whole."""
    batch = texts(case)
    starts = torch.rand(4, case.num_samples, generator=case.generator()) < 0.2
    batch["documents"] = starts.cumsum(1)

    def loss_fn(model, batch):
        documents = batch["documents"]
        earlier = torch.ones(2 * [documents.shape[1]], dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None]) & earlier
        return cross_entropy(model(batch, mask[:, None]), batch["labels"])

    return cut_up(case, Model, loss_fn, batch)


@kind("equal", **LONG)
def summed_over_given_items(case: Case):
    """A sum, divided by a number of items that the batch has, as the Trainer divides."""
    batch = texts(case)
    count = float((batch["labels"] != -100).sum())

    def loss_fn(model, batch):
        logits = model(batch).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count

    return cut_up(case, Model, loss_fn, batch, reduction="sum")


@kind("equal", **LONG)
def distilled(case: Case):
    """A frozen teacher attends too, and each token's loss is a divergence."""
    teacher = Model().requires_grad_(False)
    teacher.head.weight.mul_(2)

    def loss_fn(model, batch):
        with torch.no_grad():
            wanted = teacher(batch).log_softmax(-1)
        each = F.kl_div(model(batch).log_softmax(-1), wanted, reduction="none", log_target=True)
        counts = batch["labels"] != -100
        return (each.sum(-1) * counts).sum() / counts.sum()

    return cut_up(case, Model, loss_fn, texts(case))


@kind("equal", **LONG)
def smoothed_and_tied(case: Case):
    """Label smoothing, and a head that shares its weights with the embedding."""

    def make():
        model = Model()
        model.head.weight = model.tokens.weight
        return model

    def loss_fn(model, batch):
        logits = model(batch).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), label_smoothing=0.1)

    return cut_up(case, make, loss_fn, texts(case))


class OwnPlaces(Model):
    """A model that numbers its tokens itself."""

    def positions(self, batch):
        return self.places(torch.arange(batch["tokens"].shape[1]))


class CountedPlaces(Model):
    """A model that numbers its tokens by a sum over those before, as RoBERTa does."""

    def positions(self, batch):
        return self.places((batch["tokens"] != 0).long().cumsum(1))


@kind("refused", "position_ids", **LONG)
def places_of_the_model(case: Case):
    """The model makes its positions, with labels everywhere, or after prompts."""
    batch = texts(case, prompt=0.8 * (case.seed % 2))
    return cut_up(case, OwnPlaces, mean_over_labels, batch)


@kind("refused", "position_ids", **LONG)
def places_by_a_sum(case: Case):
    """The model counts the tokens that are no padding."""
    return cut_up(case, CountedPlaces, mean_over_labels, texts(case))


class Mixer(nn.Module):
    """Mixes tokens outside of attention: by a convolution, a recurrence, a shift, a sum or a mean."""

    KINDS = "convolution", "recurrence", "shift", "sum", "mean", "norm"

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if name == "convolution" else None
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True) if name == "recurrence" else None

    def forward(self, hidden):
        if self.convolution is not None:
            return self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        if self.recurrence is not None:
            return self.recurrence(hidden)[0]
        if self.name == "shift":
            return F.pad(hidden, (0, 0, 1, -1))
        if self.name == "sum":
            return hidden.cumsum(1) / 10
        if self.name == "mean":
            return hidden - hidden.mean(1, keepdim=True)
        return hidden / hidden.norm(dim=1, keepdim=True)


@kind("refused", "compute each token by itself", **LONG)
def tokens_mixed_elsewhere(case: Case):
    """A layer mixes tokens outside of attention."""
    name = Mixer.KINDS[case.seed % len(Mixer.KINDS)]
    return cut_up(case, lambda: Model(lambda: Mixer(name)), mean_over_labels, texts(case))


@kind("refused", "compute each token by itself", **LONG)
def attention_by_hand(case: Case):
    """Attention by products and a softmax, which no one replaces."""
    return cut_up(case, lambda: Model(by_hand=True), mean_over_labels, texts(case))


@kind("refused", "over the whole sequence", **LONG)
def window_of_the_model(case: Case):
    """The model makes the mask of a window from the number of its tokens."""

    def loss_fn(model, batch):
        length = batch["tokens"].shape[1]
        near = torch.ones(length, length, dtype=torch.bool).tril().triu(-3)
        return cross_entropy(model(batch, near), batch["labels"])

    return cut_up(case, Model, loss_fn, texts(case))


@kind("refused", "attention to another sequence are not cut", **LONG)
def attention_to_another_sequence(case: Case):
    """The tokens attend to the states of an encoder, which stay whole."""
    batch = texts(case)
    batch["states"] = torch.randn(4, 17, WIDTH, generator=case.generator(), dtype=torch.float64)

    def loss_fn(model, batch):
        return cross_entropy(model(batch, None, batch["states"]), batch["labels"])

    return cut_up(case, Model, loss_fn, batch)


def shifted_here(model, batch):
    return cross_entropy(model(batch)[:, :-1], batch["labels"][:, 1:])


@kind("refused", "shift", **LONG)
def labels_shifted_in_the_loss(case: Case):
    """The loss shifts labels, whose weights are counted with the shift or without."""
    weight_fn = af.count_labels("labels", shift=case.seed % 2)
    return cut_up(case, Model, shifted_here, texts(case), weight_fn=weight_fn)


@kind("refused", "count_labels", **LONG)
def mean_of_means_of_rows(case: Case):
    """Each row has the same weight: a mean over rows of the means over their labels."""

    def loss_fn(model, batch):
        logits, labels = model(batch), batch["labels"]
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        counts = (labels != -100).sum(1)
        return (each.view_as(labels).sum(1) / counts).mean()

    return cut_up(case, Model, loss_fn, texts(case), weight_fn=af.count_samples)


@kind("refused", "wrap_cp", **LONG)
def mean_over_all_tokens_beside(case: Case):
    """A penalty is the mean over all tokens, beside a mean over the labels that count."""
    batch = texts(case)
    batch["labels"][:, : case.num_samples // 6] = -100  # so blocks never have equally many labels

    def loss_fn(model, batch):
        logits = model(batch)
        penalty = logits.logsumexp(-1).square().mean()
        return cross_entropy(logits, batch["labels"]) + 0.1 * penalty

    return cut_up(case, Model, loss_fn, batch)


@kind("refused", "wrap_cp", **LONG)
def last_token_alone(case: Case):
    """The loss is that of the last token of each sequence."""

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch)[:, -1], batch["labels"][:, -1])

    return cut_up(case, Model, loss_fn, texts(case), weight_fn=af.count_samples)


@kind("refused", "wrap_cp", **LONG)
def experts_in_balance(case: Case):
    """A loss of balance is a product of means over all tokens."""

    def loss_fn(model, batch):
        logits = model(batch)
        shares = logits.softmax(-1).flatten(0, 1)
        chosen = F.one_hot(shares.argmax(-1), WORDS).double()
        balance = (chosen.mean(0) * shares.mean(0)).sum()
        return cross_entropy(logits, batch["labels"]) + balance

    return cut_up(case, Model, loss_fn, texts(case))


@kind("refused", "one length in all entries", cp=(2, 3), num_samples=(12, 15))
def an_entry_that_is_longer(case: Case):
    """The batch has one token more than labels."""
    batch = texts(replace(case, num_samples=case.num_samples + 1))
    batch["labels"], batch["places"] = batch["labels"][:, 1:], batch["places"][:, 1:]
    whole = {**batch, "tokens": batch["tokens"][:, :-1]}
    return cut_up(
        case, Model, mean_over_labels, batch, whole=lambda model, _: mean_over_labels(model, whole)
    )
