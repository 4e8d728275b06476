# SPDX-License-Identifier: Apache-2.0
"""Processes image and text together, by an image processor and a tokenizer."""

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin

from .image import ITNetImageProcessor


class ITNetProcessorKwargs(ProcessingKwargs, total=False):
    _defaults = {"text_kwargs": {"padding": True}}


class ITNetProcessor(ProcessorMixin):
    """
    Combines an [`ITNetImageProcessor`] and a tokenizer. Texts are padded to the longest of a batch; one that is longer
    than the tokenizer's `model_max_length` is an error, unless `truncation=True`.

    Pairs of images, `[[a, b], [c, d]]`, with one text each become `pixel_values` `[B, 2, C, H, W]`.
    """

    valid_processor_kwargs = ITNetProcessorKwargs

    def __init__(self, image_processor=None, tokenizer=None, **kwargs):
        super().__init__(image_processor, tokenizer, **kwargs)

    @classmethod
    def from_model_config(cls, config, tokenizer) -> "ITNetProcessor":
        """Returns the processor for a model's configuration, around a tokenizer."""
        return cls(ITNetImageProcessor.from_model_config(config), tokenizer)

    def __call__(self, images=None, text=None, **kwargs) -> BatchFeature:
        """Processes `images` (one, a list, or a list of lists of the same length) with `text` (one or a list)."""
        are_several = isinstance(images, (list, tuple))
        if are_several and isinstance(text, (list, tuple)) and len(images) != len(text):
            raise ValueError(f"`images` holds {len(images)} entries, but there are {len(text)} texts")
        are_grouped = are_several and len(images) > 0 and isinstance(images[0], (list, tuple))
        if are_grouped:
            counts = [len(group) for group in images]
            if len(set(counts)) > 1:
                raise ValueError(f"every text needs the same number of images, got {counts}")
            images = [image for group in images for image in group]
        batch = super().__call__(images=images, text=text, **kwargs)
        if "input_ids" in batch:
            self._check_length(batch["input_ids"])
        if are_grouped:
            pixels, size = batch["pixel_values"], counts[0]
            groups = [pixels[start : start + size] for start in range(0, len(pixels), size)]
            batch["pixel_values"] = groups if isinstance(pixels, list) else pixels.reshape(-1, size, *pixels.shape[1:])
        return batch

    def _check_length(self, input_ids) -> None:
        rows = input_ids if len(input_ids) and hasattr(input_ids[0], "__len__") else [input_ids]
        longest, limit = max(map(len, rows)), self.tokenizer.model_max_length
        if longest > limit:
            fault = f"a text has {longest} tokens, more than `model_max_length` ({limit}) of the tokenizer"
            raise ValueError(f"{fault}: shorten it, or pass `truncation=True`")
