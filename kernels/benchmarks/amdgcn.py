"""What is in the loop over keys of a kernel for AMD, counted in the listing that its compiler leaves."""

import re
from typing import NamedTuple

WAVE = 64
_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")  # a quarter of the rate
_BYTES = {"u8": 1, "i8": 1, "ubyte": 1, "u16": 2, "i16": 2, "b16": 2, "ushort": 2, "short": 2, "b32": 4, "dword": 4,
          "b64": 8, "dwordx2": 8, "b96": 12, "dwordx3": 12, "b128": 16, "dwordx4": 16}  # fmt: skip


class LoopCounts(NamedTuple):
    """Of one wave and one iteration."""

    slots: int  # issue slots of the vector units; matrix instructions have a pipe of their own
    shared_bytes: int
    global_bytes: int


def key_loop(listing: str) -> list[str]:
    """Returns instructions of the loop with the most matrix instructions, of those that have no such loop inside.

    What holds the kernel's end is no loop: the compiler moves rare cases behind it, which branch back.
    """
    instructions, labels, loops = [], {}, []
    for line in listing.splitlines():
        text = line.split(";")[0].strip()
        if label := re.match(r"(\.LBB\w+):", text):
            labels[label[1]] = len(instructions)
        elif re.match(r"[a-z]+_", text):
            instructions.append(text)
            target = re.match(r"s_c?branch\w*\s+(\.LBB\w+)", text)
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))

    def products(loop: tuple[int, int]) -> int:
        return sum(op.startswith("v_mfma") for op in instructions[slice(*loop)])

    def is_loop(loop: tuple[int, int]) -> bool:
        return products(loop) > 0 and not any(op.startswith("s_endpgm") for op in instructions[slice(*loop)])

    found = [loop for loop in set(loops) if is_loop(loop)]
    inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return instructions[slice(*max(inner, key=products))] if inner else []


def count(body: list[str]) -> LoopCounts:
    slots = shared = through_l2 = 0
    for line in body:
        opcode = line.split()[0]
        if opcode.startswith("v_") and not opcode.startswith("v_mfma"):
            slots += 4 if _SLOW.match(opcode) else 1
        elif opcode.startswith("ds_") and "permute" not in opcode:
            shared += WAVE * _width(opcode) * (2 if re.match(r"ds_(read|write)2", opcode) else 1)
        elif re.match(r"(global|buffer|flat)_(load|store)_", opcode):
            through_l2 += WAVE * _width(opcode)
    return LoopCounts(slots, shared, through_l2)


def _width(opcode: str) -> int:
    """Returns the bytes of a lane."""
    return next((_BYTES[part] for part in reversed(opcode.split("_")) if part in _BYTES), 4)
