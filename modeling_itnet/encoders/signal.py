# SPDX-License-Identifier: Apache-2.0
"""Raw signals: features and positions given directly, on any mesh of any dimension."""

from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure
from itnet_kernels.transforms import may_look_at
from itnet_kernels.validation import is_one_of

from ..checks import check_mask, input_dtype
from ..domain import Domain, Signal
from ..operator import ITNetFourierFeatures


class ITNetSignalEncoder(nn.Module):
    """u = inputs_embeds + W_pos gamma(x) at the given positions; the measure is the given one or uniform.

    With ``signal_feature_size`` = c, values a(x) [B, n, c] may be given instead: u = W_in a(x) + b + W_pos gamma(x).
    ``measure`` holds quadrature weights, for example cell volumes; they are normalised to sum to 1.
    """

    required = ("inputs_embeds", "signal_values")
    optional = ("positions", "measure", "attention_mask")

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        self.hidden_size, self.position_dim = config.hidden_size, config.position_dim
        self.main_input_name = "signal_values" if config.signal_feature_size else "inputs_embeds"
        self.lift = nn.Linear(config.signal_feature_size, config.hidden_size) if config.signal_feature_size else None
        self.position_projection = nn.Linear(position_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.embedding_dropout_prob)

    def input_embeddings(self) -> nn.Module:
        return self.position_projection

    def forward(
        self,
        fourier: ITNetFourierFeatures,
        inputs_embeds: Tensor | None = None,  # [B, n, d]
        signal_values: Tensor | None = None,  # [B, n, c] in place of inputs_embeds
        positions: Tensor | None = None,  # [n, s] or [B, n, s]
        measure: Tensor | None = None,  # [B, n]
        attention_mask: Tensor | None = None,  # [B, n]
    ) -> Signal:
        name, given = ("inputs_embeds", inputs_embeds) if signal_values is None else ("signal_values", signal_values)
        if signal_values is not None:
            inputs_embeds = self._lifted(signal_values)
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] == 0 or inputs_embeds.shape[2] != self.hidden_size:
            raise ValueError(
                f"`inputs_embeds` {list(inputs_embeds.shape)} must be [batch, positions, {self.hidden_size}] with at "
                f"least one position: `hidden_size` is {self.hidden_size}"
            )
        batch, count = inputs_embeds.shape[:2]
        if positions is None:
            raise ValueError(f"`positions` is missing: a signal needs `{name}` and `positions`")
        if not is_one_of(positions.shape, [count, self.position_dim], [batch, count, self.position_dim]):
            raise ValueError(
                f"`positions` {list(positions.shape)} must be [{count}, {self.position_dim}] or "
                f"[{batch}, {count}, {self.position_dim}] to go with `{name}` {list(given.shape)}"
            )
        is_padded = measure is not None or attention_mask is not None
        measure = signal_measure(inputs_embeds, measure, attention_mask)
        domain = Domain(positions.float(), measure, fourier.frequencies, is_padded=is_padded)
        features = inputs_embeds + self.position_projection(domain.gamma(inputs_embeds.dtype))
        return Signal(self.dropout(features), domain)

    def _lifted(self, signal_values: Tensor) -> Tensor:
        size = 0 if self.lift is None else self.lift.in_features
        shape = list(signal_values.shape)
        if self.lift is None or len(shape) != 3 or shape[1] == 0 or shape[2] != size:
            raise ValueError(
                f"`signal_values` {shape} must be [batch, positions, {size}] with at least one position: "
                f"`signal_feature_size` is {size}"
            )
        return self.lift(signal_values.to(input_dtype(self.lift)))


def signal_measure(features: Tensor, measure: Tensor | None, mask: Tensor | None) -> Tensor:
    """omega [B, n] of features [B, n, d]: the given quadrature weights, normalised over real positions, or uniform."""
    uniform = uniform_measure(features, None if mask is None else check_mask(mask, *features.shape[:2]))
    if measure is None:
        return uniform
    if measure.shape != uniform.shape:
        raise ValueError(f"`measure` {list(measure.shape)} must be {list(uniform.shape)}, one weight per position")
    weights = measure.float() * (uniform > 0)
    total = weights.sum(1, keepdim=True)
    if may_look_at(total) and not bool((total > 0).all() and (weights >= 0).all()):
        raise ValueError("`measure` must not be negative and must not vanish on all real positions of a sample")
    return weights / total
