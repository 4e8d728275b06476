"""Whole models in every integration mode beside attention: speed, growth with the length, and peak memory."""

from statistics import median

from contestants import ITNET, KINDS, Size, contestant, taking_part
from report import conditions, judged, table
from rich.progress import track
from timing import interleaved, median_ratio, peak_bytes

LENGTHS = (196, 512, 1024, 4096)
GROWTH_LENGTH = 4096
LINEAR = ("lr-8", "nf-25")  # whose time must not grow faster than the length
NEAR = "nf-25"
#: Of near_far over SDPA: speed of a training step by length, and peak memory. Of the linear modes: time(2n) / time(n).
SPEED_GOALS, MEMORY_GOAL, GROWTH_GOAL = {196: 0.5, 1024: 0.75, 4096: 1.4}, 1.3, 2.2


def measure(
    rounds: int,
    size: Size,
    lengths: tuple[int, ...] = LENGTHS,
    only: tuple[str, ...] | None = None,
    with_memory: bool = True,
) -> dict[str, dict]:
    """Returns speeds by kind and length and, if GROWTH_LENGTH is among the lengths, growth beyond it."""
    cells = [(kind, n) for n in lengths for kind in KINDS]
    speed = {
        f"{kind}, n = {n}": speed_at(kind, n, rounds, size, only, with_memory)
        for kind, n in track(cells, description="modes", transient=True)
    }
    linear = [name for name in LINEAR if only is None or name in only]
    return {"speed": speed, "growth": growth(rounds, size, linear) if GROWTH_LENGTH in lengths else {}}


def speed_at(
    kind: str, n: int, rounds: int, size: Size, only: tuple[str, ...] | None, with_memory: bool
) -> dict[str, dict]:
    """Returns positions per second, speed over SDPA and peak bytes of all contestants."""
    field = {name: contestant(name, n, size) for name in taking_part(n, only)}
    times = interleaved({name: lambda c=c: c.run(kind) for name, c in field.items()}, rounds)
    del field
    row = {
        name: {
            "positions_per_second": size.batch(n) * n / median(seconds),
            "speed_over_sdpa": median_ratio(times["sdpa"], seconds),
            "speed_over_exact": median_ratio(times["exact"], seconds) if "exact" in times else None,
        }
        for name, seconds in times.items()
    }
    if with_memory:
        for name, figures in row.items():
            figures["peak_bytes"] = peak_bytes("contestants", name, kind, str(n), str(size.layers))
        for figures in row.values():
            figures["peak_over_sdpa"] = figures["peak_bytes"] / row["sdpa"]["peak_bytes"]
    return row


def growth(rounds: int, size: Size, names: list[str], n: int = GROWTH_LENGTH) -> dict[str, dict[str, float]]:
    """Returns the time at 2n over the time at n, one sample each, by contestant and kind."""
    size = Size(size.layers, size.width, size.heads, tokens=1)
    result = {name: {} for name in names}
    for name in track(names, description="growth", transient=True):
        field = {count: contestant(name, count, size) for count in (n, 2 * n)}
        for kind in KINDS:
            times = interleaved({count: lambda c=c, kind=kind: c.run(kind) for count, c in field.items()}, rounds)
            result[name][kind] = median_ratio(times[2 * n], times[n])
    return result


def summary(results: dict) -> str:
    """Returns speeds over SDPA of all contestants, then the figures that have goals, and the machine."""
    parts = [_speed_table(results["speed"])]
    if any(NEAR in row for row in results["speed"].values()):
        parts.append(_near_table(results["speed"]))
    if results["growth"]:
        head = [f"time at n = {2 * GROWTH_LENGTH} / time at n = {GROWTH_LENGTH} (goal)", *KINDS]
        rows = results["growth"].items()
        parts.append(table(head, ([name, *(judged(row[k], GROWTH_GOAL, True) for k in KINDS)] for name, row in rows)))
    over_exact = []
    for label, row in results["speed"].items():
        kind, n = label.split(", n = ")
        if kind == "forward" and "exact" in row and "mc-128" in row:
            goal = 0.7 * int(n) / ITNET["mc-128"]["num_samples"]
            over_exact.append(f"{judged(row['mc-128']['speed_over_exact'], goal)} at n = {n}")
    if over_exact:
        parts.append(f"mc-128 at evaluation, speed over exact: {', '.join(over_exact)}.")
    return "\n\n".join([*parts, conditions(results)])


def _speed_table(speed: dict[str, dict]) -> str:
    """Returns one row per length and kind, one column per contestant."""
    columns = list(dict.fromkeys(name for row in speed.values() for name in row))
    has_memory = all("peak_bytes" in figures for row in speed.values() for figures in row.values())

    def cell(figures: dict | None) -> str:
        if figures is None:
            return "–"
        return f"{figures['speed_over_sdpa']:.2f}" + (f" ({figures['peak_bytes'] / 1e6:.0f})" if has_memory else "")

    head = ["speed over SDPA" + (" (peak MB)" if has_memory else ""), *columns]
    return table(head, ([label, *(cell(row.get(name)) for name in columns)] for label, row in speed.items()))


def _near_table(speed: dict[str, dict]) -> str:
    rows = []
    for label, row in speed.items():
        kind, n = label.split(", n = ")
        if NEAR in row:
            goal = SPEED_GOALS.get(int(n)) if kind == "training step" else None
            memory = row[NEAR].get("peak_over_sdpa")
            shown = "–" if memory is None else judged(memory, MEMORY_GOAL, True)
            rows.append([label, judged(row[NEAR]["speed_over_sdpa"], goal), shown])
    return table([f"{NEAR} over SDPA (goal)", "speed", "peak memory"], rows)
