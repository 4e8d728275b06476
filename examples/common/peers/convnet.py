"""A small residual ConvNet."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput

from modeling_itnet import ITNetConfig


class ConvNet(nn.Module):
    """Stem 3x3 stride 2, residual 3x3 blocks, pooled by 2 halfway, global mean: [B, C, H, W] -> [B, num_labels]."""

    def __init__(self, config: ITNetConfig):
        super().__init__()
        self.config = config  # where Trainer looks before it smooths labels
        width, depth = config.hidden_size, config.num_hidden_layers
        self.stem = nn.Conv2d(config.num_channels, width, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.pool_after = (depth - 1) // 2
        self.classifier = nn.Linear(width, config.num_labels)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        features = self.stem(pixel_values)
        for index, (norm, convolution) in enumerate(zip(self.norms, self.convolutions, strict=True)):
            features = features + convolution(F.gelu(norm(features)))
            if index == self.pool_after:
                features = F.max_pool2d(features, 2)
        logits = self.classifier(features.mean((2, 3)))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return ImageClassifierOutput(loss=loss, logits=logits)
