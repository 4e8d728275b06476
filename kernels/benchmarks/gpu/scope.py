"""How large a run is: on a GPU at the paper's shapes, or in Triton's interpreter at tiny ones."""

from dataclasses import dataclass, field

import torch

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelSize:
    """Depth, width and heads of a model."""

    layers: int
    width: int
    heads: int


@dataclass(frozen=True)
class Scope:
    """Sizes of checks and timings."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    timed_dtype: torch.dtype  # of the operators, and of autocast around models
    is_measured: bool  # whether the times are those of a GPU

    # Checks
    samples: int  # with positions of their own
    sharing: int  # samples that share their positions
    check_heads: int
    head_dim: int
    width: int
    frequencies: int
    rank: int
    factor_hidden: int
    long: int  # positions of a check: several tiles on a GPU, the last of them not full
    short: int

    # Timings
    lengths: tuple[int, ...]  # of operators
    tokens: int  # positions of a batch of operators
    batch: int  # of models
    image: int  # positions of an image: a square number
    text: int
    points: int
    caption: int  # tokens of image and text
    contexts: tuple[int, ...]  # of decoding
    near_size: int
    total_rank: int  # of all heads, in the paper's tables
    num_samples: int
    vocabulary: int
    models: dict[str, ModelSize] = field(hash=False)

    @property
    def autocast_type(self) -> str:
        return torch.device(self.device).type


#: The paper's models; d_h = 64, w = 128, L = 64.
PAPER_MODELS = {"S": ModelSize(12, 384, 6), "B": ModelSize(12, 768, 12), "L": ModelSize(24, 1024, 16)}


def on_gpu() -> Scope:
    """Returns the paper's shapes; ROCm calls its devices cuda as well."""
    return Scope(
        "cuda", (torch.float32, torch.float16, torch.bfloat16), torch.bfloat16, True,
        samples=2, sharing=2, check_heads=2, head_dim=64, width=128, frequencies=64, rank=8, factor_hidden=32,
        long=130, short=65, lengths=(196, 512, 1024), tokens=16384, batch=32, image=196, text=512, points=1024,
        caption=64, contexts=(64, 4096), near_size=49, total_rank=64, num_samples=128, vocabulary=30522,
        models=PAPER_MODELS,
    )  # fmt: skip


def interpreted() -> Scope:
    """Returns sizes as small as every path allows. Models of all sizes are the same one here, and so are lengths."""
    small = ModelSize(1, 16, 1)
    return Scope(
        "cpu", (torch.float32, torch.float16), torch.float16, False,
        samples=2, sharing=1, check_heads=1, head_dim=16, width=32, frequencies=2, rank=2, factor_hidden=4,
        long=5, short=4, lengths=(4,), tokens=4, batch=1, image=4, text=4, points=4, caption=1,
        contexts=(2,), near_size=9, total_rank=2, num_samples=3, vocabulary=11,
        models=dict.fromkeys(PAPER_MODELS, small),
    )  # fmt: skip
