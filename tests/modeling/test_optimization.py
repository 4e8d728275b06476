"""optimizer_param_groups: which tensors decay."""

import pytest
import torch

from modeling_itnet import optimizer_param_groups

# Endings of parameter names; together with the layers they are all there is.
LAYER_DECAYED = {
    "operator.kernel.w1",
    "operator.kernel.w2",
    "operator.output.weight",
    "operator.residual.weight",
    "feed_forward.expand.weight",
    "feed_forward.contract.weight",
}
LAYER_FREE = {
    "operator.kernel.b1",
    "operator.kernel.b2",
    "operator_norm.weight",
    "operator_norm.bias",
    "feed_forward_norm.weight",
    "feed_forward_norm.bias",
    "feed_forward.expand.bias",
    "feed_forward.contract.bias",
}
# model -> (decayed, not decayed) outside the layers
OUTSIDE = {
    "image-classification": (
        {
            "itnet.encoder.patch_embeddings.0.weight",
            "itnet.encoder.position_projection.weight",
            "classifier.weight",
        },
        {
            "itnet.encoder.patch_embeddings.0.bias",
            "itnet.encoder.cls_token",
            "itnet.layernorm.weight",
            "itnet.layernorm.bias",
            "classifier.bias",
        },
    ),
    "sequence-classification": (
        {
            "itnet.encoder.word_embeddings.weight",
            "itnet.encoder.token_type_embeddings.weight",
            "itnet.encoder.position_projection.weight",
            "classifier.weight",
        },
        {"itnet.layernorm.weight", "itnet.layernorm.bias", "classifier.bias"},
    ),
    "masked-lm": (
        {
            "itnet.encoder.word_embeddings.weight",  # and, tied to it, the decoder
            "itnet.encoder.token_type_embeddings.weight",
            "itnet.encoder.position_projection.weight",
            "lm_head.dense.weight",
        },
        {
            "itnet.layernorm.weight",
            "itnet.layernorm.bias",
            "lm_head.dense.bias",
            "lm_head.layernorm.weight",
            "lm_head.layernorm.bias",
            "lm_head.decoder.bias",
        },
    ),
}


def group_names(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def in_layers(names):
    return {f"itnet.layers.{index}.{name}" for index in range(2) for name in names}


@pytest.mark.parametrize("name", OUTSIDE)
class TestGroups:
    def test_membership(self, tiny_model, name):
        model = tiny_model(name)
        decayed, free = group_names(model, optimizer_param_groups(model, 0.05))
        assert set(decayed) == OUTSIDE[name][0] | in_layers(LAYER_DECAYED)
        assert set(free) == OUTSIDE[name][1] | in_layers(LAYER_FREE)

    def test_each_parameter_once(self, tiny_model, name):
        model = tiny_model(name)
        groups = optimizer_param_groups(model, 0.05)
        listed = [id(parameter) for group in groups for parameter in group["params"]]
        assert len(listed) == len(set(listed))
        assert set(listed) == {id(parameter) for parameter in model.parameters()}

    def test_rates(self, tiny_model, name):
        groups = optimizer_param_groups(tiny_model(name), 0.05)
        assert [group["weight_decay"] for group in groups] == [0.05, 0.0]

    def test_frozen_parameters_are_left_out(self, tiny_model, name):
        model = tiny_model(name)
        model.itnet.encoder.requires_grad_(False)
        model.itnet.layers[0].operator.kernel.b2.requires_grad_(False)
        listed = {name for group in group_names(model, optimizer_param_groups(model, 0.1)) for name in group}
        assert listed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert not [name for name in listed if "encoder" in name]


class TestKernelVariants:
    def test_three_layer_kernel(self, tiny_model):
        model = tiny_model("image", kernel_num_layers=3)
        decayed, free = group_names(model, optimizer_param_groups(model, 0.05))
        assert "layers.0.operator.kernel.w_mid" in decayed
        assert "layers.0.operator.kernel.b_mid" in free

    def test_shared_output_bias(self, tiny_model):
        model = tiny_model("image", kernel_output_sharing="shared")
        decayed, free = group_names(model, optimizer_param_groups(model, 0.05))
        assert "layers.1.operator.kernel.w2" in decayed
        assert "layers.1.operator.kernel.b2" in free


class TestUse:
    def test_decay_pulls_matrices_only(self, tiny_model):
        """With zero gradients AdamW moves a parameter by its decay alone."""
        model = tiny_model("image-classification")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.AdamW(optimizer_param_groups(model, weight_decay=0.5), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        decayed = OUTSIDE["image-classification"][0] | in_layers(LAYER_DECAYED)
        for name, value in model.state_dict().items():
            expected = before[name] * 0.95 if name in decayed else before[name]
            torch.testing.assert_close(value, expected, msg=lambda m, name=name: f"{name}: {m}")

    def test_negative_decay(self, tiny_model):
        with pytest.raises(ValueError, match=r"`weight_decay` \(-0.1\) must not be negative"):
            optimizer_param_groups(tiny_model("image"), -0.1)
