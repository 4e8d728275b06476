# SPDX-License-Identifier: Apache-2.0
"""What a causal model keeps of the tokens that it has read, so that the next ones cost no more than themselves."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from configuration_itnet import ITNetConfig, find_modality
from itnet_kernels import LowRankState

from ..domain import Domain
from ..integration.choice import integration_mode

if TYPE_CHECKING:
    from ..integration.factors import ITNetFactors

#: Tokens that a cache without all of them can be cut back by, at least.
SPARE = 64


class ITNetCacheLayer:
    """What one layer keeps: the features of the last tokens, and what all tokens amount to in a low-rank kernel.

    The exact kernel needs the features of all tokens, which are its keys and its values. A low-rank kernel needs a
    state of fixed size. So that tokens can be taken back, it has two: that of all tokens, and that of those before the
    kept features, from which the first can be had again for fewer tokens.
    """

    is_compileable, is_croppable, supports_early_init = False, True, False

    def __init__(self):
        self.features: Tensor | None = None  # u of the last tokens [B, m, H, d_h]
        self.state: LowRankState | None = None  # of all tokens; None: not known, as some were taken back
        self.start: LowRankState | None = None  # of the tokens before the features; None: there are none
        self.num_dropped = 0  # of the features and new ones of this call, how many will not be kept

    @property
    def keys(self) -> Tensor:
        """The features as attention would keep them: [B, H, m, d_h]."""
        return self.features.transpose(1, 2)

    values = keys  # one tensor is both

    def with_new(self, heads: Tensor) -> Tensor:
        """Returns the kept features, and then those of new tokens [B, n, H, d_h]: [B, m + n, H, d_h]."""
        return heads if self.features is None else torch.cat([self.features, heads], dim=1)

    def far_field(self, factors: "ITNetFactors", heads: Tensor, domain: Domain) -> Tensor:
        """Returns the low-rank integral over all tokens up to each of the new ones, and moves the states on."""
        num_kept, count = 0 if self.features is None else self.features.shape[1], heads.shape[1]
        if self.state is None and num_kept > 0:
            self.state = _advance(factors, self.features, domain.past, self.start)
        cut = self.num_dropped - num_kept  # new tokens that will not be kept
        if cut <= 0:
            if self.num_dropped > 0:
                first = domain.past.span(0, self.num_dropped)
                self.start = _advance(factors, self.features[:, : self.num_dropped], first, self.start)
            out, self.state = factors(heads, domain, state=self.state)
            return out
        first, self.start = factors(heads[:, :cut], domain.span(0, cut), state=self.state)
        last, self.state = factors(heads[:, cut:], domain.span(cut, count), state=self.start)
        return torch.cat([first, last], dim=1)

    def store(self, keys: Tensor) -> None:
        """Keeps the last of the features that :meth:`with_new` returned."""
        # A slice would keep the memory of all.
        self.features = keys[:, self.num_dropped :].clone() if self.num_dropped else keys

    def select(self, indices: Tensor) -> None:
        """Puts other samples in place of those that the batch has, by their numbers."""
        if self.features is not None:
            self.features = self.features.index_select(0, indices.to(self.features.device))
        self.state, self.start = (_select_state(state, indices) for state in (self.state, self.start))

    def cut(self, count: int) -> None:
        """Takes the last ``count`` tokens back."""
        self.features, self.state = self.features[:, : self.features.shape[1] - count], None


class ITNetCache(Cache):
    """The cache of a causal ITNet, for `past_key_values` of its forward and of `generate`.

    | `integration_mode` | what a layer keeps |
    |---|---|
    | exact, monte_carlo | the features of all tokens: `n d` numbers, half of what attention keeps |
    | near_far | those of the last `near_size + 63` to twice as many tokens, and two states of the far field |
    | low_rank | those of the last 65 to 130 tokens, and two states |

    A state has `r H` numbers with `factor_form="vector"` and `r d` with "matrix", and `d + 1` more, whatever the
    number of tokens. Beside that, all layers share the coordinates of the kept tokens and which of them are padding.

    Everything that a cache does is exact: continuing with one or several tokens, left or right padding, other samples
    in other places (beams), and taking tokens back (`crop`, by which assisted decoding refuses candidates). A cache
    without all tokens can take back the last 64 of them, and any number since `activate_past_recording`.

    Args:
        config: that of the model.
        spare: tokens that can be taken back at least, of a cache without all of them.
    """

    def __init__(self, config: ITNetConfig, spare: int = SPARE):
        if not config.is_causal:
            raise ValueError(f"`is_causal` ({config.is_causal}) must be True: only causal models have a cache")
        if not find_modality(config.modality).has_tokens:
            raise ValueError(f"`modality` ({config.modality!r}) has no tokens: only models of texts have a cache")
        super().__init__(layers=[ITNetCacheLayer() for _ in range(config.num_hidden_layers)])
        self.signature = _signature(config)
        self.spare = spare
        mode = integration_mode(config, config.max_position_embeddings)
        #: Tokens before a new one whose features it needs; None for all.
        self.reach = {"near_far": config.near_size - 1, "low_rank": 0}.get(mode)
        self.records_past = False
        self._clear()

    def _clear(self) -> None:
        self.length = 0  # tokens so far, padding included
        self.undoable = 0  # of these, since the last crop
        self.count: Tensor | None = None  # real tokens so far [B]
        self.positions: Tensor | None = None  # of the kept tokens [B, m, 1]
        self.measure: Tensor | None = None  # 1 for each real one of them, 0 for padding [B, m]

    def extend(self, domain: Domain) -> Domain:
        """Returns the domain of new tokens, behind those kept, and tells the layers what they may forget."""
        # Any constant is a uniform measure to a causal operator, and pieces of every length agree on 1.
        measure = (domain.measure > 0).to(domain.measure.dtype)
        positions = domain.positions.expand(measure.shape[0], *domain.positions.shape[-2:])
        domain = domain.replaced(measure=measure)
        if self.positions is not None:
            domain.past = Domain(self.positions, self.measure, domain.frequencies)
            positions = torch.cat([self.positions, positions], dim=1)
            measure = torch.cat([self.measure, measure], dim=1)
        count = domain.measure.shape[1]
        self.length, self.undoable = self.length + count, self.undoable + count
        real = domain.measure.sum(1).long()
        self.count = real if self.count is None else self.count + real
        num_dropped = self._num_dropped(measure)
        self.positions, self.measure = positions[:, num_dropped:], measure[:, num_dropped:]
        for layer in self.layers:
            layer.num_dropped = num_dropped
        return domain

    def _num_dropped(self, measure: Tensor) -> int:
        """Returns how many of the tokens [B, m] that are there need not be kept; 0 until that saves half of them."""
        if self.reach is None:
            return 0
        spare = max(self.spare, self.undoable) if self.records_past else self.spare
        before = measure[:, : max(measure.shape[1] - spare, 0)].flip(1).cumsum(1)  # real ones from each to the last
        needed = spare + 1  # something remains when these are taken back
        if self.reach > 0 and before.shape[1] > 0:  # as many real ones, before those that may be taken back
            needed += int((before < before[:, -1:].clamp(max=self.reach)).sum(1).max())
        return measure.shape[1] - needed if measure.shape[1] > 2 * needed else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Takes tokens back: ``-tokens_to_remove`` of them, or all behind the first ``tokens_to_remove`` if positive.

        The cache is then what it was before them.
        """
        number = -tokens_to_remove if tokens_to_remove <= 0 else self.length - tokens_to_remove
        self.undoable = 0
        if number <= 0:
            return
        if number >= self.length:
            self.reset()
            return
        kept, count = self.measure[:, :-number], self.count - self.measure[:, -number:].sum(1).long()
        has_all = self.reach is None or self.measure.shape[1] == self.length
        if not has_all and (number >= self.measure.shape[1] or (kept.sum(1) < count.clamp(max=self.reach)).any()):
            raise ValueError(
                f"`tokens_to_remove` ({tokens_to_remove}) takes {number} of {self.length} tokens back, but this cache "
                f"keeps no more than the last {self.measure.shape[1]} and the {self.reach} before those taken back: "
                f"make it with a larger `spare` ({self.spare}), or call `activate_past_recording` before tokens that "
                "may be taken back"
            )
        self.positions, self.measure, self.count = self.positions[:, :-number], kept, count
        self.length -= number
        for layer in self.layers:
            layer.cut(number)

    def activate_past_recording(self) -> None:
        """Keeps all tokens since the last `crop` from now on, so that they can be taken back."""
        self.records_past, self.undoable = True, 0

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return self.records_past

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sample `beam_idx[k]` sample k."""
        if self.count is not None:
            self.count, self.positions, self.measure = (
                tensor.index_select(0, beam_idx.to(tensor.device))
                for tensor in (self.count, self.positions, self.measure)
            )
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the samples of these numbers, or of a mask, only."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sample `repeats` times, one after the other."""
        if self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forgets all tokens."""
        self._clear()
        self.layers = [ITNetCacheLayer() for _ in self.layers]

    def check(self, config: ITNetConfig, features: Tensor) -> None:
        """Says what is wrong if a model of this configuration cannot continue the cache with features [B, n, d]."""
        own, signature = self.signature, _signature(config)
        for name in own:
            if own[name] != signature[name]:
                raise ValueError(
                    f"`past_key_values` belong to a model with `{name}` {own[name]!r}, but this one has "
                    f"{signature[name]!r}: a cache goes with the model that filled it"
                )
        if self.count is None:
            return
        batch, device = features.shape[0], features.device
        if self.batch_size != batch:
            raise ValueError(
                f"`past_key_values` hold {self.batch_size} texts, but this batch has {batch}: `reorder_cache`, "
                "`batch_repeat_interleave` and `batch_select_indices` change which texts they hold"
            )
        if self.positions.device != device:
            raise ValueError(f"`past_key_values` are on {self.positions.device}, but the new tokens on {device}")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens so far, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns the length and the first token of the attention mask that new tokens need."""
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        """Number of texts, or -1 before the first."""
        return -1 if self.count is None else self.count.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.count is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache keeps."""
        tensors = [self.count, self.positions, self.measure]
        for layer in self.layers:
            tensors += [layer.features, *(layer.state or ()), *(layer.start or ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _signature(config: ITNetConfig) -> dict[str, Any]:
    """Returns what models must agree on to share a cache."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "is_causal", "max_position_embeddings")
    signature = {name: getattr(config, name) for name in names}
    signature["integration_mode"] = mode = integration_mode(config, config.max_position_embeddings)
    if mode in ("low_rank", "near_far"):
        signature |= {name: getattr(config, name) for name in ("rank", "factor_form", "factor_decay")}
    return signature | ({"near_size": config.near_size} if mode == "near_far" else {})


def _advance(factors: "ITNetFactors", heads: Tensor, domain: Domain, state: LowRankState | None) -> LowRankState:
    """Returns the state after more tokens. One query is asked, as there must be one."""
    count = heads.shape[1]
    return factors(heads, domain, queries=heads[:, -1:], query_domain=domain.span(count - 1, count), state=state)[1]


def _select_state(state: LowRankState | None, indices: Tensor) -> LowRankState | None:
    if state is None:
        return None
    return LowRankState(*(None if t is None else t.index_select(0, indices.to(t.device)) for t in state))
