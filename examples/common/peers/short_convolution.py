"""GPT-2 and Llama with a short convolution before each block: part of what a near field does."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WIDTH = 4  # tokens, as in Mamba


class CausalConvolution(nn.Module):
    """u_i + Σ_k w_k ⊙ u_(i-k) + b for k = 0..WIDTH-1, feature by feature: [B, n, d] -> [B, n, d].

    It starts as the identity. The values that `nn.Conv1d` starts with are as large as 0.5, where embeddings are 0.02.
    """

    def __init__(self, size: int):
        super().__init__()
        self.convolution = nn.Conv1d(size, size, WIDTH, groups=size)
        nn.init.zeros_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)

    def forward(self, features: Tensor) -> Tensor:
        past = F.pad(features.transpose(1, 2), (WIDTH - 1, 0))  # [B, d, WIDTH - 1 + n]
        return features + self.convolution(past).transpose(1, 2)


class ConvolvedBlock(nn.Module):
    """A block of a transformer after a convolution of its input."""

    def __init__(self, block: nn.Module, size: int):
        super().__init__()
        self.convolution, self.block = CausalConvolution(size), block

    def forward(self, features: Tensor, *args, **kwargs):
        return self.block(self.convolution(features), *args, **kwargs)


def _without_cache(config) -> None:
    """Reads texts anew for each token: a cache of keys and values lacks the last inputs of the convolutions."""
    config.use_cache = False


class ConvolvedGPT2(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config):
        _without_cache(config)
        super().__init__(config)
        blocks = self.transformer.h
        self.transformer.h = nn.ModuleList(ConvolvedBlock(block, config.hidden_size) for block in blocks)


class ConvolvedLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig):
        _without_cache(config)
        super().__init__(config)
        blocks = self.model.layers
        self.model.layers = nn.ModuleList(ConvolvedBlock(block, config.hidden_size) for block in blocks)
