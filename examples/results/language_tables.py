"""The page of language.py beside the tables of all trials: baselines that count, and scores after equal times."""

import json
import statistics
import time
from pathlib import Path

import torch
import trial_tables
from language_problems import MODELS, Language, corpus
from ngrams import WittenBell
from trials import TUNING_SEED, training_step

TIMED = ("near_far", "near_far-2", "near_far-plain", "gpt2", "llama", "llama_conv", "mamba")
PEERS = ("gpt2", "gpt2_conv", "llama", "llama-0.05", "llama_conv", "mamba")
ORDERS = (1, 3, 5)


def run_baselines(problem: Language, folder: Path) -> dict:
    """n-grams of all training bytes, and of as many as a model reads; writes their log if there is none."""
    path = folder / "baselines" / f"{problem.name}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    train, test = corpus(problem.folder, "train"), corpus(problem.folder, "test")
    log = {"problem": problem.name, "train_bytes": len(train), "test_bytes": len(test), "rows": []}
    for count in (min(problem.seen, len(train)), len(train)):
        for order in ORDERS:
            start = time.process_time()
            bits = WittenBell(train[:count], order).bits_per_byte(test)
            seconds = round(time.process_time() - start, 1)
            log["rows"].append({"order": order, "bytes": count, "test": round(bits, 4), "cpu_seconds": seconds})
            print(f"{problem.name}, {order}-grams of {count:,} bytes: {bits:.3f} bits per byte", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return log


def baselines(problem: Language, folder: Path) -> list[str]:
    path = folder / "baselines" / f"{problem.name}.json"
    if not path.is_file():
        return []
    log = json.loads(path.read_text(encoding="utf-8"))
    table = [["counted", "of bytes", "test", "CPU seconds"]]
    for row in log["rows"]:
        name = "bytes" if row["order"] == 1 else f"{row['order']}-grams, Witten-Bell"
        table.append([name, f"{row['bytes']:,}", f"{row['test']:.3f}", f"{row['cpu_seconds']:.0f}"])
    return [*trial_tables.markdown(table), ""]


def run_timings(problem: Language, folder: Path, names: tuple[str, ...] = TIMED, rounds: int = 20) -> dict:
    """CPU milliseconds of a training step, median of as many, all models taking turns; writes them."""
    steps, times = {}, {name: [] for name in names}
    for name in names:
        torch.manual_seed(0)
        steps[name] = training_step(problem.build(name), problem, problem.steps, problem.rates[0], TUNING_SEED)
    for step in range(1, rounds + 3):
        for name in names:
            start = time.process_time()
            steps[name](step)
            times[name].append(1e3 * (time.process_time() - start))
    log = {"milliseconds": {name: round(statistics.median(own[2:]), 1) for name, own in times.items()}}  # after two
    log |= {"rounds": rounds, "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(log, flush=True)
    path = folder / "baselines" / "timings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return log


def timings(folder: Path) -> list[str]:
    path = folder / "baselines" / "timings.json"
    if not path.is_file():
        return []
    log = json.loads(path.read_text(encoding="utf-8"))
    text = ", ".join(f"{MODELS[name].label} {value:.0f}" for name, value in log["milliseconds"].items())
    return [f"Milliseconds of CPU of a training step, in turns, medians of {log['rounds']}: {text}.", ""]


def equal_time(problem: Language, logs: list[dict]) -> list[str]:
    """Near and far in the time that a peer takes for all steps, beside the peers in all steps."""
    fewer = [log for log in logs if log["problem"].startswith(f"{problem.name}-time-")]
    peers = [log for log in logs if log["problem"] == problem.name and log["model"] in PEERS and log["test"]]
    if not fewer or not peers:
        return []
    table = [["model", "steps", "test", "CPU seconds", "seeds"]]
    for steps, name in dict.fromkeys((log["steps"], log["model"]) for log in (*fewer, *peers)):
        own = [log for log in (*fewer, *peers) if (log["steps"], log["model"]) == (steps, name)]
        seconds = statistics.mean(log["training_cpu_seconds"] for log in own)
        scores = trial_tables.spread([log["test"]["test"] for log in own])
        table.append([problem.contestants[name].label, f"{steps:,}", scores, f"{seconds:.0f}", f"{len(own)}"])
    text = "Equal times: near and far in as many steps as take it the time of Llama or of Mamba, with a schedule "
    text += (
        "that ends there. Trials shared processor cores with others, and their CPU seconds differ by up to a third; "
    )
    text += "the number of steps comes from steps in turns, above."
    return [text, "", *trial_tables.markdown(table), ""]


def page(found: dict[str, Language], folder: Path) -> str:
    logs, lines = trial_tables.read_logs(folder), timings(folder)
    for problem in found.values():
        if not problem.tuned_on:
            lines += trial_tables.section(problem, logs, "language")
            lines += [*baselines(problem, folder), *equal_time(problem, logs)]
    return "\n".join(lines).strip()
