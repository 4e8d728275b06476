# SPDX-License-Identifier: Apache-2.0
"""The encoder of raw signals: features and positions are given directly, on any mesh of any dimension."""

from torch import Tensor, nn

from configuration_itnet import ITNetConfig
from itnet_kernels.measure import uniform_measure
from itnet_kernels.transforms import may_look_at

from ..checks import check_mask, check_shape, input_dtype
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
        self.position_dim = config.position_dim
        self.sizes = {"inputs_embeds": config.hidden_size, "signal_values": config.signal_feature_size}
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
        setting = "hidden_size" if signal_values is None else "signal_feature_size"
        note = f" with at least one position: `{setting}` is {self.sizes[name]}"
        check_shape(given, name, ["batch", "positions", self.sizes[name]], note=note)
        if signal_values is not None:
            inputs_embeds = self.lift(signal_values.to(input_dtype(self.lift)))
        batch, count = given.shape[:2]
        if positions is None:
            raise ValueError(f"`positions` is missing: a signal needs `{name}` and `positions`")
        expected, note = [count, self.position_dim], f" to go with `{name}` {list(given.shape)}"
        check_shape(positions, "positions", expected, [batch, *expected], note=note)
        is_padded = measure is not None or attention_mask is not None
        measure = signal_measure(inputs_embeds, measure, attention_mask)
        domain = Domain(positions.float(), measure, fourier.frequencies, is_padded=is_padded)
        features = inputs_embeds + self.position_projection(domain.gamma(inputs_embeds.dtype))
        return Signal(self.dropout(features), domain)


def signal_measure(features: Tensor, measure: Tensor | None, mask: Tensor | None) -> Tensor:
    """Returns omega [B, n] of features [B, n, d]: quadrature weights, normalised over real positions, or uniform."""
    uniform = uniform_measure(features, check_mask(mask, *features.shape[:2]))
    if measure is None:
        return uniform
    check_shape(measure, "measure", list(uniform.shape), note=", one weight per position")
    weights = measure.float() * (uniform > 0)
    total = weights.sum(1, keepdim=True)
    if may_look_at(total) and not bool((total > 0).all() and (weights >= 0).all()):
        raise ValueError("`measure` must not be negative and must not vanish on all real positions of a sample")
    return weights / total
