"""The models that are compared: ITNet in every integration mode and attention of the same depth, width and heads.

The peers are Transformers' ViT (at 196 patches) and BERT, both with SDPA, and the models of the packages
performer-pytorch, nystrom-attention and linear-attention-transformer: ``pip install ".[bench]"``. Depth does not
change a ratio, so there are only a few layers.

python -m contestants NAME KIND N LAYERS prints by how many bytes a run raises the peak memory.
"""

import importlib.util
import sys
from dataclasses import dataclass

import torch
from operator_speed import patch_grid
from timing import PeakMemory
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from modeling_itnet import ITNetConfig, ITNetModel

IMAGE_POSITIONS = 196
LONGEST_EXACT = 1024
KINDS = ("forward", "training step")
PACKAGES = {"performer": "performer_pytorch", "nystrom": "nystrom_attention", "linear": "linear_attention_transformer"}
ITNET = {
    "exact": {"integration_mode": "exact"},
    "mc-128": {"integration_mode": "monte_carlo", "num_samples": 128},
    "lr-8": {"integration_mode": "low_rank", "rank": 8},
    "nf-25": {
        "integration_mode": "near_far",
        "near_size": 25,
        "kernel_hidden_size": 16,
        "factor_form": "matrix",
        "rank": 8,
    },
}
NAMES = (*ITNET, "sdpa", *PACKAGES)


@dataclass(frozen=True)
class Size:
    """What all models of a comparison have in common."""

    layers: int = 2
    width: int = 384
    heads: int = 6
    tokens: int = 2048  # per batch, where the length allows

    def batch(self, n: int) -> int:
        return max(1, self.tokens // n)

    def fields(self) -> dict[str, int]:
        """Returns the sizes as the configurations of Transformers name them."""
        return {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width,
        }


@dataclass
class Contestant:
    """A model and what it is called with."""

    model: nn.Module
    inputs: dict[str, Tensor]

    def forward(self) -> None:
        with torch.no_grad():
            self.model.eval()(**self.inputs)

    def loss(self) -> Tensor:
        """Returns the mean square of the features, and a tenth of the proposal's loss where there is one."""
        out = self.model.train()(**self.inputs)
        features = out if isinstance(out, Tensor) else out.last_hidden_state
        proposal_loss = None if isinstance(out, Tensor) else out.get("proposal_loss")
        loss = features.square().mean()
        return loss if proposal_loss is None else loss + 0.1 * proposal_loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.model.zero_grad()

    def run(self, kind: str) -> None:
        if kind == "forward":
            self.forward()
        else:
            self.backward(self.loss())


def taking_part(n: int, only: tuple[str, ...] | None = None) -> list[str]:
    """Returns who takes part at this length, SDPA always. Packages that are not installed do not, nor long exact
    models."""
    is_able = {name: bool(importlib.util.find_spec(module)) for name, module in PACKAGES.items()}
    is_able |= {"exact": n <= LONGEST_EXACT}
    is_wanted = lambda name: only is None or name in only or name == "sdpa"  # noqa: E731
    return [name for name in NAMES if is_able.get(name, True) and is_wanted(name)]


def contestant(name: str, n: int, size: Size) -> Contestant:
    """Returns one of NAMES at n positions; 196 of them are the patches of an image.

    Elsewhere near_far is a text, whose neighbourhoods are windows, and the other modes are signals on a grid.
    """
    torch.manual_seed(0)
    is_image = n == IMAGE_POSITIONS
    if name in ITNET:
        modality = "text" if ITNET[name]["integration_mode"] == "near_far" else "signal"
        return itnet("image" if is_image else modality, n, size, **ITNET[name])
    if name == "sdpa":
        return vit(size) if is_image else bert(n, size)
    return Contestant(_package_model(name, n, size), {"x": torch.randn(size.batch(n), n, size.width)})


def itnet(modality: str, n: int, size: Size, **settings) -> Contestant:
    noise = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = {"modality": modality, **size.fields(), **noise, **settings}
    if modality == "image":
        return Contestant(ITNetModel(ITNetConfig(**config)), _images(size))
    features = torch.randn(size.batch(n), n, size.width)
    if modality == "text":
        return Contestant(ITNetModel(ITNetConfig(**config, vocab_size=8)), {"inputs_embeds": features})
    model = ITNetModel(ITNetConfig(**config, position_dim=2))
    return Contestant(model, {"inputs_embeds": features, "positions": patch_grid(n)})


def vit(size: Size) -> Contestant:
    model = ViTModel(ViTConfig(**size.fields(), **_SDPA), add_pooling_layer=False)
    return Contestant(model, _images(size))


def bert(n: int, size: Size) -> Contestant:
    config = BertConfig(**size.fields(), **_SDPA, vocab_size=8, max_position_embeddings=n)
    features = torch.randn(size.batch(n), n, size.width)
    return Contestant(BertModel(config, add_pooling_layer=False), {"inputs_embeds": features})


_SDPA = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}


def _images(size: Size) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size.batch(IMAGE_POSITIONS), 3, 224, 224)}


def _package_model(name: str, n: int, size: Size) -> nn.Module:
    arguments = {"dim": size.width, "depth": size.layers, "heads": size.heads}
    if name == "performer":
        from performer_pytorch import Performer

        return Performer(**arguments, dim_head=size.width // size.heads, causal=False)
    if name == "nystrom":
        from nystrom_attention import Nystromformer

        return Nystromformer(**arguments, dim_head=size.width // size.heads, num_landmarks=64)
    from linear_attention_transformer import LinearAttentionTransformer

    # The package has no argument for x: its forward takes it by that name.
    return LinearAttentionTransformer(**arguments, max_seq_len=n, n_local_attn_heads=0)


def main(name: str, kind: str, n: str, layers: str) -> None:
    contestant(name, 64 if int(n) != IMAGE_POSITIONS else IMAGE_POSITIONS, Size(layers=1)).run(kind)  # libraries load
    with PeakMemory() as memory:
        contestant(name, int(n), Size(layers=int(layers))).run(kind)
    print(memory.bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
