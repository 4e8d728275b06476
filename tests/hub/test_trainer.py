"""Trainer: accumulation, and the proposal loss in its log."""

import logging

import pytest
from torch.utils.data import Dataset
from transformers import TrainingArguments

from modeling_itnet.heads import common
from modeling_itnet.training.trainer import ITNetTrainer


class Rows(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


@pytest.fixture
def logged(tmp_path, make_model, make_inputs, make_labels):
    """logged(name, batch, accumulation, **config): what Trainer logs, at a learning rate of 0."""

    def run(name, batch, accumulation, label_smoothing=0.0, **config):
        rows = {**make_inputs(name, batch=8), **make_labels(name, batch=8)}
        settings = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            logging_steps=1,
            learning_rate=0.0,
            label_smoothing_factor=label_smoothing,
            seed=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = ITNetTrainer(make_model(name, **config), settings, train_dataset=Rows(rows))
        trainer.train()
        return trainer.state.log_history[0]

    return run


@pytest.mark.parametrize("name", ["image-classification", "masked-lm", "token-classification", "point-cloud"])
def test_accumulation_changes_neither_loss_nor_gradient(logged, name):
    """Eight rows at once, or two at a time over four steps of accumulation."""
    whole, parts = logged(name, 8, 1), logged(name, 2, 4)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed labels"])
@pytest.mark.parametrize("name", ["image-classification", "masked-lm"])
def test_proposal_loss_is_part_of_the_loss_and_logged(logged, name, smoothing):
    config = {"integration_mode": "monte_carlo", "num_samples": 64, "label_smoothing": smoothing}
    without = logged(name, 8, 1, **config, proposal_loss_weight=0.0)
    with_it = logged(name, 8, 1, **config, proposal_loss_weight=0.5)
    assert with_it["proposal_loss"] == pytest.approx(without["proposal_loss"], rel=1e-4)
    assert with_it["proposal_loss"] != 0
    expected = without["loss"] + 0.5 * with_it["proposal_loss"]
    assert with_it["loss"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_no_proposal_no_entry(logged):
    assert "proposal_loss" not in logged("image-classification", 8, 1)


def test_a_loss_computed_outside_is_warned_of(make_model, make_inputs, caplog):
    common.logger.warning_once.__func__.cache_clear()
    model = make_model("image-classification", integration_mode="monte_carlo", num_samples=4).train()
    with caplog.at_level(logging.WARNING):
        model(**make_inputs("image-classification"))
    assert "config.proposal_loss_weight * output.proposal_loss" in caplog.text
