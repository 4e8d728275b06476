"""An MLP on raw pixels: what images give to a model that knows nothing of space."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput

from modeling_itnet import ITNetConfig


class PixelMLP(nn.Module):
    """Two hidden layers of the width of the configuration: [B, C, H, W] -> [B, num_labels]."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        height, width = config.image_shape
        size = config.hidden_size
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(config.num_channels * height * width, size),
            nn.GELU(),
            nn.Linear(size, size),
            nn.GELU(),
            nn.Linear(size, config.num_labels),
        )

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.layers(pixel_values)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return ImageClassifierOutput(loss=loss, logits=logits)
