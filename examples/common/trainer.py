"""The Trainer of the scripts: AdamW groups of ITNet, an EMA of the weights, augmentation in training only."""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback

from modeling_itnet import ITNetPreTrainedModel, optimizer_param_groups
from modeling_itnet.training.trainer import ITNetTrainer

EMA_FILE = "ema.safetensors"


class WeightAverage(TrainerCallback):
    """m <- d m + (1 - d) w after every step t, with d = min(decay, (1 + t) / (10 + t)): young averages forget sooner.

    It is written beside each checkpoint and read back when training resumes.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"`ema_decay` ({decay}) must lie between 0 and 1")
        self.model, self.decay = model, decay
        self.average: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.global_step and (folder / EMA_FILE).is_file():
            self.average = load_file(folder / EMA_FILE, device=str(args.device))
        else:
            self.average = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def on_step_end(self, args, state, control, **kwargs):
        update = get_ema_multi_avg_fn(min(self.decay, (1 + state.global_step) / (10 + state.global_step)))
        update(list(self.average.values()), [self.model.get_parameter(name) for name in self.average], None)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            save_file(self.average, Path(args.output_dir) / f"checkpoint-{state.global_step}" / EMA_FILE)

    @contextmanager
    def applied(self):
        """Lets the model hold the average inside, and its own weights again outside."""
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._load(self.average or weights)
        try:
            yield
        finally:
            self._load(weights)

    @torch.no_grad()
    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])


class ExampleTrainer(ITNetTrainer):
    """ITNetTrainer with another collator for evaluation and, if asked for, an average of the weights to evaluate.

    Args:
        eval_collator: Collates evaluation batches, if not as in training.
        kwargs: Arguments of Trainer. `args` is an `ExampleTrainingArguments`.
    """

    def __init__(self, *, eval_collator=None, **kwargs):
        super().__init__(**kwargs)
        if not isinstance(self.accelerator.unwrap_model(self.model), ITNetPreTrainedModel):
            # Peers accept `num_items_in_batch` and ignore it: their losses are means over the batch.
            self.model_accepts_loss_kwargs = False
        self.eval_collator = eval_collator or self.data_collator
        self.weight_average = None
        if self.args.ema_decay is not None:
            self.weight_average = WeightAverage(self.model, self.args.ema_decay)
            self.add_callback(self.weight_average)

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            options = {"betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}
            groups = optimizer_param_groups(self.model, self.args.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate, **options)
        return self.optimizer

    def get_eval_dataloader(self, eval_dataset=None):
        collator, self.data_collator = self.data_collator, self.eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = collator

    def averaged(self) -> AbstractContextManager:
        """Lets the model hold the average of its weights inside, if there is one."""
        return self.weight_average.applied() if self.weight_average else nullcontext()

    def evaluate(self, *args, **kwargs):
        with self.averaged():
            return super().evaluate(*args, **kwargs)
