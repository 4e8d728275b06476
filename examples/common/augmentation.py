"""Image augmentation by kornia, on whole batches, and the soft labels that mixing images makes."""

from collections.abc import Callable

import kornia.augmentation as K
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def augmentations(size: tuple[int, int], kind: str, magnitude: int, erasing: float) -> nn.Module:
    """Pixels in [0, 1] to pixels in [0, 1].

    "none"; "light": a shifted crop and a flip; "flip": the flip alone; "rand": crop of random size, flip and
    RandAugment with two operations of a magnitude out of 30 (Table hp_imagenet). `erasing` is the probability that a
    rectangle is blanked.
    """
    steps: list[nn.Module] = []
    if kind == "light":
        steps += [K.RandomCrop(size, padding=max(size) // 8, padding_mode="reflect")]
    elif kind == "rand":
        steps += [K.RandomResizedCrop(size, scale=(0.08, 1.0))]
    elif kind not in ("none", "flip"):
        raise ValueError(f"`augmentation` ({kind!r}) must be none, flip, light or rand")
    if kind != "none":
        steps += [K.RandomHorizontalFlip()]
    if kind == "rand":
        steps += [K.auto.RandAugment(n=2, m=magnitude)]
    if erasing > 0:
        steps += [K.RandomErasing(p=erasing)]
    return nn.Sequential(*steps)


class MixImages:
    """Mixup (lambda ~ Beta(a, a)) or CutMix, either with probability 1/2 if both are on, of a batch with itself."""

    def __init__(self, mixup: float, cutmix: float, num_labels: int):
        self.kinds: list[tuple[Callable, float]] = []
        self.kinds += [(_mixup, mixup)] if mixup > 0 else []
        self.kinds += [(_cutmix, cutmix)] if cutmix > 0 else []
        self.num_labels = num_labels

    def __call__(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """pixels [B, C, H, W], labels [B] -> pixels, and labels [B, num_labels] if anything is mixed."""
        if not self.kinds:
            return pixels, labels
        mix, alpha = self.kinds[int(torch.randint(len(self.kinds), ()))]
        order = torch.randperm(len(pixels))
        share = float(torch.distributions.Beta(alpha, alpha).sample())
        pixels, share = mix(pixels, pixels[order], share)
        targets = F.one_hot(labels, self.num_labels).float()
        return pixels, share * targets + (1 - share) * targets[order]


def _mixup(pixels: Tensor, other: Tensor, share: float) -> tuple[Tensor, float]:
    return share * pixels + (1 - share) * other, share


def _cutmix(pixels: Tensor, other: Tensor, share: float) -> tuple[Tensor, float]:
    """A rectangle of (1 - share) of the area comes from the other image; the share that is kept, after clipping."""
    height, width = pixels.shape[2:]
    side = (1 - share) ** 0.5
    cut_height, cut_width = int(height * side), int(width * side)
    y, x = int(torch.randint(height, ())), int(torch.randint(width, ()))
    top, bottom = max(y - cut_height // 2, 0), min(y + cut_height // 2, height)
    left, right = max(x - cut_width // 2, 0), min(x + cut_width // 2, width)
    mixed = pixels.clone()
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
