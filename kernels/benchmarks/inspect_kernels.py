"""What the compiler makes of the Triton kernels, without a GPU.

    python kernels/benchmarks/inspect_kernels.py --arch sm_90

Compiles every shipped tile configuration offline, disassembles it and counts what is in the loop over keys. With
``--check`` it fails if one of them spills there, computes something twice or has its products serialised. The
utilisation is a bound from issue slots and tensor cores of one SM (docs/kernels.md), not a measurement: tensor time
against the time of the other instructions, as if both overlapped perfectly and as if they never did. Memory bounds it
further.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError as error:
    raise ImportError("the inspection needs the triton package: pip install triton") from error

from itnet_kernels.exact.triton.backward import itnet_bwd_kernel
from itnet_kernels.exact.triton.configs import (
    BACKWARD,
    BACKWARD_POSITIONS,
    FORWARD,
    Problem,
    TileFamily,
    backward_units,
    suitable_settings,
    tile_rows,
)
from itnet_kernels.exact.triton.forward import itnet_fwd_kernel
from itnet_kernels.exact.triton.tile import NOT_SPECIALISED

KERNELS = {"forward": (FORWARD, itnet_fwd_kernel), "backward": (BACKWARD, itnet_bwd_kernel)}
PRODUCTS = {"forward": 2, "backward": 6}  # matrix products of 2 * rows * keys * d_h FLOP per key tile

# Special-function instructions of an element: tanh, or the exponentials of erf and of its derivative.
MUFU = {("forward", "half"): 1, ("backward", "half"): 1, ("forward", "fp32"): 1, ("backward", "fp32"): 2}

# Hopper, per SM and clock; H200 at its boost clock.
TENSOR_FLOPS = 4096
LANES = 128
MUFU_COST, ALU_COST = 8, 2  # issue slots of an instruction on the quarter- and half-rate pipes
SM_REGISTERS, SM_SHARED, SM_THREADS = 65536, 233472, 2048
H200_TFLOPS, H200_TBYTES = 989.0, 4.8

# Shared memory that one program may use.
SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
SMALL_SHARED_LIMIT = 65536  # AMD and anything unknown

_FMA_PIPE = {"FADD", "FMUL", "FFMA", "HADD2", "HFMA2", "HMUL2", "IMAD"}
_NOT_ALU = {"MUFU", "BAR", "BRA", "SYNCS", "WARPGROUP", "WARPSYNC", "NOP", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR"}
_MEMORY = ("LD", "ST", "UTMA", "RED", "ATOM")
_TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "QGMMA", "UTCQMMA")


class PaperShape(NamedTuple):
    """A layer of the paper: heads of size 64, kernel width 128."""

    name: str
    heads: int
    positions: int


PAPER_SHAPES = [
    PaperShape(name, heads, n) for name, heads in (("S", 6), ("B", 12), ("L", 16)) for n in (196, 512, 1024)
]


@dataclass
class KernelReport:
    """Static figures of one compiled kernel. ``*_per_element``: issued per pair and hidden unit, in the key loop."""

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    width: int
    config: dict[str, int]
    registers: int
    stack_bytes: int
    loop_spill_instructions: int
    shared_bytes: int
    loop_instructions: int | None = None
    programs_per_sm: int | None = None
    tensor_instructions: dict[str, int] | None = None
    tensor_waits: int | None = None
    wgmma_flop_share: float | None = None  # of the FLOPs that the loop's products need
    flop_share: float | None = None  # the same of all tensor-core instructions, where their shapes are known
    instructions_per_element: float | None = None
    fma_per_element: float | None = None
    mufu_per_element: float | None = None
    utilisation_perfect: float | None = None
    utilisation_none: float | None = None
    serialised: str | None = None  # what ptxas says if it serialises the products

    def faults(self) -> list[str]:
        """Why this configuration must not ship; empty if nothing is wrong."""
        found = []
        # Operands of float32 products are kept in three parts: a few of them may be spilled, out of thousands.
        allowed = (self.loop_instructions or 0) // 50 if self.dtype == "fp32" else 0
        if self.loop_spill_instructions > allowed:
            found.append(f"{self.loop_spill_instructions} spills in the loop")
        if self.shared_bytes > SHARED_LIMIT.get(self.arch, SMALL_SHARED_LIMIT):
            found.append(f"{self.shared_bytes} bytes of shared memory")
        expected = MUFU[self.kernel, "fp32" if self.dtype == "fp32" else "half"]
        if self.mufu_per_element not in (None, expected):
            found.append(f"{self.mufu_per_element} special functions per element instead of {expected}")
        products = 3 if self.dtype == "fp32" else 1  # 3xTF32
        if self.flop_share not in (None, products):
            found.append(f"{self.flop_share} times the products' FLOPs instead of {products}")
        if self.serialised:
            found.append(self.serialised)
        return found


def compile_kernel(
    kernel: str, config: dict[str, int],
    arch: str = "sm_90", head_dim: int = 64, width: int = 128, dtype: str = "bf16",
    is_causal: bool = False, has_bias: bool = True, needs_measure: bool = False,
):  # fmt: skip
    """The compiled kernel of one configuration (``triton.compile``)."""
    function = KERNELS[kernel][1].fn
    is_nvidia = arch.startswith("sm_")
    gelu = "erf" if dtype == "fp32" else "tanh.approx" if is_nvidia else "tanh"
    constants = {
        "W": width,
        "D": head_dim,
        "BP": BACKWARD_POSITIONS,
        "KC": backward_units(head_dim, itemsize(dtype), major_of(arch)),
        "HAS_BIAS": has_bias,
        "NEEDS_MEASURE": needs_measure,
        "IS_CAUSAL": is_causal,
        "GELU": gelu,
        "PRECISION": "tf32x3" if is_nvidia else "ieee",
    } | config
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = {name: _argument_type(name, dtype) for name in function.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    unaligned = NOT_SPECIALISED["do_not_specialize_on_alignment"]
    aligned = [
        i
        for i, name in enumerate(function.arg_names)
        if name == "padded_keys" or (signature[name][0] == "*" and name not in unaligned)
    ]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", int(arch[3:]), 32) if is_nvidia else GPUTarget("hip", arch, 64)
    options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def itemsize(dtype: str) -> int:
    """Bytes of an operand's element."""
    return 4 if dtype == "fp32" else 2


def major_of(arch: str) -> int | None:
    """Major compute capability of an NVIDIA architecture."""
    return int(arch[3:]) // 10 if arch.startswith("sm_") else None


def problem_of(arch: str, head_dim: int, dtype: str) -> Problem:
    limit = SHARED_LIMIT.get(arch, SMALL_SHARED_LIMIT)
    return Problem(head_dim, itemsize(dtype), major_of(arch), limit)


def _argument_type(name: str, dtype: str) -> str:
    half = {"p_keys", "p_values", "p_moments", "p_dmoments", "p_dbias"}
    if name == "p_bias":
        return "*fp32" if dtype == "fp32" else "*fp16"
    if name.startswith("p_"):
        return f"*{dtype}" if name in half else "*fp32"
    return "i32"


def shipped_configs(kernel: str, arch: str = "sm_90", head_dim: int = 64, dtype: str = "bf16") -> list[dict[str, int]]:
    """The configurations that autotuning would try on ``arch``, the default first."""
    family: TileFamily = KERNELS[kernel][0]
    return suitable_settings(family, problem_of(arch, head_dim, dtype))


def inspect_kernel(
    kernel: str, config: dict[str, int],
    arch: str = "sm_90", head_dim: int = 64, width: int = 128, dtype: str = "bf16",
    **flags: bool,
) -> KernelReport:  # fmt: skip
    """Compiles one configuration and counts."""
    compiled = compile_kernel(kernel, config, arch, head_dim, width, dtype, **flags)
    head = (kernel, arch, dtype, head_dim, width, config)
    if not arch.startswith("sm_"):
        listing = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{name}:\s+(\d+)", listing)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return KernelReport(*head, registers, 4 * spilled, spilled, compiled.metadata.shared)
    usage, sass = _disassemble(compiled.asm["cubin"])
    body = key_loop(sass)
    report = KernelReport(
        *head,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        loop_spill_instructions=sum(op.startswith(("STL", "LDL")) for op in body),
        shared_bytes=compiled.metadata.shared,
    )
    _count(report, body)
    if arch == "sm_90":
        report.serialised = serialisation_message(compiled.asm["ptx"])
    return report


_NVIDIA_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


def serialisation_message(ptx: str) -> str | None:
    """The message C75xx with which ptxas says that it serialises the asynchronous products of a kernel, if it does."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w", encoding="utf-8") as file:
            file.write(ptx)
        log = ""
        for tool in ("ptxas", "ptxas-blackwell"):  # the older one may not know this version of PTX
            command = [os.path.join(_NVIDIA_TOOLS, tool), f"--gpu-name={target}", source, "-o", source + ".cubin"]
            if not os.path.exists(command[0]):
                continue
            result = subprocess.run(command, capture_output=True, text=True)
            log = result.stdout + result.stderr
            if result.returncode == 0:
                message = re.search(r"\(C75\d\d\)[^\n']*", log)
                return message and message[0].strip()
        raise RuntimeError(f"ptxas could not compile the kernel for {target}: {log}")


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) by the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(tool: str, flag: str) -> str:
            command = [os.path.join(_NVIDIA_TOOLS, tool), flag, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        return run("cuobjdump", "-res-usage"), run("nvdisasm", "-c")


def key_loop(sass: str) -> list[str]:
    """Opcodes of the loop over keys: of the backward branches, the one around the most tensor-core instructions.

    Behind the kernel's end are no loops over keys, but rare cases that the compiler moved out of their way.
    """
    instructions, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*);", line):
            instructions.append(match[1])
            target = re.search(r"`\((\.L_x_\d+)\)", match[2]) if match[1].startswith("BRA") else None
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    end = max((i for i, op in enumerate(instructions) if op == "EXIT"), default=len(instructions))
    bodies = [instructions[start:stop] for start, stop in loops if stop <= end]
    return max(bodies, key=lambda body: sum(op.startswith(_TENSOR) for op in body), default=[])


def _count(report: KernelReport, body: list[str]) -> None:
    """Fills in what follows from the loop's opcodes."""
    warps, keys = report.config["num_warps"], report.config["BK"]
    problem = problem_of(report.arch, report.head_dim, report.dtype)
    rows = tile_rows(KERNELS[report.kernel][0], report.config, problem)
    per_thread = rows * keys / (32 * warps)
    kinds = Counter(op.split(".")[0] for op in body)
    per_program = SM_REGISTERS // (-(-report.registers // 8) * 8 * 32 * warps)
    report.programs_per_sm = min(per_program, SM_SHARED // (report.shared_bytes + 1024), SM_THREADS // (32 * warps))
    report.tensor_instructions = {kind: kinds[kind] for kind in _TENSOR if kinds[kind]}
    report.tensor_waits = sum(op.startswith("WARPGROUP.DEPBAR") for op in body)
    flops = 2 * rows * keys * report.head_dim * PRODUCTS[report.kernel]
    shapes = [re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", op) for op in body]
    wgmma = sum(2 * int(m[1]) * int(m[2]) * int(m[3]) for m in shapes if m) * warps // 4
    report.wgmma_flop_share = round(wgmma / flops, 3)
    if not kinds["UTCHMMA"]:  # does not name its shape
        shapes = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}
        warp_products = sum(2 * shapes[op.split(".")[1]] for op in body if op.startswith("HMMA"))
        report.flop_share = round((wgmma + warps * warp_products) / flops, 3)
    fma = sum(kinds[kind] for kind in _FMA_PIPE)
    alu = sum(
        count
        for kind, count in kinds.items()
        if kind not in _FMA_PIPE | _NOT_ALU and not kind.startswith((*_MEMORY, *_TENSOR, "U", "R2U"))
    )
    report.loop_instructions = len(body)
    report.instructions_per_element = round(len(body) / per_thread, 2)
    report.fma_per_element = round(fma / per_thread, 2)
    report.mufu_per_element = round(kinds["MUFU"] / per_thread, 2)
    if report.arch == "sm_90" and report.dtype != "fp32":
        slots = max(len(body), fma, MUFU_COST * kinds["MUFU"], ALU_COST * alu) / per_thread
        tensor, other = flops / (rows * keys) / TENSOR_FLOPS, slots / LANES
        report.utilisation_perfect = round(tensor / max(tensor, other), 3)
        report.utilisation_none = round(tensor / (tensor + other), 3)


def predict(shape: PaperShape, reports: dict[str, KernelReport]) -> dict[str, float | str]:
    """FLOPs and H200 time of one layer and one sample, from the static utilisation of the default configurations.

    The pair kernels, the GEMMs with W2 (taken at full rate) and the traffic of what the kernels exchange with them.
    """
    n, heads, width, dim = shape.positions, shape.heads, 128, 64
    row = {"model": shape.name, "positions": n}
    for kernel, gemms in (("forward", 1), ("backward", 2)):
        pairs = 2 * PRODUCTS[kernel] * heads * n * n * width * dim / 1e9
        dense = gemms * 2 * heads * n * width * dim * dim / 1e9
        # A (and dA) written and read; dL/dpre and the key partials, 4 bytes for each pair and unit, written and read.
        traffic = gemms * 4 * heads * n * width * dim + (8 * heads * n * n * width if kernel == "backward" else 0)
        report = reports[kernel]
        row[f"{kernel}_gflop"] = round(pairs + dense, 2)
        for kind in ("perfect", "none"):
            seconds = pairs / (getattr(report, f"utilisation_{kind}") * H200_TFLOPS) + dense / H200_TFLOPS
            row[f"{kernel}_us_{kind}"] = round(seconds * 1e3, 1)
        row[f"{kernel}_traffic_us"] = round(traffic / H200_TBYTES / 1e6, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_90, sm_100, ... or gfx942, ...")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64])
    parser.add_argument("--width", type=int, nargs="+", default=[128])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="fail if a configuration has a fault")
    options = parser.parse_args()
    reports = [
        inspect_kernel(kernel, config, options.arch, head_dim, width, options.dtype)
        for head_dim in options.head_dim
        for width in options.width
        for kernel in KERNELS
        for config in shipped_configs(kernel, options.arch, head_dim, options.dtype)
    ]
    predictions = []
    if reports[0].utilisation_none is not None and 64 in options.head_dim and 128 in options.width:
        paper = [r for r in reports if (r.head_dim, r.width) == (64, 128)]
        defaults = {kernel: next(r for r in paper if r.kernel == kernel) for kernel in KERNELS}
        predictions = [predict(shape, defaults) for shape in PAPER_SHAPES]
    if options.json:
        print(json.dumps({"kernels": [asdict(r) for r in reports], "predictions": predictions}, indent=2))
    else:
        print(_table([_row(report) for report in reports]))
    if predictions and not options.json:
        print(f"\nOne layer, one sample, H200, {options.dtype}, default configurations (bounds, no measurement):\n")
        print(_table(predictions))
    faults = [f"{r.kernel} d_h={r.head_dim} w={r.width} {r.config}: {fault}" for r in reports for fault in r.faults()]
    if options.check and faults:
        sys.exit("\n".join(faults))


def _row(report: KernelReport) -> dict:
    config = " ".join(f"{name.replace('num_', '')}={value}" for name, value in report.config.items())
    tensor = " ".join(f"{count} {kind}" for kind, count in (report.tensor_instructions or {}).items())
    return {
        "kernel": report.kernel,
        "d_h": report.head_dim,
        "w": report.width,
        "config": config,
        "regs": report.registers,
        "stack B": report.stack_bytes,
        "loop spills": report.loop_spill_instructions,
        "smem KB": round(report.shared_bytes / 1024, 1),
        "CTA/SM": report.programs_per_sm,
        "tensor": tensor,
        "waits": report.tensor_waits,
        "FMA/el": report.fma_per_element,
        "MUFU/el": report.mufu_per_element,
        "all/el": report.instructions_per_element,
        "util perfect": report.utilisation_perfect,
        "util none": report.utilisation_none,
        "faults": "; ".join(report.faults()) or "none",
    }


def _table(rows: list[dict]) -> str:
    cells = [list(rows[0]), *[["-" if value is None else str(value) for value in row.values()] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    main()
