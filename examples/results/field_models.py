"""Models of fields: ITNet's layers and a linear map, and what a measure is to a model and to its loss."""

from collections.abc import Callable
from dataclasses import dataclass

import examples_path  # noqa: F401
from torch import Tensor, nn

from modeling_itnet import ITNetConfig, ITNetModel
from modeling_itnet.heads.signal import relative_l2
from modeling_itnet.outputs import SignalRegressionOutput


class PointwiseITNet(nn.Module):
    """The layers of an ITNet and a linear map at every position: [B, n, c] -> [B, n, num_labels].

    ITNetForSignalRegression ends with a layer that queries other positions. It would hide what the mode of the layers
    can do, where it integrates in another one. With ``absolute`` false, features start from the values alone, so that
    a kernel of relative inputs makes the model invariant to translations. With ``final_norm`` false, the linear map
    reads the last layer as it is: the size of a sum over pairs, which a layer norm takes away, is what a force is.
    """

    def __init__(self, config: ITNetConfig, absolute: bool = True, final_norm: bool = True):
        super().__init__()
        self.itnet = ITNetModel(config)
        if not absolute:
            self.itnet.encoder.position_projection = Nothing()
        if not final_norm:
            self.itnet.layernorm = nn.Identity()
        self.regressor = nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self, signal_values: Tensor, positions: Tensor, measure: Tensor | None = None, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        outputs = self.itnet(signal_values=signal_values, positions=positions, measure=measure)
        predictions = self.regressor(outputs.last_hidden_state)
        loss = relative_l2(predictions, labels).mean() if labels is not None else None
        return SignalRegressionOutput(loss=loss, predictions=predictions)


class Nothing(nn.Module):
    """0, whatever comes in."""

    def forward(self, values: Tensor) -> Tensor:
        return values.new_zeros(())


class FieldModel(nn.Module):
    """A model whose loss is an integral against the measure of the sample, whether or not it sees that measure itself.

    So an ablation that takes the measure from a model leaves what it is trained for as it is.
    """

    def __init__(self, network: nn.Module, sees_measure: bool = True):
        super().__init__()
        self.network, self.sees_measure = network, sees_measure

    def forward(
        self, signal_values: Tensor, positions: Tensor, measure: Tensor, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        seen = {"measure": measure} if self.sees_measure else {}
        predictions = self.network(signal_values=signal_values, positions=positions, **seen).predictions
        loss = None if labels is None else weighted_errors(predictions, labels, measure).mean()
        return SignalRegressionOutput(loss=loss, predictions=predictions)


def weighted_errors(predictions: Tensor, labels: Tensor, measure: Tensor) -> Tensor:
    """(∫ |p − y|² dμ / ∫ |y|² dμ)^½ of every sample: [B, n, c] each and [B, n] -> [B]."""
    weights = measure.unsqueeze(-1)
    squares = (weights * (predictions - labels).square()).sum((1, 2)), (weights * labels.square()).sum((1, 2))
    return (squares[0] / squares[1]).sqrt()


@dataclass(frozen=True)
class OfFields:
    """A function from a configuration to a :class:`FieldModel`."""

    build: Callable[[ITNetConfig], nn.Module]
    sees_measure: bool = True

    def __call__(self, config: ITNetConfig) -> FieldModel:
        return FieldModel(self.build(config), self.sees_measure)
