"""One training run: train or resume, evaluate, save the model and its card, write what was measured as JSON."""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import transformers
from huggingface_hub import EvalResult
from transformers import PreTrainedModel, set_seed
from transformers.trainer_utils import get_last_checkpoint

from modeling_itnet import ITNetConfig, ITNetPreTrainedModel
from modeling_itnet.hub.card import model_card

from .arguments import DataArguments, ExampleTrainingArguments, ModelArguments
from .trainer import ExampleTrainer


def build_model(arguments: ModelArguments, classes: dict[str, tuple], config: ITNetConfig) -> torch.nn.Module:
    """The model that --model_type names. ``classes`` maps names to (class, function from our config to the class's).

    A checkpoint brings its own configuration; only the number of labels is the task's.
    """
    if arguments.model_type not in classes:
        raise ValueError(f"`model_type` ({arguments.model_type!r}) must be one of {', '.join(classes)}")
    model_class, make_config = classes[arguments.model_type]
    if arguments.model_name_or_path is None:
        return model_class(make_config(config))
    if not issubclass(model_class, PreTrainedModel):
        raise ValueError(f"`model_name_or_path` cannot be used with `model_type` {arguments.model_type!r}")
    labels = {"id2label": config.id2label, "label2id": config.label2id}
    return model_class.from_pretrained(arguments.model_name_or_path, **labels)


def run(
    trainer: ExampleTrainer,
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    config: ITNetConfig,
    extra: dict | None = None,
    derive: Callable[[dict], dict] | None = None,
) -> dict:
    """Trains and evaluates; returns the results, which are also written to disk. ``extra`` joins them.

    ``derive`` makes further metrics of the metrics.
    """
    args: ExampleTrainingArguments = trainer.args
    start, cpu_start = time.perf_counter(), time.process_time()
    checkpoint = args.resume_from_checkpoint
    if checkpoint is None and Path(args.output_dir).is_dir() and not args.overwrite_output_dir:
        checkpoint = get_last_checkpoint(args.output_dir)
    train = trainer.train(resume_from_checkpoint=checkpoint).metrics
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    drop = ("runtime", "_per_second", "epoch", "model_preparation_time")
    metrics = {name: value for name, value in metrics.items() if not name.endswith(drop)}
    metrics |= derive(metrics) if derive else {}
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config if isinstance(model, ITNetPreTrainedModel) else config
    results = {
        "script": Path(sys.argv[0]).stem,
        "dataset": Path(data_arguments.dataset).name,
        "model_type": model_arguments.model_type,
        "integration_mode": config.integration_mode if model_arguments.model_type == "itnet" else None,
        "seed": args.seed,
        "learning_rate": args.learning_rate,
        "parameters": sum(p.numel() * (2 if p.is_complex() else 1) for p in model.parameters()),
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "metrics": {name: _rounded(value) for name, value in metrics.items()},
        "train_loss": _rounded(train["train_loss"]),
        "steps": trainer.state.global_step,
        "epochs": _rounded(trainer.state.epoch),
        "train_seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_memory_mb": round(_peak_memory_mb()),
        "command": command(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **(extra or {}),
    }
    if trainer.is_world_process_zero():
        path = Path(args.results_file or Path(args.output_dir) / "results.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(results["metrics"]))
    save(trainer, data_arguments, results)
    return results


def save(trainer: ExampleTrainer, data_arguments: DataArguments, results: dict) -> None:
    """The model as evaluated, and its card."""
    folder = Path(trainer.args.output_dir)
    if trainer.weight_average:
        with trainer.weight_average.applied():
            trainer.save_model()
    else:
        trainer.save_model()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_world_process_zero() and isinstance(model, ITNetPreTrainedModel):
        dataset = results["dataset"]
        scores = [
            EvalResult(
                task_type=model.config.modality.replace("_", "-"),
                dataset_type=dataset,
                dataset_name=f"{dataset}, {data_arguments.eval_split}",
                metric_type=name,
                metric_value=value,
                metric_args={"command": results["command"]},
            )
            for name, value in results["metrics"].items()
        ]
        model_card(folder.name, model.config, type(model), scores).save(folder / "README.md")


def command() -> str:
    """How to repeat this run: its command line without where the output went."""
    words, skip = [], False
    for word in sys.argv:
        if skip or word in ("--output_dir", "--results_file", "--disable_tqdm"):
            skip = not skip
        else:
            words.append(os.path.relpath(word) if os.path.isabs(word) else word)
    return f"python {shlex.join(words)}"


def start(args: ExampleTrainingArguments) -> None:
    """Seeds, before anything random is made."""
    set_seed(args.seed)
    transformers.logging.set_verbosity_warning()


def _rounded(value: float) -> float:
    return value if not isinstance(value, float) or not math.isfinite(value) else float(f"{value:.6g}")


def _peak_memory_mb() -> float:
    """Of the GPU, or of the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().peak_wset / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
