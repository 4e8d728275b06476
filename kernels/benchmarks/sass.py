"""Compiles the Triton kernels offline, disassembles them and counts what is in their loop over keys."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

import amdgcn

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
    FUSED_BACKWARD,
    POSITION_GRADIENT,
    POSITION_WEIGHTS,
    Problem,
    backward_units,
    device_kind,
    suitable_settings,
    tile_rows,
)
from itnet_kernels.exact.triton.forward import itnet_fwd_kernel
from itnet_kernels.exact.triton.fused_backward import itnet_fused_bwd_kernel
from itnet_kernels.exact.triton.position_gradient import itnet_position_gradient_kernel
from itnet_kernels.exact.triton.position_weights import itnet_position_weights_kernel
from itnet_kernels.exact.triton.tile import NOT_SPECIALISED

KERNELS = {
    "forward": (FORWARD, itnet_fwd_kernel),
    "backward": (BACKWARD, itnet_bwd_kernel),
    "fused_backward": (FUSED_BACKWARD, itnet_fused_bwd_kernel),
    "position_gradient": (POSITION_GRADIENT, itnet_position_gradient_kernel),
    "position_weights": (POSITION_WEIGHTS, itnet_position_weights_kernel),
}
PRODUCTS = {
    "forward": 2,
    "backward": 6,
    "fused_backward": 6,
    "position_gradient": 2,
    "position_weights": 4,
}  # of 2 * rows * keys * d_h FLOP per key tile

# Special-function instructions of an element: tanh, or the exponentials of erf and of its derivative.
MUFU = {
    "forward": 1,
    "backward": 2,
    "fused_backward": 2,
    "position_gradient": 2,
    "position_weights": 2,
}  # of float32; half precision has one

FREQUENCIES = 64  # L, of Fourier features

# Per multiprocessor of NVIDIA's GPUs.
SM_REGISTERS, SM_SHARED, SM_THREADS = 65536, 233472, 2048

# Shared memory that one program may use.
SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
SMALL_SHARED_LIMIT = 65536  # AMD and anything unknown

_FMA_PIPE = {"FADD", "FMUL", "FFMA", "HADD2", "HFMA2", "HMUL2", "IMAD"}
_NOT_ALU = {"MUFU", "BAR", "BRA", "SYNCS", "WARPGROUP", "WARPSYNC", "NOP", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR"}
_MEMORY = ("LD", "ST", "UTMA", "RED", "ATOM")
_TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "QGMMA", "UTCQMMA")


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
    shared_bytes_per_element: float | None = None  # through shared memory and L1, products' operands included
    global_bytes_per_element: float | None = None  # through L2
    fma_slots: float | None = None  # issue slots of an element on the FMA pipe, and on the others by their rates
    alu_slots: float | None = None
    row_slots: float | None = None  # issue slots and bytes of a row outside of the loop, as often as the loop runs
    row_shared_bytes: float | None = None
    row_global_bytes: float | None = None
    serialised: str | None = None  # what ptxas says if it serialises the products

    def faults(self) -> list[str]:
        """Returns why this configuration must not ship; empty if nothing is wrong."""
        found = []
        # Operands of float32 products are kept in three parts: a few of them may be spilled, out of thousands.
        allowed = (self.loop_instructions or 0) // 50 if self.dtype == "fp32" else 0
        if self.loop_spill_instructions > allowed:
            found.append(f"{self.loop_spill_instructions} spills in the loop")
        if self.shared_bytes > SHARED_LIMIT.get(self.arch, SMALL_SHARED_LIMIT):
            found.append(f"{self.shared_bytes} bytes of shared memory")
        expected = MUFU[self.kernel] if self.dtype == "fp32" else 1
        # The tile's own prologue may have a few more, such as a division, where it is part of the loop.
        if self.mufu_per_element is not None and not expected <= self.mufu_per_element <= 1.05 * expected:
            found.append(f"{self.mufu_per_element} special functions per element instead of {expected}")
        products = 3 if self.dtype == "fp32" else 1  # 3xTF32
        # The position gradient forms dA of each head in its loop: one more product of a tile, and no more.
        # The position weights multiply with as many lengths as a tile has positions.
        most = products * {"position_gradient": 1.5, "position_weights": 1.25}.get(self.kernel, 1)
        if self.flop_share is not None and not products <= self.flop_share <= most:
            found.append(f"{self.flop_share} times the products' FLOPs instead of {products}")
        if self.serialised:
            found.append(self.serialised)
        return found


def compile_kernel(
    kernel: str, config: dict[str, int],
    arch: str = "sm_90", head_dim: int = 64, width: int = 128, dtype: str = "bf16",
    is_causal: bool = False, has_bias: bool = True, needs_measure: bool = False,
):  # fmt: skip
    """Returns the compiled kernel of one configuration (``triton.compile``)."""
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
        "HAS_DISTANCE": True,
        "BL": FREQUENCIES,
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
    """Counts the bytes of an operand's element."""
    return 4 if dtype == "fp32" else 2


def major_of(arch: str) -> int | None:
    """Returns the major compute capability of an NVIDIA architecture."""
    return int(arch[3:]) // 10 if arch.startswith("sm_") else None


def problem_of(arch: str, head_dim: int, dtype: str) -> Problem:
    limit = SHARED_LIMIT.get(arch, SMALL_SHARED_LIMIT)
    return Problem(head_dim, itemsize(dtype), major_of(arch), limit)


def _argument_type(name: str, dtype: str) -> str:
    half = {
        "p_queries",
        "p_keys",
        "p_values",
        "p_upstream",
        "p_w2",
        "p_moments",
        "p_dmoments",
        "p_dbias",
        "p_gamma_y",
        "p_lengths",
    }
    if name == "p_bias":
        return "*fp32" if dtype == "fp32" else "*fp16"
    if name.startswith("p_"):
        return f"*{dtype}" if name in half else "*fp32"
    return "i32"


def rows_of(report: "KernelReport") -> int:
    """Counts the rows of a program's tile."""
    problem = problem_of(report.arch, report.head_dim, report.dtype)
    return tile_rows(KERNELS[report.kernel][0], report.config, problem)


def kernels_on(arch: str, head_dim: int = 64, dtype: str = "bf16") -> tuple[str, ...]:
    """Returns the kernels that run on ``arch``: those of device.has_fused_backward."""
    kind = device_kind(major_of(arch))
    is_ampere = kind == "ampere"
    if head_dim > 64 or dtype == "fp32" or kind in ("blackwell", "other") or (is_ampere and head_dim < 64):
        return "forward", "backward"
    return "forward", "fused_backward", "position_weights", "backward" if is_ampere else "position_gradient"


def shipped_configs(kernel: str, arch: str = "sm_90", head_dim: int = 64, dtype: str = "bf16") -> list[dict[str, int]]:
    """Returns the configurations that autotuning would try on ``arch``, the default first."""
    return suitable_settings(KERNELS[kernel][0], problem_of(arch, head_dim, dtype))


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
        report = KernelReport(*head, registers, 4 * spilled, spilled, compiled.metadata.shared)
        slots, *moved = amdgcn.count(amdgcn.key_loop(listing))
        elements = rows_of(report) * config["BK"] / config["num_warps"]  # of a wave
        report.instructions_per_element = round(amdgcn.WAVE * slots / elements, 2)
        report.shared_bytes_per_element, report.global_bytes_per_element = (round(b / elements, 2) for b in moved)
        return report
    usage, sass = disassemble(compiled.asm["cubin"])
    lines, surroundings = loop_and_surroundings(sass)
    body = [line.split(" ", 1)[0] for line in lines]
    report = KernelReport(
        *head,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        loop_spill_instructions=sum(op.startswith(("STL", "LDL")) for op in body),
        shared_bytes=compiled.metadata.shared,
    )
    _count(report, body)
    _count_bytes(report, lines, surroundings)
    if arch == "sm_90":
        report.serialised = serialisation_message(compiled.asm["ptx"])
    return report


_NVIDIA_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


def serialisation_message(ptx: str) -> str | None:
    """Returns the message C75xx with which ptxas says that it serialises the asynchronous products of a kernel, if it
    does."""
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


def disassemble(cubin: bytes) -> tuple[str, str]:
    """Returns (resource usage, SASS) by the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(tool: str, flag: str) -> str:
            command = [os.path.join(_NVIDIA_TOOLS, tool), flag, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        return run("cuobjdump", "-res-usage"), run("nvdisasm", "-c")


def key_loop(sass: str) -> list[str]:
    """Returns instructions of the loop over keys, opcode first: of the innermost loops that multiply, the largest."""
    return loop_and_surroundings(sass)[0]


def loop_and_surroundings(sass: str) -> tuple[list[str], list[str]]:
    """Returns the loop over keys, and what runs once for each time that it runs: the rest of the loop around it, or of
    all.

    Behind the kernel's end are no loops over keys, but rare cases that the compiler moved out of their way.
    """
    instructions, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)(.*);", line):
            # What @!PT guards is never executed: it takes its slot and moves nothing.
            instructions.append(("NOP" if (match[1] or "").strip() == "@!PT" else match[2]) + " " + match[3].strip())
            target = re.search(r"`\((\.L_x_\d+)\)", match[3]) if match[2].startswith("BRA") else None
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    end = max((i for i, op in enumerate(instructions) if op.startswith("EXIT")), default=len(instructions))

    def products(loop: tuple[int, int]) -> int:
        return sum(op.startswith(_TENSOR) for op in instructions[slice(*loop)])

    def contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
        return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]

    loops = [loop for loop in loops if loop[1] <= end and products(loop)]
    innermost = [loop for loop in loops if not any(contains(loop, other) for other in loops)]
    keys = max(innermost, key=products, default=(0, 0))
    around = min(
        (loop for loop in loops if contains(loop, keys)), key=lambda loop: loop[1] - loop[0], default=(0, end)
    )
    return instructions[slice(*keys)], instructions[around[0] : keys[0]] + instructions[keys[1] : around[1]]


def _count(report: KernelReport, body: list[str]) -> None:
    """Fills in what follows from the loop's opcodes."""
    warps, keys = report.config["num_warps"], report.config["BK"]
    rows = rows_of(report)
    per_thread = rows * keys / (32 * warps)
    kinds = Counter(op.split(".")[0] for op in body)
    per_program = SM_REGISTERS // (-(-report.registers // 8) * 8 * 32 * warps)
    report.programs_per_sm = min(per_program, SM_SHARED // (report.shared_bytes + 1024), SM_THREADS // (32 * warps))
    report.tensor_instructions = {kind: kinds[kind] for kind in _TENSOR if kinds[kind]}
    report.tensor_waits = sum(op.startswith("WARPGROUP.DEPBAR") for op in body)
    flops = 2 * rows * keys * report.head_dim * PRODUCTS[report.kernel]
    if report.kernel == "position_weights":  # two of its products have 2 L columns instead of 2 d_h
        flops += 4 * rows * keys * (FREQUENCIES - report.head_dim)
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
    report.fma_slots, report.alu_slots = round(fma / per_thread, 2), round(alu / per_thread, 2)


_WIDTHS = {"64": 8, "128": 16, "F32x2": 8, "F32x4": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


def _count_bytes(report: KernelReport, lines: list[str], surroundings: list[str]) -> None:
    """Counts the bytes that the loop moves, and the rest for each row.

    Loads outside of the loop read the same lines many times, from L1: they are not counted for L2.
    """
    rows, threads = rows_of(report), 32 * report.config["num_warps"]
    shared, through_l2 = _bytes(lines, report.config["num_warps"])
    elements = rows * report.config["BK"]
    if report.arch == "sm_90":  # elsewhere the operands of products are not in the listing, or not by their size
        report.shared_bytes_per_element = round(shared / elements, 2)
    report.global_bytes_per_element = round(through_l2 / elements, 2)
    shared, through_l2 = _bytes(surroundings, report.config["num_warps"])
    through_l2 -= _bytes([line for line in surroundings if line.startswith("LDG.")], report.config["num_warps"])[1]
    report.row_slots = len(surroundings) * threads / rows
    report.row_shared_bytes = shared / rows if report.arch == "sm_90" else None
    report.row_global_bytes = through_l2 / rows


def _bytes(lines: list[str], warps: int) -> tuple[int, int]:
    """Counts the bytes of a program through shared memory and L1, and through L2.

    An upper estimate: lanes that read the same address count as if they did not, and all branches as if taken.
    """
    shared = through_l2 = 0
    for line in lines:
        opcode, *parts = line.split(" ", 1)[0].split(".")
        width = 32 * warps * next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
        if opcode in ("LDSM", "STSM"):
            shared += warps * 128 * int(parts[-1] if parts[-1].isdigit() else 1)
        elif opcode in ("LDS", "STS", "LDL", "STL"):
            shared += width
        elif opcode in ("LDG", "STG", "LDGSTS", "REDG", "RED", "ATOMG"):
            shared, through_l2 = shared + width, through_l2 + width
        elif opcode == "HGMMA":
            m, n, k = map(int, parts[0].split("x"))
            operands = line.split(" ", 1)[1].split(",")
            from_memory = n * k + (m * k if "gdesc" in operands[1] else 0)
            shared += 2 * from_memory * warps // 4
    return shared, through_l2
