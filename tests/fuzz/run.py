"""Runs random cases of everything that computes against an oracle in float64 (see fuzzing/oracle.py).

    python tests/fuzz/run.py --cases 20000 --seed 0 --workers 2 --log outputs/fuzz.jsonl
    python tests/fuzz/run.py --family positions --seed 1234          # one case again, with what was drawn

Cases are shared out to the families; those of a family have the seeds S, S+1, ... With --log, finished cases are
written there, and a run that was stopped goes on where it was. Prints a line for each family: cases, and the largest
error in units of what rounding may do. Exits with 1 if a case is wrong.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

# Before anything imports Triton: its kernels run in the interpreter here.
os.environ["TRITON_INTERPRET"] = "1"
for path in ("kernels", "configuration", ""):  # a clone that is not installed
    sys.path.append(str(Path(__file__).resolve().parents[2] / path))

BLOCK = 50  # cases that a worker takes at a time


def plan(names: list[str], cases: int, seed: int) -> list[tuple[str, int]]:
    """(family, seed) of all cases, shared out by the families' shares."""
    from fuzzing import FAMILIES

    total = sum(FAMILIES[name].share for name in names)
    counts = {name: cases * FAMILIES[name].share // total for name in names}
    for index in range(cases - sum(counts.values())):  # what rounding left over
        counts[names[index % len(names)]] += 1
    return [(name, seed + index) for name, count in counts.items() for index in range(count)]


def run_block(block: list[tuple[str, int]]) -> list[dict]:
    import torch
    from fuzzing import run_case
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows = []
    for family, seed in block:
        outcome = run_case(family, seed)
        rows.append({"family": family, "seed": seed, "ratio": outcome.ratio, "where": outcome.where})
        if outcome.ratio > 1 or outcome.comparisons == 0:
            rows[-1]["choices"] = {name: str(value) for name, value in outcome.choices.items()}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=None, help="1 with --family, 2000 otherwise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", help="only this one; may be given several times")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--log", type=Path, help="JSON lines of finished cases, which are not run again")
    options = parser.parse_args()
    from fuzzing import FAMILIES

    unknown = [name for name in options.family or [] if name not in FAMILIES]
    if unknown:
        parser.error(f"--family ({unknown[0]}) must be one of {', '.join(FAMILIES)}")
    names = options.family or list(FAMILIES)
    cases = plan(names, options.cases or (1 if options.family else 2000), options.seed)
    rows = read(options.log) if options.log is not None and options.log.exists() else []
    wanted = set(cases)
    rows = [row for row in rows if (row["family"], row["seed"]) in wanted]
    done = {(row["family"], row["seed"]) for row in rows}
    rest = [case for case in cases if case not in done]
    blocks = [rest[start : start + BLOCK] for start in range(0, len(rest), BLOCK)]
    if options.log is not None:
        options.log.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    for row in rows:
        report(row)
    for finished in each(blocks, options.workers):
        rows += finished
        for row in finished:
            report(row, always=len(cases) == 1)
        if options.log is not None:
            with open(options.log, "a", encoding="utf-8") as log:
                log.writelines(json.dumps(row) + "\n" for row in finished)
    wrong = 0
    for name in names:
        own = [row for row in rows if row["family"] == name]
        bad = sum(is_wrong(row) for row in own)
        wrong += bad
        worst = max((row["ratio"] for row in own), default=0.0)
        print(f"{name:12} {len(own):6} cases, {bad} wrong, largest error {worst:.3g} of what is allowed")
    print(f"{len(rows)} cases, {wrong} wrong, {time.time() - started:.0f} s for {len(rest)} of them")
    return 1 if wrong else 0


def each(blocks: list, workers: int):
    if workers == 1 or len(blocks) < 2:
        yield from map(run_block, blocks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(run_block, blocks)


def read(path: Path) -> list[dict]:
    """The rows of a log; a line that was cut off when the run was stopped does not count."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def is_wrong(row: dict) -> bool:
    return not row["ratio"] <= 1 or "choices" in row


def report(row: dict, always: bool = False) -> None:
    if is_wrong(row):
        again = f"python tests/fuzz/run.py --family {row['family']} --seed {row['seed']}"
        print(f"WRONG {row['ratio']:.3g} {row['where']} | {again} | {row.get('choices')}", flush=True)
    elif always:
        print(f"right {row['ratio']:.3g} {row['where']}")


if __name__ == "__main__":
    sys.exit(main())
