"""Peers on signals: their formulas written out, in float64, and what a measure means to each of them."""

import math

import pytest
import torch
from torch.nn import functional as F

from modeling_itnet import ITNetConfig

NAMES = (
    "EGNN",
    "InteractionNetwork",
    "PointwiseMLP",
    "SignalFNO",
    "SignalGNO",
    "SignalLinearAttention",
    "SignalPointNet",
    "SignalPointTransformer",
    "SignalTransformer",
    "Transolver",
)
WEIGHED = tuple(name for name in NAMES if name not in ("EGNN", "PointwiseMLP", "SignalPointTransformer"))
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(scope="module")
def peers(load_script):
    return load_script("common.peers")


@pytest.fixture(scope="module")
def config(tiny_sizes):
    own = {"modality": "signal", "signal_feature_size": 3, "position_dim": 2, "num_labels": 2, "near_radius": 0.5}
    own |= {"local_neighbors": 4, "rank": 5}
    return ITNetConfig(**{**tiny_sizes, **own})


@pytest.fixture
def batch():
    given = {"signal_values": torch.randn(2, 9, 3), "positions": torch.rand(2, 9, 2), "labels": torch.randn(2, 9, 2)}
    return {name: values.double() for name, values in given.items()}


@pytest.fixture
def places(load_script, config, batch):
    fourier = load_script("modeling_itnet.operator").ITNetFourierFeatures(config).double()
    return load_script("common.peers.places").Places(batch["positions"], torch.rand(2, 9).double(), fourier)


@pytest.mark.parametrize("name", NAMES)
def test_peers_know_no_order_and_judge_themselves(peers, config, batch, name):
    model = getattr(peers, name)(config).double().eval()
    order = torch.tensor([3, 0, 7, 1, 2, 8, 6, 5, 4])
    output = model(**batch)
    moved = model(**{key: values[:, order] for key, values in batch.items()})
    torch.testing.assert_close(moved.predictions, output.predictions[:, order], **CLOSE)
    errors = (output.predictions - batch["labels"]).flatten(1).norm(dim=1) / batch["labels"].flatten(1).norm(dim=1)
    torch.testing.assert_close(output.loss, errors.mean(), **CLOSE)
    output.loss.backward()
    unused = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not [key for key in unused if not (name == "EGNN" and key.startswith("layers.1.update"))]
    alone = model(**{key: values[:1] for key, values in batch.items()})
    torch.testing.assert_close(alone.predictions, output.predictions[:1], **CLOSE)


@pytest.mark.parametrize("name", WEIGHED)
def test_a_position_of_weight_two_is_two_positions(peers, config, batch, name):
    """With the measure a peer is a function of the measure, not of a list of points."""
    grid = {"side": 4, "modes": 2} if name == "SignalFNO" else {}  # so coarse that cells hold several positions
    model = getattr(peers, name)(config, **grid).double().eval()
    weights = torch.ones(2, 9).double()
    weights[:, -1] = 2
    single = model(**batch, measure=weights).predictions
    twice = model(**{key: torch.cat([values, values[:, -1:]], dim=1) for key, values in batch.items()}).predictions
    torch.testing.assert_close(twice[:, :9], single, **CLOSE)
    uniform = model(**batch).predictions
    torch.testing.assert_close(model(**batch, measure=torch.full((2, 9), 3.0).double()).predictions, uniform, **CLOSE)
    assert not torch.allclose(uniform, single, rtol=1e-6)


def test_linear_attention_written_out(load_script):
    attention = load_script("common.peers.signal_attention").linear_attention
    query, key, value = (torch.randn(2, 3, 5, 4).double() for _ in range(3))
    measure = torch.rand(2, 5).double()
    found = attention(query, key, value, measure)
    for sample, head, i in [(0, 0, 0), (1, 2, 4), (0, 1, 3)]:
        total, mass = torch.zeros(4).double(), 0.0
        for j in range(5):
            product = query[sample, head, i].softmax(0) @ key[sample, head, j].softmax(0) * measure[sample, j]
            total, mass = total + product * value[sample, head, j], mass + product
        torch.testing.assert_close(found[sample, head, i], total / mass, **CLOSE)


def test_physics_attention_written_out(load_script):
    attention = load_script("common.peers.signal_attention").physics_attention
    values, slices = torch.randn(1, 2, 6, 4).double(), torch.randn(1, 2, 6, 3).double().softmax(-1)
    measure, projections = torch.rand(1, 6).double(), torch.nn.Linear(4, 12, bias=False).double()
    found = attention(values, slices, measure, projections)
    for head in range(2):
        tokens = []
        for m in range(3):
            weights = [measure[0, j] * slices[0, head, j, m] for j in range(6)]
            total = sum(weight * values[0, head, j] for j, weight in enumerate(weights))
            tokens.append(total / sum(weights))
        query, key, value = projections(torch.stack(tokens)).chunk(3, dim=-1)
        attended = (query @ key.T / math.sqrt(4)).softmax(-1) @ value
        torch.testing.assert_close(found[0, head], slices[0, head] @ attended, **CLOSE)


def test_ball_integrals_written_out(load_script, places):
    gno = load_script("common.peers.signal_gno")
    layer = gno.BallIntegral(4, 7, places.gamma.shape[-1], radius=0.4).double()
    values = torch.randn(2, 9, 4).double()
    found, met = layer(values, places), 0
    for sample in range(2):
        for i in range(9):
            total, mass = torch.zeros(4).double(), 0.0
            for j in range(9):
                if math.dist(places.positions[sample, i].tolist(), places.positions[sample, j].tolist()) >= 0.4:
                    continue
                hidden = layer.sender(places.gamma[sample, j]) + layer.receiver(places.gamma[sample, i])
                weight = places.measure[sample, j]
                total, mass = total + weight * layer.kernel(F.gelu(hidden)) * values[sample, j], mass + weight
                met += 1
            torch.testing.assert_close(found[sample, i], total / mass, **CLOSE)
    assert 18 < met < 162  # some pairs are near, some are not


def test_ball_integrals_are_those_of_neuraloperator(load_script, places):
    integral_transform = pytest.importorskip("neuralop.layers.integral_transform", reason="extra `peers`")
    gno, channels = load_script("common.peers.signal_gno"), pytest.importorskip("neuralop.layers.channel_mlp")
    size = places.gamma.shape[-1]
    layer = gno.BallIntegral(4, 7, size, radius=0.4).double()
    mlp = channels.LinearChannelMLP(layers=[2 * size, 7, 4], non_linearity=F.gelu).double()
    first, last = mlp.fcs
    with torch.no_grad():
        first.weight.copy_(torch.cat([layer.sender.weight, layer.receiver.weight], dim=1))
        first.bias.copy_(layer.sender.bias)
        last.load_state_dict(layer.kernel.state_dict())
    theirs = integral_transform.IntegralTransform(
        channel_mlp=mlp, transform_type="linear", reduction="mean", use_torch_scatter=False
    )
    uniform = type(places)(places.positions[:1], None, places.fourier)
    _, queries, keys = uniform.edges(0.4)
    ends = F.pad(torch.bincount(queries, minlength=9).cumsum(0), (1, 0))
    values = torch.randn(9, 4).double()
    neighbors = {"neighbors_index": keys, "neighbors_row_splits": ends}
    expected = theirs(y=uniform.gamma[0], neighbors=neighbors, x=uniform.gamma[0], f_y=values)
    torch.testing.assert_close(layer(values[None], uniform)[0].float(), expected.float())  # theirs sums in float32


def test_vector_attention_takes_the_nearest(places):
    distance = (places.positions.unsqueeze(2) - places.positions.unsqueeze(1)).norm(dim=-1)
    expected = distance.argsort(-1)[..., :4]
    assert torch.equal(places.nearest(4).sort(-1).values, expected.sort(-1).values)
    assert places.nearest(50).shape == (2, 9, 9)


def test_vectors_of_egnn_turn_with_positions(peers, config, batch):
    model = peers.EGNN(config).double()
    angle = torch.tensor(0.7)
    turn = torch.tensor([[angle.cos(), -angle.sin()], [-angle.sin(), -angle.cos()]]).double()  # with a reflection
    moved = {**batch, "positions": batch["positions"] @ turn.T + 5.0}
    expected = model(**batch).predictions @ turn.T
    torch.testing.assert_close(model(**moved).predictions, expected, rtol=1e-8, atol=1e-10)


def test_egnn_written_out(load_script):
    layer = load_script("common.peers.egnn").EquivariantLayer(3, 5).double()
    features, positions = torch.randn(1, 4, 3).double(), torch.rand(1, 4, 2).double()
    first = torch.cat([layer.receiver.weight, layer.sender.weight, layer.distance.weight], dim=1)
    found, moved = layer(features, positions)
    for i in range(4):
        shift, total = torch.zeros(2).double(), torch.zeros(5).double()
        for j in range(4):
            offset = positions[0, i] - positions[0, j]
            joint = torch.cat([features[0, i], features[0, j], (offset @ offset)[None]])
            message = layer.message(first @ joint + layer.receiver.bias)
            shift, total = shift + offset * layer.vector(message) / 4, total + message / 4
        torch.testing.assert_close(moved[0, i], positions[0, i] + shift, **CLOSE)
        expected = features[0, i] + layer.update(torch.cat([features[0, i], total]))
        torch.testing.assert_close(found[0, i], expected, **CLOSE)


def test_spectral_convolution_multiplies_frequencies(load_script):
    """A wave comes out as the same wave, times the weight of its frequency; one beyond the modes not at all."""
    layer = load_script("common.peers.signal_fno").SpectralConvolution(1, 3).double()
    weight = torch.view_as_complex(layer.weight.detach())
    first, second = torch.meshgrid(*[torch.arange(12).double() / 12] * 2, indexing="ij")
    for k, l in ((1, 2), (-2, 1), (0, 1)):
        phase = 2 * math.pi * (k * first + l * second)
        factor = weight[int(k < 0), 0, 0, k if k >= 0 else 3 + k, l]
        expected = factor.real * phase.cos() - factor.imag * phase.sin()
        torch.testing.assert_close(layer(phase.cos()[None, None])[0, 0], expected, **CLOSE)
    beyond = layer((2 * math.pi * 4 * first).cos()[None, None])
    torch.testing.assert_close(beyond, torch.zeros_like(beyond), **CLOSE)


def test_grids_hold_what_lies_on_them(load_script):
    """At the nodes means are values, and bilinear functions come back everywhere."""
    script = load_script("common.peers.signal_fno")
    axis = torch.linspace(0, 1, 5).double()
    positions = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).view(1, 25, 2)

    def bilinear(x):
        return torch.stack([1 + x[..., 0] - 2 * x[..., 1], x[..., 0] * x[..., 1]], dim=-1)

    values, measure = bilinear(positions), torch.rand(1, 25).double() + 0.1
    fields = script.to_grid(values, measure, *script.grid_weights(positions, 5), 5)
    torch.testing.assert_close(fields.flatten(2).transpose(1, 2), values, **CLOSE)
    anywhere = torch.rand(1, 30, 2).double()
    found = script.from_grid(fields, *script.grid_weights(anywhere, 5))
    torch.testing.assert_close(found, bilinear(anywhere), **CLOSE)
    lonely = script.to_grid(values[:, :1], measure[:, :1], *script.grid_weights(positions[:, :1], 5), 5)
    assert torch.equal(lonely[0, :, 0, 0], values[0, 0]) and not lonely.flatten(2)[..., 1:].any()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("SignalGNO", {"near_radius": None}, "`near_radius` (None) must be given"),
        ("SignalFNO", {"position_dim": 3}, "`position_dim` (3) must be 2"),
        ("EGNN", {"num_labels": 1}, "`num_labels` (1) must be `position_dim` (2)"),
    ],
)
def test_bad_settings(peers, config, name, settings, message):
    values = {**config.to_dict(), **settings}
    for key in ("id2label", "label2id"):
        values.pop(key, None)
    with pytest.raises(ValueError) as error:
        getattr(peers, name)(ITNetConfig(**values))
    assert message in str(error.value)
