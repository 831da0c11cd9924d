"""Images to train on, and the three classifiers that recipes/finetune_image.py trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, ResNetConfig, ViTConfig
from transformers.modeling_outputs import ImageClassifierOutput

from .data import shuffled_order

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Images:
    """Pixels [N, 3, size, size] in fp32, between -1 and 1, and labels [N]; some are held out."""

    name: str
    classes: int
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]

    @property
    def size(self) -> int:
        return self.train[0].size(-1)

    def batches(self, seed: int, count: int, batch_size: int, device: str) -> Iterator[Batch]:
        """The first `count` batches in the order of `seed`."""
        pixels, labels = self.train
        order = torch.tensor(shuffled_order(len(labels), seed, count * batch_size))
        for rows in order.split(batch_size):
            yield {"pixel_values": pixels[rows].to(device), "labels": labels[rows].to(device)}


def load_images(args: argparse.Namespace) -> Images:
    """The images of --dataset, or the digits of scikit-learn."""
    return _from_dataset(args) if args.dataset else digits(args.image_size)


def digits(size: int) -> Images:
    """1,797 handwritten digits of 8 x 8 pixels, enlarged; every fifth one is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("the default images are scikit-learn's: pip install scikit-learn, or --dataset") from error
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    pixels = nn.functional.interpolate(pixels, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(found.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    parts = ((pixels[rows].contiguous(), labels[rows]) for rows in (~held_out, held_out))
    return Images("digits of scikit-learn", 10, *parts)


def _from_dataset(args: argparse.Namespace) -> Images:
    """A set of the hub, or a local folder with a folder of images for each class."""
    from datasets import load_dataset

    splits = load_dataset(args.dataset, args.dataset_config)
    missing = {"train"} - set(splits) or {args.image_column, args.label_column} - set(splits["train"].column_names)
    if missing:
        raise SystemExit(f"--dataset {args.dataset}: no {sorted(missing)[0]!r}; it has {splits}")
    # the rows of a folder come class by class
    train = splits["train"].shuffle(seed=0)
    held_out = next((splits[name].shuffle(seed=0) for name in ("validation", "test") if name in splits), None)
    if held_out is None:
        cut = train.train_test_split(test_size=0.2, seed=0)
        train, held_out = cut["train"], cut["test"]
    train, held_out = (part.select(range(min(args.max_images, len(part)))) for part in (train, held_out))
    names = sorted({*train[args.label_column], *held_out[args.label_column]})
    if len(names) < 2:
        raise SystemExit(f"--dataset {args.dataset}: {len(names)} class among the labels; classification needs two")
    parts = (_tensors(part, args, {name: i for i, name in enumerate(names)}) for part in (train, held_out))
    return Images(args.dataset, len(names), *parts)


def _tensors(part: Any, args: argparse.Namespace, number: dict[Any, int]) -> tuple[Tensor, Tensor]:
    side = args.image_size
    images = (image.convert("RGB").resize((side, side)) for image in part[args.image_column])
    rows = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in images]
    pixels = torch.stack(rows).view(-1, side, side, 3).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pixels.contiguous(), torch.tensor([number[label] for label in part[args.label_column]])


class Affine(nn.Module):
    """A gain and a shift per feature, which ResMLP has instead of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, self.gain, x)


class ResMLPLayer(nn.Module):
    """A linear layer across the patches, then an MLP across the features; each one's output is scaled and added."""

    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.before, self.across = Affine(width), nn.Linear(patches, patches)
        self.between, self.up, self.act, self.down = (
            Affine(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
        )  # fmt: skip
        self.scales = nn.Parameter(torch.ones(2, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, patches, width]
        x = x + self.scales[0] * self.across(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.scales[1] * self.down(self.act(self.up(self.between(x))))


class ResMLP(nn.Module):
    """ResMLP (arXiv 2105.03404) in plain torch modules: linear layers, GELU, and no norm."""

    def __init__(self, width: int, layers: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.Sequential(*(ResMLPLayer(width, (size // patch) ** 2) for _ in range(layers)))
        self.last, self.head = Affine(width), nn.Linear(width, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> ImageClassifierOutput:
        """Pixels [B, 3, size, size] and labels [B] -> the mean loss, and logits [B, classes]."""
        x = self.layers(self.patches(pixel_values).flatten(2).transpose(1, 2))
        logits = self.head(self.last(x).mean(1))
        return ImageClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def small_vit(size: int, classes: int) -> nn.Module:
    """Two layers of width 64 on patches of an eighth of the image's side."""
    config = ViTConfig(
        image_size=size, patch_size=size // 8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, initializer_range=0.1, num_labels=classes,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config)


def small_resnet(size: int, classes: int) -> nn.Module:
    """Two stages of two layers with two convolutions each, the first one of a quarter of the image's side."""
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=classes
    )
    return AutoModelForImageClassification.from_config(config)


def small_resmlp(size: int, classes: int) -> nn.Module:
    """Two layers of width 64 on patches of an eighth of the image's side."""
    return ResMLP(64, 2, size, size // 8, classes)


IMAGE_MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "vit": small_vit,
    "resnet": small_resnet,
    "resmlp": small_resmlp,
}


def image_model(name: str, images: Images, seed: int) -> Any:
    """One of the small models with fresh weights, or a pretrained one of that name with a fresh head."""
    torch.manual_seed(seed)
    if name in IMAGE_MODELS:
        return IMAGE_MODELS[name](images.size, images.classes).train()
    try:
        model = AutoModelForImageClassification.from_pretrained(
            name, num_labels=images.classes, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"--models {name}: none of {', '.join(IMAGE_MODELS)}, and {error}") from error
    return model.train()


def fit_images(model: Any, images: Images, args: argparse.Namespace, seed: int) -> list[float]:
    """Train in place with AdamW, linear warm-up and a fall to zero; returns the losses."""
    device = args.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scale = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, **_cycle(args.max_steps))
    losses = []
    for batch in images.batches(seed, args.max_steps, args.batch_size, device):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scale.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _cycle(steps: int) -> dict[str, float]:
    """The length of the schedule and the share of its warm-up: a fifth, and one step at least."""
    # torch divides by the length of the warm-up, which is a step less than its share says
    return {"total_steps": steps + 1, "pct_start": max(0.2, 2 / (steps + 1))}


@torch.no_grad()
def accuracy(model: Any, images: Images, batch_size: int, device: str) -> float:
    """The share of held-out images whose class is predicted correctly. Stock code runs here."""
    model.eval()
    right = 0
    for pixels, labels in zip(*(part.split(batch_size) for part in images.held_out), strict=True):
        logits = model(pixel_values=pixels.to(device), labels=labels.to(device)).logits
        right += int((logits.argmax(-1) == labels.to(device)).sum())
    model.train()
    return right / len(images.held_out[1])
