"""The page of language.py beside the tables of all trials: baselines that count, and scores after equal times."""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import trial_tables
from language_problems import Language, corpus
from ngrams import WittenBell
from trials import TUNING_SEED

PEERS = ("gpt2", "gpt2_conv", "llama", "llama_conv", "mamba")
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


def score_after(log: dict, seconds: float) -> float | None:
    """The validation score after as many CPU seconds of training, between two scores of the curve on a line.

    None before the first score, or if training diverged; the last score if training took less.
    """
    points = list(zip(log["validation_cpu_seconds"], (score for _, score in log["validation"]), strict=True))
    if any(score is None for _, score in points) or seconds < points[0][0]:
        return None
    for (start, first), (end, second) in pairwise(points):
        if seconds <= end:
            return first + (second - first) * (seconds - start) / (end - start)
    return points[-1][1]


def equal_time(problem: Language, logs: list[dict]) -> list[str]:
    """A line per model: its validation score when the fastest peer, and the slowest model, has ended."""
    final = [log for log in logs if log["problem"] == problem.name and log["seed"] != TUNING_SEED]
    totals = {
        name: statistics.mean(log["training_cpu_seconds"] for log in found)
        for name in problem.contestants
        if (found := [log for log in final if log["model"] == name])
    }
    peers = {name: seconds for name, seconds in totals.items() if name in PEERS}
    if not peers or len(totals) < 2:
        return []
    fastest, slowest = min(peers, key=peers.get), max(totals, key=totals.get)
    marks = list(dict.fromkeys((totals[fastest], totals[slowest])))
    heading = ["model", "CPU seconds of all steps", *(f"validation after {seconds:.0f} s" for seconds in marks)]
    table = [heading]
    for name, total in totals.items():
        own = [log for log in final if log["model"] == name]
        cells = []
        for seconds in marks:
            scores = [score_after(log, seconds) for log in own]
            cells.append(trial_tables.spread(scores) if any(score is not None for score in scores) else "not yet")
        table.append([problem.contestants[name].label, f"{total:.0f}", *cells])
    text = f"Equal times: where {problem.contestants[fastest].label}, the fastest peer, and "
    text += (
        f"{problem.contestants[slowest].label}, the slowest model, have taken all steps. Schedules of the learning "
    )
    text += "rate end with the steps of each model, so that one that is cut short is at a disadvantage."
    return [text, "", *trial_tables.markdown(table), ""]


def page(found: dict[str, Language], folder: Path) -> str:
    logs, lines = trial_tables.read_logs(folder), []
    for problem in found.values():
        lines += trial_tables.section(problem, logs, "language")
        lines += [*baselines(problem, folder), *equal_time(problem, logs)]
    return "\n".join(lines).strip()
