# SPDX-License-Identifier: Apache-2.0
"""Text: tokens on a line (s = 1)."""

import torch
from torch import Tensor, nn
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure
from itnet_kernels.transforms import may_look_at
from itnet_kernels.validation import is_one_of

from ..checks import check_ids, check_mask, check_shape
from ..domain import Domain, Signal
from ..operator import ITNetFourierFeatures

logger = logging.get_logger(__name__)


class ITNetTextEncoder(nn.Module):
    """u(x_k) = E[token_k] + E_type[segment_k] + W_pos gamma(x_k); uniform measure over the real tokens.

    Token k = 1..n sits at x_k = k/n, where n counts real tokens only. A causal model uses k / max_position_embeddings
    instead: with k/n a token would see how long the text is going to be. Texts of any length run; those of a causal
    model that are longer than that unit lie outside the interval that it was trained on.
    """

    required = ("input_ids", "inputs_embeds")
    optional = ("attention_mask", "token_type_ids", "position_ids")
    main_input_name = "input_ids"

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        self.unit = config.max_position_embeddings if config.is_causal else None
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.position_projection = nn.Linear(position_size, config.hidden_size, bias=False)
        self.position_projection.initialization = "position"
        self.dropout = nn.Dropout(config.embedding_dropout_prob)

    def input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def forward(
        self,
        fourier: ITNetFourierFeatures,
        input_ids: Tensor | None = None,  # [B, n]
        inputs_embeds: Tensor | None = None,  # [B, n, d] in place of input_ids
        attention_mask: Tensor | None = None,  # [B, n]
        token_type_ids: Tensor | None = None,  # [B, n]
        position_ids: Tensor | None = None,  # [n] or [B, n], from 0
    ) -> Signal:
        if inputs_embeds is None:
            check_shape(input_ids, "input_ids", ["batch", "tokens"], may_be_empty=True)
            table = self.word_embeddings
            features = table(check_ids(input_ids, table.weight.shape[0], "input_ids", "vocab_size"))
        else:
            expected = ["batch", "tokens", self.position_projection.out_features]
            features = check_shape(inputs_embeds, "inputs_embeds", expected, may_be_empty=True)
        batch, count = features.shape[:2]
        if count == 0:
            raise ValueError("`input_ids` holds no token; a text needs at least one")
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None and not is_one_of(ids.shape, [batch, count], [1, count], [count]):
                raise ValueError(f"`{name}` {list(ids.shape)} must be [{batch}, {count}]: one for each token")
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, count, dtype=torch.long, device=features.device)
        types = self.token_type_embeddings
        check_ids(token_type_ids, types.weight.shape[0], "token_type_ids", "type_vocab_size")
        features = features + types(token_type_ids)
        mask = check_mask(attention_mask, batch, count)
        positions = self.positions(count, mask, position_ids, features.device)
        if self.unit is not None and count > self.unit and may_look_at(positions) and positions.max() > 1:
            logger.warning_once(
                f"a text is longer than `max_position_embeddings` ({self.unit}): its positions exceed 1, where a "
                "causal model has learned nothing"
            )
        given = {"is_padded": mask is not None, "layout": ((count,),)}
        domain = Domain(positions, uniform_measure(features, mask), fourier.frequencies, **given)
        return Signal(self.dropout(features + self.position_projection(domain.gamma(features.dtype))), domain)

    def positions(self, count: int, mask: Tensor | None, position_ids: Tensor | None, device) -> Tensor:
        """x_k of every token: [n, 1] if the samples agree by construction, else [B, n, 1]."""
        if position_ids is not None:
            number = position_ids.to(device).float() + 1
        elif mask is not None:
            number = mask.int().cumsum(1)  # left padding sits at 0, right padding at the last k
        else:
            number = torch.arange(1, count + 1, device=device, dtype=torch.float32)
        length = self.unit
        if length is None:
            length = count if mask is None else mask.sum(1, keepdim=True)
        return (number / length).unsqueeze(-1)
