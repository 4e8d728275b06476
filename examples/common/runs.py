"""One training run: train or resume, evaluate, save the model and its card, write what was measured as JSON."""

import atexit
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
import transformers
from huggingface_hub import EvalResult
from transformers import PreTrainedModel, set_seed
from transformers.trainer_utils import get_last_checkpoint

from modeling_itnet import ITNetConfig, ITNetPreTrainedModel
from modeling_itnet.hub.card import model_card, result_task

from .arguments import DataArguments, ExampleTrainingArguments, ModelArguments
from .data import evaluated_rows, find_data
from .trainer import ExampleTrainer


@atexit.register
def leave_process_group() -> None:
    """Ends what torchrun began.

    A thread of gloo that has just finished a collective still holds its tensors and needs the interpreter to let go of
    them. If the interpreter ends first, that thread aborts the process; if the group does, both wait for each other.
    """
    if torch.distributed.is_initialized():
        time.sleep(0.5)
        torch.distributed.destroy_process_group()


#: Name -> class of a model, with a function that makes its configuration of ITNet's, unless it takes that itself.
Models = dict[str, type | tuple[type, Callable]]


def build_model(arguments: ModelArguments, classes: Models, config: ITNetConfig) -> torch.nn.Module:
    """Returns the model that --model_type names.

    ``config`` is that of the checkpoint, if one is named. A peer's checkpoint brings its own; only the labels are the
    task's.
    """
    if arguments.model_type not in classes:
        raise ValueError(f"`model_type` ({arguments.model_type!r}) must be one of {', '.join(classes)}")
    found = classes[arguments.model_type]
    model_class, make_config = found if isinstance(found, tuple) else (found, lambda config: config)
    if arguments.model_name_or_path is None:
        return model_class(make_config(config))
    if not issubclass(model_class, PreTrainedModel):
        raise ValueError(f"`model_name_or_path` cannot be used with `model_type` {arguments.model_type!r}")
    settings = {"config": config}
    if arguments.model_type != "itnet":
        settings = {"id2label": config.id2label, "label2id": config.label2id}
    return load_checkpoint(model_class, arguments, **settings)


def load_checkpoint(model_class: type[PreTrainedModel], arguments: ModelArguments, **settings) -> PreTrainedModel:
    """Returns the model of --model_name_or_path; weights that do not fit are an error unless made anew."""
    name, anew = arguments.model_name_or_path, arguments.ignore_mismatched_sizes
    try:
        return model_class.from_pretrained(name, ignore_mismatched_sizes=anew, **settings)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"weights of {name!r} have other sizes than the classes of the data or the given settings need; "
            "--ignore_mismatched_sizes true starts those anew"
        ) from error


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
    checkpoint = args.resume_from_checkpoint or last_checkpoint(trainer, model_arguments, data_arguments)
    train = trainer.train(resume_from_checkpoint=checkpoint).metrics
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    drop = ("runtime", "_per_second", "epoch", "model_preparation_time")
    metrics = {name: value for name, value in metrics.items() if not name.endswith(drop)}
    metrics |= derive(metrics) if derive else {}
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config if isinstance(model, PreTrainedModel) else config
    results = {
        "script": args.script,
        "dataset": (find_data(data_arguments.dataset) or Path(data_arguments.dataset)).name,
        "evaluated_on": evaluated_rows(data_arguments),
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
    write_results(args, results)
    if trainer.is_world_process_zero():
        print(json.dumps(results["metrics"]))
    save(trainer, results)
    return results


def write_results(args: ExampleTrainingArguments, results: dict) -> None:
    """Writes what was measured, where the options say."""
    if args.should_save:
        path = Path(args.results_file or Path(args.output_dir) / "results.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def last_checkpoint(trainer: ExampleTrainer, *arguments: ModelArguments | DataArguments) -> str | None:
    """Returns the newest checkpoint in the output folder if it is one of this very run; one of another run is an
    error.

    A run is the same if its script, model and training data are. With --overwrite_output_dir old checkpoints go.
    """
    args: ExampleTrainingArguments = trainer.args
    folder, checkpoint = Path(args.output_dir), None
    described = {"script": args.script}
    for values in arguments:
        described |= asdict(values)
    for name in ("eval_split", "max_eval_samples"):
        described.pop(name)
    path = folder / "run.json"
    if args.overwrite_output_dir:
        if trainer.is_world_process_zero():
            for old in folder.glob("checkpoint-*"):
                shutil.rmtree(old)
    elif folder.is_dir():
        checkpoint = get_last_checkpoint(folder)
        before = json.loads(path.read_text(encoding="utf-8")) if checkpoint and path.is_file() else described
        differing = [name for name in described if before.get(name) != described[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"`output_dir` ({folder}) holds a checkpoint of another run, with `{name}` {before.get(name)!r}, not "
                f"{described[name]!r}: choose another --output_dir, or --overwrite_output_dir true to start anew"
            )
    if trainer.is_world_process_zero():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return checkpoint


def save(trainer: ExampleTrainer, results: dict) -> None:
    """Saves the model as it was evaluated, and its card."""
    folder = Path(trainer.args.output_dir)
    with trainer.averaged():
        trainer.save_model()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_world_process_zero() and isinstance(model, ITNetPreTrainedModel):
        dataset = results["dataset"]
        scores = [
            EvalResult(
                task_type=result_task(type(model)),
                dataset_type=dataset,
                dataset_name=f"{dataset}, {results['evaluated_on']}",
                metric_type=name,
                metric_value=value,
                metric_args={"command": results["command"]},
            )
            for name, value in results["metrics"].items()
        ]
        model_card(folder.name, model.config, type(model), scores, has_code=False).save(folder / "README.md")


def command() -> str:
    """Returns how to repeat this run: the command line of the script or of `itnet train`, without the output."""
    outputs = ("output_dir", "results_file", "disable_tqdm")
    program, *given = sys.argv
    words = ["itnet"] if Path(program).stem == "itnet" else ["python", program]
    while given:
        word = given.pop(0)
        named = given[0].partition("=")[0] if word in ("-o", "--override") else word.removeprefix("--")
        if named in outputs:
            given.pop(0)
        else:
            words.append(word)
    return shlex.join(os.path.relpath(word) if os.path.isabs(word) else word for word in words)


def start(args: ExampleTrainingArguments) -> None:
    """Seeds the random numbers, before anything random is made."""
    set_seed(args.seed)
    transformers.logging.set_verbosity_warning()


def _rounded(value: float) -> float:
    return value if not isinstance(value, float) or not math.isfinite(value) else float(f"{value:.6g}")


def _peak_memory_mb() -> float:
    """Returns the peak memory of the GPU, or of the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().peak_wset / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
