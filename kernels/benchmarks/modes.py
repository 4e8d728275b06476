"""Whole models in every integration mode beside attention of the same depth, width and heads (d = 384, H = 6).

The peers are Transformers' ViT (at 196 patches) and BERT, both with SDPA, and the models of the packages
performer-pytorch, nystrom-attention and linear-attention-transformer: ``pip install ".[bench]"``. Depth does not
change a ratio, so there are only a few layers.

python kernels/benchmarks/modes.py MODEL KIND N LAYERS prints by how many bytes a run raises the peak memory.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from operator_speed import patch_grid
from timing import PeakMemory, interleaved, median_ratio, peak_bytes
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from modeling_itnet import ITNetConfig, ITNetModel

WIDTH, HEADS = 384, 6
IMAGE_POSITIONS = 196
TOKENS = 2048  # per batch, where the length allows
LENGTHS = (196, 512, 1024, 4096)
LONGEST_EXACT = 1024
KINDS = ("forward", "training step")
PACKAGES = {"performer": "performer_pytorch", "nystrom": "nystrom_attention", "linear": "linear_attention_transformer"}
ITNET = {
    "exact": {"integration_mode": "exact"},
    "mc-128": {"integration_mode": "monte_carlo", "num_samples": 128},
    "lr-8": {"integration_mode": "low_rank", "rank": 8},
}


@dataclass
class Contestant:
    """A model and what it is called with."""

    model: nn.Module
    inputs: dict[str, Tensor]

    def run(self, kind: str) -> None:
        if kind == "forward":
            with torch.no_grad():
                self.model.eval()(**self.inputs)
            return
        out = self.model.train()(**self.inputs)
        features = out if isinstance(out, Tensor) else out.last_hidden_state
        loss = features.square().mean()
        proposal_loss = None if isinstance(out, Tensor) else out.get("proposal_loss")
        (loss if proposal_loss is None else loss + 0.1 * proposal_loss).backward()
        self.model.zero_grad()


def names(n: int) -> list[str]:
    """Who takes part at this length. Packages that are not installed do not."""
    own = [name for name in ITNET if name != "exact" or n <= LONGEST_EXACT]
    return [*own, "sdpa", *(name for name, module in PACKAGES.items() if importlib.util.find_spec(module))]


def contestant(name: str, n: int, layers: int) -> Contestant:
    torch.manual_seed(0)
    batch = max(1, TOKENS // n)
    is_image = n == IMAGE_POSITIONS
    features = torch.randn(batch, n, WIDTH)
    size = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    size["intermediate_size"] = 4 * WIDTH
    if name in ITNET:
        noise = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}
        config = {**size, **noise, **ITNET[name]}
        if is_image:
            model = ITNetModel(ITNetConfig(modality="image", **config))
            return Contestant(model, {"pixel_values": torch.randn(batch, 3, 224, 224)})
        model = ITNetModel(ITNetConfig(modality="signal", position_dim=2, **config))
        return Contestant(model, {"inputs_embeds": features, "positions": patch_grid(n)})
    if name == "sdpa":
        noise = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}
        if is_image:
            model = ViTModel(ViTConfig(**size, **noise), add_pooling_layer=False)
            return Contestant(model, {"pixel_values": torch.randn(batch, 3, 224, 224)})
        config = BertConfig(**size, **noise, vocab_size=8, max_position_embeddings=n)
        return Contestant(BertModel(config, add_pooling_layer=False), {"inputs_embeds": features})
    return Contestant(_package_model(name, n, layers), {"x": features})


def _package_model(name: str, n: int, layers: int) -> nn.Module:
    size = {"dim": WIDTH, "depth": layers, "heads": HEADS}
    if name == "performer":
        from performer_pytorch import Performer

        return Performer(**size, dim_head=WIDTH // HEADS, causal=False)
    if name == "nystrom":
        from nystrom_attention import Nystromformer

        return Nystromformer(**size, dim_head=WIDTH // HEADS, num_landmarks=64)
    from linear_attention_transformer import LinearAttentionTransformer

    # The package has no argument for x: its forward takes it by that name.
    return LinearAttentionTransformer(**size, max_seq_len=n, n_local_attn_heads=0)


def mode_speed(
    rounds: int, layers: int, lengths: tuple[int, ...] = LENGTHS, advance: Callable[[], object] = lambda: None
) -> dict[str, dict]:
    """Positions per second, speed over SDPA and peak bytes of all contestants, by kind and length."""
    results = {}
    for n in lengths:
        for kind in KINDS:
            field = {name: contestant(name, n, layers) for name in names(n)}
            times = interleaved({name: lambda c=c, kind=kind: c.run(kind) for name, c in field.items()}, rounds)
            positions = max(1, TOKENS // n) * n
            del field
            results[f"{kind}, n = {n}"] = {
                name: {
                    "positions_per_second": positions / median(seconds),
                    "speed_over_sdpa": median_ratio(times["sdpa"], seconds),
                    "speed_over_exact": median_ratio(times["exact"], seconds) if "exact" in times else None,
                    "peak_bytes": peak_bytes("modes", name, kind, str(n), str(layers)),
                }
                for name, seconds in times.items()
            }
            advance()
    return results


def growth(rounds: int, layers: int, n: int = 4096) -> dict[str, float]:
    """Time at 2n over time at n, one sample each."""
    field = {count: contestant("lr-8", count, layers) for count in (n, 2 * n)}
    times = interleaved({count: lambda c=c: c.run("forward") for count, c in field.items()}, rounds)
    return {"low_rank_time_doubling": median_ratio(times[2 * n], times[n])}


def mode_table(results: dict[str, dict]) -> str:
    """One row per length and kind, one column per contestant: speed relative to SDPA, and peak memory."""
    columns = list(dict.fromkeys(name for row in results.values() for name in row))
    lines = ["| speed over SDPA (peak MB) | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, row in results.items():
        cells = [
            f"{row[name]['speed_over_sdpa']:.2f} ({row[name]['peak_bytes'] / 1e6:.0f})" if name in row else "–"
            for name in columns
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mode_summary(results: dict) -> str:
    """The table, the goals beside it that are not relative to SDPA, and the machine."""
    system, longest = results["machine"], results["longest"]
    over_exact = []
    for label, row in results["speed"].items():
        kind, n = label.split(", n = ")
        if kind == "forward" and "exact" in row:
            goal = 0.7 * int(n) / ITNET["mc-128"]["num_samples"]
            over_exact.append(f"{row['mc-128']['speed_over_exact']:.2f} at n = {n} (goal {goal:.2f})")
    return "\n".join(
        [
            mode_table(results["speed"]),
            "",
            f"Low rank, forward: time at n = {2 * longest} / time at n = {longest}: "
            f"{results['low_rank_time_doubling']:.2f} (goal 2.2).",
            f"mc-128 at evaluation, speed over exact: {', '.join(over_exact)}.",
            f"({results['layers']} layers; {system['threads']} threads of {system['instructions']}, torch "
            f"{system['torch']}; medians of {results['rounds']} interleaved rounds.)",
        ]
    )


def main(name: str, kind: str, n: str, layers: str) -> None:
    contestant(name, 64 if int(n) != IMAGE_POSITIONS else IMAGE_POSITIONS, 1).run(kind)  # libraries load
    with PeakMemory() as memory:
        contestant(name, int(n), int(layers)).run(kind)
    print(memory.bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
