"""The ablations of the paper where they can be seen: typed particles and Darcy flow on deformed meshes, three seeds.

python examples/results/ablations.py --plan
python examples/results/ablations.py --part 1/2 & python examples/results/ablations.py --part 2/2
python examples/results/ablations.py --table

Every row is an ITNet of evidence.py with one setting changed: inputs of the kernel (the 13 rows of the paper's Table
ablation_kernel_full), Fourier features (L = 0 are raw coordinates), kernel width w, depth, ε (`kernel_init_scale`),
the rank of the low-rank mode, trained at each, the radius of near fields, and, on meshes, the measure. Rows have the
learning rate and the knobs that the search of their model found: run evidence.py first, for its models exact,
near_far and low_rank. All have the width that those began with; parameters are not matched, as in the paper.
"""

from dataclasses import replace
from pathlib import Path

import evidence
import evidence_tables
from comparisons import compare, holm
from evidence_tables import errors, read_rows
from field_models import OfFields
from grid import KERNEL_INPUTS, RESULTS, ROOT
from protocol import Rival, Searched
from search import Point
from trial_commands import Study
from trial_tables import markdown

SCRIPT = "ablations"
LOGS = RESULTS / SCRIPT
PAGE = ROOT / "docs" / "ablations.md"
ABLATED = ("particles", "darcy-meshes")
BASES = ("exact", "near_far", "low_rank")
SETTINGS = {  # by the model that they change
    "exact": {
        "num_fourier_features": (0, 4, 8, 32),
        "fourier_scale": (10.0, 100.0),
        "kernel_hidden_size": (4, 8, 64),
        "num_hidden_layers": (1, 2, 3, 4),
        "kernel_init_scale": (1e-3, 1e-2, 1e-1),
    },
    "near_far": {"near_radius": (0.05, 0.1, 0.2, 0.4)},
    "low_rank": {"rank": (1, 2, 4, 8, 16, 32)},
}


def ablated(problem: Searched, logs: Path) -> Searched:
    """The problem with a row for every change of its ITNets; their searches are those of its own ``logs``."""
    rivals = {name: problem.contestants[name] for name in BASES}
    for name, groups in KERNEL_INPUTS.items():
        label = f"kernel of {', '.join(groups) or 'nothing (constant)'}"
        rivals[f"inputs-{name}"] = changed("exact", rivals["exact"], label, kernel_inputs=groups)
    for base, settings in SETTINGS.items():
        for setting, values in settings.items():
            for value in values:
                label = f"{problem.contestants[base].label}, `{setting}={value:g}`"
                rivals[f"{base}-{setting}-{value:g}"] = changed(base, rivals[base], label, **{setting: value})
    for base in BASES:
        build = rivals[base].build
        if isinstance(build, OfFields):
            row = changed(base, rivals[base], f"{rivals[base].label}, without the measure")
            rivals[f"{base}-uniform"] = replace(row, build=OfFields(build.build, sees_measure=False))
    config = problem.at("exact", Point(problem.rates[0], problem.space("exact").start)).config("exact")
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    return replace(
        problem,
        name=f"{problem.name}-ablated",
        title=f"{problem.title}: ablations",
        shared={**problem.shared, **sizes},
        contestants=rivals,
        parameters=0,
        seeds=(1, 2, 3),
        clock="",
        base=problem,
        base_logs=logs,
    )


def changed(base: str, rival: Rival, label: str, **settings) -> Rival:
    return replace(rival, label=label, settings=settings, knobs={}, tuned_as=base)


def problems(data: Path, logs: Path = evidence.LOGS) -> dict[str, Searched]:
    """By name. ``data`` is the folder of the data sets, ``logs`` that of the logs of evidence.py."""
    found = evidence.problems(data)
    return {problem.name: problem for problem in (ablated(found[name], logs) for name in ABLATED)}


def against_bases(problem: Searched, found: dict[str, list[dict]]) -> list[str]:
    """Every row against the model that it changes: error over error, and p corrected for all of a table."""
    made = {}
    for model, logs in found.items():
        base = found[problem.contestants[model].tuned_as or model]
        if problem.contestants[model].tuned_as and len(logs) == len(base) == len(problem.seeds):
            for test in logs[0]["test"]:
                pair = errors(logs, test), errors(base, test)
                if pair[0] is not None and pair[1] is not None:
                    made[model, test] = compare(*pair)
    corrected = dict(zip(made, holm([comparison.p for comparison in made.values()]), strict=True))
    tests = list(dict.fromkeys(test for _, test in made))
    table = [["changed", *tests]]
    for model in dict.fromkeys(model for model, _ in made):
        cells = [evidence_tables.cell(made[model, test], corrected[model, test]) for test in tests]
        table.append([problem.contestants[model].label, *cells])
    return [*markdown(table), ""] if made else []


def page(found: dict[str, Searched], folder: Path) -> str:
    lines = []
    for problem in found.values():
        logs = read_rows(problem, folder, "seed")
        if any(logs.values()):
            lines += [f"### {problem.title}", "", *evidence_tables.rows(problem, logs, None, len(problem.seeds)), ""]
            lines += against_bases(problem, logs)
    return "\n".join(lines).strip()


def main() -> None:
    evidence.run(Study(SCRIPT, problems, page, LOGS, PAGE), __doc__)


if __name__ == "__main__":
    main()
