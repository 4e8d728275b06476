r"""A whole ITNet in float64, from the paper's appendix and the model's weights by name: encoder, layers, pooling.

v  = u + W^O [integral]_h + W_theta LN(u)        with the integral of LN(u), Eq. multihead
u' = v + W_2 GELU(W_1 LN(v) + b_1) + b_2         Eq. app_layer
"""

import math

import torch
from torch import Tensor

from . import oracle
from .oracle import Rounding, gelu


class Network:
    """The oracle of one model: ``weights`` is its state dict, ``config`` its configuration."""

    def __init__(self, config, weights: dict[str, Tensor], r: Rounding):
        self.config, self.r = config, r
        self.weights = {name: tensor.detach().double() for name, tensor in weights.items()}
        self.frequencies = self.weights["fourier.frequencies"]
        self.layout = None  # the grids that the encoder finds, in their order

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        u, x, measure = getattr(self, f"_{self.config.modality}")(**inputs)
        neighbors = inputs.get("neighbors")
        gate = self.weights.get("encoder.gate_root")
        for index in range(self.config.num_hidden_layers):
            name = f"layers.{index}"
            features = self.norm(f"{name}.operator_norm", u)
            u = u + self.operator(f"{name}.operator", features, x, measure, neighbors, gate)
            hidden = self.linear(f"{name}.feed_forward.expand", self.norm(f"{name}.feed_forward_norm", u))
            u = u + self.linear(f"{name}.feed_forward.contract", self.r(gelu(hidden, self.r)))
        u = self.norm("layernorm", u)
        return {"states": u, "pooled": self.pooled(u, measure)}

    def operator(self, name: str, features: Tensor, x: Tensor, measure: Tensor, neighbors=None, gate=None) -> Tensor:
        """W^O integral + W_theta features; the kernel is multiplied by 1[edge] + rho^2 on a graph."""
        omega = oracle.pair_measure(measure, features.shape[1], self.config.is_causal, self.r)
        edges = None
        if neighbors is not None and gate is not None:
            edges = torch.zeros_like(omega)
            for column in neighbors.unbind(-1):  # an edge that is listed twice counts twice
                there = (column >= 0).double().unsqueeze(-1)
                edges = edges.scatter_add(2, column.clamp(min=0).unsqueeze(-1), there)
        heads = features.unflatten(-1, (self.config.num_attention_heads, -1))
        mode = self.config.integration_mode
        integral = 0
        if mode in ("low_rank", "near_far"):
            integral = integral + self.far(name, heads, x, omega if edges is None else omega * (gate.square() + edges))
        if mode != "low_rank":
            if mode == "near_far":
                omega, table = self.near_measure(x, measure, edges)
                gates = table if edges is None else gate.square() * table + edges
            else:
                gates = 1 if edges is None else gate.square() + edges
            integral = integral + self.integral(name, heads, x, omega * gates)
        return self.linear(f"{name}.output", integral.flatten(-2)) + self.linear(f"{name}.residual", features)

    def near_measure(self, x: Tensor, measure: Tensor, edges: Tensor | None) -> tuple[Tensor, Tensor]:
        """What weighs the pairs of a near field, and which ones are in it: [B, n, n] each."""
        real, count = measure > 0, measure.shape[1]
        layout = ((count,),) if self.config.is_causal else self.layout
        if layout is not None:
            table = oracle.windows(layout, real, self.config.near_size, self.config.is_causal)
            mass = (table * measure.unsqueeze(1)).sum(2, keepdim=True)
        elif edges is None:  # a constant: the volume of a ball, or that of the unit cube
            radius, dim = self.config.near_radius, x.shape[-1]
            table = ((x.unsqueeze(2) - x.unsqueeze(1)).norm(dim=-1) <= radius) & real.unsqueeze(1)
            mass = torch.tensor(min(math.pi ** (dim / 2) / math.gamma(dim / 2 + 1) * radius**dim, 1.0)).double()
        else:  # that of the neighbourhood of a random node
            table = ((edges > 0) | torch.eye(count, dtype=torch.bool)) & real.unsqueeze(1)
            mass = torch.einsum("bi,bij,bj->b", measure, table.double(), measure)[:, None, None]
            mass = mass / measure.sum(1)[:, None, None]
        scale = torch.where(mass > 0, 1 / mass.where(mass > 0, 1), 0)
        return self.r(scale) * measure.unsqueeze(1), table.double()

    def far(self, name: str, heads: Tensor, x: Tensor, omega: Tensor) -> Tensor:
        """The integral with a low-rank kernel."""
        phi, psi = (self._factor(f"{name}.factors.{part}", heads, x) for part in ("phi", "psi"))
        bias, matrices, rates = (
            self.weights.get(f"{name}.factors.{part}") for part in ("bias", "matrices", "log_decay")
        )
        decay = None
        if rates is not None:  # e^(-lambda (x_i - x_j)), of keys that a query sees
            spans = (x[:, :, None, 0] - x[:, None, :, 0]).where(omega > 0, 0)[..., None, None]
            decay = self.r(torch.exp(-rates.exp() * spans))
        if matrices is not None:
            return oracle.low_rank_matrix(heads, phi, psi, matrices, bias, omega, self.r, decay)
        return oracle.low_rank(heads, phi, psi, bias, omega, self.r, decay)

    def integral(self, name: str, heads: Tensor, x: Tensor, omega: Tensor) -> Tensor:
        """The integral with the full kernel."""
        names = ("w1", "b1", "w_mid", "b_mid", "w2", "b2", *oracle.DIRECTIONS)
        kernel = {key: self.weights.get(f"{name}.kernel.{key}") for key in names}
        batch, count = heads.shape[:2]
        values = oracle.kernel_values(
            *(oracle.over_pairs(heads, batch, axis, count) for axis in (2, 1)),
            *(oracle.over_pairs(x, batch, axis, count) for axis in (2, 1)),
            kernel | {"fourier": self.frequencies},
            self.config.kernel_inputs,
            self.r,
        )
        return self.r(torch.einsum("bij,bijha->biha", omega, values))

    def _factor(self, name: str, heads: Tensor, x: Tensor) -> Tensor:
        gamma = self.gamma(x).unsqueeze(-2)
        joint = torch.cat([gamma.expand(*heads.shape[:3], -1), heads], -1)
        w1, b1, w2, b2 = (self.weights[f"{name}.{key}"] for key in ("w1", "b1", "w2", "b2"))
        hidden = self.r(gelu(self.r(joint @ w1.T + b1), self.r))
        return self.r(torch.einsum("bnhk,hr...k->bnhr...", hidden, w2) + b2)

    def gamma(self, x: Tensor) -> Tensor:
        return self.r(oracle.gamma(self.r.coordinate(x), self.frequencies))

    def linear(self, name: str, u: Tensor) -> Tensor:
        out = self.r(u) @ self.r(self.weights[f"{name}.weight"]).T
        bias = self.weights.get(f"{name}.bias")
        return self.r(out if bias is None else out + bias)

    def norm(self, name: str, u: Tensor) -> Tensor:
        centred = u - u.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + self.config.layer_norm_eps).sqrt()
        return self.r(self.r(centred) / scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def pooled(self, u: Tensor, measure: Tensor) -> Tensor:
        rows = []
        for features, omega in zip(u, measure, strict=True):
            real = features[omega > 0]
            if self.config.pooling == "cls":
                rows.append(real[0])
            elif self.config.pooling == "max":
                rows.append(real.amax(0))
            else:
                rows.append((features * (omega / omega.sum())[:, None]).sum(0))
        return torch.stack(rows)

    # The encoders: features [B, n, d], positions [B, n, s], measure [B, n].

    def _text(self, input_ids, attention_mask=None, token_type_ids=None, prefix="encoder", **_):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        number = mask.cumsum(1).double()
        unit = self.config.max_position_embeddings if self.config.is_causal else mask.sum(1, keepdim=True).double()
        x = (number / unit).unsqueeze(-1).float().double()  # positions are float32
        if prefix != "encoder":
            x = torch.cat([x, torch.full_like(x, 2.0)], -1)
        self.layout = (*(self.layout or ()), (input_ids.shape[1],))
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        u = self.weights[f"{prefix}.word_embeddings.weight"][input_ids]
        u = u + self.weights[f"{prefix}.token_type_embeddings.weight"][types]
        u = u + self.linear(f"{prefix}.position_projection", self.gamma(x))
        return u, x, mask.double() / mask.sum(1, keepdim=True)

    def _image(self, pixel_values, prefix="encoder", **_):
        pixels, features, places = pixel_values.double(), [], []
        for index, side in enumerate(self.config.patch_sizes):
            weight = self.weights[f"{prefix}.patch_embeddings.{index}.weight"]
            bias = self.weights[f"{prefix}.patch_embeddings.{index}.bias"]
            rows, columns = (length // side for length in pixels.shape[2:])
            self.layout = (*(self.layout or ()), (rows, columns))
            for i in range(rows):
                for j in range(columns):
                    patch = pixels[:, :, i * side : (i + 1) * side, j * side : (j + 1) * side]
                    features.append(torch.einsum("bcpq,dcpq->bd", self.r(patch), self.r(weight)) + bias)
                    places.append([(i + 0.5) / rows, (j + 0.5) / columns])
        token = self.weights.get(f"{prefix}.cls_token")
        if token is not None:
            self.layout = ((), *self.layout)
            features.insert(0, token[0].expand(len(pixels), -1))
            places.insert(0, [0.5, 0.5])
        x = torch.tensor(places, dtype=torch.float64).float().double().expand(len(pixels), -1, -1)
        u = torch.stack(features, 1) + self.linear(f"{prefix}.position_projection", self.gamma(x))
        return u, x, torch.full(u.shape[:2], 1 / u.shape[1], dtype=torch.float64)

    def _multimodal(self, pixel_values, **text):
        parts = [self._image(pixel_values, "encoder.image"), self._text(**text, prefix="encoder.text")]
        embeddings = self.weights["encoder.modality_embeddings.weight"]
        u = torch.cat([part[0] + e for part, e in zip(parts, embeddings, strict=True)], 1)
        x = torch.cat([part[1] for part in parts], 1)
        if self.config.measure == "uniform":
            shares = [(part[2] > 0).sum(1, keepdim=True).double() for part in parts]
        else:
            shares = [1.0, 1.0] if self.config.measure == "balanced" else list(self.config.measure)
        measure = [part[2] * share / sum(shares) for part, share in zip(parts, shares, strict=True)]
        return u, x, torch.cat(measure, 1)

    def _point_cloud(self, points, point_features=None, attention_mask=None, **_):
        x = points.double()
        mask = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask
        raw = [] if point_features is None else [point_features.double()]
        embedded = self.gamma(x) if self.config.point_embedding == "fourier" else x
        u = self.linear("encoder.embedding", torch.cat([embedded, *raw], -1))
        if self.config.local_neighbors:
            u = u + self._local(torch.cat([x, *raw], -1), x, mask)
        return u, x, mask.double() / mask.sum(1, keepdim=True)

    def _local(self, inputs: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        """max over the K nearest real points of MLP(differences)."""
        rows = []
        for sample, places, real in zip(inputs, x, mask.bool(), strict=True):
            distances = (places[:, None] - places[None]).square().sum(-1)
            distances = distances.masked_fill(~real[None], torch.inf)
            count = min(self.config.local_neighbors, int(real.sum()))
            nearest = distances.sort(dim=1, stable=True).indices[:, :count]
            differences = sample[nearest] - sample[:, None]
            hidden = self.r(gelu(self.linear("encoder.local.expand", differences), self.r))
            rows.append(self.linear("encoder.local.contract", hidden).amax(1))
        return torch.stack(rows)

    def _graph(self, positions, node_features=None, node_types=None, attention_mask=None, **_):
        if node_types is None:
            u = self.linear("encoder.embedding", node_features.double())
        else:
            u = self.weights["encoder.embedding.weight"][node_types]
        mask = torch.ones(u.shape[:2]) if attention_mask is None else attention_mask
        return u, positions.float().double(), mask.double() / mask.sum(1, keepdim=True)

    def _signal(self, positions, inputs_embeds=None, signal_values=None, measure=None, attention_mask=None):
        u = self.linear("encoder.lift", signal_values.double()) if inputs_embeds is None else inputs_embeds.double()
        x = positions.float().double().expand(len(u), *positions.shape[-2:])
        mask = torch.ones(u.shape[:2]) if attention_mask is None else attention_mask
        omega = mask.double() if measure is None else measure.double() * mask
        u = u + self.linear("encoder.position_projection", self.gamma(x))
        return u, x, omega / omega.sum(1, keepdim=True)
