"""How long a layer and a model take on a GPU, predicted from what the compiler made of the kernels; never measured.

Six things a layer needs, each at its full rate, as if the other five cost nothing; the slowest is the prediction, and
gives it its name:

    tensor    products by tensor cores
    issue     instructions: issue slots, or the FMA pipe, special functions and half-rate pipes of the loops over keys
    shared    bytes through shared memory and L1, of the listing of sm_90 (the others do not name their operands)
    l2        bytes between L2 and the multiprocessors
    hbm       what has to come from memory and go there
    launch    launches, one after the other on the host

The kernels of a pass run one after the other, so that their times add up; inside a kernel the slowest limit counts.
Attention (flash-attention of the same heads and lengths) goes through the same model, with the instructions that its
mathematics needs at least: one exponential and seven other instructions per pair.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sass import PRODUCTS, KernelReport

LIMITS = ("tensor", "issue", "shared", "l2", "hbm", "launch")
WIDTH, HEAD_DIM = 128, 64
LAUNCH_SECONDS = 2.5e-6  # an asynchronous launch from Python
MUFU_COST, ALU_COST = 8, 2  # issue slots of an instruction on the eighth- and half-rate pipes


class Device(NamedTuple):
    """Rates of a GPU: published ones, but for L2, which is what measurements of others found."""

    name: str
    arch: str
    tflops: float  # dense, bfloat16
    processors: int
    ghz: float
    lanes: int  # instructions of a lane that a multiprocessor issues per clock
    shared: float  # bytes per clock and multiprocessor
    l2: float
    hbm: float  # TB/s


DEVICES = (
    Device("H200", "sm_90", 989, 132, 1.83, 128, 128, 36, 4.8),
    Device("H100", "sm_90", 989, 132, 1.83, 128, 128, 36, 3.35),
    Device("A100", "sm_80", 312, 108, 1.41, 128, 128, 40, 2.0),
    Device("B200", "sm_100", 2250, 148, 1.85, 128, 128, 36, 8.0),
    Device("MI300X", "gfx942", 1307, 304, 2.1, 64, 128, 64, 5.3),
)


@dataclass
class Work:
    """What one kernel or GEMM needs."""

    flops: float = 0.0
    slots: float = 0.0  # issue slots of a lane
    shared: float = 0.0  # bytes
    l2: float = 0.0  # bytes
    hbm: float = 0.0  # bytes

    def seconds(self, device: Device) -> dict[str, float]:
        clocks = device.processors * device.ghz * 1e9
        return {
            "tensor": self.flops / device.tflops / 1e12,
            "issue": self.slots / device.lanes / clocks,
            "shared": self.shared / device.shared / clocks,
            "l2": self.l2 / device.l2 / clocks,
            "hbm": self.hbm / device.hbm / 1e12,
        }


class Prediction(NamedTuple):
    """Time of a pass, what limits most of it, and the share of the tensor cores' rate that its mathematics uses."""

    seconds: float
    limit: str
    utilisation: float


def issue_slots(report: KernelReport) -> float:
    """Counts the slots of an element: all instructions, or the slowest pipe's. Those of AMD have their rates in them
    already."""
    if report.mufu_per_element is None:
        return report.instructions_per_element or 0.0
    others = MUFU_COST * report.mufu_per_element, ALU_COST * report.alu_slots
    return max(report.instructions_per_element, report.fma_slots, *others)


def layer_work(kernels: dict[str, KernelReport], heads: int, n: int, batch: int, shared_positions: bool) -> dict:
    """Returns the parts of a layer's sum over pairs, by pass."""
    rows = heads * batch * n * WIDTH  # (position, hidden unit) of all heads
    elements, moments = rows * n, 2 * rows * HEAD_DIM
    sets = 1 if shared_positions else batch
    bias = 2 * sets * n * n * WIDTH  # bytes, float16

    gemm = 2 * rows * HEAD_DIM * HEAD_DIM

    def pair_kernel(name: str, hbm: float = 0, gemms: int = 0) -> Work:
        """Counts the loop over keys, and what a row costs outside of it: ``gemms`` products with W2, loads and
        stores."""
        report = kernels[name]
        flops = 2 * PRODUCTS[name] * HEAD_DIM * (report.flop_share or 1) * elements + gemms * gemm

        def total(per_element: float | None, per_row: float | None) -> float:
            return (per_element or 0) * elements + (per_row or 0) * rows

        slots = total(issue_slots(report), report.row_slots)
        shared = total(report.shared_bytes_per_element, report.row_shared_bytes)
        return Work(flops, slots, shared, total(report.global_bytes_per_element, report.row_global_bytes), hbm)

    position_gemm = 2 * sets * n * n * WIDTH * 128
    forward = {
        "bias": Work(position_gemm, l2=bias),
        "pairs": pair_kernel("forward"),
        "W2": Work(gemm, l2=2 * moments),  # written by one kernel, read by the next, a chunk at a time
    }
    if "fused_backward" in kernels:
        backward = {
            "bias": Work(position_gemm, l2=bias),
            "pairs": pair_kernel("fused_backward", gemms=2),
            "positions": pair_kernel("position_weights", gemms=1),
        }
    else:  # dL/dpre and the key partials, 2 + 2 bytes written and read; A and dA written and read
        chunks = pair_kernel("backward", 4 * elements + 2 * moments)
        backward = {"bias": Work(position_gemm, l2=bias), "pairs": chunks}
        backward["sums"] = Work(2 * gemm + 2 * position_gemm, hbm=4 * elements + 2 * moments)
    return {"forward": forward, "backward": backward}


def predict(parts: dict[str, Work], device: Device, useful_flops: float, launches: int = 0) -> Prediction:
    """Adds up the parts, which run one after the other; each takes as long as its slowest limit."""
    total, by_limit = 0.0, dict.fromkeys(LIMITS, 0.0)
    for work in parts.values():
        times = work.seconds(device)
        slowest = max(times, key=times.get)
        total += times[slowest]
        by_limit[slowest] += times[slowest]
    host = launches * LAUNCH_SECONDS
    if host > total:
        total, by_limit = host, {"launch": host}
    return Prediction(total, max(by_limit, key=by_limit.get), useful_flops / total / device.tflops / 1e12)


def useful_flops(heads: int, n: int, batch: int) -> float:
    """Counts what the mathematics of a forward needs; a backward counts three times as much."""
    return heads * batch * n * WIDTH * HEAD_DIM * (4 * n + 2 * HEAD_DIM)


def attention_work(heads: int, n: int, batch: int) -> dict[str, dict[str, Work]]:
    """Counts the work of Flash-attention, whose element is a pair. It takes 8 slots: one of the exponential at an
    eighth of the rate."""
    pairs, tokens = heads * batch * n * n, heads * batch * n * HEAD_DIM
    return {
        "forward": {"pairs": Work(4 * HEAD_DIM * pairs, 8 * pairs, hbm=8 * tokens)},
        "backward": {"pairs": Work(10 * HEAD_DIM * pairs, 14 * pairs, hbm=18 * tokens)},
    }


def model_seconds(layer: float, device: Device, layers: int, width: int, n: int, batch: int, is_step: bool) -> float:
    """Predicts a whole model: its layers' sums over pairs, and the dense products, W_theta, W_O and the feed-forward
    layers."""
    dense = 2 * batch * n * (2 * width * width + 8 * width * width) * (3 if is_step else 1)
    return layers * (layer + dense / (0.7 * device.tflops * 1e12))
