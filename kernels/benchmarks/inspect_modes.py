"""What the compiler makes of the Triton kernels of the other modes, without a GPU.

    python kernels/benchmarks/inspect_modes.py --arch sm_90 --check

Compiles every kernel offline in its default configuration for an architecture: registers, spills in the loop with the
products, shared memory, matrix instructions. With ``--check`` it fails if one spills there, does not fit the shared
memory, or has its products serialised by ptxas.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import triton
from inspect_kernels import table
from sass import (
    SHARED_LIMIT,
    SMALL_SHARED_LIMIT,
    disassemble,
    itemsize,
    key_loop,
    major_of,
    serialisation_message,
)
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from itnet_kernels.low_rank.triton.factors import expand_kernel, project_kernel
from itnet_kernels.low_rank.triton.features import feature_apply_kernel, feature_sum_kernel
from itnet_kernels.low_rank.triton.launch import within_warps
from itnet_kernels.low_rank.triton.scan import scan_kernel
from itnet_kernels.low_rank.triton.step import step_kernel
from itnet_kernels.low_rank.triton.within import within_bwd_kernel, within_fwd_kernel
from itnet_kernels.sampled.triton.backward import list_bwd_kernel
from itnet_kernels.sampled.triton.bias import list_bias_kernel
from itnet_kernels.sampled.triton.configs import list_tile, power_of_two
from itnet_kernels.sampled.triton.forward import list_fwd_kernel
from itnet_kernels.sampled.triton.step import list_step_kernel
from itnet_kernels.sampled.triton.sums import content_sum_kernel, pair_sum_kernel

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass
class ModeReport:
    """Static figures of one compiled kernel."""

    kernel: str
    arch: str
    dtype: str
    config: dict[str, int]
    registers: int
    stack_bytes: int
    loop_spills: int
    loop_instructions: int
    shared_bytes: int
    tensor: dict[str, int]
    serialised: str | None

    def faults(self) -> list[str]:
        """Returns why this configuration must not ship; empty if nothing is wrong."""
        found = []
        # Operands of float32 products are kept in three parts: a few of them may be spilled, out of thousands.
        if self.loop_spills > (self.loop_instructions // 50 if self.dtype == "fp32" else 0):
            found.append(f"{self.loop_spills} spills in the loop")
        if self.shared_bytes > SHARED_LIMIT.get(self.arch, SMALL_SHARED_LIMIT):
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if self.serialised:
            found.append(self.serialised)
        return found


def _list_constants(name: str, arch: str, dtype: str, head_dim: int, width: int) -> tuple[dict, dict]:
    tile = list_tile(name, head_dim, itemsize(dtype), major_of(arch))
    constants = {
        "W": width, "D": head_dim, "D_PADDED": power_of_two(head_dim), "BK": tile.keys,
        "KC": min(tile.units, power_of_two(width)), "HAS_BIAS": True, "NEEDS_COEFFICIENTS": False,
    }  # fmt: skip
    return constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _bias_constants(arch: str, dtype: str, head_dim: int, width: int) -> tuple[dict, dict]:
    flags = dict.fromkeys(("HAS_Y", "HAS_RELATIVE", "HAS_DISTANCE"), True)
    return {"W": width, "DIM": 2, "L": 64, "L_PADDED": 64, "KC": 64, "BK": 64} | flags, {"num_warps": 4}


def _sum_constants(arch: str, dtype: str, head_dim: int, width: int) -> tuple[dict, dict]:
    return {"W": width, "D": head_dim, "COLUMNS": 12 * head_dim, "BLOCK": 256, "TILES": 1, "AT_ONCE": 16}, {}


def _low_rank_constants(arch: str, dtype: str, head_dim: int, width: int) -> tuple[dict, dict]:
    """Returns the constants of rank 8, factors with 32 hidden units and blocks of 32 positions; DTYPE is a type of
    Triton."""
    sizes = {"R": 8, "R_PADDED": 16, "K": 32, "K_PADDED": 32, "BN": 64, "BLOCK": 32, "C": 32, "BC": 32, "ONE": 1}
    for name in ("D", "A"):
        sizes |= {name: head_dim, f"{name}_PADDED": power_of_two(head_dim)}
    flags = {"DECAYS": True, "IS_HIDDEN": False, "HAS_FACTORS": True, "REVERSE": False}
    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    return sizes | flags | {"DTYPE": types[dtype]}, {"num_warps": 4}


def _within_constants(*given) -> tuple[dict, dict]:
    constants, _ = _low_rank_constants(*given)
    return constants, {"num_warps": within_warps(constants["D"])}


def _feature_constants(arch: str, dtype: str, head_dim: int, width: int) -> tuple[dict, dict]:
    """Returns the constants of the sums of the vector form: 32 hidden units take the place of ranks, and C is the head
    size."""
    constants, options = _low_rank_constants(arch, dtype, head_dim, width)
    return constants | {"R": 32, "R_PADDED": 64, "C": head_dim, "C_PADDED": power_of_two(head_dim)}, options


def _list_step_constants(arch: str, dtype: str, head_dim: int, width: int) -> tuple[dict, dict]:
    names = ("X", "Y", "RELATIVE", "DISTANCE", "UX", "UY", "PRODUCT")
    sizes = (128, 128, 128, 1, head_dim, head_dim, head_dim)
    columns = {f"AT_{name}": sum(sizes[:k]) for k, name in enumerate(names)} | {"COLUMNS": sum(sizes)}
    constants, options = _low_rank_constants(arch, dtype, head_dim, width)
    own = {"W": width, "F": 128, "L": 64, "L_PADDED": 64, "DIM": 1, "LISTED": True, "KC": 16}
    own["BK"] = 64 if head_dim <= 64 else 32
    return constants | columns | own, options


def _step_constants(*given) -> tuple[dict, dict]:
    constants, options = _low_rank_constants(*given)
    return constants | {"IS_MATRIX": True, "HAS_BIAS": True}, options


_FACTORS = {"p_u", "p_other", "p_hidden", "p_f", "p_g", "p_v"}
# Name: the kernel, its constants and options, and its arguments in the operands' dtype.
KERNELS = {
    "list forward": (list_fwd_kernel, lambda *given: _list_constants("forward", *given), {"p_keys", "p_moments"}),
    "list backward": (
        list_bwd_kernel,
        lambda *given: _list_constants("backward", *given),
        {"p_keys", "p_moments", "p_dmoments", "p_dvirtual", "p_dbias", "p_dkeys"},
    ),
    "list bias": (list_bias_kernel, _bias_constants, set()),
    "list step": (list_step_kernel, _list_step_constants, {"p_query", "p_keys", "p_w1", "p_b1", "p_w2", "p_b2"}),
    "pairs of keys": (pair_sum_kernel, _sum_constants, {"p_parts"}),
    "content weights": (content_sum_kernel, _sum_constants, {"p_dvirtual"}),
    "feature sum": (feature_sum_kernel, _feature_constants, _FACTORS),
    "feature apply": (feature_apply_kernel, _low_rank_constants, _FACTORS),
    "factor project": (project_kernel, _low_rank_constants, _FACTORS),
    "factor expand": (expand_kernel, _low_rank_constants, _FACTORS),
    "within blocks": (within_fwd_kernel, _within_constants, {"p_f", "p_g"}),
    "within blocks, backward": (
        within_bwd_kernel,
        _within_constants,
        {"p_f", "p_g", "p_x"},
    ),
    "low-rank step": (step_kernel, _step_constants, {"p_u", "p_query", "p_key"}),
    "running sum": (scan_kernel, _low_rank_constants, set()),
}


def inspect_mode(kernel: str, arch: str, dtype: str = "bf16", head_dim: int = 64, width: int = 128) -> ModeReport:
    """Compiles a kernel in its default configuration."""
    function, settings, operands = KERNELS[kernel]
    is_nvidia = arch.startswith("sm_")
    constants, options = settings(arch, dtype, head_dim, width)
    constants |= {
        "GELU": "erf" if dtype == "fp32" else "tanh.approx" if is_nvidia else "tanh",
        "PRECISION": "tf32x3" if is_nvidia else "ieee",
    }
    constants = {name: constants[name] for name in function.arg_names if name in constants}
    half = "*fp32" if dtype == "fp32" else "*fp16"
    special = {"p_bias": half, "p_gamma_y": half, "p_indices": "*i32", "p_order": "*i32", "p_starts": "*i32"}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.startswith("p_"):
            return special.get(name, f"*{dtype}" if name in operands else "*fp32")
        return "i32"

    signature = {name: kind(name) for name in function.arg_names}
    aligned = [i for i, name in enumerate(function.arg_names) if signature[name][0] == "*" or name == "padded"]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", int(arch[3:]), 32) if is_nvidia else GPUTarget("hip", arch, 64)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)
    config = {name: constants[name] for name in ("KC", "BK", "BLOCK", "BN") if name in constants} | options
    head = (kernel, arch, dtype, config)
    shared = compiled.metadata.shared
    if not is_nvidia:
        listing = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{name}:\s+(\d+)", listing)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return ModeReport(*head, registers, 4 * spilled, spilled, 0, shared, {}, None)
    usage, sass = disassemble(compiled.asm["cubin"])
    body = key_loop(sass)
    tensor = {name: sum(op.startswith(name) for op in body) for name in ("HGMMA", "HMMA", "UTCHMMA")}
    return ModeReport(
        *head,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        loop_spills=sum(op.startswith(("STL", "LDL")) for op in body),
        loop_instructions=len(body),
        shared_bytes=shared,
        tensor={name: count for name, count in tensor.items() if count},
        serialised=serialisation_message(compiled.asm["ptx"]) if arch == "sm_90" else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kernel", nargs="+", default=list(KERNELS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="fail if a kernel has a fault")
    options = parser.parse_args()
    reports = [
        inspect_mode(kernel, arch, options.dtype, options.head_dim, options.width)
        for kernel in options.kernel
        for arch in options.arch
    ]
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        print(table([_row(report) for report in reports]))
    faults = [f"{r.kernel} {r.arch} {r.config}: {fault}" for r in reports for fault in r.faults()]
    if options.check and faults:
        sys.exit("\n".join(faults))


def _row(report: ModeReport) -> dict:
    return {
        "kernel": report.kernel,
        "arch": report.arch,
        "config": " ".join(f"{name.replace('num_', '')}={value}" for name, value in report.config.items()),
        "regs": report.registers,
        "stack B": report.stack_bytes,
        "loop spills": report.loop_spills,
        "smem KB": round(report.shared_bytes / 1024, 1),
        "tensor": " ".join(f"{count} {kind}" for kind, count in report.tensor.items()) or "none",
        "faults": "; ".join(report.faults()) or "none",
    }


if __name__ == "__main__":
    main()
