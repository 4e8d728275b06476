"""Trains a small language model on a bundled text, and lets it write: about a minute on a CPU.

    python examples/generate_text.py
    python examples/generate_text.py --text my.txt --prompt "It was" --steps 1000

The text is Alice's Adventures in Wonderland by Lewis Carroll (1865), which is in the public domain.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, pipeline

from modeling_itnet.hub import create_checkpoint

TEXT = Path(__file__).parent / "data" / "alice.txt"


def train(folder: str, text: Path, steps: int, length: int = 128, batch_size: int = 4) -> None:
    """Makes a model in ``folder``, trains it on pieces of a text, and saves it there."""
    model = create_checkpoint("itnet-tiny", folder, task="causal-lm", texts=[text], vocab_size=1000)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # [tokens]; the tokenizer would warn that these are longer than one text may be
    tokens = torch.tensor(tokenizer.encode(text.read_text(encoding="utf-8"), verbose=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (batch_size,))
        batch = torch.stack([tokens[start : start + length] for start in starts])  # [batch_size, length]
        loss = model.train()(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss:.2f}")
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="text file to learn")
    parser.add_argument("--prompt", default="Alice was", help="text to continue")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--output_dir", default="outputs/generate_text")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    train(arguments.output_dir, arguments.text, arguments.steps)
    write = pipeline("text-generation", arguments.output_dir)
    settings = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.8, "top_k": 40}
    print(write(arguments.prompt, **settings)[0]["generated_text"])
    print(f"more: itnet generate {arguments.output_dir} {arguments.prompt!r}")


if __name__ == "__main__":
    main()
