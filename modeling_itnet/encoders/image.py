# SPDX-License-Identifier: Apache-2.0
"""The encoder of images: patches lie on one or several grids of the unit square (s = 2)."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure

from ..checks import check_shape, input_dtype
from ..domain import Domain, Signal
from ..operator import ITNetFourierFeatures

#: The [CLS] position sits in the middle of the image.
CLS_POSITION = (0.5, 0.5)


class ITNetImageEncoder(nn.Module):
    """u(x) = W_img patch + W_pos gamma(x) at the patch centres x in [0, 1]^2, ordered (row, column); uniform measure.

    With several patch sizes the grids form one joint domain (App. enc_multiscale). Positions are coordinates, so any
    image size that is a multiple of the patch sizes works, trained on or not. ``pooling="cls"`` adds a [CLS] position
    in front, at the centre of the image.
    """

    required = ("pixel_values",)
    optional = ()
    main_input_name = "pixel_values"

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_embeddings = nn.ModuleList(
            nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)
            for size in config.patch_sizes
        )
        self.position_projection = nn.Linear(position_size, config.hidden_size, bias=False)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden_size)) if config.pooling == "cls" else None
        self.dropout = nn.Dropout(config.embedding_dropout_prob)

    def reset_own_parameters(self, config: ITNetConfig) -> None:
        if self.cls_token is not None:
            init.normal_(self.cls_token, std=config.initializer_range)

    def input_embeddings(self) -> nn.Module:
        return self.patch_embeddings[0]  # of the first grid: whatever hooks it, its outputs reach every layer

    def forward(self, fourier: ITNetFourierFeatures, pixel_values: Tensor) -> Signal:
        """Takes pixel_values [B, C, height, width]."""
        channels = self.num_channels
        expected, note = ["batch", channels, "height", "width"], f": `num_channels` is {channels}"
        check_shape(pixel_values, "pixel_values", expected, note=note, may_be_empty=True)
        for size in (embed.kernel_size[0] for embed in self.patch_embeddings):
            if any(side == 0 or side % size for side in pixel_values.shape[2:]):
                raise ValueError(
                    f"image size {list(pixel_values.shape[2:])} of `pixel_values` must be a multiple of "
                    f"`patch_size` ({size})"
                )
        pixel_values = pixel_values.to(input_dtype(self.patch_embeddings[0]))
        maps = [embed(pixel_values) for embed in self.patch_embeddings]  # [B, d, rows, columns] each
        features = torch.cat([m.flatten(2).transpose(1, 2) for m in maps], dim=1)  # [B, n, d]
        positions = torch.cat([patch_centres(*m.shape[2:], device=m.device) for m in maps])  # [n, 2]
        layout = tuple(tuple(m.shape[2:]) for m in maps)
        if self.cls_token is not None:
            layout = ((), *layout)
            features = torch.cat([self.cls_token.expand(features.shape[0], -1, -1), features], dim=1)
            positions = torch.cat([positions.new_tensor([CLS_POSITION]), positions])
        domain = Domain(positions, uniform_measure(features), fourier.frequencies, is_padded=False, layout=layout)
        return Signal(self.dropout(features + self.position_projection(domain.gamma(features.dtype))), domain)


def patch_centres(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Returns the centres of a grid of patches over [0, 1]^2, row by row: [rows * columns, 2]."""
    row, column = ((torch.arange(count, device=device) + 0.5) / count for count in (rows, columns))
    return torch.cartesian_prod(row, column)
