"""Families of whole models: every modality against the oracle, and what must not change an output."""

import tempfile
from copy import deepcopy

import torch
from torch import Tensor

from modeling_itnet import Domain, ITNetConfig, ITNetModel, ITNetOperator

from .case import DOUBLE, Draw, Outcome, allowed
from .network import Network
from .oracle import GROUPS
from .problems import draw_measure

SINGLE = torch.finfo(torch.float32).eps
MODALITIES = ("text", "image", "multimodal", "point_cloud", "graph", "signal")
PADDED = ("text", "multimodal", "point_cloud", "graph", "signal")
VOCABULARY, FEATURES, NODE_TYPES = 12, 2, 4


def draw_config(draw: Draw, modality: str, **given) -> ITNetConfig:
    heads = draw.integer("heads", 1, 2)
    values = {
        "modality": modality,
        "num_attention_heads": heads,
        "hidden_size": heads * draw.integer("head size", 2, 4),
        "intermediate_size": 5,
        "num_hidden_layers": draw.integer("layers", 1, 2),
        "num_fourier_features": draw.choice("frequencies", (0, 1, 3)),
        "fourier_scale": 1.0,
        "kernel_hidden_size": draw.integer("width", 1, 6),
        "kernel_num_layers": draw.choice("kernel layers", (2, 2, 3)),
        "kernel_directions": draw.chance("directions", 0.25),
        "kernel_init_scale": 1.0,
        "kernel_inputs": draw.choice("all inputs", (GROUPS, None)) or draw.subset("inputs", GROUPS),
        "kernel_output_sharing": draw.choice("sharing", ("per_head", "shared")),
        "integration_mode": draw.choice("mode", ("exact", "exact", "low_rank", "near_far", "near_far")),
        "near_size": draw.choice("near size", (1, 9) if modality in ("image", "multimodal") else (1, 3, 5)),
        "near_radius": draw.choice("near radius", (0.2, 0.5, 3.0)),
        "factor_form": draw.choice("factor form", ("vector", "matrix")),
        "rank": draw.integer("rank", 1, 3),
        "factor_hidden_size": 4,
        "image_size": 8,
        "patch_size": draw.choice("patches", (4, 8, (4, 8))),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "node_feature_size": FEATURES,
        "num_node_types": draw.choice("node types", (0, NODE_TYPES)),
        "edge_gate": draw.chance("edges", 0.6),
        "signal_feature_size": FEATURES,
        "point_feature_size": draw.choice("point features", (0, FEATURES)),
        "point_embedding": draw.choice("point embedding", ("fourier", "raw")),
        "local_neighbors": draw.choice("neighbors", (0, 3)),
        "is_causal": modality in ("text", "signal") and draw.chance("causal", 0.4),
        "hidden_dropout_prob": 0.0,
        "embedding_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
    }
    if modality == "signal":
        values["position_dim"] = draw.integer("dim", 1, 3)
    if modality == "multimodal":
        values["measure"] = draw.choice("measure", ("uniform", "balanced", (3, 1)))
    if modality in ("text", "image", "multimodal") and not values["is_causal"]:
        values["pooling"] = draw.choice("pooling", ("cls", "mean", "max"))
    return ITNetConfig(**(values | given))


def draw_model(draw: Draw, config: ITNetConfig, dtype=torch.float64, model_class=ITNetModel) -> torch.nn.Module:
    """In evaluation mode, every parameter moved off its initial value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * draw.normal(*parameter.shape) + parameter)
    return model.to(dtype).eval()


def draw_inputs(draw: Draw, config: ITNetConfig, count: int) -> dict[str, Tensor]:
    """One sample of ``count`` positions, without padding, with a leading axis of 1."""
    modality = config.modality
    text = {"input_ids": draw.integers(1, VOCABULARY, 1, count)}
    image = {"pixel_values": draw.normal(1, 3, 8, 8).float()}
    if modality == "text":
        return text | {"token_type_ids": draw.integers(0, 2, 1, count)}
    if modality == "image":
        return image
    if modality == "multimodal":
        return image | text
    if modality == "point_cloud":
        features = {"point_features": draw.normal(1, count, FEATURES).float()} if config.point_feature_size else {}
        return {"points": draw.normal(1, count, 3).float()} | features
    if modality == "graph":
        types = config.num_node_types
        nodes = {"node_types": draw.integers(0, types, 1, count)} if types else {}
        nodes = nodes or {"node_features": draw.normal(1, count, FEATURES).float()}
        edges = {"neighbors": _edges(draw, count)} if config.edge_gate else {}
        return nodes | edges | {"positions": draw.normal(1, count, config.position_dim).float()}
    values = {"signal_values": draw.normal(1, count, FEATURES).float()}
    values["positions"] = draw.uniform(1, count, config.position_dim).float()
    # One choice for all samples of a batch.
    own = draw.choices["own measure"] if "own measure" in draw.choices else draw.chance("own measure", 0.5)
    return values | ({"measure": draw.uniform(1, count).float() + 0.1} if own else {})


def _edges(draw: Draw, count: int) -> Tensor:
    """Up to three different neighbours of each node, -1 for none."""
    chosen = torch.stack([draw.permutation(count + 2)[:3] for _ in range(count)])
    return chosen.where(chosen < count, -1).unsqueeze(0)


def padded(draw: Draw, samples: list[dict[str, Tensor]], extra: int, side: str) -> tuple[dict, list[Tensor]]:
    """One batch of all samples, filled up with garbage, and where each sample's positions went.

    ``side`` is "left", "right" or "anywhere": the real positions keep their order but need not be next to each other.
    """
    names = [name for name in samples[0] if name != "pixel_values"]
    lengths = [sample[names[0]].shape[1] for sample in samples]
    total = max(lengths) + extra
    places = []
    for length in lengths:
        if side == "anywhere":
            places.append(draw.permutation(total)[:length].sort().values)
        else:
            places.append(torch.arange(length) + (total - length if side == "left" else 0))
    batch = {}
    for name in names:
        rows = []
        for sample, where in zip(samples, places, strict=True):
            value = sample[name]
            if name == "neighbors":
                value = torch.where(value >= 0, where[value.clamp(min=0)], -1)
                row = value.new_full((1, total, value.shape[2]), 0)
            elif value.is_floating_point():
                row = draw.normal(1, total, *value.shape[2:]).abs().to(value.dtype)
            else:
                row = torch.ones(1, total, *value.shape[2:], dtype=value.dtype)
            row[:, where] = value
            rows.append(row)
        batch[name] = torch.cat(rows)
    if "pixel_values" in samples[0]:
        batch["pixel_values"] = torch.cat([sample["pixel_values"] for sample in samples])
    mask = torch.zeros(len(samples), total, dtype=torch.long)
    for row, where in zip(mask, places, strict=True):
        row[where] = 1
    return batch | {"attention_mask": mask}, places


def states_at(config: ITNetConfig, states: Tensor, where: Tensor) -> Tensor:
    """Last hidden states of one sample at its real positions; the image of a pair comes first and has no padding."""
    if config.modality != "multimodal":
        return states[where]
    image = states.shape[0] - _text_length(states, config)
    return torch.cat([states[:image], states[image + where]])


def _text_length(states: Tensor, config: ITNetConfig) -> int:
    patches = sum((config.image_shape[0] // p) * (config.image_shape[1] // p) for p in config.patch_sizes)
    return states.shape[0] - patches - (config.pooling == "cls")


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Values in the model's dtype; coordinates and weights of the domain as they are."""
    values = ("signal_values", "point_features", "node_features", "pixel_values")
    return {name: tensor.to(dtype) if name in values else tensor for name, tensor in inputs.items()}


@torch.no_grad()
def network(draw: Draw, outcome: Outcome) -> None:
    """A model of any modality in float64 or float32, padded or not, against the oracle."""
    modality = draw.choice("modality", MODALITIES)
    config = draw_config(draw, modality)
    dtype = draw.choice("dtype", (torch.float64, torch.float32))
    model = draw_model(draw, config, dtype)
    samples = [draw_inputs(draw, config, draw.integer("positions", 1, 6)) for _ in range(draw.integer("batch", 1, 2))]
    if modality in PADDED:
        inputs, _ = padded(draw, samples, draw.integer("padding", 0, 2), draw.choice("side", ("left", "right")))
    else:
        inputs = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    real = inputs.get("attention_mask", torch.ones(1, 1))
    # Fourier features and measures are float32 in every model.
    wanted = allowed(lambda r: Network(config, model.state_dict(), r).forward(inputs), SINGLE, SINGLE)
    out = model(**cast(inputs, dtype))
    outcome.compare("pooled", out.pooler_output, wanted["pooled"].exact, wanted["pooled"].computed)
    for index in range(len(samples)):
        rows = real[min(index, len(real) - 1)].nonzero().flatten()
        actual, exact = out.last_hidden_state[index], wanted["states"].exact[index]
        if modality in PADDED:
            actual, exact = states_at(config, actual, rows), states_at(config, exact, rows)
        outcome.compare("states", actual, exact, wanted["states"].computed)


@torch.no_grad()
def layer(draw: Draw, outcome: Outcome) -> None:
    """A single ``ITNetOperator``, on positions that the batch shares or not, with any measure."""
    config = draw_config(draw, "signal")
    dtype = draw.choice("dtype", (torch.float64, torch.float32))
    operator = draw_model(draw, config, dtype, ITNetOperator)
    batch, count = draw.integer("batch", 1, 2), draw.integer("positions", 1, 8)
    features = draw.normal(batch, count, config.hidden_size).to(dtype)
    x = draw.uniform(*((batch,) if draw.chance("per sample", 0.5) else ()), count, config.position_dim).float()
    measure = draw_measure(draw, batch, count)
    measure = (torch.full((batch, count), 1 / count) if measure is None else measure).float()
    frequencies = draw.normal(config.num_fourier_features, config.position_dim).float()
    weights = {f"operator.{name}": tensor for name, tensor in operator.state_dict().items()}

    def expected(r):
        oracle = Network(config, weights | {"fourier.frequencies": frequencies}, r)
        places = x.double().expand(batch, *x.shape[-2:])
        return {"out": oracle.operator("operator", features.double(), places, measure.double())}

    eps = torch.finfo(dtype).eps
    # The factors of low rank are functions of float32 features of the positions.
    position_eps = DOUBLE if config.integration_mode == "exact" else SINGLE
    wanted = allowed(expected, max(eps, position_eps), position_eps)["out"]
    # Padding has no neighbourhood.
    rows = measure > 0 if config.integration_mode == "near_far" else torch.ones_like(measure, dtype=torch.bool)
    out = operator(features, Domain(x, measure, frequencies))
    outcome.compare("out", out[rows], wanted.exact[rows], wanted.computed)


@torch.no_grad()
def invariance(draw: Draw, outcome: Outcome) -> None:
    """What must not change an output: padding, batch mates, order, the future of a causal model, saving."""
    what = draw.choice("what", ("mates", "mates", "order", "future", "file"))
    causal = {} if what != "future" else {"is_causal": True}
    choices = {"order": ("point_cloud", "graph", "signal"), "future": ("text", "signal")}.get(what, PADDED)
    modality = draw.choice("modality", choices)
    mode = draw.choice("integration", ("exact", "near_far", "low_rank", "monte_carlo", "auto"))
    if what == "order":  # k-means starts from the first position
        mode = mode if mode in ("low_rank", "near_far") else "exact"
        causal = {"is_causal": False}
    settings = {"integration_mode": mode, "num_samples": draw.integer("samples", 1, 4), "exact_max_positions": 4}
    if mode == "auto":
        settings["approximate_mode"] = draw.choice("approximate", ("near_far", "low_rank", "monte_carlo", None))
    config = draw_config(draw, modality, **settings, **causal)
    model = draw_model(draw, config)
    lengths = [draw.integer(f"positions {i}", 1, 9) for i in range(draw.integer("batch", 2, 3))]
    samples = [cast(draw_inputs(draw, config, length), torch.float64) for length in lengths]
    alone = [model(**sample) for sample in samples]
    tolerances = [sensitivity(draw, model, sample, out) for sample, out in zip(samples, alone, strict=True)]
    if what == "mates":
        side = draw.choice("side", ("left", "right", "anywhere"))
        batch, places = padded(draw, samples, draw.integer("padding", 0, 3), side)
        together = model(**batch)
        for index, (out, where) in enumerate(zip(alone, places, strict=True)):
            states = states_at(config, together.last_hidden_state[index], where)
            outcome.compare("states", states, out.last_hidden_state[0], tolerances[index])
            outcome.compare("pooled", together.pooler_output[index], out.pooler_output[0], tolerances[index])
    elif what == "order":
        order = draw.permutation(lengths[0])
        out = model(**permuted(samples[0], order))
        outcome.compare("states", out.last_hidden_state[0], alone[0].last_hidden_state[0][order], tolerances[0])
        outcome.compare("pooled", out.pooler_output, alone[0].pooler_output, tolerances[0])
    elif what == "future":
        seen = draw.integer("seen", 1, lengths[0])
        out = model(**{name: tensor[:, :seen] for name, tensor in samples[0].items()})
        outcome.compare("states", out.last_hidden_state[0], alone[0].last_hidden_state[0][:seen], tolerances[0])
    else:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = ITNetModel.from_pretrained(folder, dtype=torch.float64).eval()
        for name, tensor in model.state_dict().items():
            outcome.compare(f"saved {name}", again.state_dict()[name], tensor, 0.0)
        outcome.compare("states", again(**samples[0]).last_hidden_state, alone[0].last_hidden_state, tolerances[0])


def permuted(sample: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Position k of the result is position order[k] of the sample; edges follow their nodes."""
    result = {name: tensor[:, order] for name, tensor in sample.items()}
    if "neighbors" in sample:
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        edges = result["neighbors"]
        result["neighbors"] = torch.where(edges >= 0, rank[edges.clamp(min=0)], -1)
    return result


def sensitivity(draw: Draw, model: torch.nn.Module, sample: dict[str, Tensor], out) -> float:
    """What rounding to float32, as measures and Fourier features are, may do to the outputs of a sample."""
    size = 2.0**-20
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.mul_(1 + size * draw.normal(*parameter.shape))
    moved = (copy(**sample).last_hidden_state - out.last_hidden_state).abs().max()
    return float(50 * SINGLE * (moved / size + out.last_hidden_state.abs().max()))
