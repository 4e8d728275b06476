# SPDX-License-Identifier: Apache-2.0
"""``itnet generate`` continues texts."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import TextStreamer
from typer import Argument, Option, echo, get_text_stream

from ..heads.causal_lm import ITNetForCausalLM
from . import commands, given
from .inputs import checkpoint_config, load_model, model_class, read_tokenizer


@commands.command()
def generate(
    checkpoint: Annotated[Path, Argument(help="Folder with a causal language model and its tokenizer.")],
    prompts: Annotated[list[str], Argument(help="Texts to continue; - reads one from standard input.")],
    max_new_tokens: Annotated[int, Option(min=1, help="Add at most this many tokens; an end of text stops.")] = 50,
    temperature: Annotated[float | None, Option(help="Below 1, likely tokens become likelier; default: 1.")] = None,
    top_k: Annotated[int | None, Option(min=1, help="Draw only from this many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Draw only from the likeliest tokens of this total share.")] = None,
    num_beams: Annotated[int, Option(min=1, help="Search for the likeliest text with this many candidates.")] = 1,
    seed: Annotated[int | None, Option(help="Seed of the draws; the same seed gives the same text.")] = None,
    greedy: Annotated[bool, Option("--greedy", help="Always take the likeliest token; nothing is drawn.")] = False,
    stream: Annotated[
        bool | None, Option(help="Print tokens as they come, as terminals do by default. Beams come at the end.")
    ] = None,
) -> None:
    """Prints every text with what was added; tokens are drawn, unless --greedy or --num-beams is given."""
    chances = given(temperature=temperature, top_k=top_k, top_p=top_p)
    _check_chances(chances, greedy, num_beams)
    prompts = [_read(prompt) for prompt in prompts]
    model, tokenizer = _load(checkpoint)
    is_drawn = not greedy and num_beams == 1
    settings = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": is_drawn, "top_k": None}
    streams = (sys.stdout.isatty() if stream is None else stream) and num_beams == 1
    if seed is not None:
        torch.manual_seed(seed)
    for prompt in prompts:
        _continue(model, tokenizer, prompt, streams, settings | chances)


def _check_chances(chances: dict[str, Any], greedy: bool, num_beams: int) -> None:
    """Says what is wrong with how tokens are to be chosen."""
    if greedy and num_beams > 1:
        raise ValueError(f"`--greedy` does not go with `--num-beams` ({num_beams}): give one of the two")
    if chances and (greedy or num_beams > 1):
        names = ", ".join(f"`--{name.replace('_', '-')}` ({value})" for name, value in chances.items())
        other = "--greedy" if greedy else "--num-beams"
        raise ValueError(f"{names} is about tokens that are drawn, and with `{other}` none are")
    if chances.get("temperature", 1) <= 0:
        raise ValueError(f"`--temperature` ({chances['temperature']}) must be positive; --greedy is the limit at 0")
    if not 0 < chances.get("top_p", 1) <= 1:
        raise ValueError(f"`--top-p` ({chances['top_p']}) must be in (0, 1]")


def _read(prompt: str) -> str:
    """Returns a prompt, or the standard input in place of "-", without the line break at its end."""
    source = "the standard input" if prompt == "-" else "a prompt"
    text = get_text_stream("stdin").read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise ValueError(f"{source} is empty: there is nothing to continue")
    return text


def _load(checkpoint: Path) -> tuple[ITNetForCausalLM, Tokenizer]:
    """Returns the language model of a folder, and its tokenizer."""
    found = model_class(checkpoint_config(checkpoint))
    if not issubclass(found, ITNetForCausalLM):
        raise ValueError(
            f"{checkpoint} holds an {found.__name__}, which cannot generate; `itnet create itnet-small DIR --task "
            "causal-lm` makes a model that can"
        )
    return load_model(checkpoint), read_tokenizer(checkpoint)


def _continue(model: ITNetForCausalLM, tokenizer: Tokenizer, prompt: str, streams: bool, settings: dict) -> None:
    """Prints a prompt and what the model adds to it, at the end or token by token."""
    batch = tokenizer(prompt, return_tensors="pt")
    if batch["input_ids"].shape[1] == 0:
        raise ValueError(f"the prompt {prompt!r} has no token: there is nothing to continue")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if streams else None
    tokens = model.generate(**inputs, **settings, streamer=streamer)
    if not streams:
        echo(tokenizer.decode(tokens[0], skip_special_tokens=True))
