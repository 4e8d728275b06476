"""Every statement of App. init, each as a test. Spreads must lie within five standard errors."""

import math

import pytest
import torch

from modeling_itnet import (
    Domain,
    ITNetForImageClassification,
    ITNetForMaskedLM,
    ITNetForSequenceClassification,
    ITNetModel,
)

WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": None,
    "num_fourier_features": 16,
    "kernel_hidden_size": 64,
    "kernel_init_scale": 1e-3,
    "vocab_size": 1000,
}
DEPTHS = (1, 3)


@pytest.fixture(scope="module", params=DEPTHS, ids=lambda depth: f"{depth}-layers")
def image_model(request, tiny_config):
    torch.manual_seed(5)
    return ITNetForImageClassification(tiny_config("image", num_hidden_layers=request.param, **WIDE))


@pytest.fixture(scope="module")
def text_model(tiny_config):
    torch.manual_seed(6)
    return ITNetForMaskedLM(tiny_config("text", **WIDE))


@pytest.fixture(scope="module")
def sample():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 9, 128, generator=generator, dtype=torch.float64)
    measure = torch.rand(2, 9, generator=generator, dtype=torch.float64)
    return features, torch.rand(9, 2, generator=generator), measure / measure.sum(1, keepdim=True)


def assert_normal(values, std):
    values, count = values.detach() / std, values.numel()
    assert abs(values.std() - 1) < 5 / math.sqrt(2 * count)
    assert abs(values.mean()) < 5 / math.sqrt(count)
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96 / count)  # a uniform distribution has 1.8


def assert_uniform(values, bound):
    values, count = values.detach() / bound, values.numel()
    assert values.abs().max() <= 1
    assert values.abs().max() > 1 - 10 / count
    assert abs(values.square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / count)
    assert abs(values.mean()) < 5 / math.sqrt(3 * count)


def layers(model):
    return model.itnet.layers


class TestKernel:
    def test_w1(self, image_model):
        for layer in layers(image_model):
            assert_normal(layer.operator.kernel.w1, 0.02)

    def test_b1_is_zero(self, image_model):
        for layer in layers(image_model):
            assert not layer.operator.kernel.b1.any()

    def test_w2(self, image_model):
        for layer in layers(image_model):
            assert_normal(layer.operator.kernel.w2, 1e-3 / math.sqrt(64))

    def test_heads_start_different(self, image_model):
        w2 = layers(image_model)[0].operator.kernel.w2
        assert len({head.sum().item() for head in w2}) == 4

    def test_layers_start_different(self, text_model):
        first, second = (layer.operator.kernel for layer in layers(text_model))
        assert not torch.equal(first.w1, second.w1)
        assert not torch.equal(first.w2, second.w2)

    @pytest.mark.parametrize("sharing", ["per_head", "shared"])
    def test_b2_is_the_identity(self, tiny_config, sharing):
        model = ITNetModel(tiny_config("image", **WIDE, kernel_output_sharing=sharing))
        for layer in model.layers:
            matrices = layer.operator.kernel.b2.view(-1, 32, 32)
            assert torch.equal(matrices, torch.eye(32).expand(len(matrices), -1, -1))

    @pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-1])
    def test_the_scale_of_w2_is_a_setting(self, tiny_config, scale):
        w2 = ITNetModel(tiny_config("image", **WIDE | {"kernel_init_scale": scale})).layers[0].operator.kernel.w2
        if scale:
            assert_normal(w2, scale / 8)
        else:
            assert not w2.any()

    def test_biases_and_directions(self, tiny_config):
        """b1 bends hidden units elsewhere on request; a direction starts as small as W2, and without a constant."""
        settings = {"kernel_bias_scale": 2.0, "kernel_directions": True}
        kernel = ITNetModel(tiny_config("image", **WIDE, **settings)).layers[0].operator.kernel
        assert_normal(kernel.b1, 2.0)
        assert kernel.w2_directions.shape == (4, 2, 32 * 32, 64)
        assert_normal(kernel.w2_directions, 1e-3 / 8)
        assert not kernel.b2_directions.any()

    def test_middle_layer_keeps_the_spread(self, tiny_config):
        kernel = ITNetModel(tiny_config("image", **WIDE, kernel_num_layers=3)).layers[0].operator.kernel
        assert_normal(kernel.w_mid, 1 / 8)
        assert not kernel.b_mid.any()
        assert_normal(kernel.w1, 0.02)
        assert_normal(kernel.w2, 1e-3 / 8)


class TestOperator:
    """The initial operator is pooling plus skip: W^O mean(u) + u, up to epsilon."""

    SCALES = (1e-3, 1e-4)

    def operator(self, tiny_config, scale, **overrides):
        torch.manual_seed(7)
        model = ITNetModel(tiny_config("image", **WIDE | {"kernel_init_scale": scale} | overrides))
        return model.layers[0].operator.double(), model.fourier.frequencies

    def mean(self, features, measure):
        return (features * measure.unsqueeze(-1)).sum(1, keepdim=True).expand_as(features)

    @pytest.mark.parametrize("depth", [2, 3], ids=["two-layer-kernel", "three-layer-kernel"])
    def test_the_head_integral_is_the_mean_up_to_epsilon(self, tiny_config, sample, depth):
        features, positions, measure = sample
        errors = []
        for scale in self.SCALES:
            operator, frequencies = self.operator(tiny_config, scale, kernel_num_layers=depth)
            integral = operator.integral(features, Domain(positions, measure, frequencies))
            errors.append((integral - self.mean(features, measure)).abs().max().item())
        assert 0 < errors[0] < self.SCALES[0] * features.abs().max()
        assert errors[0] / errors[1] == pytest.approx(self.SCALES[0] / self.SCALES[1], rel=1e-5)

    def test_the_operator_is_projected_mean_plus_identity(self, tiny_config, sample):
        features, positions, measure = sample
        for scale in self.SCALES:
            operator, frequencies = self.operator(tiny_config, scale)
            expected = self.mean(features, measure) @ operator.output.weight.T + features
            error = (operator(features, Domain(positions, measure, frequencies)) - expected).abs().max()
            assert 0 < error < scale * features.abs().max()

    def test_epsilon_zero_is_exact(self, tiny_config, sample):
        features, positions, measure = sample
        operator, frequencies = self.operator(tiny_config, 0.0)
        expected = self.mean(features, measure) @ operator.output.weight.T + features
        actual = operator(features, Domain(positions, measure, frequencies))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    def test_w_theta_is_the_identity(self, image_model):
        for layer in layers(image_model):
            assert torch.equal(layer.operator.residual.weight, torch.eye(128))

    def test_w_o(self, image_model):
        depth = len(layers(image_model))
        for layer in layers(image_model):
            assert_uniform(layer.operator.output.weight, math.sqrt(6 / (128 + 128)) / math.sqrt(2 * depth))


class TestFeedForwardAndNorms:
    def test_hidden_layer(self, image_model):
        for layer in layers(image_model):
            assert layer.feed_forward.expand.weight.shape == (512, 128)
            assert_uniform(layer.feed_forward.expand.weight, math.sqrt(6 / (128 + 512)))

    def test_output_layer(self, image_model):
        depth = len(layers(image_model))
        for layer in layers(image_model):
            assert_uniform(layer.feed_forward.contract.weight, math.sqrt(6 / (128 + 512)) / math.sqrt(2 * depth))

    def test_biases_are_zero(self, image_model):
        for layer in layers(image_model):
            assert not layer.feed_forward.expand.bias.any()
            assert not layer.feed_forward.contract.bias.any()

    def test_layer_norms_only_normalise(self, image_model, text_model):
        norms = [
            m for model in (image_model, text_model) for m in model.modules() if isinstance(m, torch.nn.LayerNorm)
        ]
        assert len(norms) == 2 * len(layers(image_model)) + 1 + 2 * 2 + 2
        for norm in norms:
            assert torch.equal(norm.weight, torch.ones(128))
            assert torch.equal(norm.bias, torch.zeros(128))


class TestEmbeddings:
    @pytest.mark.parametrize("patch_size", [16, (8, 16)], ids=["one-grid", "two-grids"])
    def test_patch_embedding(self, tiny_config, patch_size):
        model = ITNetModel(tiny_config("image", **WIDE, patch_size=patch_size, image_size=32))
        for embed in model.encoder.patch_embeddings:
            assert_normal(embed.weight, 0.02)
            assert not embed.bias.any()

    def test_cls_token(self, image_model):
        assert image_model.itnet.encoder.cls_token.shape == (1, 1, 128)
        assert_normal(image_model.itnet.encoder.cls_token, 0.02)

    def test_token_embeddings(self, text_model):
        embeddings = text_model.itnet.encoder.word_embeddings.weight
        assert not embeddings[0].any()  # padding
        assert_normal(embeddings[1:], 0.02)
        assert_normal(text_model.itnet.encoder.token_type_embeddings.weight, 0.02)

    def test_no_padding_token(self, tiny_config):
        model = ITNetModel(tiny_config("text", **WIDE, pad_token_id=None))
        assert_normal(model.encoder.word_embeddings.weight, 0.02)
        assert model.encoder.word_embeddings.weight[0].any()

    def test_position_projection(self, image_model, text_model):
        assert_normal(image_model.itnet.encoder.position_projection.weight, 0.02)
        # Positions of text start as large as its tokens.
        frequencies = text_model.config.num_fourier_features
        assert_normal(text_model.itnet.encoder.position_projection.weight, 0.02 / math.sqrt(frequencies))
        positions = (
            text_model.itnet.fourier(torch.rand(500, 1)) @ text_model.itnet.encoder.position_projection.weight.T
        )
        assert abs(positions.std() / text_model.itnet.encoder.word_embeddings.weight.std() - 1) < 0.1

    def test_heads(self, tiny_config, text_model):
        config = tiny_config("text", **WIDE | {"num_labels": 50})
        linear = ITNetForSequenceClassification(config).classifier
        assert_normal(linear.weight, 0.02)
        assert not linear.bias.any()
        assert_normal(text_model.lm_head.dense.weight, 0.02)
        assert not text_model.lm_head.dense.bias.any()
        assert not text_model.lm_head.decoder.bias.any()

    def test_initializer_range(self, tiny_config):
        model = ITNetModel(tiny_config("image", **WIDE, initializer_range=0.1))
        assert_normal(model.layers[0].operator.kernel.w1, 0.1)
        assert_normal(model.encoder.patch_embeddings[0].weight, 0.1)

    @pytest.mark.parametrize("sharing", ["shared", "per_head"])
    def test_scales_of_positions(self, tiny_config, sharing, tmp_path):
        """Of W1 by columns, and of W_pos; what a checkpoint holds is left alone."""
        scales = {"kernel_position_scale": 10.0, "position_init_scale": 0.0, "kernel_input_sharing": sharing}
        groups = {"kernel_inputs": ("x-y", "distance", "u_x", "u_x*u_y")}
        model = ITNetModel(tiny_config("text", **WIDE, **scales, **groups))
        positions, content = model.layers[0].operator.kernel.w1.split([2 * 16 + 1, 2 * 32], dim=-1)
        assert_normal(positions, 0.2)
        assert_normal(content, 0.02)
        assert not model.encoder.position_projection.weight.any()
        model.save_pretrained(tmp_path)
        loaded = ITNetModel.from_pretrained(tmp_path).layers[0].operator.kernel.w1
        assert torch.equal(loaded, model.layers[0].operator.kernel.w1)

    def test_gate(self, tiny_config):
        operator = ITNetModel(tiny_config("text", **WIDE, output_gate=True)).layers[0].operator
        assert_uniform(operator.gate.weight, math.sqrt(6 / 256))


class TestPartialCheckpoints:
    """What a checkpoint lacks is initialised as above when it is loaded, and what it holds is left alone."""

    MISSING = {
        "layers.0.operator.kernel.w1": lambda value: assert_normal(value, 0.02),
        "layers.0.operator.kernel.b2": lambda value: torch.equal(value, torch.eye(32).flatten().expand(4, -1)),
        "layers.0.operator.kernel.w2": lambda value: assert_normal(value, 1e-3 / 8),
        "layers.0.operator.output.weight": lambda value: assert_uniform(value, math.sqrt(6 / 256) / 2),
        "layers.0.operator.residual.weight": lambda value: torch.equal(value, torch.eye(128)),
        "layers.0.feed_forward.contract.weight": lambda value: assert_uniform(value, math.sqrt(6 / 640) / 2),
        "layers.0.operator_norm.weight": lambda value: torch.equal(value, torch.ones(128)),
        "encoder.cls_token": lambda value: assert_normal(value, 0.02),
    }

    def test_missing_weights(self, tiny_config, shake, tmp_path):
        model = shake(ITNetModel(tiny_config("image", **WIDE)), scale=1.0)
        state = model.state_dict()
        model.save_pretrained(tmp_path, state_dict={name: state[name] for name in state if name not in self.MISSING})
        loaded, report = ITNetModel.from_pretrained(tmp_path, output_loading_info=True)
        assert set(report["missing_keys"]) == set(self.MISSING)
        for name, value in loaded.state_dict().items():
            if name in self.MISSING:
                assert self.MISSING[name](value) is not False, name
            else:
                assert torch.equal(value, state[name]), name
