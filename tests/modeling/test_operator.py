"""ITNetOperator against Eq. multihead written out pair by pair, and the frozen Fourier features."""

import math

import pytest
import torch
from transformers import AutoModel

from modeling_itnet import Domain, ITNetFourierFeatures, ITNetModel, ITNetOperator

GROUPS = ("x", "y", "x-y", "distance", "u_x", "u_y", "u_x*u_y")  # Eq. kernel_input
GRID_WITH_CLS = [(0.5, 0.5), (0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)]
GRID_4X4 = [((row + 0.5) / 4, (column + 0.5) / 4) for row in range(4) for column in range(4)]
LONG_LINE = [(k / 13,) for k in range(1, 14)]
LINE = [(1 / 6,), (2 / 6,), (3 / 6,), (4 / 6,), (5 / 6,), (1.0,)]
SCATTERED = [(0.1, 0.7, 0.3), (0.9, 0.2, 0.4), (0.35, 0.35, 0.8), (0.6, 0.05, 0.55)]

# id -> (positions, settings that differ from the defaults)
CASES = {
    "image": (GRID_WITH_CLS, {}),
    "text": (LINE, {}),
    "scattered-3d": (SCATTERED, {}),
    "image-4x4": (GRID_4X4, {}),  # large enough for the displacement table of a regular domain
    "text-13": (LONG_LINE, {}),
    "single-position": ([(0.3, 0.6)], {}),
    "image-shared-output": (GRID_WITH_CLS, {"kernel_output_sharing": "shared"}),
    "text-three-layers": (LINE, {"kernel_num_layers": 3}),
    "text-causal": (LINE, {"is_causal": True}),
    "text-causal-shared-three-layers": (
        LINE,
        {"is_causal": True, "kernel_output_sharing": "shared", "kernel_num_layers": 3},
    ),
    "image-raw-coordinates": (GRID_WITH_CLS, {"num_fourier_features": 0}),
    "text-subset-of-inputs": (LINE, {"kernel_inputs": ("distance", "u_y", "u_x*u_y")}),
    "image-gated": (GRID_WITH_CLS, {"output_gate": True}),
    "text-causal-gated": (LINE, {"is_causal": True, "output_gate": True}),
    "image-directions": (GRID_WITH_CLS, {"kernel_directions": True, "kernel_num_layers": 3}),
    "scattered-directions-shared-output": (
        SCATTERED,
        {"kernel_directions": True, "kernel_output_sharing": "shared", "kernel_inputs": ("distance", "u_x", "u_y")},
    ),
    "text-causal-directions": (LINE, {"kernel_directions": True, "is_causal": True}),
    "image-four-heads": (GRID_WITH_CLS, {"num_attention_heads": 4, "rank": 4}),
}


def gelu(value):
    return 0.5 * value * (1 + torch.erf(value / math.sqrt(2)))


def gamma(x, frequencies):
    if len(frequencies) == 0:
        return x
    angles = 2 * math.pi * (frequencies @ x)
    return torch.cat([angles.sin(), angles.cos()])


def literal_operator(operator, config, features, positions, measure, frequencies):
    """Eq. multihead: every z_ij, both (or three) MLP layers, K_ij, the sum over j; then W^O and W_theta."""
    kernel, size = operator.kernel, config.head_dim
    rows = []
    for u, omega in zip(features, measure, strict=True):
        for i, x in enumerate(positions):
            last = i if config.is_causal else len(positions) - 1
            visible = range(last + 1)
            mass = sum(omega[j] for j in visible) if config.is_causal else 1.0
            heads = []
            for head in range(config.num_attention_heads):
                own = slice(head * size, (head + 1) * size)
                output = 0 if config.kernel_output_sharing == "shared" else head
                total = torch.zeros(size, dtype=features.dtype)
                for j in visible:
                    y, u_x, u_y = positions[j], u[i, own], u[j, own]
                    groups = {
                        "x": gamma(x, frequencies),
                        "y": gamma(y, frequencies),
                        "x-y": gamma(x - y, frequencies),
                        "distance": ((x - y) ** 2).sum().sqrt().reshape(1),
                        "u_x": u_x,
                        "u_y": u_y,
                        "u_x*u_y": u_x * u_y,
                    }
                    z = torch.cat([groups[name] for name in GROUPS if name in config.kernel_inputs])
                    hidden = gelu(kernel.w1 @ z + kernel.b1)
                    if config.kernel_num_layers == 3:
                        hidden = gelu(kernel.w_mid @ hidden + kernel.b_mid)
                    flat = kernel.w2[output] @ hidden + kernel.b2[output]
                    for k in range(len(x) if config.kernel_directions else 0):
                        along = kernel.w2_directions[output, k] @ hidden + kernel.b2_directions[output, k]
                        flat = flat + (x[k] - y[k]) * along
                    matrix = torch.stack([flat[row * size : (row + 1) * size] for row in range(size)])
                    total = total + omega[j] / mass * (matrix @ u_y)
                heads.append(total)
            joined = torch.cat(heads)
            if config.output_gate:
                gate = operator.gate.weight @ u[i]
                joined = joined * gate / (1 + torch.exp(-gate))
            rows.append(operator.output.weight @ joined + operator.residual.weight @ u[i])
    return torch.stack(rows).view_as(features)


def make_case(tiny_config, shake, name, **overrides):
    positions = torch.tensor(CASES[name][0], dtype=torch.float64)
    count, dim = positions.shape
    config = tiny_config("signal", position_dim=dim, **CASES[name][1], **overrides)
    operator = ITNetModel(config).layers[0].operator
    operator = shake(operator).double()
    frequencies = ITNetFourierFeatures(config).frequencies
    features = torch.randn(2, count, config.hidden_size, dtype=torch.float64, requires_grad=True)
    measure = torch.rand(2, count, dtype=torch.float64) + 0.1
    return config, operator, features, positions, measure / measure.sum(1, keepdim=True), frequencies


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("name", CASES)
class TestEquation:
    def test_output_and_gradients(self, tiny_config, shake, name, backend):
        case = make_case(tiny_config, shake, name, backend=backend)
        config, operator, features, positions, measure, frequencies = case
        inputs = [features, *operator.parameters()]
        expected = literal_operator(operator, config, features, positions, measure, frequencies.double())
        actual = operator(features, Domain(positions, measure, frequencies))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        probe = torch.randn_like(expected)
        gradients = torch.autograd.grad((actual * probe).sum(), inputs)
        expected_gradients = torch.autograd.grad((expected * probe).sum(), inputs)
        names = ["features", *(name for name, _ in operator.named_parameters())]
        for what, got, wanted in zip(names, gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10, msg=lambda m, what=what: f"{what}: {m}")


class TestAlone:
    """An operator outside of a model."""

    MODES = {
        "exact": {},
        "monte carlo": {"integration_mode": "monte_carlo"},
        "low rank": {"approximate_mode": "low_rank"},
        "three layers": {"kernel_num_layers": 3},
        "gate": {"output_gate": True},
        "directions": {"kernel_directions": True, "kernel_bias_scale": 1.0},
    }

    @pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
    def test_initialises_itself_as_in_a_model(self, tiny_config, settings):
        config = tiny_config("signal", **settings, hidden_size=64, kernel_hidden_size=64)
        torch.manual_seed(3)
        operator = ITNetOperator(config)
        torch.manual_seed(3)
        again = ITNetOperator(config).state_dict()
        wanted = ITNetModel(config).layers[0].operator.state_dict()
        assert list(operator.state_dict()) == list(wanted)
        for name, value in operator.state_dict().items():
            assert torch.equal(value, again[name]), name
            same = torch.tensor([float(t.double().std(correction=0)) for t in (value, wanted[name])])
            assert same[0] == pytest.approx(float(same[1]), rel=6 / math.sqrt(2 * value.numel()), abs=1e-12), name
        assert not torch.equal(ITNetOperator(config).output.weight, operator.output.weight)

    def test_defaults(self, tiny_config, shake):
        config = tiny_config("signal")
        operator, model = shake(ITNetOperator(config)), ITNetModel(config)
        features, positions = torch.randn(2, 7, 16), torch.rand(7, 2)
        expected = operator(features, Domain(positions, torch.full((2, 7), 1 / 7), model.fourier.frequencies))
        torch.testing.assert_close(operator(features, positions), expected)

    def test_fills_memory_that_held_something_else(self, tiny_config, monkeypatch):
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
        for settings in self.MODES.values():
            operator = ITNetOperator(tiny_config("signal", **settings))
            assert all(parameter.isfinite().all() for parameter in operator.parameters())

    def test_on_the_meta_device(self, tiny_config):
        with torch.device("meta"):
            operator = ITNetOperator(tiny_config("signal", approximate_mode="low_rank"))
        assert all(parameter.is_meta for parameter in operator.parameters())

    def test_settings_are_read_when_they_are_used(self, tiny_config, shake):
        config = tiny_config("signal", approximate_mode="low_rank")
        operator, arguments = shake(ITNetOperator(config)).eval(), (torch.randn(1, 7, 16), torch.rand(7, 2))
        for mode in ("exact", "low_rank"):
            config.integration_mode, config.is_causal = mode, False
            whole = operator(*arguments)
            config.is_causal = True
            causal = operator(*arguments)
            torch.testing.assert_close(causal[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)  # sees everything
            assert not torch.allclose(causal[:, 0], whole[:, 0], atol=1e-2)
        config.integration_mode, config.backend = "exact", "triton"
        with pytest.raises(ValueError, match="triton"):
            operator(*arguments)


class TestOperator:
    def test_positions_per_sample(self, tiny_config, shake):
        config, operator, features, positions, measure, frequencies = make_case(tiny_config, shake, "scattered-3d")
        both = torch.stack([positions, positions.flip(0) ** 2])
        actual = operator(features, Domain(both, measure, frequencies))
        for sample in range(2):
            one = slice(sample, sample + 1)
            alone = (features[one], both[sample], measure[one], frequencies.double())
            torch.testing.assert_close(actual[one], literal_operator(operator, config, *alone), rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("name", CASES)
    def test_every_parameter_gets_a_gradient(self, tiny_config, shake, name):
        _, operator, features, positions, measure, frequencies = make_case(tiny_config, shake, name)
        operator(features, Domain(positions, measure, frequencies)).square().sum().backward()
        for parameter_name, parameter in operator.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().max() > 0, parameter_name

    def test_parameters(self, tiny_config):
        """W1 is shared by the heads, W2 and b2 are not; W^O and W_theta have no bias."""
        config = tiny_config("image", num_attention_heads=4, rank=4)
        shapes = {name: tuple(p.shape) for name, p in ITNetOperator(config).named_parameters()}
        assert shapes == {
            "kernel.w1": (12, 6 * 3 + 1 + 3 * 4),
            "kernel.b1": (12,),
            "kernel.w2": (4, 16, 12),
            "kernel.b2": (4, 16),
            "output.weight": (16, 16),
            "residual.weight": (16, 16),
        }

    def test_shared_output_has_one_kernel_for_all_heads(self, tiny_config):
        kernel = ITNetOperator(tiny_config("image", kernel_output_sharing="shared")).kernel
        assert (tuple(kernel.w2.shape), tuple(kernel.b2.shape)) == ((1, 64, 12), (1, 64))


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


class TestFourierFeatures:
    @pytest.mark.parametrize(
        ("frequencies", "position"),
        [([[1.5]], (0.2,)), ([[1.0, -2.0], [0.5, 3.0]], (0.3, 0.7)), ([[4.0, 0.0, 1.0]], (0.1, 0.2, 0.9))],
        ids=["1d", "2d", "3d"],
    )
    def test_formula(self, tiny_config, frequencies, position):
        config = tiny_config("signal", position_dim=len(position), num_fourier_features=len(frequencies))
        fourier = ITNetFourierFeatures(config)
        fourier.frequencies = torch.tensor(frequencies)
        cycles = [sum(b * x for b, x in zip(row, position, strict=True)) for row in frequencies]
        expected = [math.sin(2 * math.pi * c) for c in cycles] + [math.cos(2 * math.pi * c) for c in cycles]
        torch.testing.assert_close(fourier(torch.tensor(position)), torch.tensor(expected), rtol=0, atol=1e-6)

    def test_no_frequencies_means_raw_coordinates(self, tiny_config):
        fourier = ITNetFourierFeatures(tiny_config("image", num_fourier_features=0))
        positions = torch.rand(5, 2)
        assert fourier.size == 2
        assert torch.equal(fourier(positions), positions)

    @pytest.mark.parametrize("scale", [1.0, 10.0])
    def test_distribution(self, tiny_config, scale):
        fourier = ITNetFourierFeatures(tiny_config("image", num_fourier_features=4096, fourier_scale=scale))
        values = fourier.frequencies
        assert values.shape == (4096, 2)
        assert fourier.size == 8192
        assert abs(values.std() / scale - 1) < 5 / math.sqrt(2 * values.numel())
        assert abs(values.mean() / scale) < 5 / math.sqrt(values.numel())
        assert abs((values / scale).pow(4).mean() - 3) < 5 * math.sqrt(96 / values.numel())  # normal, not uniform

    def test_the_seed_decides(self, tiny_config):
        torch.manual_seed(1)
        first = ITNetFourierFeatures(tiny_config("image")).frequencies
        torch.manual_seed(2)
        assert torch.equal(ITNetFourierFeatures(tiny_config("image")).frequencies, first)
        assert torch.equal(ITNetModel(tiny_config("image")).fourier.frequencies, first)
        other = ITNetFourierFeatures(tiny_config("image", fourier_seed=1)).frequencies
        assert not torch.isclose(other, first).any()

    def test_frozen_and_saved_once(self, tiny_config):
        model = ITNetModel(tiny_config("image"))
        assert [name for name in model.state_dict() if "frequencies" in name] == ["fourier.frequencies"]
        assert not model.fourier.frequencies.requires_grad
        assert not list(model.fourier.parameters())

    def test_training_leaves_it_alone(self, tiny_model, tiny_inputs):
        model = tiny_model("image").train()
        before = model.fourier.frequencies.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**tiny_inputs("image")).last_hidden_state.square().sum().backward()
        optimizer.step()
        assert torch.equal(model.fourier.frequencies, before)

    @pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_loading_restores_what_was_saved(self, tiny_config, tmp_path, dtype):
        model = ITNetModel(tiny_config("image"))
        model.fourier.frequencies += 1 / 3  # not what the seed gives
        loaded = AutoModel.from_pretrained(saved(model, tmp_path), dtype=dtype)
        assert next(loaded.parameters()).dtype == (dtype or torch.float32)
        assert loaded.fourier.frequencies.dtype == torch.float32
        assert torch.equal(loaded.fourier.frequencies, model.fourier.frequencies)

    def test_saving_a_half_precision_model_keeps_it_exact(self, tiny_config, tmp_path):
        model = ITNetModel(tiny_config("image"))
        before = model.fourier.frequencies.clone()
        loaded = AutoModel.from_pretrained(saved(model.to(torch.bfloat16), tmp_path))
        assert torch.equal(loaded.fourier.frequencies, before)

    def test_an_old_checkpoint_without_it_gets_the_one_of_the_seed(self, tiny_config, tmp_path):
        model = ITNetModel(tiny_config("image"))
        state = {name: value for name, value in model.state_dict().items() if "frequencies" not in name}
        model.save_pretrained(tmp_path, state_dict=state)
        loaded = AutoModel.from_pretrained(tmp_path)
        assert torch.equal(loaded.fourier.frequencies, model.fourier.frequencies)

    @pytest.mark.parametrize(
        "cast",
        [
            lambda model: model.to(torch.bfloat16),
            lambda model: model.half(),
            lambda model: model.bfloat16(),
            lambda model: model.double(),
            lambda model: model.to("cpu", torch.bfloat16).float(),
        ],
        ids=["to-bfloat16", "half", "bfloat16", "double", "bfloat16-and-back"],
    )
    def test_casts_do_not_round_it(self, tiny_config, cast):
        model = ITNetModel(tiny_config("image"))
        before = model.fourier.frequencies.clone()
        cast(model)
        assert model.fourier.frequencies.dtype == torch.float32
        assert torch.equal(model.fourier.frequencies, before)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_building_in_another_dtype_does_not_round_it(self, tiny_config, dtype):
        model = AutoModel.from_config(tiny_config("image"), dtype=dtype)
        assert next(model.parameters()).dtype == dtype
        assert model.fourier.frequencies.dtype == torch.float32
        assert torch.equal(model.fourier.frequencies, ITNetModel(tiny_config("image")).fourier.frequencies)

    def test_features_of_a_bfloat16_model_are_exact(self, tiny_config):
        fourier = ITNetModel(tiny_config("image", fourier_scale=10.0)).to(torch.bfloat16).fourier
        positions = torch.rand(50, 2)
        expected = torch.stack([gamma(x, fourier.frequencies.double()) for x in positions.double()])
        torch.testing.assert_close(fourier(positions).double(), expected, rtol=0, atol=1e-4)

    def test_meta_device(self, tiny_config):
        with torch.device("meta"):
            model = ITNetModel(tiny_config("image"))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        model.load_state_dict(ITNetModel(tiny_config("image")).state_dict(), assign=True)
        drawn = ITNetModel(tiny_config("image")).fourier.frequencies
        assert torch.equal(model.fourier.frequencies, drawn)
        model.to_empty(device="cpu")
        model.fourier.frequencies.fill_(math.nan)  # what empty memory may hold
        model._init_weights(model.fourier)
        assert torch.equal(model.fourier.frequencies, drawn)
