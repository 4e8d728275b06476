# SPDX-License-Identifier: Apache-2.0
"""The head of operator learning: it maps a function on one set of points to a function on any other set of points."""

from torch import Tensor, nn
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import can_return_tuple

from configuration_itnet import ITNetConfig
from itnet_kernels import Coordinates, integral_transform

from ..checks import check_mask, check_shape
from ..domain import Domain
from ..encoders.signal import signal_measure
from ..integration.factors import ITNetFactors
from ..integration.near import find_near_keys
from ..layers import ITNetFeedForward
from ..modeling_itnet import INPUTS, ITNetHead
from ..operator import ITNetKernel, near_integral
from ..outputs import SignalRegressionOutput
from .interpolation import local_interpolation, shepard_interpolation


class ITNetQueryLayer(nn.Module):
    """Reads a signal u on y_1..y_n at other positions q_1..q_m: an ITNet layer whose queries are not its keys.

        v(q) = S[u](q) + W_pos gamma(q),    S[u] the Shepard interpolant of u
        z(q) = v(q) + W^O [ sum_j omega_j kappa^(h)(q, y_j, LN(v)(q), u_j) u_j^(h) ]_h + W_theta LN(v)(q)
        w(q) = LN(z(q) + F(LN(z)(q)))

    With ``integration_mode="near_far"`` the integral is taken like that of the layers, and S[u] over the nearest
    positions, so that the cost is linear in m and n. In all other modes both go over all positions: m n. In a causal
    model the queries are the positions, and query i sees y_1..y_i alone.
    """

    def __init__(self, config: ITNetConfig, position_size: int):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.position_projection = nn.Linear(position_size, size, bias=False)
        self.query_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.kernel = ITNetKernel(config)
        self.factors = ITNetFactors(config) if config.integration_mode == "near_far" else None
        self.output = nn.Linear(size, size, bias=False)  # W^O
        self.residual = nn.Linear(size, size, bias=False)  # W_theta
        self.output.initialization, self.residual.initialization = "xavier_output", "identity"
        self.feed_forward_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.feed_forward = ITNetFeedForward(config)
        self.layernorm = nn.LayerNorm(size, eps=config.layer_norm_eps)

    def forward(
        self,
        features: Tensor,  # u [B, n, d], normalised
        domain: Domain,
        query_positions: Tensor,  # [m, s] or [B, m, s]
    ) -> Tensor:
        """Returns w [B, m, d]."""
        places = self.places(domain, query_positions)
        hidden_states = self.interpolated(features, domain, places, is_local=self.factors is not None)
        queries = self.query_norm(hidden_states)
        integral = self.integral(features, domain, queries, places)
        hidden_states = hidden_states + self.output(integral) + self.residual(queries)
        hidden_states = hidden_states + self.feed_forward(self.feed_forward_norm(hidden_states))
        return self.layernorm(hidden_states)

    def places(self, domain: Domain, query_positions: Tensor) -> Coordinates:
        """Returns the coordinates of the queries, which are those of the keys where both are the same positions."""
        if query_positions is domain.positions:
            return domain.coordinates
        return Coordinates(query_positions, domain.frequencies, name="query_positions")

    def interpolated(self, features: Tensor, domain: Domain, places: Coordinates, is_local: bool) -> Tensor:
        """Returns v [B, m, d], which is S[u] over all positions or, except in a causal model, over the nearest."""
        where, is_causal = (domain.positions, domain.measure, places.positions), self.config.is_causal
        if is_local and not is_causal:
            values = local_interpolation(features, *where)
        else:
            values = shepard_interpolation(features, *where, is_causal)
        return values + self.position_projection(places.features_in(features.dtype))

    def integral(self, features: Tensor, domain: Domain, queries: Tensor, places: Coordinates) -> Tensor:
        """Returns the heads' integrals side by side, before W^O, for queries LN(v) [B, m, d]: [B, m, d]."""
        u, queries = (tensor.unflatten(-1, (self.config.num_attention_heads, -1)) for tensor in (features, queries))
        kernel = self.kernel(domain.frequencies)
        if self.factors is None:
            given = {"queries": queries, "query_positions": places, "is_causal": self.config.is_causal}
            settings = {"measure": domain.measure, "backend": self.config.backend}
            return integral_transform(u, domain.coordinates, kernel, **given, **settings).flatten(-2)
        near = find_near_keys(self.config, places, domain)
        near = near_integral(u, domain, kernel, near, self.config, queries, places)
        return (near + self.factors(u, domain, queries=queries, query_domain=places)[0]).flatten(-2)


@auto_docstring(
    custom_intro="""
    ITNet for operator learning (`modality="signal"`): the values of a function on one set of points go in, the values
    of another function on any other set of points come out. Neither set is fixed: every sample may bring its own, and
    a model runs on meshes that it was not trained on.
    """
)
class ITNetForSignalRegression(ITNetHead):
    modality = "signal"
    main_input_name = "signal_values"
    output_class = SignalRegressionOutput
    accepts_loss_kwargs = False  # the loss is a mean over samples, and Trainer counts points
    takes_label_smoothing = False
    own_modes = ("exact",)  # in which the query layer integrates, whatever the mode of the layers

    def __init__(self, config: ITNetConfig):
        super().__init__(config)
        self.decoder = ITNetQueryLayer(config, self.itnet.fourier.size)
        self.regressor = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @auto_docstring(custom_args=INPUTS)
    def forward(
        self,
        signal_values: Tensor | None = None,
        positions: Tensor | None = None,
        query_positions: Tensor | None = None,
        measure: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SignalRegressionOutput:
        signal = {"signal_values": signal_values, "inputs_embeds": inputs_embeds, "positions": positions}
        outputs = self.itnet(**signal, measure=measure, attention_mask=attention_mask, **kwargs)
        features = outputs.last_hidden_state
        query_positions = self._queries(query_positions, positions, features.shape[0])
        measure = signal_measure(features, measure, attention_mask)
        domain = Domain(positions.float(), measure, self.itnet.fourier.frequencies)
        hidden_states = self.decoder(features, domain, query_positions.float())
        predictions = self.regressor(hidden_states)
        loss = None if labels is None else self.task_loss(predictions, labels, query_mask)
        return self.output(outputs, {"predictions": predictions}, loss=loss)

    def _queries(self, query_positions: Tensor | None, positions: Tensor, batch: int) -> Tensor:
        dim = self.config.position_dim
        if query_positions is not None and self.config.is_causal:
            raise ValueError(
                f"`query_positions` {list(query_positions.shape)} cannot be given to a causal model (`is_causal`): "
                "what an output may see follows from its place among `positions`"
            )
        query_positions = positions if query_positions is None else query_positions
        return check_shape(query_positions, "query_positions", ["queries", dim], [batch, "queries", dim])

    def task_loss(self, predictions: Tensor, labels: Tensor, query_mask: Tensor | None) -> Tensor:
        """Returns the loss by `config.signal_loss`. Every sample counts alike, however many queries it has."""
        check_shape(labels, "labels", list(predictions.shape), note=": [batch, queries, `num_labels`]")
        predictions, labels = predictions.float(), labels.to(predictions.device).float()
        count = predictions.shape[1]
        if query_mask is not None:
            mask = check_mask(query_mask, *predictions.shape[:2], name="query_mask")  # [B, m]
            predictions, labels = predictions * mask.unsqueeze(-1), labels * mask.unsqueeze(-1)
            count = mask.sum(1).clamp(min=1)
        if self.config.signal_loss == "relative_l2":
            return relative_l2(predictions, labels).mean()
        return ((predictions - labels).square().mean(-1).sum(1) / count).mean()


def relative_l2(predictions: Tensor, labels: Tensor) -> Tensor:
    """Returns |p - y| / |y| of every sample, over all points and components: [B, m, c] each -> [B]."""
    return (predictions - labels).norm(dim=(1, 2)) / labels.norm(dim=(1, 2))
