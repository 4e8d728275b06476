# SPDX-License-Identifier: Apache-2.0
"""The encoder of texts: tokens lie on a line (s = 1)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure
from itnet_kernels.transforms import may_look_at
from itnet_kernels.validation import is_one_of

from ..checks import check_ids, check_mask, check_shape
from ..domain import Domain, Signal
from ..integration.documents import Documents, document_starts, find_documents, positions_in_documents
from ..operator import ITNetFourierFeatures

if TYPE_CHECKING:
    from ..generation.cache import ITNetCache

logger = logging.get_logger(__name__)


class ITNetTextEncoder(nn.Module):
    """u(x_k) = E[token_k] + E_type[segment_k] + W_pos gamma(x_k); uniform measure over the real tokens.

    Token k = 1..n sits at x_k = k/n, where n counts real tokens only. A causal model uses k / max_position_embeddings
    instead: with k/n a token would see how long the text is going to be. Texts of any length run; those of a causal
    model that are longer than that unit lie outside the interval that it was trained on.

    A row of a causal model may hold several documents, which do not see each other: `seq_idx` numbers them,
    `cu_seq_lens_q` says where they start, or `position_ids` restart, in rows without an `attention_mask`.
    """

    required = ("input_ids", "inputs_embeds")
    optional = ("attention_mask", "token_type_ids", "position_ids", "seq_idx", "cu_seq_lens_q")
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
        seq_idx: Tensor | None = None,  # [B, n]
        cu_seq_lens_q: Tensor | None = None,  # [documents + 1]
        cache: "ITNetCache | None" = None,  # the tokens before these
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
        past = None if cache is None or cache.length == 0 else cache
        if past is None:
            mask = check_mask(attention_mask, batch, count, may_be_empty=cache is not None)
        else:
            mask = _mask_after(past, attention_mask, count)
        documents = None
        if seq_idx is not None or cu_seq_lens_q is not None or self.unit is not None:
            restarts = position_ids if mask is None and past is None else None
            documents = self._documents(batch, count, restarts, seq_idx, cu_seq_lens_q)
        if documents is not None and position_ids is None:
            real = features.new_ones(batch, count) if mask is None else mask
            position_ids = positions_in_documents(documents, real)
        positions = self.positions(count, mask, position_ids, features.device, None if past is None else past.count)
        if self.unit is not None and may_look_at(positions) and positions.max() > 1:
            logger.warning_once(
                f"a text is longer than `max_position_embeddings` ({self.unit}): its positions exceed 1, where a "
                "causal model has learned nothing"
            )
        given = {"is_padded": mask is not None, "layout": ((count,),), "documents": documents}
        domain = Domain(positions, uniform_measure(features, mask), fourier.frequencies, **given)
        features = self.dropout(features + self.position_projection(domain.gamma(features.dtype)))
        return Signal(features, domain if cache is None or documents is not None else cache.extend(domain))

    def _documents(self, batch: int, count: int, *given: Tensor | None) -> Documents | None:
        if self.unit is None:
            raise ValueError("`seq_idx` and `cu_seq_lens_q` tell documents apart in rows of causal models only")
        starts = document_starts(batch, count, *given)
        return None if starts is None else find_documents(starts)

    def positions(
        self, count: int, mask: Tensor | None, position_ids: Tensor | None, device, before: Tensor | None = None
    ) -> Tensor:
        """Returns x_k of every token: [n, 1] if the samples agree by construction, else [B, n, 1].

        ``before`` [B] are the real tokens that a cache holds of every text.
        """
        if position_ids is not None:
            number = position_ids.to(device).float() + 1
        elif mask is not None:
            number = mask.int().cumsum(1)  # left padding sits at 0, right padding at the last k
        else:
            number = torch.arange(1, count + 1, device=device, dtype=torch.float32)
        if before is not None and position_ids is None:
            number = number + before.unsqueeze(1)
        length = self.unit
        if length is None:
            length = count if mask is None else mask.sum(1, keepdim=True)
        return (number / length).unsqueeze(-1)


def _mask_after(cache: "ITNetCache", mask: Tensor | None, count: int) -> Tensor | None:
    """Returns the mask [B, n] of new tokens, from one of theirs or one of all tokens, which `generate` gives."""
    if mask is None:
        return None
    batch, total = cache.batch_size, cache.length + count
    check_shape(mask, "attention_mask", [batch, total], [batch, count], note=": the cached tokens and the new ones")
    mask = check_mask(mask, batch, mask.shape[1], may_be_empty=True)
    if mask.shape[1] == total and may_look_at(mask):
        read, kept = mask[:, :-count], cache.measure
        number = read.sum(1).long()
        if not (torch.equal(number, cache.count) and torch.equal(read[:, -kept.shape[1] :], kept.to(read.dtype))):
            raise ValueError(
                f"`attention_mask` calls {number.tolist()} of the cached tokens real, but {cache.count.tolist()} were "
                "in `past_key_values`, or others were: what was read cannot become padding, nor padding a token"
            )
    return mask[:, -count:]
