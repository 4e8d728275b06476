"""What language.py trains: causal language models of one size on bytes of two corpora."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path

import examples_path  # noqa: F401
import numpy as np
import torch
from common.arguments import DataArguments
from common.data import load_split
from common.streams import TokenBlocks, collate_blocks, ended
from recall_problems import CAUSAL_LM, fitted_sizes, itnet_of_equal_size, peer
from torch import nn
from torch.nn import functional as F
from trials import Batch, Contestant, Problem
from typed_particles import seeded

#: Steps of near and far that take as long as 1,000 of a peer: `language.py --timings`.
EQUAL_TIMES = {"llama": 430, "mamba": 1540}
TRAIN = 1  # the stream of random numbers that draws training batches
EVALUATED = 32  # blocks per batch of validation and test
LADDER = (3e-4, 5.5e-4, 1e-3, 1.7e-3, 3e-3, 5.5e-3, 1e-2)  # two learning rates per factor of about three

#: Settings of the ITNet whose number of parameters all models have. They were found on validation data of Gutenberg,
#: in short runs at the tuning seed (docs/language.md). Positions are k / 128: neighbours are 3/8 of a wave of the
#: typical frequency apart, so that the kernel can tell the places of a short window.
SETTINGS = CAUSAL_LM | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 744,
    "fourier_scale": 48.0,
    "kernel_inputs": ("x-y", "u_x", "u_y", "u_x*u_y"),
    "kernel_hidden_size": 8,
    "initializer_range": 0.05,
    "near_size": 4,
    "rank": 2,
}


@lru_cache(maxsize=4)
def corpus(folder: Path, split: str) -> np.ndarray:
    """The texts of a split, a line break after each, as bytes: [N] of uint8. Blank ones are left out."""
    rows = load_split(DataArguments(dataset=str(folder)), split)
    text = "".join(ended(text, "\n") for text in rows["text"] if text.strip())
    return np.frombuffer(text.encode(), dtype=np.uint8)


@dataclass(frozen=True)
class Language(Problem):
    """The next byte, in blocks of ``length`` bytes; scores are bits per byte."""

    folder: Path = Path("data/gutenberg")
    length: int = 128
    validated: int = 256  # blocks of validation, spread over all of it
    tested: int | None = 2048  # most blocks of the test, spread over all of it

    def batch(self, seed: int, step: int) -> Batch:
        stream, generator = corpus(self.folder, "train"), seeded(TRAIN, seed, step)
        starts = torch.randint(len(stream) - self.length + 1, (self.batch_size,), generator=generator).tolist()
        blocks = [torch.from_numpy(stream[start : start + self.length].astype(np.int64)) for start in starts]
        return collate_blocks(blocks)

    @cached_property
    def seen(self) -> int:
        """Bytes that a model reads in training."""
        return self.steps * self.batch_size * self.length

    def facts(self, model: str) -> dict:
        return fitted_sizes(self.build(model))

    def validation(self) -> Iterator[Batch]:
        return self._batches("validation", self.validated)

    def tests(self) -> dict[str, Iterator[Batch]]:
        return {"test": self._batches("test", self.tested)}

    def _batches(self, split: str, limit: int | None) -> Iterator[Batch]:
        blocks = TokenBlocks(corpus(self.folder, split), self.length)
        count = min(len(blocks), limit or len(blocks))
        chosen = [index * len(blocks) // count for index in range(count)]
        for start in range(0, count, EVALUATED):
            yield collate_blocks([blocks[index] for index in chosen[start : start + EVALUATED]])

    @staticmethod
    def score(model: nn.Module, batches: Iterator[Batch]) -> float:
        """Bits per byte: every byte but the first of the corpus is predicted from those before it in its block."""
        nats, count = 0.0, 0
        for batch in batches:
            logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
            nats += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
            count += labels.numel()
        return nats / count / np.log(2)


def _itnet(label: str, **own) -> Contestant:
    return Contestant(label, lambda config: itnet_of_equal_size(SETTINGS, own), own, rates=LADDER[4:7])


#: What made ITNet learn faster on validation data (docs/language.md). It has as many layers as Mamba then.
GATED = {
    "num_hidden_layers": 4,
    "output_gate": True,
    "factor_decay": True,
    "kernel_position_scale": 10.0,
    "position_init_scale": 0.0,
}
MODELS = {
    "near_far": _itnet("ITNet, near and far", **GATED),
    "near_far-2": _itnet("ITNet, near and far, two layers", **{**GATED, "num_hidden_layers": 2}),
    "near_far-plain": _itnet("ITNet, near and far, two layers, no gate"),
    "exact": _itnet("ITNet, exact", integration_mode="exact", **{**GATED, "factor_decay": False}),
    "low_rank-decay": _itnet("ITNet, low rank, matrices", integration_mode="low_rank", **GATED),
    "low_rank": _itnet(
        "ITNet, low rank, vectors, two layers, no gate", integration_mode="low_rank", factor_form="vector"
    ),
    "gpt2": peer("GPT-2", "gpt2"),
    "gpt2_conv": peer("GPT-2 with a short convolution", "gpt2_conv"),
    "llama": peer("Llama", "llama"),
    # As large as those of the ITNets, which made Llama learn faster in a look at validation data.
    "llama-0.05": peer("Llama, initial weights of 0.05", "llama", initializer_range=0.05),
    "llama_conv": peer("Llama with a short convolution", "llama_conv"),
    "mamba": peer("Mamba", "mamba"),
}


def problems(data: Path) -> dict[str, Language]:
    """By name. ``data`` is the folder of the data sets.

    "<corpus>-time-<peer>" has near and far alone, in as many steps as take it the time of that peer, with a schedule
    that ends there.
    """
    found = {
        name: Language(
            name,
            title,
            "bits per byte",
            is_error=True,
            steps=1000,
            tuning_steps=250,
            batch_size=8,
            weight_decay=0.01,
            shared=SETTINGS,
            contestants=MODELS,
            rates=LADDER[2:5],
            ladder=LADDER,
            curve=10,
            folder=data / name,
        )
        for name, title in (("gutenberg", "Gutenberg"), ("wikitext2", "WikiText-2"))
    }
    for problem, (peer_name, steps) in product(list(found.values()), EQUAL_TIMES.items()):
        title = f"{problem.title}, time of {MODELS[peer_name].label}"
        own = {"name": f"{problem.name}-time-{peer_name}", "title": title, "steps": steps, "tuned_on": problem.name}
        found[own["name"]] = replace(problem, **own, contestants={"near_far": MODELS["near_far"]})
    return found
