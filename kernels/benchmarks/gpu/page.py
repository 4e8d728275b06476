"""The page of a run: what ran where, whether it is right, what was timed beside what was predicted and printed."""

from collections.abc import Callable

from report import table

from . import paper_tables

NOT_A_MEASUREMENT = (
    "**Not a measurement.** The kernels ran in Triton's interpreter on a CPU, at tiny shapes. Times are those of the "
    "interpreter, predictions those of an A100 for heads of 64 features: only the way to this page is tested. The "
    "interpreter gets bfloat16 wrong, so that it is left out here."
)
LIMITS = """\
- Checks compare with the literal sums in float64. float32 may be off by 2e-5 of a result's size, half precision by \
twice the error of plain PyTorch in that dtype and two roundings. They run with deterministic algorithms, hence with \
the default tiles; timings run with the tiles that autotuning chose.
- Times are medians of 3 to 20 runs after two that are not counted, one device, no CUDA graphs, no `torch.compile`. \
A step is forward and backward; of a model also the optimiser (AdamW), with weights in float32 and autocast around it.
- TFLOPS count what the mathematics needs. A backward counts as three forwards (SDPA's as 2.5).
- Peak memory is what forward and backward need beyond weights and inputs.
- Predictions know the sums over pairs and the dense products, each at its slowest limit: neither normalisation and \
activations nor the optimiser nor the host's time between kernels. A ratio above 1 is slower than predicted.
- The paper does not say what its throughputs are of, nor at which batch: training steps and forward passes at \
B = {batch} stand here. Its 64 ranks are those of all heads together, rounded up for each. PCT is not in \
Transformers: attention of the same depth and width over as many vectors stands for it, without its \
neighbourhoods. ViLT has the attention that Transformers gives it."""


def page(results: dict) -> str:
    parts = [f"# Kernels and models on {results['device']}"]
    if not results["is_measured"]:
        parts.append(NOT_A_MEASUREMENT)
    parts += [_conditions(results), "## Checks", _checks(results["checks"])]
    if not results["all_checks_passed"]:
        return "\n\n".join([*parts, "Nothing was timed: a check failed."]) + "\n"
    for title, section, function in SECTIONS:
        rows = results["rows"][section]
        parts += [f"## {title}", function(rows, results)]
    return "\n\n".join([*parts, "## Limits", LIMITS.format(batch=results["batch"])]) + "\n"


def _conditions(results: dict) -> str:
    names = ("device", "memory_gb", "driver", "torch", "triton", "transformers", "python", "commit", "when")
    rows = [[name.replace("_", " "), str(results.get(name))] for name in names]
    rows += [["predictions for", str(results["predicted_for"])], ["seconds", f"{results['seconds']:.0f}"]]
    rows += [["estimated seconds", f"{results['estimated_seconds']:.0f}"]]
    return table(["", ""], rows)


def _checks(rows: list[dict]) -> str:
    """Returns one row for each case, one column for each dtype: the worst error over what is allowed."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    found = {(row["family"], row["case"], row["dtype"]): row for row in rows}
    cases = list(dict.fromkeys(key[:2] for key in found))
    cells = [[family, case, *(_verdict(found[family, case, dtype]) for dtype in dtypes)] for family, case in cases]
    passed = sum(row["passed"] for row in rows)
    text = "Worst result of a check: its relative error, and that as a share of what is allowed; *bits* if two runs "
    text += "were compared and agree."
    return "\n\n".join([f"{passed} of {len(rows)} passed. {text}", table(["kernels", "case", *dtypes], cells)])


def _verdict(row: dict) -> str:
    if "error" in row:
        return f"**failed**: {_note({'failure': row['error']})}"
    text = f"{row['worst']} {row['relative_error']:.1e} ({row['share_of_allowed']:.2f})"
    bits = {True: ", bits", False: ", **bits differ**", None: ""}[row.get("repeats")]
    return f"{text}{bits}" if row["passed"] else f"**failed**: {text}{bits}"


def _note(row: dict) -> str:
    return row.get("failure", "").replace("|", "/").replace("\n", " ")


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _tflops(row: dict, kind: str) -> float | None:
    milliseconds = row.get(f"{kind}_ms")
    factor = 1 if kind == "forward" else 3.5 if row["mode"] == "SDPA" else 4
    return None if milliseconds is None else factor * row["flops"] / milliseconds / 1e9


def _timed(row: dict, kind: str) -> list[str]:
    """Returns what was measured, what was predicted, and their ratio."""
    measured, predicted = row.get(f"{kind}_ms"), row.get(f"predicted_{kind}_ms")
    ratio = None if measured is None or not predicted else measured / predicted
    return [_number(measured), _number(predicted), _number(ratio)]


def _operators(rows: list[dict], results: dict) -> str:
    head = ["model", "n", "B", "mode", "forward ms", "predicted", "ratio", "step ms", "predicted", "ratio"]
    head += ["predicted limit", "TFLOPS forward", "TFLOPS step", "peak MB", "note"]
    cells = [
        [row["model"], str(row["n"]), str(row["batch"]), row["mode"], *_timed(row, "forward"), *_timed(row, "step"),
         row.get("predicted_limit", "–"), _number(_tflops(row, "forward"), 1), _number(_tflops(row, "step"), 1),
         _number(row.get("peak_mb"), 0), _note(row)]
        for row in rows
    ]  # fmt: skip
    return table(head, cells)


def _training_steps(rows: list[dict], results: dict) -> str:
    """Lists each model's step beside that of its peer of the same size."""
    head = ["modality", "model", "n", "mode", "step ms", "predicted", "ratio", "predicted limit"]
    head += ["speed over the peer", "peak MB", "note"]
    peers = {(row["modality"], row["model"]): row.get("step_ms") for row in rows if "SDPA" in row["mode"]}
    cells = []
    for row in rows:
        peer, own = peers[row["modality"], row["model"]], row.get("step_ms")
        speed = None if peer is None or own is None else peer / own
        cells.append(
            [row["modality"], row["model"], str(row["n"]), row["mode"], *_timed(row, "step"),
             row.get("predicted_limit", "–"), _number(speed), _number(row.get("peak_mb"), 0), _note(row)]
        )  # fmt: skip
    return table(head, cells)


def _decoding(rows: list[dict], results: dict) -> str:
    cells = [[row["mode"], str(row["context"]), _number(row.get("forward_ms")), _note(row)] for row in rows]
    return table(["B model, one text", "context", "ms per token", "note"], cells)


def _profiling(rows: list[dict], results: dict) -> str:
    peak = results["peak_tflops"]
    head = ["method", "forward ms", "predicted", "ratio", "TFLOPS", "share of the peak"]
    head += ["paper, TFLOPS", "paper, share"]
    cells = []
    for row in rows:
        tflops = _tflops(row, "forward")
        share = None if tflops is None or peak is None else tflops / peak
        paper = [str(row["paper_tflops"]), _number(row["paper_share"])]
        cells.append([row["method"], *_timed(row, "forward"), _number(tflops, 1), _number(share), *paper])
    peak_text = f"Peak of this device: {peak or 'unknown'} TFLOPS, dense, bfloat16; "
    peak_text += f"the paper's {paper_tables.PAPER_PEAK}."
    return "\n\n".join([table(head, cells), peak_text])


def _wallclock(rows: list[dict], results: dict) -> str:
    head = ["method", "benchmark", "n", "timed", "training / s", "forward / s", "peak GB", "relative, training"]
    head += ["step ms", "predicted", "ratio", "paper, / s", "paper, GB", "paper, relative", "note"]
    first, cells = {}, []
    for row in rows:
        rates = [None if row.get(f"{kind}_ms") is None else 1e3 * row["batch"] / row[f"{kind}_ms"]
                 for kind in ("step", "forward")]  # fmt: skip
        peer = first.setdefault(row["benchmark"], rates[0])
        relative = None if peer is None or rates[0] is None else rates[0] / peer
        memory = row.get("peak_mb")
        cells.append(
            [row["method"], row["benchmark"], str(row["n"]), row["timed"], *(_number(rate, 1) for rate in rates),
             _number(None if memory is None else memory / 1024, 1), _number(relative), *_timed(row, "step"),
             str(row["paper_throughput"]), _number(row["paper_peak_gb"], 1), _number(row["paper_relative"]),
             _note(row)]
        )  # fmt: skip
    return table(head, cells)


SECTIONS: tuple[tuple[str, str, Callable[[list[dict], dict], str]], ...] = (
    ("Table profiling of the paper", "profiling", _profiling),
    ("Table wallclock of the paper", "wallclock", _wallclock),
    ("Training steps", "training steps", _training_steps),
    ("The operator of each mode", "operators", _operators),
    ("Decoding", "decoding", _decoding),
)
