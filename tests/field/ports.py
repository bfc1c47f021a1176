"""Kinds that are ports of public programs: tiny models of transformers, with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import Case, figures, recipe, samples, sgd, update


def drawn_loops(case: Case, make_model, loss_fn, loader, draw, lr=0.1, **options: Any):
    """Return the loop by hand and the one with steps, both with rows of noise that `draw` draws."""

    def optimizer_of(model):
        optimizer = sgd(model)
        optimizer.param_groups[0]["lr"] = lr
        return optimizer

    def by_hand():
        model, losses = make_model(), []
        optimizer = optimizer_of(model)
        for number, batch in enumerate(loader):
            noise = af.draw(draw, replace(af.DistState(), step=number), rows=batch)
            loss = loss_fn(model, {**batch, "noise": noise})
            losses.append(update(model, loss, optimizer))
        return figures(model, losses)

    def run(state):
        model, losses = make_model(), []
        plan = af.Plan(loss_fn, model, optimizer_of(model), **options)
        state, step = af.build(recipe(case)(plan), state)
        for batch in af.shard_loader(loader, state):
            noise = af.draw(draw, state, rows=batch)
            state, report = step(state, {**batch, "noise": noise})
            losses.append(report.loss)
        return figures(model, losses)

    return by_hand, run


def speech(case: Case, ctc: str, **options: Any):
    """Speech of several lengths, with masks of time, to letters: wav2vec2 and CTC."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=6,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",  # of a group, it would depend on the padding
        mask_time_prob=0.3,
        # each of these would draw in the forward, where no rank knows its rows of the batch
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        attn_implementation="sdpa",  # "eager" computes softmax in float32
    )
    generator = case.generator()
    lengths = torch.randint(190, 260, (case.num_samples,), generator=generator).tolist()
    sounds = [torch.randn(each, generator=generator, dtype=torch.float64) for each in lengths]
    texts = [torch.randint(1, 6, (1 + each % 3,), generator=generator) for each in lengths]

    def collate(rows):
        sounds, texts = zip(*rows, strict=True)
        ones = [torch.ones(len(each), dtype=torch.int64) for each in sounds]
        return {
            "input_values": pad_sequence(sounds, batch_first=True),
            "attention_mask": pad_sequence(ones, batch_first=True),
            "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
        }

    def speech_model():
        torch.manual_seed(0)
        return Wav2Vec2ForCTC(config).double()

    def loss_fn(model, batch):
        sounds, mask, labels = batch["input_values"], batch["attention_mask"], batch["labels"]
        num_frames = model._get_feat_extract_output_lengths(mask.sum(1))
        hidden = batch["noise"][:, : int(model._get_feat_extract_output_lengths(sounds.shape[1]))]
        logits = model(sounds, attention_mask=mask, mask_time_indices=hidden).logits
        # transformers' own loss, which would compute in float32
        return F.ctc_loss(
            logits.log_softmax(2).transpose(0, 1),
            labels[labels >= 0],
            num_frames,
            (labels >= 0).sum(1),
            blank=config.pad_token_id,
            reduction=ctc,
        )

    def hides(generator: torch.Generator, num_rows: int) -> Tensor:
        return torch.rand(num_rows, 20, generator=generator) < config.mask_time_prob

    rows = list(zip(sounds, texts, strict=True))
    loader = DataLoader(rows, batch_size=case.batch_size, collate_fn=collate)
    return drawn_loops(case, speech_model, loss_fn, loader, hides, lr=0.01, **options)


@kind("equal")
def speech_by_mean(case: Case):
    """wav2vec2 with `ctc_loss_reduction="mean"`: a mean over samples, each over its letters."""
    return speech(case, "mean")


@kind("equal")
def speech_by_sum(case: Case):
    """wav2vec2 with `ctc_loss_reduction="sum"`, the default: a sum over samples."""
    return speech(case, "sum", reduction="sum")


@kind("refused", "reduction='sum'", world_size=(2, 3), num_samples=(24,))
def speech_by_a_sum_as_a_mean(case: Case):
    """The same with a plan that takes the sum for a mean."""
    by_hand, run = speech(case, "sum")
    return by_hand, run, speech(case, "sum", reduction="sum")[1]


@kind("equal")
def masked_autoencoder(case: Case):
    """Pictures with most patches hidden (MAE): the noise that hides them is drawn for the batch."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
        mask_ratio=0.75,
        norm_pix_loss=bool(case.seed % 2),
        attn_implementation="sdpa",  # "eager" computes softmax in float32
    )
    x, _ = samples(case)
    pictures = (x[:, :, None] * torch.arange(1, 17)).sin().view(-1, 1, 8, 8)
    loader = DataLoader([{"pixel_values": each} for each in pictures], case.batch_size)

    def autoencoder():
        torch.manual_seed(0)
        return ViTMAEForPreTraining(config).double()

    def loss_fn(model, batch):
        return model(batch["pixel_values"], noise=batch["noise"]).loss

    def noise_of(generator: torch.Generator, num_rows: int) -> Tensor:
        return torch.rand(num_rows, 16, generator=generator, dtype=torch.float64)

    return drawn_loops(case, autoencoder, loss_fn, loader, noise_of)
