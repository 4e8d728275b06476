"""A whole model with the operator inside compiles to one graph."""

import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_image_classifier(backend):
    torch.manual_seed(0)
    config = ITNetConfig(
        modality="image",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        kernel_hidden_size=32,
        num_fourier_features=4,
        num_labels=3,
    )
    model = ITNetForImageClassification(config).double().eval()
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = model(pixel_values=pixels).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(pixel_values=pixels).logits, expected)
    compiled(pixel_values=pixels, labels=torch.tensor([0, 1])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
