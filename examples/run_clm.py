"""Causal language modelling with ITNet, GPT-2, Llama or Mamba, on lines or documents of text.

python examples/run_clm.py configuration/recipes/gutenberg-clm-cpu.yaml  # after examples/data/download.py gutenberg
python examples/run_clm.py --dataset corpus.txt --holdout 0.1 --tokenizer bytes
torchrun --nproc_per_node 8 examples/run_clm.py configuration/recipes/clm-base.yaml --dataset ...

The texts are joined and cut into blocks of --max_seq_length tokens. Loss is in nats per token; bits per byte do not
depend on the tokenizer. Peers have as many parameters as the ITNet that the options describe; gpt2_conv and llama_conv
have a short convolution before each block. At the end, the model goes on with --prompt.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from common.arguments import DataArguments, ExampleTrainingArguments, ModelArguments, parse
from common.byte_tokenizers import load_causal_tokenizer
from common.data import check_texts, find_column, load_train_and_eval
from common.losses import next_token_loss
from common.peers.causal_lm import CAUSAL_PEERS
from common.runs import build_model, run, start
from common.streams import TokenBlocks, collate_blocks, count_bytes, token_streams
from common.trainer import ExampleTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_itnet import ITNetForCausalLM

PEERS = {name: CAUSAL_PEERS[name] for name in ("gpt2", "gpt2_conv", "llama", "llama_conv", "mamba")}
MODELS = {"itnet": ITNetForCausalLM, **PEERS}


@dataclass
class CausalLMArguments(DataArguments):
    eval_split: str = field(default="validation", metadata={"help": "Split to evaluate on."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    rows_are: Literal["lines", "documents"] = field(
        default="lines", metadata={"help": "What follows a text: a line break, or the end-of-text token."}
    )
    tokenizer: str = field(default="train", metadata={"help": "bytes, train (pieces of bytes), folder or Hub id."})
    vocab_size: int = field(default=4096, metadata={"help": "Size of a vocabulary that is trained."})
    max_seq_length: int = field(default=128, metadata={"help": "Tokens per block."})
    prompt: str | None = field(
        default=None, metadata={"help": "What the trained model goes on with; default: the first evaluated tokens."}
    )
    sample_tokens: int = field(default=200, metadata={"help": "Most tokens of it, within max_seq_length; 0 for none."})


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, count: int) -> str:
    """Returns ``prompt`` [m] and at most ``count`` more tokens, drawn at a temperature of 0.8 by a fixed seed."""
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 50, "max_new_tokens": count}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = prompt.unsqueeze(0).to(model.device)
        ids = model.eval().generate(given, attention_mask=torch.ones_like(given), **settings)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def main(recipe: dict | None = None, options: list[str] | None = None) -> None:
    model_args, data_args, args = parse(
        ModelArguments, CausalLMArguments, ExampleTrainingArguments, recipe=recipe, options=options
    )
    start(args)
    if data_args.max_seq_length < 2:
        raise ValueError(f"`max_seq_length` ({data_args.max_seq_length}) must be at least 2")
    rows = load_train_and_eval(data_args)
    column = find_column(rows[0], "text_column", data_args.text_column)
    check_texts(rows[1], find_column(rows[1], "text_column", column))
    name, length = model_args.model_name_or_path or data_args.tokenizer, data_args.max_seq_length
    tokenizer = load_causal_tokenizer(name, rows[0], column, data_args.vocab_size, length, args)
    end = "\n" if data_args.rows_are == "lines" else tokenizer.eos_token_id
    train, test = token_streams(rows, column, tokenizer, end, args)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    task = {"is_causal": True, "vocab_size": len(tokenizer), "max_position_embeddings": length}
    config = model_args.config("text", **task, **(special if model_args.model_name_or_path is None else {}))
    is_itnet = model_args.model_type == "itnet"
    trainer = ExampleTrainer(
        model=build_model(model_args, MODELS, config),
        args=args,
        train_dataset=TokenBlocks(train, length),
        eval_dataset=TokenBlocks(test, length),
        data_collator=collate_blocks,
        processing_class=tokenizer,
        compute_loss_func=None if is_itnet else next_token_loss(args.label_smoothing_factor),
    )
    bits = len(test) / count_bytes(rows[1], column, end) / math.log(2)  # per byte, for a nat per token
    measures = {"tokenizer": Path(name).name, "tokens": len(train), "eval_tokens": len(test)}
    run(
        trainer,
        model_args,
        data_args,
        config,
        extra=measures,
        derive=lambda m: {"bits_per_byte": bits * m["loss"], "perplexity": math.exp(m["loss"])},
    )
    if data_args.sample_tokens and trainer.is_world_process_zero():
        prompt = torch.from_numpy(test[: length // 4].astype("int64"))
        if data_args.prompt:
            prompt = tokenizer(data_args.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        prompt = prompt[-(length // 2) :]
        count = min(data_args.sample_tokens, length - len(prompt))  # GPT-2 knows no further positions
        with trainer.averaged():
            model = trainer.accelerator.unwrap_model(trainer.model)
            print(sample(model, tokenizer, prompt, count))


if __name__ == "__main__":
    main()
