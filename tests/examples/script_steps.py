"""Runs scripts of examples/ for a few steps and records their losses; by torchrun too, all of them in one go.

torchrun --nproc_per_node 2 script_steps.py RUNS.json FOLDER

RUNS.json maps names to [script, arguments]; FOLDER/<name>.json receives what `record` returns.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from transformers import DataCollatorForLanguageModeling

ROOT = Path(__file__).resolve().parents[2]


def mask_every_third(self, inputs, *args, **kwargs):
    """Masks that depend on the tokens alone, so that they do not change with the size of the batch."""
    asked = (inputs % 3 == 0) & (inputs > 4)  # the first five are special
    labels = inputs.where(asked, -100)
    return inputs.masked_fill(asked, self.tokenizer.mask_token_id), labels


def record(script: str, arguments: list[str], folder: Path) -> dict:
    """{"loss", "grad_norm" and "proposal_loss": per step, "evaluations": losses} of a run of a script."""
    options = ["--output_dir", str(folder), "--use_cpu", "true", "--disable_tqdm", "true", "--bf16", "false"]
    module = importlib.import_module(script)
    trainers, make = [], module.ExampleTrainer

    def keep(**kwargs):
        trainers.append(make(**kwargs))
        return trainers[-1]

    with (
        mock.patch.object(sys, "argv", [f"examples/{script}.py", *arguments, *options]),
        mock.patch.object(module, "ExampleTrainer", keep),
        mock.patch.object(DataCollatorForLanguageModeling, "torch_mask_tokens", mask_every_third),
    ):
        module.main()
    steps = [entry for entry in trainers[0].state.log_history if "grad_norm" in entry]
    evaluations = {
        name: value
        for entry in trainers[0].state.log_history
        for name, value in entry.items()
        if name.startswith("eval_") and name.endswith("loss")
    }
    return {
        "loss": [entry["loss"] for entry in steps],
        "grad_norm": [float(entry["grad_norm"]) for entry in steps],
        "proposal_loss": [entry["proposal_loss"] for entry in steps if "proposal_loss" in entry],
        "evaluations": evaluations,
        "processes": trainers[0].args.world_size,
    }


def main(runs: Path, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    torch.set_num_threads(1)
    for name, (script, arguments) in json.loads(runs.read_text(encoding="utf-8")).items():
        recorded = record(script, arguments, folder / name)
        if os.environ["RANK"] == "0":
            (folder / f"{name}.json").write_text(json.dumps(recorded), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
