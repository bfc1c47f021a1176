"""Classify images by a ResNet, as accelerate's cv_example.py does the breeds of Oxford-IIIT Pet.

    python examples/vision.py
    accel-fn launch -n 2 --cpu examples/vision.py
    python examples/vision.py --data-dir images --model microsoft/resnet-50

The folder has files such as Abyssinian_1.jpg, from www.robots.ox.ac.uk/~vgg/data/pets. By default
the digits that come with scikit-learn stand in for them, and a small ResNet for a pretrained one.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from transformers import ResNetConfig, ResNetForImageClassification

import accel_fn as af


class Images(Dataset):
    """Tensors [3, size, size], each a random crop if `crop`, and labels."""

    def __init__(self, samples, size, crop):
        self.samples, self.size, self.crop = samples, size, crop

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        image = Image.open(image) if isinstance(image, Path) else Image.fromarray(image)
        image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255
        if self.crop:
            side = int(min(image.shape[1:]) * (0.8 + 0.2 * torch.rand(())))
            y, x = (int(torch.randint(full - side + 1, ())) for full in image.shape[1:])
            image = image[:, y : y + side, x : x + side]
        return F.interpolate(image[None], [self.size] * 2, mode="bilinear")[0], label


def load_samples(folder):
    """Pairs of an image and its label, in a random order, and the number of labels."""
    if folder:
        images = sorted(folder.glob("*.jpg"))
        names = [path.stem.rpartition("_")[0] for path in images]
    else:
        images, names = load_digits(return_X_y=True)
        images = (images * 15.9).astype(np.uint8).reshape(-1, 8, 8)
    kinds, labels = np.unique(names, return_inverse=True)
    return [(images[i], labels[i]) for i in torch.randperm(len(images))], len(kinds)


def load_model(name, num_labels):
    if name:
        options = {"num_labels": num_labels, "ignore_mismatched_sizes": True}
        model = ResNetForImageClassification.from_pretrained(name, **options).train()
    else:
        size = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
        config = ResNetConfig(**size, layer_type="basic", hidden_act="gelu", num_labels=num_labels)
        model = ResNetForImageClassification(config)
        model.resnet.embedder.pooler = torch.nn.AvgPool2d(2)  # smooth: rounding stays rounding
    return model


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images).logits
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


def main(args):
    state = af.init()
    torch.manual_seed(42)
    samples, num_labels = load_samples(args.data_dir)
    model = load_model(args.model, num_labels)
    size, cut = 224 if args.data_dir else 32, len(samples) * 4 // 5
    train = af.data.seed_samples(Images(samples[:cut], size, crop=True), state)
    train_loader = af.shard_loader(DataLoader(train, 64, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(Images(samples[cut:], size, crop=False), 64), state)

    # eps: a layer before BatchNorm has gradients near 0, and Adam would divide rounding by rounding
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-3)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(train_loader))
    log = af.log_to("runs/vision/log.jsonl")
    wrap = af.wrap_ddp(sync_batchnorm=True)  # BatchNorm over the rows of all ranks
    recipe = af.compose(af.place(), wrap, af.with_amp(), af.schedule(cycle), log)
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    for epoch in af.progress(train_loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = step(state, batch)
            epoch.show(report)
        found = af.evaluate(step, state, test_loader)
        af.log_values(step, state, found, prefix="test/")
        figures = (f"{name} {value:.4f}" for name, value in found.items())
        af.print_on_main("epoch", epoch.index, *figures, state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Classify images by a ResNet.")
    parser.add_argument("--data-dir", type=Path, help="of jpg files (default: digits)")
    parser.add_argument("--model", help="such as microsoft/resnet-50 (default: a small one)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    main(parser.parse_args())
