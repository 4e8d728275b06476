"""Trainer: accumulation, and the proposal loss in its log."""

import logging

import pytest
import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from modeling_itnet import modeling_itnet as core
from modeling_itnet.training.trainer import ITNetTrainer


class Rows(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


@pytest.fixture
def trainer_of(tmp_path, make_model, make_inputs, make_labels):
    """trainer_of(name, batch, accumulation, ..., **config): a trainer for one step, at a learning rate of 0."""

    def make(name, batch, accumulation, label_smoothing=0.0, labels=None, **config):
        rows = {**make_inputs(name, batch=8), **(labels or make_labels(name, batch=8))}
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
        rows = Rows(rows)
        return ITNetTrainer(make_model(name, **config), settings, train_dataset=rows, eval_dataset=rows)

    return make


@pytest.fixture
def logged(trainer_of):
    """What such a trainer logs."""

    def run(*args, **kwargs):
        trainer = trainer_of(*args, **kwargs)
        trainer.train()
        return trainer.state.log_history[0]

    return run


@pytest.mark.parametrize(
    "name", ["image-classification", "causal-lm", "masked-lm", "token-classification", "point-cloud"]
)
def test_accumulation_changes_neither_loss_nor_gradient(logged, name):
    """Eight rows at once, or two at a time over four steps of accumulation."""
    whole, parts = logged(name, 8, 1), logged(name, 2, 4)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed labels"])
@pytest.mark.parametrize("name", ["image-classification", "causal-lm", "masked-lm"])
def test_proposal_loss_is_part_of_the_loss_and_logged(logged, name, smoothing):
    config = {"integration_mode": "monte_carlo", "num_samples": 64, "label_smoothing": smoothing}
    without = logged(name, 8, 1, **config, proposal_loss_weight=0.0)
    with_it = logged(name, 8, 1, **config, proposal_loss_weight=0.5)
    assert with_it["proposal_loss"] == pytest.approx(without["proposal_loss"], rel=1e-4)
    assert with_it["proposal_loss"] != 0
    expected = without["loss"] + 0.5 * with_it["proposal_loss"]
    assert with_it["loss"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["image-classification", "causal-lm", "masked-lm", "token-classification"])
def test_the_head_smooths_labels_as_transformers_does(make_model, make_inputs, make_labels, name):
    model, labels = make_model(name).train(), make_labels(name, batch=8)
    torch.manual_seed(0)
    outputs = model(**make_inputs(name, batch=8), **labels, label_smoothing=0.2)
    expected = LabelSmoother(epsilon=0.2)(outputs, labels["labels"], shift_labels=name == "causal-lm")
    torch.testing.assert_close(outputs.loss, expected)
    assert (outputs.loss - model(**make_inputs(name, batch=8), **labels).loss).abs() > 1e-3


def test_labels_are_not_smoothed_at_evaluation(trainer_of):
    plain, smoothed = (trainer_of("image-classification", 8, 1, factor) for factor in (0.0, 0.4))
    assert smoothed.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert smoothed.train().training_loss != pytest.approx(plain.train().training_loss, rel=1e-3)


def test_soft_labels(logged):
    """MixUp's labels [B, C] in a Trainer that smooths them, whole and in parts."""
    settings = {"label_smoothing": 0.1, "problem_type": "single_label_classification"}
    soft = {"labels": torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)}
    whole, parts = (logged("image-classification", *cut, labels=soft, **settings) for cut in ((8, 1), (2, 4)))
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["question-answering", "visual-question-answering", "signal"])
def test_nothing_to_smooth(trainer_of, name):
    with pytest.raises(
        ValueError, match=r"`label_smoothing_factor` \(0.1\) must be 0: the loss of ITNetFor\w+ has no"
    ):
        trainer_of(name, 8, 1, 0.1)


def test_no_proposal_no_entry(logged):
    assert "proposal_loss" not in logged("image-classification", 8, 1)


def test_a_loss_computed_outside_is_warned_of(make_model, make_inputs, caplog):
    core.logger.warning_once.__func__.cache_clear()
    model = make_model("image-classification", integration_mode="monte_carlo", num_samples=4).train()
    with caplog.at_level(logging.WARNING):
        model(**make_inputs("image-classification"))
    assert "config.proposal_loss_weight * output.proposal_loss" in caplog.text
