# SPDX-License-Identifier: Apache-2.0
"""The encoder of image and text, which lie on one joint domain of the plane (s = 2)."""

import torch
from torch import Tensor, nn

from configuration_itnet import ITNetConfig

from ..domain import Domain, Signal
from ..operator import ITNetFourierFeatures
from .image import ITNetImageEncoder
from .text import ITNetTextEncoder

#: Second coordinate of all text tokens; images end at 1.
TEXT_LINE = 2.0


class ITNetPlaneTextEncoder(ITNetTextEncoder):
    """Text on a line of the plane that no image reaches: token k of n sits at (k/n, 2)."""

    def positions(self, *args) -> Tensor:
        line = super().positions(*args)  # [n, 1] or [B, n, 1]
        return torch.cat([line, torch.full_like(line, TEXT_LINE)], dim=-1)


class ITNetMultimodalEncoder(nn.Module):
    """Patches on the unit square and tokens at (k/n, 2), each with the embedding of its modality added.

    The image comes first. With ``pooling="cls"`` its [CLS] position is the first of all, and the one that heads read;
    the [CLS] token of the text is a token like any other. ``config.measure`` shares the mass 1 out: "uniform" gives
    every position the same weight, "balanced" image and text one half each, [a, b] the image a / (a + b) and the text
    b / (a + b); within a modality all real positions weigh the same. [CLS] belongs to the image.
    """

    required = ("input_ids", "inputs_embeds")
    optional = ("pixel_values", "attention_mask", "token_type_ids", "position_ids")
    main_input_name = "pixel_values"

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        self.measure = (1.0, 1.0) if config.measure == "balanced" else config.measure
        self.image = ITNetImageEncoder(config, position_size)
        self.text = ITNetPlaneTextEncoder(config, position_size)
        self.modality_embeddings = nn.Embedding(2, config.hidden_size)  # e_img, e_txt

    def input_embeddings(self) -> nn.Module:
        return self.text.input_embeddings()

    def forward(self, fourier: ITNetFourierFeatures, pixel_values: Tensor | None = None, **text_inputs) -> Signal:
        """Takes pixel_values [B, C, height, width] and as text_inputs the arguments of :class:`ITNetTextEncoder`."""
        if pixel_values is None:
            raise ValueError("`pixel_values` is missing: multimodal input is an image and a text")
        image, text = self.image(fourier, pixel_values), self.text(fourier, **text_inputs)
        if image.features.shape[0] != text.features.shape[0]:
            raise ValueError(
                f"`pixel_values` holds {len(image.features)} images, but there are {len(text.features)} texts"
            )
        features = [part.features + e for part, e in zip((image, text), self.modality_embeddings.weight, strict=True)]
        plane = image.positions.expand(*text.positions.shape[:-2], -1, -1)  # [n_img, 2] or [B, n_img, 2], as the text
        positions = torch.cat([plane, text.positions], dim=-2)
        given = {"is_padded": text.domain.is_padded, "layout": image.domain.layout + text.domain.layout}
        domain = Domain(positions, self._measure(image, text), fourier.frequencies, **given)
        return Signal(torch.cat(features, dim=1), domain)

    def _measure(self, image: Signal, text: Signal) -> Tensor:
        """Returns omega [B, n_img + n_txt]. Both parts come with a uniform measure of their own."""
        shares = self.measure
        if shares == "uniform":
            shares = [(part.measure > 0).sum(1, keepdim=True) for part in (image, text)]  # real positions
        total = shares[0] + shares[1]
        return torch.cat([image.measure * (shares[0] / total), text.measure * (shares[1] / total)], dim=1)
