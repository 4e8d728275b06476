"""Losses and gradients do not depend on how a batch of four is cut: one process, two, or two accumulated halves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch

from modeling_itnet import ITNetConfig, ITNetForImageClassification
from modeling_itnet.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16", "rank=2"]
SMALL += ["kernel_hidden_size=4", "num_fourier_features=4", "local_neighbors=2", "integration_mode=exact"]
SMALL += ["hidden_dropout_prob=0.0", "embedding_dropout_prob=0.0", "drop_path_rate=0.0"]
PICTURE = ["image_size=16", "patch_size=8"]
STEPS = ["--max_steps", "2", "--logging_steps", "1", "--warmup_steps", "0", "--learning_rate", "1e-2"]
STEPS += ["--adam_epsilon", "1e-2", "--max_grad_norm", "1e9"]  # a step that is smooth in its gradient
FOLDS = ["--num_folds", "2", "--max_folds", "1"]
LENGTHS = ["--max_seq_length", "16", "--second_seq_length", "16"]
TOKENS = ["--max_seq_length", "16", "--max_train_samples", "8", "--max_eval_samples", "8", "--sample_tokens", "0"]
# name -> script, recipe, options, settings. Everything random in the data is off: augmentation, drawn points, queries.
CASES = {
    "image": (
        "run_image_classification",
        "cifar10-cpu",
        ["--augmentation", "none", "--label_smoothing_factor", "0.1"],
        PICTURE,
    ),
    "image-vit": (
        "run_image_classification",
        "cifar10-cpu",
        ["--augmentation", "none", "--label_smoothing_factor", "0.1", "--model_type", "vit"],
        PICTURE,
    ),
    "points": ("run_point_cloud", "modelnet10-cpu", ["--augment", "false", "--num_points", "64"], []),
    "operator": ("run_operator_learning", "burgers-cpu", [], []),
    "classes": ("run_glue", "sst2-cpu", [], []),
    "classes-bert": ("run_glue", "sst2-cpu", ["--model_type", "bert"], []),
    "scores": ("run_glue", "stsb-cpu", [], []),
    "scores-bert": ("run_glue", "stsb-cpu", ["--model_type", "bert"], []),
    "masked": ("run_mlm", "wikitext2-cpu", LENGTHS, []),
    "masked-bert": ("run_mlm", "wikitext2-cpu", [*LENGTHS, "--model_type", "bert"], []),
    "next": ("run_clm", "gutenberg-clm-cpu", TOKENS, []),
    "next-gpt2": ("run_clm", "gutenberg-clm-cpu", [*TOKENS, "--model_type", "gpt2"], []),
    "answers": ("run_vqa", "easy_vqa-cpu", [], PICTURE),
    "answers-vilt": ("run_vqa", "easy_vqa-cpu", ["--model_type", "vilt"], PICTURE),
    "statements": ("run_nlvr", "nlvr-cpu", [], PICTURE),
    "pairs": ("run_nlvr", "nlvr2-base", ["--preset", "itnet-tiny"], PICTURE),
    "graphs": ("run_graph_classification", "mutag-cpu", FOLDS, []),
}
CUTS = {"one": (4, 1), "accumulated": (2, 2), "two": (2, 1)}  # rows per process, accumulated batches


def arguments(tiny_data, vocabulary: Path, name: str, cut: str) -> list[str]:
    script, recipe, options, settings = CASES[name]
    data = tiny_data[script] / "pairs" if name == "pairs" else tiny_data[script]
    words = [str(RECIPES / f"{recipe}.yaml"), "--dataset", str(data), *STEPS, *options]
    if script in ("run_glue", "run_mlm", "run_vqa", "run_nlvr"):
        words += ["--tokenizer", str(vocabulary)]  # one that is trained numbers its pieces anew each time
    rows, accumulated = CUTS[cut]
    words += ["--per_device_train_batch_size", str(rows), "--gradient_accumulation_steps", str(accumulated)]
    words += ["--per_device_eval_batch_size", str(2 if cut == "two" else 4)]
    return [*words, "--config_overrides", *SMALL, *settings]


@pytest.fixture(scope="module")
def vocabulary(load_script, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *load_script("tiny_data").WORDS]
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def two_processes(tiny_data, vocabulary, tmp_path_factory) -> dict[str, dict]:
    """What every case records with two processes, all under one torchrun."""
    folder = tmp_path_factory.mktemp("two")
    runs = {name: [CASES[name][0], arguments(tiny_data, vocabulary, name, "two")] for name in CASES}
    (folder / "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(__file__).parent / "script_steps.py"), str(folder / "runs.json"), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in CASES}


@pytest.fixture(scope="module")
def one_process(load_script, tiny_data, vocabulary, tmp_path_factory):
    """(name, cut) -> what a case records in this process; made once."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def run(name: str, cut: str) -> dict:
        if (name, cut) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
                made[name, cut] = load_script("script_steps").record(
                    CASES[name][0], arguments(tiny_data, vocabulary, name, cut), folder / f"{name}-{cut}"
                )
        return made[name, cut]

    return run


def assert_same(found: dict, expected: dict, tolerance: float = 1e-5) -> None:
    assert len(expected["loss"]) == 2 and min(expected["grad_norm"]) > 1e-3
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
    assert expected["evaluations"]
    assert found["evaluations"] == pytest.approx(expected["evaluations"], rel=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_accumulation(one_process, name):
    assert_same(one_process(name, "accumulated"), one_process(name, "one"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes(one_process, two_processes, name):
    assert two_processes[name]["processes"] == 2
    assert_same(two_processes[name], one_process(name, "one"))


@pytest.mark.parametrize("model_type", ["itnet", "peer"])
def test_mixed_images_count_by_rows(load_script, model_type):
    """Soft labels [B, C] of mixed images: losses of parts add up to the mean over all rows."""
    torch.manual_seed(0)
    pixels, labels = torch.randn(5, 3, 16, 16), torch.rand(5, 3).softmax(-1)
    config = ITNetConfig.from_preset(
        "itnet-tiny",
        modality="image",
        image_size=16,
        patch_size=8,
        num_labels=3,
        problem_type="single_label_classification",
    )
    model = ITNetForImageClassification(config).eval()  # nothing is dropped
    logits = model(pixel_values=pixels).logits
    if model_type == "itnet":

        def loss(part: slice, items: int | None) -> torch.Tensor:
            given = {"pixel_values": pixels[part], "labels": labels[part]}
            return model(**given, label_smoothing=0.1, num_items_in_batch=items).loss

    else:
        peer_loss = load_script("common.losses").peer_loss(0.1)

        def loss(part: slice, items: int | None) -> torch.Tensor:
            return peer_loss({"logits": logits[part]}, labels[part], items)

    smooth = 0.9 * labels + 0.1 / 3
    expected = -(smooth * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss(slice(0, 3), 15) + loss(slice(3, 5), 15), expected)
    torch.testing.assert_close(loss(slice(0, 5), None), expected)


def test_monte_carlo_logs_its_proposal_loss(load_script, tiny_data, vocabulary, tmp_path):
    """The trainer of the scripts logs what trains the proposals; the loss contains it with its weight."""
    runs = {}
    for weight in (0.0, 2.0):
        words = arguments(tiny_data, vocabulary, "image", "one")
        words += ["integration_mode=monte_carlo", "num_samples=64", f"proposal_loss_weight={weight}"]
        words += ["--learning_rate", "0"]
        runs[weight] = load_script("script_steps").record("run_image_classification", words, tmp_path / f"{weight}")
    assert len(runs[2.0]["proposal_loss"]) == 2
    assert runs[2.0]["proposal_loss"] == pytest.approx(runs[0.0]["proposal_loss"], rel=1e-5)
    added = [both - alone for both, alone in zip(runs[2.0]["loss"], runs[0.0]["loss"], strict=True)]
    assert added == pytest.approx([2 * value for value in runs[2.0]["proposal_loss"]], rel=1e-4)
    assert min(runs[2.0]["proposal_loss"]) > 0.1  # a cross entropy over five positions
