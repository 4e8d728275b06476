"""Operator learning on raw signals: the lift, the query layer against its formula, meshes."""

import pytest
import torch
from torch.nn import functional as F

from itnet_kernels import integral_transform
from modeling_itnet import ITNetForSignalRegression, ITNetModel
from modeling_itnet.heads.interpolation import shepard_interpolation


@pytest.fixture
def model(tiny_config, shake):
    config = tiny_config("signal", signal_feature_size=2, num_labels=1)
    return shake(ITNetForSignalRegression(config), 0.1).eval()


def test_lift(tiny_config, shake):
    model = shake(ITNetModel(tiny_config("signal", signal_feature_size=2))).eval()
    values, positions = torch.randn(3, 7, 2), torch.rand(7, 2)
    lift = model.encoder.lift
    lifted = model(inputs_embeds=values @ lift.weight.T + lift.bias, positions=positions).last_hidden_state
    torch.testing.assert_close(
        model(signal_values=values, positions=positions).last_hidden_state, lifted, rtol=0, atol=1e-5
    )


def test_query_layer_against_its_formula(model):
    values, positions, queries = torch.randn(3, 7, 2), torch.rand(3, 7, 2), torch.rand(4, 2)
    measure = torch.rand(3, 7)
    layer, fourier = model.decoder, model.itnet.fourier
    u = model.itnet(signal_values=values, positions=positions, measure=measure).last_hidden_state
    distances = torch.cdist(queries.double().expand(3, -1, -1), positions.double())
    weights = measure.double().unsqueeze(1) / distances**4
    interpolated = (weights / weights.sum(-1, keepdim=True)).float() @ u
    v = interpolated + layer.position_projection(fourier(queries))
    query = F.layer_norm(v, (16,), layer.query_norm.weight, layer.query_norm.bias, 1e-6)
    integral = integral_transform(
        u.unflatten(-1, (2, -1)),
        positions,
        layer.kernel(fourier.frequencies),
        measure=measure / measure.sum(1, keepdim=True),
        queries=query.unflatten(-1, (2, -1)),
        query_positions=queries,
        backend="reference",
    )
    z = v + integral.flatten(-2) @ layer.output.weight.T + query @ layer.residual.weight.T
    w = z + layer.feed_forward(layer.feed_forward_norm(z))
    expected = model.regressor(layer.layernorm(w))
    actual = model(signal_values=values, positions=positions, query_positions=queries, measure=measure).predictions
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


class TestInterpolation:
    def test_exact_at_the_data_and_the_mean_between_two(self):
        u, y = torch.randn(2, 2, 3), torch.tensor([[0.2], [0.6]])
        measure = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
        torch.testing.assert_close(shepard_interpolation(u, y, measure, y), u, rtol=0, atol=1e-5)
        between = shepard_interpolation(u, y, measure, torch.tensor([[0.4]]))[:, 0]
        torch.testing.assert_close(between, torch.einsum("bn,bnd->bd", measure, u), rtol=0, atol=1e-5)

    def test_pieces_give_the_whole_and_its_gradient(self, monkeypatch):
        u, y, q = torch.randn(2, 6, 3, requires_grad=True), torch.rand(2, 6, 2), torch.rand(5, 2)
        measure = torch.rand(2, 6)
        whole = shepard_interpolation(u, y, measure, q)
        (expected,) = torch.autograd.grad(whole.square().sum(), u)
        monkeypatch.setattr("modeling_itnet.heads.interpolation._CHUNK_PAIRS", 24)  # two queries at a time
        pieces = shepard_interpolation(u, y, measure, q)
        (actual,) = torch.autograd.grad(pieces.square().sum(), u)
        torch.testing.assert_close(pieces, whole)
        torch.testing.assert_close(actual, expected)

    @pytest.mark.parametrize("extent", [1e-30, 1e-5, 1.0, 1e6, 1e30])
    def test_the_unit_of_length_does_not_matter(self, extent):
        u, y, q = torch.randn(2, 6, 3), torch.rand(2, 6, 2), torch.rand(5, 2)
        measure = torch.rand(2, 6)
        assert torch.equal(shepard_interpolation(u, extent * y, measure, extent * y), u)
        distances = torch.cdist(q.double().expand(2, -1, -1), y.double())
        weights = measure.double().unsqueeze(1) / distances**4
        expected = ((weights / weights.sum(-1, keepdim=True)) @ u.double()).float()
        actual = shepard_interpolation(u, extent * y, measure, extent * q)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)  # 4 log|q - y| in float32

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_exact_at_the_data_in_every_dtype(self, dtype):
        u, y = torch.randn(2, 6, 3).to(dtype), 3 + 1e-5 * torch.rand(6, 1)
        assert torch.equal(shepard_interpolation(u, y, torch.rand(2, 6), y), u)

    def test_a_causal_query_sees_the_past(self, monkeypatch):
        u, y, measure = torch.randn(2, 6, 3), torch.rand(2, 6, 1).round(decimals=1), torch.rand(2, 6)
        measure[1, :2] = 0
        y[0, 4] = y[0, 1] = y[0, 3]  # a position that comes again
        actual = shepard_interpolation(u, y, measure, y, is_causal=True)
        monkeypatch.setattr("modeling_itnet.heads.interpolation._CHUNK_PAIRS", 24)  # two queries at a time
        torch.testing.assert_close(shepard_interpolation(u, y, measure, y, is_causal=True), actual)
        for i in range(6):
            past = slice(0, i + 1)
            expected = shepard_interpolation(u[:, past], y[:, past], measure[:, past], y[:, i : i + 1])[:, 0]
            expected = expected.where(measure[:, past].sum(1, keepdim=True) > 0, 0)
            torch.testing.assert_close(actual[:, i], expected)

    def test_padding_does_not_count(self):
        u, y, q = torch.randn(1, 6, 3), torch.rand(1, 6, 2), torch.rand(5, 2)
        measure = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0, 0.0]])
        expected = shepard_interpolation(u[:, :4], y[:, :4], measure[:, :4], q)
        torch.testing.assert_close(shepard_interpolation(u, y, measure, q), expected)


def test_queries_do_not_see_each_other(model):
    values, positions, queries = torch.randn(2, 7, 2), torch.rand(7, 2), torch.rand(5, 2)
    together = model(signal_values=values, positions=positions, query_positions=queries).predictions
    alone = model(signal_values=values, positions=positions, query_positions=queries[3:4]).predictions
    torch.testing.assert_close(alone, together[:, 3:4], rtol=0, atol=1e-5)


def test_default_queries_are_the_input_positions(model):
    values, positions = torch.randn(2, 7, 2), torch.rand(2, 7, 2)
    expected = model(signal_values=values, positions=positions, query_positions=positions).predictions
    assert torch.equal(model(signal_values=values, positions=positions).predictions, expected)


def test_every_sample_has_its_own_mesh(model):
    values, positions, queries = torch.randn(2, 7, 2), torch.rand(2, 7, 2), torch.rand(2, 5, 2)
    together = model(signal_values=values, positions=positions, query_positions=queries).predictions
    for i in range(2):
        alone = model(
            signal_values=values[i : i + 1], positions=positions[i : i + 1], query_positions=queries[i : i + 1]
        )
        torch.testing.assert_close(alone.predictions[0], together[i], rtol=0, atol=1e-5)


def test_splitting_a_cell_changes_nothing(model):
    """Two copies of a point with half the weight each are the same measure: the answer is that of the function."""
    values, positions, queries = torch.randn(1, 7, 2), torch.rand(1, 7, 2), torch.rand(5, 2)
    measure = torch.rand(1, 7) + 0.1
    expected = model(signal_values=values, positions=positions, query_positions=queries, measure=measure).predictions
    halved = torch.cat([measure[:, :6], measure[:, 6:] / 2, measure[:, 6:] / 2], dim=1)
    doubled = [torch.cat([t, t[:, 6:]], dim=1) for t in (values, positions)]
    actual = model(signal_values=doubled[0], positions=doubled[1], query_positions=queries, measure=halved).predictions
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signal_values": torch.randn(2, 7, 3)}, "`signal_feature_size` is 2"),
        ({"signal_values": None}, "needs exactly one of `inputs_embeds` or `signal_values`"),
        ({"positions": None}, "`positions` is missing: a signal needs `signal_values` and `positions`"),
        ({"positions": torch.rand(6, 2)}, r"`positions` \[6, 2\] must be .* to go with `signal_values` \[2, 7, 2\]"),
        (
            {"signal_values": torch.randn(2, 0, 2)},
            r"`signal_values` \[2, 0, 2\] must be .* at least one position",
        ),
        ({"query_positions": torch.rand(5, 3)}, r"`query_positions` \[5, 3\] must be \[queries, 2\]"),
        ({"query_positions": torch.rand(4, 5, 2)}, r"or \[2, queries, 2\]"),
        ({"labels": torch.rand(2, 7, 1)}, r"`labels` \[2, 7, 1\] must be \[2, 5, 1\]"),
    ],
)
def test_bad_input(model, change, message):
    inputs = {
        "signal_values": torch.randn(2, 7, 2),
        "positions": torch.rand(7, 2),
        "query_positions": torch.rand(5, 2),
    }
    with pytest.raises(ValueError, match=message):
        model(**{**inputs, **change})


def test_values_need_a_lift(tiny_config):
    with pytest.raises(ValueError, match="`signal_feature_size` is 0"):
        ITNetModel(tiny_config("signal"))(signal_values=torch.randn(1, 3, 2), positions=torch.rand(3, 2))
