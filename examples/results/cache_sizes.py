"""What a cache holds, in bytes, per mode and beside GPT-2's: the table of docs/generation.md.

    python examples/results/cache_sizes.py

One text in float32, through random models of the same width and depth; the sizes do not depend on the weights.
"""

import argparse

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from modeling_itnet import ITNetCache, ITNetConfig, ITNetForCausalLM

FAR = {"rank": 8, "factor_decay": True}
MODES = {
    "exact": {"integration_mode": "exact"},
    "near_far, near_size 16, matrix": {"integration_mode": "near_far", "factor_form": "matrix", **FAR},
    "low_rank, matrix": {"integration_mode": "low_rank", "factor_form": "matrix", **FAR},
    "low_rank, vector": {"integration_mode": "low_rank", "factor_form": "vector", **FAR},
}


@torch.no_grad()
def read(model, cache, length: int, piece: int = 256):
    """The cache after a text of ``length`` random tokens, read in pieces and at the end token by token."""
    tokens = torch.randint(1, 50, (1, length))
    pieces = [*tokens[:, : length - 8].split(piece, dim=1), *tokens[:, length - 8 :].split(1, dim=1)]
    for part in pieces:
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def itnet_bytes(mode: dict, lengths: list[int], width: int, layers: int) -> list[int]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64, "vocab_size": 50}
    settings = {"max_position_embeddings": max(lengths), "kernel_hidden_size": 2, "intermediate_size": 64}
    config = ITNetConfig.from_preset("itnet-small", task="causal-lm", **sizes, **settings, **mode)
    model = ITNetForCausalLM(config).eval()
    return [read(model, ITNetCache(config), length).nbytes for length in lengths]


def gpt2_bytes(lengths: list[int], width: int, layers: int) -> list[int]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": max(lengths)}
    sizes |= {"vocab_size": 50, "n_inner": 64, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    caches = [read(model, DynamicCache(config=model.config), length) for length in lengths]
    return [
        sum(t.numel() * t.element_size() for layer in c.layers for t in (layer.keys, layer.values)) for c in caches
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096], help="tokens of the text")
    parser.add_argument("--width", type=int, default=384, help="features per token; heads have 64")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = {"GPT-2": gpt2_bytes(given.lengths, given.width, given.layers)}
    rows |= {name: itnet_bytes(mode, given.lengths, given.width, given.layers) for name, mode in MODES.items()}
    print(f"| kB after as many tokens | {' | '.join(f'{length:,}' for length in given.lengths)} |")
    print("|---" * (len(given.lengths) + 1) + "|")
    for name, sizes in rows.items():
        print(f"| {name} | {' | '.join(f'{size / 1e3:,.0f}' for size in sizes)} |")


if __name__ == "__main__":
    main()
