"""What recall.py trains: four tasks, and causal language models of one size that meet on each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import examples_path  # noqa: F401
import torch
from common.peers.causal_lm import causal_peer, same_size_itnet
from recall_tasks import associative_recall, induction, offset_copying, selective_copying
from torch import nn
from trials import Batch, Contestant, Problem
from typed_particles import seeded

from modeling_itnet import ITNetConfig, ITNetForCausalLM

TRAIN, VALIDATION, TEST = 1, 2, 3  # streams of random numbers that no two parts of the data share
EVALUATED = 64  # samples per batch of validation and test

#: Settings of small causal language models, here and in language_problems.py.
CAUSAL_LM = {
    "modality": "text",
    "is_causal": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_fourier_features": 16,
    "kernel_init_scale": 1.0,
    "integration_mode": "near_far",
    "factor_form": "matrix",
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "pad_token_id": None,
}
#: Settings of the ITNet whose number of parameters all models have. Where a setting matters to one mode only, all have
#: it. Positions are k / 128, so that neighbours are 1/8 of a wave of the mean frequency apart.
SETTINGS = CAUSAL_LM | {
    "hidden_size": 64,
    "intermediate_size": 256,
    "fourier_scale": 16.0,
    "kernel_hidden_size": 8,
    "initializer_range": 0.1,
    "near_size": 4,
    "rank": 8,
}


@dataclass(frozen=True)
class Recall(Problem):
    """A task at several sizes: those of training take turns, and each size of the tests has its own score."""

    task: Callable[..., Batch] = associative_recall
    train_sizes: tuple[dict, ...] = ()
    test_sizes: tuple[dict, ...] = ()
    held_out: int = 256  # samples of validation, in all sizes of training together, and of every test

    def batch(self, seed: int, step: int) -> Batch:
        return self.task(self.batch_size, seeded(TRAIN, seed, step), **self.train_sizes[step % len(self.train_sizes)])

    def validation(self) -> Iterator[Batch]:
        for number, size in enumerate(self.train_sizes):
            yield from self._batches(self.held_out // len(self.train_sizes), (VALIDATION, number), size)

    def tests(self) -> dict[str, Iterator[Batch]]:
        return {
            size_name(size): self._batches(self.held_out, (TEST, number), size)
            for number, size in enumerate(self.test_sizes)
        }

    def _batches(self, count: int, stream: tuple[int, ...], size: dict) -> Iterator[Batch]:
        for index in range(max(1, count // EVALUATED)):
            yield self.task(min(count, EVALUATED), seeded(*stream, index), **size)

    @staticmethod
    def score(model: nn.Module, batches: Iterator[Batch]) -> float:
        """Share of the answers that have the largest logit."""
        hits = []
        for batch in batches:
            answers = batch["labels"][:, 1:]
            predicted = model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
            hits.append((predicted == answers)[answers != -100])
        return torch.cat(hits).float().mean().item()

    @property
    def longest(self) -> int:
        """Most tokens in training."""
        return max(size["length"] for size in self.train_sizes)

    def facts(self, model: str) -> dict:
        built = self.build(model)
        return {"state_size": state_size(built, self.longest), "state_length": self.longest, **fitted_sizes(built)}


def size_name(size: dict) -> str:
    """{"length": 64, "pairs": 8} -> "n = 64, pairs = 8"."""
    return ", ".join(f"{'n' if name == 'length' else name} = {value}" for name, value in size.items())


def fitted_sizes(model: nn.Module) -> dict[str, int]:
    """The widths that make a model as large as the others."""
    config = model.config
    inner = config.n_inner if hasattr(config, "n_inner") else config.intermediate_size
    return {"hidden_size": config.hidden_size, "intermediate_size": inner}


def state_size(model: nn.Module, length: int) -> int:
    """Numbers that a model keeps of ``length`` tokens to go on from there, in all layers."""
    config, kind = model.config, type(model).__name__
    layers, width = config.num_hidden_layers, config.hidden_size
    if kind == "ScannedMamba":
        return layers * config.intermediate_size * (config.state_size + config.conv_kernel)
    if kind == "LinearAttentionLM":
        size = width // config.num_attention_heads
        return layers * config.num_attention_heads * (size**2 + size)
    if not isinstance(model, ITNetForCausalLM):
        return 2 * layers * length * width  # keys and values
    if config.integration_mode == "exact":
        return layers * length * width
    per_term = config.head_dim if config.factor_form == "matrix" else 1
    far = config.num_attention_heads * config.rank * per_term + width  # and the sum of all keys, for the constant
    near = min(length, config.near_size) * width if config.integration_mode == "near_far" else 0
    return layers * (far + near)


@cache
def _equal_size(reference: tuple, own: tuple) -> ITNetConfig:
    reference = dict(reference)
    return same_size_itnet(ITNetConfig(**{**reference, **dict(own)}), ITNetConfig(**reference))


def itnet_of_equal_size(reference: dict, own: dict) -> ITNetForCausalLM:
    """An ITNet with ``own`` settings beside those of a reference, and as many parameters as that."""
    return ITNetForCausalLM(_equal_size(tuple(reference.items()), tuple(own.items())))


def itnet(label: str, **own) -> Contestant:
    def build(config: ITNetConfig) -> ITNetForCausalLM:
        return itnet_of_equal_size({**SETTINGS, "vocab_size": config.vocab_size}, own)

    return Contestant(label, build, own)


def peer(label: str, name: str, **own) -> Contestant:
    return Contestant(label, causal_peer(name, **own))


#: Transformers begin with weights as large as those of the ITNets: their usual 0.02 is meant for wider models.
LARGER = {"initializer_range": SETTINGS["initializer_range"]}
#: What new language models begin with (docs/language.md), for as many positions as here.
LANGUAGE = {
    "output_gate": True,
    "factor_decay": True,
    "fourier_scale": 48.0,
    "kernel_inputs": ("x-y", "u_x", "u_y", "u_x*u_y"),
    "kernel_position_scale": 10.0,
    "position_init_scale": 0.0,
}
MODELS = {
    "exact": itnet("ITNet, exact", integration_mode="exact"),
    "near_far": itnet("ITNet, near 4 and far"),
    "near_far-gated": itnet("ITNet, near 4 and far, settings of language models", **LANGUAGE),
    "low_rank": itnet("ITNet, low rank 8", integration_mode="low_rank"),
    "gpt2": peer("GPT-2", "gpt2", **LARGER),
    "llama": peer("Llama (RoPE)", "llama", **LARGER),
    "linear_attention": peer("linear attention", "linear_attention", **LARGER),
    "mamba": peer("Mamba", "mamba"),
}
#: What may repair low rank, for the task alone in which low rank comes far enough, and the form of its terms.
REPAIRS = {
    "low_rank-vector": itnet("ITNet, low rank 8, vectors", integration_mode="low_rank", factor_form="vector"),
    "low_rank-decay": itnet("ITNet, low rank 8, decay", integration_mode="low_rank", factor_decay=True),
    "low_rank-32": itnet("ITNet, low rank 32", integration_mode="low_rank", rank=32, intermediate_size=64),
    "near_far-16": itnet("ITNet, near 16 and far", near_size=16),
}


def problems(data=None) -> dict[str, Recall]:
    """By name. The data are drawn, so that ``data``, a folder, is not used.

    The sizes are those at which GPT-2 learns the first three tasks in these steps.
    """

    def recall(name: str, title: str, vocabulary: int, **own) -> Recall:
        settings = {
            "shared": {**SETTINGS, "vocab_size": vocabulary},
            "contestants": MODELS,
            "steps": 500,
            "tuning_steps": 400,
            "batch_size": 32,
            "weight_decay": 0.01,
            "rates": (1e-3, 3e-3),
            "ladder": (3e-4, 1e-3, 3e-3, 1e-2),
            "curve": 10,
            "enough": 0.995,
            **own,
        }
        return Recall(name, title, "accuracy", is_error=False, **settings)

    found = (
        recall(
            "associative",
            "Multi-query associative recall",
            13,
            task=partial(associative_recall, keys=6),
            train_sizes=tuple({"length": 32, "pairs": pairs} for pairs in (2, 4, 6)),
            test_sizes=(
                *({"length": length, "pairs": 4} for length in (16, 32, 64)),
                *({"length": 32, "pairs": pairs} for pairs in (2, 6)),
            ),
        ),
        recall(
            "induction",
            "Induction",
            7,
            task=partial(induction, symbols=6),
            train_sizes=({"length": 32},),
            test_sizes=tuple({"length": length} for length in (16, 32, 64)),
        ),
        recall(
            "selective",
            "Selective copying",
            10,
            contestants=MODELS | REPAIRS,
            task=partial(selective_copying, symbols=8),
            train_sizes=({"length": 12, "copied": 3}, {"length": 24, "copied": 3}, {"length": 24, "copied": 4}),
            test_sizes=(
                *({"length": length, "copied": 3} for length in (12, 24, 48)),
                *({"length": 24, "copied": copied} for copied in (2, 4, 6)),
            ),
        ),
        recall(
            "offset",
            "Copying by an offset that a token names",
            12,
            task=partial(offset_copying, symbols=4, offsets=8),
            train_sizes=({"length": 24},),
            test_sizes=tuple({"length": length} for length in (16, 24, 48)),
        ),
    )
    return {problem.name: problem for problem in found}
