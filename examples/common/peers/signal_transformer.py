"""A softmax transformer on signals, with positions as inputs and, if told, in the scores of pairs."""

from torch import Tensor, nn

from modeling_itnet import ITNetConfig
from modeling_itnet.heads.signal import relative_l2
from modeling_itnet.operator import ITNetFourierFeatures
from modeling_itnet.outputs import SignalRegressionOutput

from .interaction_network import pair_features


class SignalTransformer(nn.Module):
    """torch's pre-norm encoder on W a(x) + b + W_pos γ(x): [B, n, c] -> [B, n, num_labels].

    With ``relative_bias`` every layer and head adds its own MLP of γ(x_i − x_j) and |x_i − x_j| to the scores of a
    pair.
    """

    def __init__(self, config: ITNetConfig, relative_bias: bool = False, bias_size: int = 16):
        super().__init__()
        self.num_heads, depth = config.num_attention_heads, config.num_hidden_layers
        self.fourier = ITNetFourierFeatures(config)
        self.lift = nn.Linear(config.signal_feature_size, config.hidden_size)
        self.position_projection = nn.Linear(self.fourier.size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.hidden_size,
                self.num_heads,
                config.intermediate_size,
                config.hidden_dropout_prob,
                "gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        )
        self.biases = None
        if relative_bias:
            self.biases = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(self.fourier.size + 1, bias_size), nn.GELU(), nn.Linear(bias_size, self.num_heads)
                )
                for _ in range(depth)
            )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.regressor = nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self, signal_values: Tensor, positions: Tensor, labels: Tensor | None = None
    ) -> SignalRegressionOutput:
        features = self.lift(signal_values) + self.position_projection(self.fourier(positions))
        pairs = None if self.biases is None else pair_features(self.fourier, positions)
        for index, layer in enumerate(self.layers):
            features = layer(features, None if pairs is None else self._scores(index, pairs))
        predictions = self.regressor(self.norm(features))
        loss = relative_l2(predictions, labels).mean() if labels is not None else None
        return SignalRegressionOutput(loss=loss, predictions=predictions)

    def _scores(self, index: int, pairs: Tensor) -> Tensor:
        """What a layer adds to its scores: [B, n, n, p] -> [B H, n, n]."""
        return self.biases[index](pairs).movedim(-1, 1).flatten(0, 1)
