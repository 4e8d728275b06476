# SPDX-License-Identifier: Apache-2.0
"""Decodes one token as a function of tensors: a token and the state before it become logits and the state after it.

`ITNetCache` grows, and decides by values what to keep. A graph that runs elsewhere can do neither, so here the state
has a fixed size. It is all that the next token needs:

| `integration_mode` | state of a layer |
|---|---|
| exact, monte_carlo | the features of the last `capacity - 1` tokens |
| near_far | those of the last `near_size - 1` tokens, and the state of the far field |
| low_rank | the state of the kernel |

Tokens cannot be taken back. The layers and their operators are the model's own, on a cache that is made of the state.
"""

import torch
from torch import Tensor, nn

from itnet_kernels import LowRankState

from ..domain import Domain
from ..heads.causal_lm import ITNetForCausalLM
from ..integration.choice import integration_mode
from ..integration.factors import ITNetFactors
from .cache import ITNetCache, ITNetCacheLayer


class DecodingStep(nn.Module):
    """A causal language model, one token at a time, with its state as arguments and results.

    ::

        step = DecodingStep(model)
        state = step.initial_state(batch=1)
        for position, token in enumerate(tokens):  # of one text, its numbers from 0
            logits, *state = step(torch.tensor([[token]]), torch.tensor([position]), *state)

    Args:
        model: it shares its weights, and is switched to evaluation.
        capacity: tokens that a token of an exact or Monte Carlo model sees, itself included; by default
            `max_position_embeddings`. Of a longer text it sees the last ones.
    """

    def __init__(self, model: ITNetForCausalLM, capacity: int | None = None):
        super().__init__()
        config = model.config
        mode = integration_mode(config, config.max_position_embeddings)
        self.has_far_field = mode in ("near_far", "low_rank")
        if capacity is not None and (self.has_far_field or capacity < 2):
            raise ValueError(
                f"`capacity` ({capacity}) must be 2 or more, and is for exact and Monte Carlo models; "
                f"`integration_mode` is {mode!r}"
            )
        self.model = model.eval()
        #: Tokens before a new one whose features are kept.
        self.window = {"near_far": config.near_size - 1, "low_rank": 0}.get(
            mode, (capacity or config.max_position_embeddings) - 1
        )

    @property
    def state_names(self) -> list[str]:
        """The names of the tensors of a state, in their order."""
        config = self.model.config
        names = ["positions", "measure"] if self.window else []  # of the kept tokens
        own = ["features"] if self.window else []
        own += ["moments", "mean", "mass"] if self.has_far_field else []
        own += ["position"] if self.has_far_field and config.factor_decay else []
        return names + [f"layers.{index}.{name}" for index in range(config.num_hidden_layers) for name in own]

    def initial_state(self, batch: int = 1) -> list[Tensor]:
        """Returns the state before the first token of ``batch`` texts, which is all zeros.

        It holds positions [B, m, 1] and measure [B, m] of the kept tokens, 1 for a token and 0 for a free place; of
        every layer features [B, m, H, d_h], moments [B, H, r] or [B, H, r, d_h], mean [B, H, d_h], mass [B] and, of a
        kernel that decays, position [B].
        """
        config, weight = self.model.config, self.model.lm_head.weight
        heads, size = config.num_attention_heads, config.head_dim
        shapes = {
            "positions": (self.window, 1),
            "measure": (self.window,),
            "features": (self.window, heads, size),
            "moments": (heads, config.rank, *((size,) if config.factor_form == "matrix" else ())),
            "mean": (heads, size),
        }
        sums = torch.promote_types(weight.dtype, torch.float32)
        dtypes = {"positions": torch.float32, "position": torch.float32, "features": weight.dtype}
        kinds = [name.split(".")[-1] for name in self.state_names]
        return [
            torch.zeros(batch, *shapes.get(kind, ()), dtype=dtypes.get(kind, sums), device=weight.device)
            for kind in kinds
        ]

    def state_after(self, cache: ITNetCache) -> list[Tensor]:
        """Returns the state after the tokens of a cache: the model reads a prompt at once, and the step goes on."""
        cache.check(self.model.config, cache.positions)
        if any(layer.features is None or (self.has_far_field and layer.state is None) for layer in cache.layers):
            raise ValueError("`cache` must hold tokens, and none may have been taken back since the last call")
        places = (cache.measure > 0).int().argsort(dim=1, stable=True)[:, -self.window :]  # of the last real tokens
        batch, count = places.shape
        tensors = dict(zip(self.state_names, self.initial_state(batch), strict=True))
        kept = {"positions": cache.positions, "measure": cache.measure} if self.window else {}
        for index, layer in enumerate(cache.layers):
            kept |= {f"layers.{index}.features": layer.features} if self.window else {}
            if self.has_far_field:
                state = {f"layers.{index}.{name}": value for name, value in layer.state._asdict().items()}
                tensors |= {name: value for name, value in state.items() if value is not None}
        rows = torch.arange(batch, device=places.device).unsqueeze(1)
        for name, tensor in kept.items():
            tensors[name][:, self.window - count :] = tensor[rows, places]
        return list(tensors.values())

    def forward(self, input_ids: Tensor, position: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Returns the logits [B, V] of the token after this one, and the state after this one.

        ``input_ids`` [B, 1] is a token of every text and ``position`` [B] its number in its text, from 0. A negative
        number is that of padding, which changes no state: so texts of several lengths go together.
        """
        is_real = position >= 0
        cache = _StepCache(self, dict(zip(self.state_names, state, strict=True)), is_real)
        given = {"attention_mask": is_real.unsqueeze(1).long(), "position_ids": position.clamp(min=-1).unsqueeze(1)}
        logits = self.model(input_ids, past_key_values=cache, **given).logits[:, 0]
        found = cache.state()
        return logits, *(found[name] for name in self.state_names)


class _StepLayer(ITNetCacheLayer):
    """What a layer keeps: a window of features that moves by a token, and one state."""

    def __init__(self, features: Tensor | None, state: LowRankState | None, is_real: Tensor):
        super().__init__()
        self.features, self.state, self.is_real = features, state, is_real

    def far_field(self, factors: ITNetFactors, heads: Tensor, domain: Domain) -> Tensor:
        out, self.state = factors(heads, domain, state=self.state)
        return out

    def store(self, keys: Tensor) -> None:
        self.features = _moved(keys, self.is_real)


class _StepCache(ITNetCache):
    """A cache that is made of a state, and holds the next one after a forward."""

    def __init__(self, step: DecodingStep, state: dict[str, Tensor], is_real: Tensor):
        super().__init__(step.model.config)
        batch, empty = is_real.shape[0], is_real.new_zeros(is_real.shape[0], 0, dtype=torch.float32)
        self.is_real = is_real
        self.positions, self.measure = state.get("positions", empty.unsqueeze(-1)), state.get("measure", empty)
        self.length, self.count = 1, is_real.new_zeros(batch, dtype=torch.long)  # there may be tokens before
        self.layers = []
        for index in range(step.model.config.num_hidden_layers):
            own = {name.split(".")[-1]: value for name, value in state.items() if name.startswith(f"layers.{index}.")}
            features = own.pop("features", None)
            self.layers.append(_StepLayer(features, LowRankState(**own) if own else None, is_real))

    def extend(self, domain: Domain) -> Domain:
        domain = super().extend(domain)
        self.positions, self.measure = (
            _moved(tensor, self.is_real) for tensor in (domain.keys.positions, domain.keys.measure)
        )
        return domain

    def _num_dropped(self, measure: Tensor) -> int:
        return 1

    def state(self) -> dict[str, Tensor]:
        found = {"positions": self.positions, "measure": self.measure}
        for index, layer in enumerate(self.layers):
            own = {"features": layer.features} | ({} if layer.state is None else layer.state._asdict())
            found |= {f"layers.{index}.{name}": value for name, value in own.items()}
        return found


def _moved(tensor: Tensor, is_real: Tensor) -> Tensor:
    """Returns a window [B, m + 1, ...] without its first token, or without its last one if that is padding."""
    return torch.where(is_real.view(-1, *[1] * (tensor.dim() - 1)), tensor[:, 1:], tensor[:, :-1])
