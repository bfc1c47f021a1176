"""Train a latent diffusion model on digits and their names: frozen parts, drawn noise, averaged weights.

    pip install diffusers transformers
    python examples/text_to_image.py
    accel-fn launch -n 2 --cpu examples/text_to_image.py

The classes are those of Stable Diffusion, and tiny. Nothing is downloaded: the program trains the
autoencoder first, and the text encoder keeps random weights, which still tell ten names apart. Load
yours by `from_pretrained`; what follows stays as it is.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPTextConfig, CLIPTextModel

import accel_fn as af

WIDTH, NUM_TIMES, LATENT = 32, 100, (4, 4, 4)
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LETTERS = " abcdefghijklmnopqrstuvwxyz"
SCHEDULER = DDPMScheduler(NUM_TIMES, beta_end=0.1, clip_sample=False)


def tokens_of(names):
    """Letters stand in for a tokenizer: [number of names, 8]."""
    return torch.tensor([[LETTERS.index(each) for each in f"{name:8}"] for name in names])


def make_models():
    vae = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=LATENT[0],
        block_out_channels=(16, WIDTH),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=8,
        mid_block_add_attention=False,
    )
    unet = UNet2DConditionModel(
        sample_size=LATENT[1],
        in_channels=LATENT[0],
        out_channels=LATENT[0],
        block_out_channels=(24, 48),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(LETTERS),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=8,
            initializer_factor=10.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return vae, unet, text


def vae_loss(vae, images):
    return F.mse_loss(vae.decode(vae.encode(images).latent_dist.mode()).sample, images)


def denoise_loss(unet, batch, frozen):
    latents = frozen["vae"].encode(batch["image"]).latent_dist.mode() * frozen["vae"].scale
    states = frozen["text"](batch["tokens"]).last_hidden_state
    noisy = SCHEDULER.add_noise(latents, batch["noise"], batch["time"])
    return F.mse_loss(unet(noisy, batch["time"], states).sample, batch["noise"])


def draw(generator, size):
    """Times and noise of a whole batch, so that they do not depend on the number of ranks."""
    return {
        "time": torch.randint(NUM_TIMES, (size,), generator=generator),
        "noise": torch.randn(size, *LATENT, generator=generator),
    }


@torch.no_grad()
def generate(unet, vae, text, names, device):
    generator = torch.Generator().manual_seed(0)  # the same images on every rank
    states = text(tokens_of(names).to(device)).last_hidden_state
    latents = torch.randn(len(names), *LATENT, generator=generator)
    for time in SCHEDULER.timesteps:
        noise = unet(latents.to(device), time, states).sample.cpu()
        latents = SCHEDULER.step(noise, time, latents, generator=generator).prev_sample
    return vae.decode(latents.to(device) / vae.scale).sample.cpu()


def main(args):
    torch.set_default_dtype(torch.float64)  # so that differences in rounding stay small
    state = af.init(seed=0)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images).view(-1, 1, 8, 8) / 8 - 1
    data = TensorDataset(images, torch.tensor(labels))
    loader = af.shard_loader(DataLoader(data, 64, shuffle=True, drop_last=True), state)
    tokens = tokens_of(NAMES)

    vae, unet, text = make_models()
    common = af.compose(af.place(), af.wrap_ddp(), af.clip(1.0))
    plan = common(af.Plan(vae_loss, vae, torch.optim.AdamW(vae.parameters(), lr=4e-3)))
    start, vae_step = af.build(plan, state)
    for epoch in loader.epochs(args.vae_epochs, since=start):
        for image, _ in epoch:
            start, report = vae_step(start, image)
    af.print_on_main(f"autoencoder: squared error {report.loss:.4f}", state=state)

    with torch.no_grad():
        vae.scale = 1 / vae.encode(images[:512].to(state.device)).latent_dist.mode().std()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3)
    plan = af.Plan(denoise_loss, unet, optimizer, frozen={"vae": vae, "text": text})
    recipe = af.compose(common, af.ema(0.98), af.log_to(args.out / "log.jsonl"))
    state, step = af.build(recipe(plan), state)
    for epoch in loader.epochs(args.epochs, since=state):
        for image, label in epoch:
            drawn = af.draw(draw, state, rows=image)
            state, report = step(state, {"image": image, "tokens": tokens[label], **drawn})
        if epoch.index % 5 == 4:
            af.print_on_main(f"epoch {epoch.index}  loss {report.loss:.4f}", state=state)

    with af.averaged(step):
        made = generate(unet, vae, text, NAMES * 10, state.device)
    nearest = KNeighborsClassifier().fit(images.flatten(1), labels)
    accuracy = nearest.score(made.flatten(1), list(range(10)) * 10)
    af.print_on_main(
        f"accuracy {accuracy:.4f}: the nearest real digits are of that name", state=state
    )
    af.on_main(lambda: torch.save(made, args.out / "images.pt"), state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a latent diffusion model on digits.")
    parser.add_argument("--vae-epochs", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("runs/text_to_image"))
    main(parser.parse_args())
