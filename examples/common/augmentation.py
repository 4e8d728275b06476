"""Image augmentation by kornia, on whole batches, and the soft labels that mixing images makes."""

import kornia.augmentation as K
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def augmentations(size: tuple[int, int], kind: str, magnitude: int, erasing: float) -> nn.Module:
    """Returns a module that turns pixels in [0, 1] into pixels in [0, 1].

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
    """Mixup or CutMix of a batch with itself, either with probability 1/2 if both are on.

    Mixup adds (1 - s) of an image and s of another, CutMix pastes a rectangle of the share s of the area; s (CutMix:
    before the sides are rounded) is drawn from Beta(alpha, alpha), once per batch.
    """

    def __init__(self, mixup: float, cutmix: float, num_labels: int):
        self.kinds = [(kind, alpha) for kind, alpha in ((self._mixup, mixup), (self._cutmix, cutmix)) if alpha > 0]
        self.num_labels = num_labels

    def __call__(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixes pixels [B, C, H, W] with labels [B]; returns both, labels as shares of classes [B, num_labels]."""
        mix, alpha = self.kinds[int(torch.randint(len(self.kinds), ()))]
        pixels, (first, second, share) = mix(pixels, labels, alpha)
        own, other = (F.one_hot(classes.long(), self.num_labels).float() for classes in (first, second))
        return pixels, torch.lerp(own, other, share.unsqueeze(-1))

    # kornia's labels are columns: the class of the image, that of the other, and the share of the one or the other.

    @staticmethod
    def _mixup(pixels: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        share = float(torch.distributions.Beta(alpha, alpha).sample())  # kornia's own is uniform on an interval
        mix = K.RandomMixUpV2(lambda_val=(share, share), data_keys=["input", "class"])
        pixels, columns = mix(pixels, labels)  # [B, 3]
        return pixels, columns.unbind(-1)

    @staticmethod
    def _cutmix(pixels: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        mix = K.RandomCutMixV2(beta=alpha, same_on_batch=True, use_correct_lambda=True, data_keys=["input", "class"])
        pixels, columns = mix(pixels, labels)  # [1, B, 3]
        first, second, kept = columns[0].unbind(-1)
        return pixels, (first, second, 1 - kept)
