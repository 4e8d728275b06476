"""What each encoder makes of its inputs: features, positions and measure, against the formulas."""

import math

import pytest
import torch
from torch.nn import functional as F

from modeling_itnet import ITNetModel


def encode(model, **inputs):
    return model.encoder(model.fourier, **inputs)


def position_features(model, positions):
    """W_pos gamma(x), with gamma written out in float64."""
    angles = 2 * math.pi * positions.double() @ model.fourier.frequencies.double().T
    gamma = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return (gamma @ model.encoder.position_projection.weight.double().T).float()


def assert_same(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class TestImage:
    # id -> (height, width, patch sizes)
    SHAPES = {
        "trained-size": (16, 16, (8,)),
        "larger": (32, 32, (8,)),
        "wide": (8, 24, (8,)),
        "tall-multi-scale": (32, 16, (4, 8)),
    }

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("pooling", ["cls", "mean"])
    def test_features_are_projected_patches_and_positions(self, tiny_model, shape, pooling):
        height, width, sizes = self.SHAPES[shape]
        model = tiny_model("image", patch_size=sizes, pooling=pooling)
        pixels = torch.randn(2, 3, height, width)
        signal = encode(model, pixel_values=pixels)
        patches = []
        for size, embed in zip(sizes, model.encoder.patch_embeddings, strict=True):
            columns = F.unfold(pixels, size, stride=size).transpose(1, 2)  # [B, patches, C * size^2], row by row
            patches.append(columns @ embed.weight.flatten(1).T + embed.bias)
        if pooling == "cls":
            patches.insert(0, model.encoder.cls_token.expand(2, 1, 16))
        expected = torch.cat(patches, dim=1) + position_features(model, signal.positions)
        assert_same(signal.features, expected)

    def test_patch_centres(self, tiny_model):
        signal = encode(tiny_model("image"), pixel_values=torch.randn(1, 3, 16, 24))
        expected = [
            (0.5, 0.5),  # [CLS]
            (0.25, 1 / 6),
            (0.25, 3 / 6),
            (0.25, 5 / 6),
            (0.75, 1 / 6),
            (0.75, 3 / 6),
            (0.75, 5 / 6),
        ]
        assert_same(signal.positions, torch.tensor(expected), atol=1e-7)

    def test_grids_follow_each_other_on_the_same_square(self, tiny_model):
        model = tiny_model("image", patch_size=(8, 16), pooling="mean")
        signal = encode(model, pixel_values=torch.randn(1, 3, 16, 16))
        expected = [(0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75), (0.5, 0.5)]
        assert_same(signal.positions, torch.tensor(expected), atol=1e-7)

    @pytest.mark.parametrize(("pooling", "count"), [("mean", 980), ("cls", 981)])
    def test_two_scales_at_224(self, tiny_config, pooling, count):
        model = ITNetModel(tiny_config("image", image_size=224, patch_size=(8, 16), pooling=pooling))
        signal = encode(model, pixel_values=torch.randn(1, 3, 224, 224))
        assert signal.features.shape == (1, count, 16)
        assert signal.positions.shape == (count, 2)
        assert len(signal.positions.unique(dim=0)) == count  # no two patches share a centre
        assert_same(signal.measure, torch.full((1, count), 1 / count), atol=1e-9)

    def test_mean_pooling_has_no_cls(self, tiny_model):
        model = tiny_model("image", pooling="mean")
        assert model.encoder.cls_token is None
        assert not [name for name, _ in model.named_parameters() if "cls" in name]
        output = model(pixel_values=torch.randn(2, 3, 16, 16))
        assert output.last_hidden_state.shape == (2, 4, 16)
        assert_same(output.pooler_output, output.last_hidden_state.mean(1))

    def test_cls_pooling_reads_the_first_position(self, tiny_model):
        output = tiny_model("image")(pixel_values=torch.randn(2, 3, 16, 16))
        assert output.last_hidden_state.shape == (2, 5, 16)
        assert torch.equal(output.pooler_output, output.last_hidden_state[:, 0])

    def test_cls_is_part_of_the_measure(self, tiny_model):
        signal = encode(tiny_model("image"), pixel_values=torch.randn(2, 3, 16, 16))
        assert_same(signal.measure, torch.full((2, 5), 0.2), atol=1e-8)

    @pytest.mark.parametrize("size", [(16, 16), (24, 24), (8, 40)], ids=str)
    def test_any_resolution_runs_through_the_model(self, tiny_model, size):
        output = tiny_model("image")(pixel_values=torch.randn(2, 3, *size))
        assert output.last_hidden_state.shape == (2, size[0] * size[1] // 64 + 1, 16)

    def test_channels(self, tiny_config):
        model = ITNetModel(tiny_config("image", num_channels=1)).eval()
        assert model(pixel_values=torch.randn(2, 1, 16, 16)).last_hidden_state.shape == (2, 5, 16)

    def test_pixels_are_cast_to_the_dtype_of_the_model(self, tiny_model):
        model = tiny_model("image").to(torch.bfloat16)
        signal = encode(model, pixel_values=torch.randn(2, 3, 16, 16))
        assert (signal.features.dtype, signal.positions.dtype) == (torch.bfloat16, torch.float32)


class TestText:
    IDS = [[5, 9, 2, 7], [3, 8, 0, 0]]
    MASK = [[1, 1, 1, 1], [1, 1, 0, 0]]

    def positions(self, model, **inputs):
        inputs.setdefault("input_ids", torch.tensor(self.IDS))
        return encode(model, **inputs).positions.squeeze(-1)

    def test_features_are_the_sum_of_three_embeddings(self, tiny_model):
        model = tiny_model("text")
        ids, types = torch.tensor(self.IDS), torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]])
        mask = torch.tensor(self.MASK)
        signal = encode(model, input_ids=ids, token_type_ids=types, attention_mask=mask)
        expected = model.encoder.word_embeddings.weight[ids] + model.encoder.token_type_embeddings.weight[types]
        assert_same(signal.features, expected + position_features(model, signal.positions))

    def test_token_types_default_to_zero(self, tiny_model):
        model, ids = tiny_model("text"), torch.tensor(self.IDS)
        zeros = encode(model, input_ids=ids, token_type_ids=torch.zeros_like(ids))
        ones = encode(model, input_ids=ids, token_type_ids=torch.ones_like(ids))
        default = encode(model, input_ids=ids)
        assert torch.equal(default.features, zeros.features)
        table = model.encoder.token_type_embeddings.weight
        assert_same(ones.features - zeros.features, (table[1] - table[0]).expand(2, 4, 16))

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"token_type_ids": torch.zeros(2, 3, dtype=torch.long)}, r"`token_type_ids` \[2, 3\] must be \[2, 4\]"),
            ({"position_ids": torch.zeros(3, 4)}, r"`position_ids` \[3, 4\] must be \[2, 4\]"),
            ({"inputs_embeds": torch.zeros(2, 4, 5)}, r"`inputs_embeds` \[2, 4, 5\] must be \[batch, tokens, 16\]"),
            ({"inputs_embeds": torch.zeros(4, 16)}, r"`inputs_embeds` \[4, 16\] must be"),
        ],
    )
    def test_wrong_shapes(self, tiny_model, inputs, message):
        if "inputs_embeds" not in inputs:
            inputs = inputs | {"input_ids": torch.tensor(self.IDS)}
        with pytest.raises(ValueError, match=message):
            encode(tiny_model("text"), **inputs)

    def test_positions_without_a_mask(self, tiny_model):
        assert_same(self.positions(tiny_model("text")), torch.tensor([0.25, 0.5, 0.75, 1.0]), atol=1e-7)

    def test_positions_count_real_tokens_only(self, tiny_model):
        model = tiny_model("text")
        right = self.positions(model, attention_mask=torch.tensor(self.MASK))
        assert_same(right[0], torch.tensor([0.25, 0.5, 0.75, 1.0]), atol=1e-7)
        assert_same(right[1, :2], torch.tensor([0.5, 1.0]), atol=1e-7)
        left = self.positions(model, attention_mask=torch.tensor(self.MASK).flip(1))
        assert_same(left[0], torch.tensor([0.25, 0.5, 0.75, 1.0]), atol=1e-7)
        assert_same(left[1, 2:], torch.tensor([0.5, 1.0]), atol=1e-7)

    def test_positions_skip_a_hole(self, tiny_model):
        mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])
        positions = self.positions(tiny_model("text"), attention_mask=mask)
        assert_same(positions[mask.bool()], torch.tensor([1 / 3, 2 / 3, 1.0, 1 / 3, 2 / 3, 1.0]), atol=1e-7)

    def test_causal_positions_have_a_fixed_unit(self, tiny_model):
        model = tiny_model("text", is_causal=True, max_position_embeddings=32)
        assert_same(self.positions(model), torch.tensor([1.0, 2.0, 3.0, 4.0]) / 32, atol=1e-8)
        left = self.positions(model, attention_mask=torch.tensor(self.MASK).flip(1))
        assert_same(left[1, 2:], torch.tensor([1.0, 2.0]) / 32, atol=1e-8)

    @pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
    def test_position_ids_count_from_zero(self, tiny_model, is_causal):
        model, unit = tiny_model("text", is_causal=is_causal), 32 if is_causal else 4
        default = self.positions(model)
        assert_same(self.positions(model, position_ids=torch.arange(4)), default)
        assert_same(self.positions(model, position_ids=torch.arange(4).expand(2, 4)), default.expand(2, 4))
        moved = self.positions(model, position_ids=torch.tensor([[0, 2, 1, 3], [3, 2, 1, 0]]))
        assert_same(moved, torch.tensor([[1.0, 3.0, 2.0, 4.0], [4.0, 3.0, 2.0, 1.0]]) / unit)

    @pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
    def test_measure(self, tiny_model, dtype):
        mask = torch.tensor(self.MASK, dtype=dtype)
        signal = encode(tiny_model("text"), input_ids=torch.tensor(self.IDS), attention_mask=mask)
        expected = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
        assert torch.equal(signal.measure, expected)
        assert signal.measure.dtype == torch.float32

    def test_inputs_embeds_replace_token_embeddings(self, tiny_model):
        model, ids, mask = tiny_model("text"), torch.tensor(self.IDS), torch.tensor(self.MASK)
        embeds = model.get_input_embeddings()(ids)
        by_ids = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state, by_ids)

    @pytest.mark.parametrize("mask", [None, [[1, 1, 1, 0], [0, 1, 1, 1]]], ids=["no-mask", "mask"])
    def test_mean_pooling_averages_real_tokens(self, tiny_model, mask):
        model, ids = tiny_model("text", pooling="mean"), torch.tensor(self.IDS)
        weights = torch.tensor(mask or [[1] * 4] * 2).float().unsqueeze(-1)
        output = model(input_ids=ids, attention_mask=None if mask is None else torch.tensor(mask))
        expected = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
        assert_same(output.pooler_output, expected)

    def test_cls_pooling_reads_the_first_real_token(self, tiny_model):
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
        output = tiny_model("text")(input_ids=torch.tensor(self.IDS), attention_mask=mask)
        expected = torch.stack([output.last_hidden_state[0, 2], output.last_hidden_state[1, 0]])
        assert torch.equal(output.pooler_output, expected)


class TestSignal:
    def inputs(self, shared=False):
        positions = torch.rand(5, 2) if shared else torch.rand(2, 5, 2)
        return {"inputs_embeds": torch.randn(2, 5, 16), "positions": positions}

    @pytest.mark.parametrize("shared", [True, False], ids=["shared-positions", "own-positions"])
    def test_features(self, tiny_model, shared):
        model, inputs = tiny_model("signal"), self.inputs(shared)
        signal = encode(model, **inputs)
        assert torch.equal(signal.positions, inputs["positions"])
        assert_same(signal.features, inputs["inputs_embeds"] + position_features(model, inputs["positions"]))

    def test_shared_positions_equal_repeated_ones(self, tiny_model):
        model, inputs = tiny_model("signal"), self.inputs(shared=True)
        shared = model(**inputs).last_hidden_state
        inputs["positions"] = inputs["positions"].repeat(2, 1, 1)
        assert_same(model(**inputs).last_hidden_state, shared, atol=1e-6)

    def test_measure_is_uniform_by_default(self, tiny_model):
        assert_same(encode(tiny_model("signal"), **self.inputs()).measure, torch.full((2, 5), 0.2), atol=1e-8)

    def test_measure_is_normalised(self, tiny_model):
        measure = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0], [0.5, 0.5, 0.5, 0.5, 0.5]])
        signal = encode(tiny_model("signal"), **self.inputs(), measure=measure)
        assert_same(signal.measure, torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0], [0.2] * 5]), atol=1e-7)

    def test_measure_is_normalised_over_real_positions(self, tiny_model):
        mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
        measure = torch.tensor([[1.0, 1.0, 2.0, 7.0, 7.0], [9.0, 1.0, 1.0, 1.0, 1.0]])
        signal = encode(tiny_model("signal"), **self.inputs(), measure=measure, attention_mask=mask)
        expected = torch.tensor([[0.25, 0.25, 0.5, 0.0, 0.0], [0.0, 0.25, 0.25, 0.25, 0.25]])
        assert_same(signal.measure, expected, atol=1e-7)

    def test_only_the_shape_of_the_measure_counts(self, tiny_model):
        model, inputs, measure = tiny_model("signal"), self.inputs(), torch.rand(2, 5) + 0.1
        once = model(**inputs, measure=measure)
        again = model(**inputs, measure=1000 * measure)
        assert_same(again.last_hidden_state, once.last_hidden_state)
        assert_same(again.pooler_output, once.pooler_output)

    def test_pooling_integrates_against_the_measure(self, tiny_model):
        measure = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0], [0.2] * 5])
        output = tiny_model("signal")(**self.inputs(), measure=measure)
        expected = (output.last_hidden_state * measure.unsqueeze(-1)).sum(1)
        assert_same(output.pooler_output, expected)

    @pytest.mark.parametrize("dim", [1, 3, 8])
    def test_any_dimension(self, tiny_model, dim):
        model = tiny_model("signal", position_dim=dim)
        output = model(inputs_embeds=torch.randn(2, 4, 16), positions=torch.rand(4, dim))
        assert output.last_hidden_state.isfinite().all()
