"""Causal language models: the time of a token in short and long contexts, bytes of the cache, and training steps.

All models have the same depth, width and heads, and a vocabulary of bytes. The peers are Transformers' GPT-2 with SDPA
and Mamba, whose mixer runs in PyTorch without its CUDA kernels.
"""

from collections.abc import Callable
from statistics import median

import torch
from contestants import Size
from report import conditions, judged, table
from timing import interleaved, median_ratio
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from modeling_itnet import ITNetConfig, ITNetForCausalLM

CONTEXTS = (64, 4096)
LENGTHS = (512, 4096)
TOKENS = 32  # decoded per timing
PEER = "gpt-2"
LINEAR = ("near_far", "low_rank", "low_rank, matrix")
#: Time per token at the longer context over the shorter, and speed of a training step over GPT-2's by length.
GROWTH_GOAL, SPEED_GOALS = 1.2, {512: 0.8, 4096: 1.5}
_MATRIX = {"factor_form": "matrix", "factor_decay": True, "rank": 8}
#: The settings of docs/language.md.
_NEAR = {"near_size": 4, "kernel_hidden_size": 8, "kernel_inputs": ("x-y", "u_x", "u_y", "u_x*u_y")}
_FAR = {"factor_form": "matrix", "factor_decay": True, "rank": 2, "output_gate": True}
ITNET = {
    "exact": {"integration_mode": "exact", "kernel_hidden_size": 16},
    "near_far": {"integration_mode": "near_far", **_NEAR, **_FAR},
    "low_rank": {"integration_mode": "low_rank", "rank": 8},
    "low_rank, matrix": {"integration_mode": "low_rank", **_MATRIX},
}


def model(name: str, size: Size, longest: int) -> nn.Module:
    """Returns a causal language model of bytes for texts of up to ``longest`` tokens."""
    torch.manual_seed(0)
    if name == PEER:
        width = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads, "n_positions": longest}
        noise = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**width, **noise, vocab_size=256, attn_implementation="sdpa"))
    if name == "mamba":
        return MambaForCausalLM(
            MambaConfig(hidden_size=size.width, num_hidden_layers=size.layers, state_size=16, vocab_size=256)
        )
    noise = {"hidden_dropout_prob": 0.0, "embedding_dropout_prob": 0.0, "drop_path_rate": 0.0}
    text = {"modality": "text", "is_causal": True, "vocab_size": 256, "max_position_embeddings": longest}
    return ITNetForCausalLM(ITNetConfig(**text, **size.fields(), **noise, **ITNET[name]))


class Decoder:
    """Decodes token by token behind a context that was read before."""

    def __init__(self, name: str, context: int, size: Size):
        self.model = model(name, size, longest=2**15).eval()
        self.cache_name = "cache_params" if name == "mamba" else "past_key_values"
        with torch.no_grad():
            self.cache = self.model(torch.randint(256, (1, context)), use_cache=True)[self.cache_name]

    @torch.no_grad()
    def run(self) -> None:
        for _ in range(TOKENS):
            given = {self.cache_name: self.cache, "use_cache": True}
            self.cache = self.model(torch.randint(256, (1, 1)), **given)[self.cache_name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the cache."""
        if hasattr(self.cache, "nbytes"):
            return self.cache.nbytes
        return sum(tensor.numel() * tensor.element_size() for layer in self.cache.layers for tensor in _tensors(layer))


def _tensors(layer) -> list[Tensor]:
    """Returns all tensors of a layer's cache in Transformers, in lists and tables too."""
    found = []
    for value in vars(layer).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in values if isinstance(tensor, Tensor)]
    return found


def training_step(name: str, n: int, size: Size) -> Callable[[], None]:
    own, ids = model(name, size, n).train(), torch.randint(256, (size.batch(n), n))

    def run() -> None:
        own(ids, labels=ids).loss.backward()
        own.zero_grad()

    return run


def measure(
    rounds: int, size: Size, contexts: tuple[int, int] = CONTEXTS, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, dict]:
    decoding = {}
    for name in (*ITNET, PEER, "mamba"):
        sides = {str(context): Decoder(name, context, size) for context in contexts}
        sizes = {context: side.nbytes for context, side in sides.items()}  # before more tokens come
        times = interleaved({context: side.run for context, side in sides.items()}, rounds)
        short, long = times.values()
        decoding[name] = {
            "milliseconds": {context: 1e3 * median(times[context]) / TOKENS for context in sides},
            "growth": median_ratio(long, short),
            "bytes": sizes,
        }
    training = {}
    for n in lengths:
        sides = {name: training_step(name, n, size) for name in (*LINEAR, PEER)}
        times = interleaved(sides, rounds)
        training[str(n)] = {name: median_ratio(times[PEER], times[name]) for name in sides}
    return {"decoding": decoding, "training": training}


def summary(results: dict) -> str:
    """Returns time per token and bytes of the cache by context; then training steps beside GPT-2's; then the
    machine."""
    short, long = next(iter(results["decoding"].values()))["milliseconds"]
    head = ["one text", f"ms per token, context {short}", f"context {long}", "ratio (goal)"]
    rows = (
        [
            name,
            *(f"{value:.2f}" for value in row["milliseconds"].values()),
            judged(row["growth"], GROWTH_GOAL if name in LINEAR else None, True),
            *(f"{value / 1e3:.0f}" for value in row["bytes"].values()),
        ]
        for name, row in results["decoding"].items()
    )
    parts = [table([*head, f"cache in KB, context {short}", f"context {long}"], rows)]
    training = results["training"]
    head = ["training step, speed over GPT-2 (goal)", *(f"n = {n}" for n in training)]
    rows = ([name, *(judged(row[name], SPEED_GOALS.get(int(n))) for n, row in training.items())] for name in LINEAR)
    return "\n\n".join([*parts, table(head, rows), conditions(results)])
