"""Two checkouts of this repository in one run: a process of each measures the same cells, in turns.

The benchmarks of this checkout measure both; what they import of the three packages is that of the checkout.

python -m against ROOT measures the packages of ROOT: it reads names of cells, one per line, and answers each by the
seconds of one run, or by why it cannot, as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import torch
from operator_speed import PAPER_SMALL, Shape, make_inputs
from report import conditions, table
from rich.progress import track
from timing import peak_bytes, seconds

HERE = Path(__file__).resolve().parent
KINDS = ("forward", "training step")
OPERATORS = {  # shape, backend, whether each sample has its own positions, whether causal
    "tiled, w = 8": (replace(PAPER_SMALL, width=8), "tiled", False, False),
    "tiled, w = 32": (replace(PAPER_SMALL, width=32), "tiled", False, False),
    "tiled, w = 128": (PAPER_SMALL, "tiled", False, False),
    "tiled, w = 32, own positions": (replace(PAPER_SMALL, width=32), "tiled", True, False),
    "tiled, w = 32, causal": (replace(PAPER_SMALL, width=32), "tiled", False, True),
    "reference, w = 32": (Shape(batch=1, n=32, heads=6, head_dim=64, width=32), "reference", False, False),
}
TINY = "preset itnet-tiny, B = 8"  # a whole model in which Python and small tensors take the time
MEMORY = {"peak memory, B = 32, n = 1024": ("32", "1024")}  # of the tiled operator, by memory_probe.py
NOISE = 1.03  # a median ratio up to here says nothing


def operator_cells() -> list[str]:
    return [f"{name}, {kind}" for name in (*OPERATORS, TINY) for kind in KINDS]


def model_cells(names: tuple[str, ...], lengths: tuple[int, ...], layers: int) -> list[str]:
    """Returns the cells of whole models, such as "model lr-8 196 2 forward"."""
    return [f"model {name} {n} {layers} {kind}" for n in lengths for name in names for kind in KINDS]


class Checkout:
    """A process that measures the packages of one checkout, when asked."""

    def __init__(self, root: Path):
        self.root = root
        paths = os.pathsep.join(str(root / part) for part in ("", "configuration", "kernels"))
        self.environment = {"PYTHONPATH": paths}
        command = [sys.executable, "-m", "against", str(root)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=HERE, env=os.environ | self.environment, **pipes)
        self._answer()

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()

    def measure(self, cell: str) -> dict[str, object]:
        """Returns {"seconds": ...} of one run, or {"error": ...} if this checkout does not have what the cell
        needs."""
        print(cell, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, object]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process for {self.root} ended with code {self._process.wait()}; see above")
        return json.loads(line)


def measure(rounds: int, here: Path, there: Path, cells: list[str], with_memory: bool = True) -> dict[str, dict]:
    """Returns median and quartiles of time here / time there within a round, by cell. Who begins changes every
    round."""
    results = {}
    with Checkout(here) as first, Checkout(there) as second:
        for cell in track(cells, description="cells", transient=True):
            warm = [side.measure(cell) for side in (first, second)]
            faults = [answer["error"] for answer in warm if "error" in answer]
            if faults:
                results[cell] = {"error": faults[0]}
                continue
            ratios = []
            for number in range(rounds):
                order = (first, second) if number % 2 == 0 else (second, first)
                times = {side: side.measure(cell)["seconds"] for side in order}
                ratios.append(times[first] / times[second])
            results[cell] = spread(ratios)
        for cell, arguments in MEMORY.items() if with_memory else ():
            peaks = [peak_bytes("memory_probe", *arguments, environment=c.environment) for c in (first, second)]
            results[cell] = spread([peaks[0] / peaks[1]])
    return {"cells": results, "slower": [cell for cell, row in results.items() if row.get("is_more")]}


def spread(ratios: list[float]) -> dict[str, object]:
    """Returns median and quartiles of the ratios, and whether they speak of a difference: ``is_more`` asks for a
    median beyond the noise and for three quarters of the rounds on the same side of 1."""
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    middle = median(ratios)
    return {"ratio": middle, "low": low, "high": high, "is_more": middle > NOISE and low > 1}


def summary(results: dict) -> str:
    def cells(row: dict) -> list[str]:
        if "error" in row:
            return ["–", "–", f"cannot be compared: {row['error']}"]
        return [f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}", "more" if row["is_more"] else ""]

    rows = ([cell, *cells(row)] for cell, row in results["cells"].items())
    head = ["here / there", "median", "quartiles", f"beyond {NOISE}"]
    found = f"More time or memory than there: {', '.join(results['slower']) or 'in no cell'}."
    return "\n\n".join([table(head, rows), found, conditions(results)])


def _make(cell: str) -> Callable[[], object]:
    if cell.startswith("model "):
        from contestants import Size, contestant

        _, name, n, layers, kind = cell.split(" ", 4)
        entry = contestant(name, int(n), Size(layers=int(layers)))
        return lambda: entry.run(kind)
    name, kind = cell.rsplit(", ", 1)
    if name == TINY:
        return _tiny_model(kind)
    return _operator(*OPERATORS[name], kind)


def _tiny_model(kind: str) -> Callable[[], object]:
    from modeling_itnet import ITNetConfig, ITNetForImageClassification

    model = ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny")).train(kind != "forward")
    images, labels = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)

    def run() -> None:
        with torch.set_grad_enabled(kind != "forward"):
            loss = model(images, labels=labels).loss
        if kind != "forward":
            loss.backward()

    return run


def _operator(shape: Shape, backend: str, has_own_positions: bool, is_causal: bool, kind: str) -> Callable[[], object]:
    from itnet_kernels import integral_transform

    u, positions, weights = make_inputs(shape, requires_grad=kind != "forward")
    if has_own_positions:
        positions = positions * torch.linspace(0.5, 1, shape.batch)[:, None, None]  # [B, n, 2]
    grad = torch.randn_like(u)

    def run() -> None:
        out = integral_transform(u, positions, weights, is_causal=is_causal, backend=backend)
        if kind != "forward":
            out.backward(grad)

    return run


def serve(root: Path) -> None:
    """Answers until the end of the input. What libraries print goes to the other stream."""
    import itnet_kernels
    import modeling_itnet

    answers, sys.stdout = sys.stdout, sys.stderr
    for package in (itnet_kernels, modeling_itnet):
        if not Path(package.__file__).resolve().is_relative_to(root.resolve()):
            raise SystemExit(f"{package.__name__} comes from {package.__file__}, not from {root}")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    current, run = None, None
    for line in sys.stdin:
        cell = line.strip()
        try:
            if cell != current:
                current, run = None, None  # the last one's memory is free before the next one is built
                current, run = cell, _make(cell)
            answer = {"seconds": seconds(run)}
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__} in {root}: {lines[-1].strip()}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
