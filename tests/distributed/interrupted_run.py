"""Run by torchrun on two processes: a Trainer run, whole or with one process killed, or resumed from its checkpoint.

torchrun --nproc_per_node 2 interrupted_run.py FOLDER whole-then-killed | resumed

Writes the loss of every step to whole.json and resumed.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from modeling_itnet import ITNetConfig, ITNetForImageClassification

STEPS, SAVED, KILLED = 6, 2, 4


class KillRankOne(TrainerCallback):
    """No farewell: what a lost machine looks like to the others."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(folder: Path, callbacks=()) -> Trainer:
    set_seed(0)
    config = ITNetConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_fourier_features=3,
        kernel_hidden_size=8,
        rank=4,
        image_size=16,
        patch_size=8,
        num_labels=3,
        drop_path_rate=0.1,  # with dropout: the state of the random generators has to survive too
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 3, 16, 16, generator=generator), torch.arange(40) % 3)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        seed=3,
    )

    def collate(rows):
        return {"pixel_values": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}

    model = ITNetForImageClassification(config)
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=data, callbacks=list(callbacks))
    assert arguments.world_size == 2
    return trainer


def losses(trainer: Trainer) -> dict[int, float]:
    return {row["step"]: [row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row}


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    if what == "resumed":
        trainer = make_trainer(folder / "killed")
        trainer.train(resume_from_checkpoint=str(folder / "killed" / f"checkpoint-{SAVED}"))
        name = "resumed.json"
    else:
        trainer = make_trainer(folder / "whole")
        trainer.train()
        name = "whole.json"
    if trainer.is_world_process_zero():
        (folder / name).write_text(json.dumps(losses(trainer)), encoding="utf-8")
    if what != "resumed":
        make_trainer(folder / "killed", [KillRankOne()]).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    time.sleep(0.5)  # threads of gloo let go of their last tensors meanwhile: see examples/common/runs.py
    torch.distributed.destroy_process_group()
