# SPDX-License-Identifier: Apache-2.0
"""Turns images into pixel values, with PIL and NumPy only."""

from numbers import Number

import numpy as np
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PILImageResampling
from transformers.processing_utils import ImagesKwargs, Unpack

from .common import CheckedSettings


class ITNetImageProcessorKwargs(ImagesKwargs, total=False):
    r"""
    num_channels (`int`, *optional*, defaults to 3):
        Channels that an image must have after conversion: the model's `num_channels`.
    """

    num_channels: int


class ITNetImageProcessor(CheckedSettings, PilBackend):
    """
    Converts to RGB, resizes, scales to [0, 1] and normalises to [-1, 1]. 16-bit images are reduced to 8 bits first:
    white stays white. Arrays have an axis of channels, first or last. `num_channels=1` is for grey images:
    RGB becomes its luminance, and mean and standard deviation have one entry.
    [`ITNetImageProcessor.from_model_config`] sets all of it.
    """

    valid_kwargs = ITNetImageProcessorKwargs
    model_input_names = ["pixel_values"]

    resample = PILImageResampling.BICUBIC
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    size = {"height": 224, "width": 224}
    do_convert_rgb = True
    do_resize = True
    do_rescale = True
    do_normalize = True
    num_channels = 3

    def __init__(self, **kwargs: Unpack[ITNetImageProcessorKwargs]):
        self.check_settings(kwargs)
        super().__init__(**kwargs)

    @classmethod
    def setting_names(cls) -> set[str]:
        return set(cls.valid_kwargs.__annotations__)

    @classmethod
    def from_model_config(cls, config, **kwargs) -> "ITNetImageProcessor":
        """Returns the processor that makes images of the size and number of channels of a model's configuration."""
        height, width = config.image_shape
        values = {"size": {"height": height, "width": width}, "num_channels": config.num_channels}
        if config.num_channels != 3:
            half = [0.5] * config.num_channels
            values |= {"do_convert_rgb": False, "image_mean": half, "image_std": half}
        return cls(**{**values, **kwargs})

    def _prepare_image_like_inputs(self, images, do_convert_rgb=None, **kwargs) -> list[np.ndarray]:
        """Returns an array [channels, height, width] per image, and checks the number of channels.

        As in the base class, but errors name the shape of what is no image, and do not print its pixels.
        """
        _check_images(images)
        arrays = []
        for image in self._prepare_images_structure(images):
            mode = image.mode if isinstance(image, Image.Image) else None
            if mode == "P" and not do_convert_rgb:
                raise ValueError(
                    "an image of mode 'P' holds palette indices, not colours: pass `do_convert_rgb=True` or convert it"
                )
            if (mode or "").startswith("I;16") or getattr(image, "dtype", None) == np.uint16:
                eight_bits = (np.asarray(image).astype(np.uint16) / 257).round().astype(np.uint8)  # white stays white
                image = Image.fromarray(eight_bits) if mode else eight_bits
            if self.num_channels == 1 and mode == "RGB":  # pipelines turn every image to RGB, grey ones too
                image = image.convert("L")
            arrays.append(self.process_image(image, do_convert_rgb, **kwargs))
            if len(arrays[-1]) != self.num_channels:
                kind = f"of mode {mode!r}" if mode else "given as an array"
                raise ValueError(
                    f"an image {kind} has {len(arrays[-1])} channels, but `num_channels` is {self.num_channels}: "
                    f"convert it, or set `do_convert_rgb` (now {do_convert_rgb}) and `num_channels` to what the model "
                    "takes"
                )
        return arrays


def _check_images(images) -> None:
    """Raises a `ValueError` for numbers that are no image, images without pixels, and values beyond 8 bits."""
    if isinstance(images, (list, tuple)):
        for image in images:
            _check_images(image)
    elif isinstance(images, Number):
        raise ValueError("images are PIL images, arrays or tensors, not lists of numbers: pass `np.array(image)`")
    elif isinstance(images, Image.Image) and 0 in images.size:
        raise ValueError(f"an image of {images.size[0]} × {images.size[1]} pixels is empty")
    elif isinstance(images, Image.Image) and images.mode in ("I", "F"):  # a conversion would cut values off at 255
        lowest, highest = images.getextrema()
        if lowest < 0 or highest > 255:
            values = f"holds values from {lowest} to {highest}"
            raise ValueError(f"an image of mode {images.mode!r} {values}: scale them to 0 to 255 first")
    elif hasattr(images, "shape") and (len(images.shape) < 3 or 0 in images.shape):
        needs = "it needs an axis of channels, as in `array[None]`, [1, height, width]"
        fault = needs if len(images.shape) < 3 else "it has no pixels"
        raise ValueError(f"an array {list(images.shape)} is no image: {fault}")
