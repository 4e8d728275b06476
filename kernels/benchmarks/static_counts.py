"""What the compiler makes of the default kernels of an architecture, as JSON: ``python -m static_counts sm_90``.

A process of its own, as the interpreter of Triton, where it is on, takes the place of the compiler.
"""

import json
import sys
from dataclasses import asdict
from functools import cache

from timing import own_process

LIST_KERNELS = ("list forward", "list backward")


@cache
def static_counts(arch: str) -> dict[str, dict]:
    """Reports of the exact kernels and of those over lists, by name: fields of KernelReport and ModeReport."""
    return json.loads(own_process("static_counts", arch, environment={"TRITON_INTERPRET": "0"}))


def main(arch: str) -> None:
    from inspect_modes import inspect_mode
    from sass import inspect_kernel, kernels_on, shipped_configs

    exact = {name: asdict(inspect_kernel(name, shipped_configs(name, arch)[0], arch)) for name in kernels_on(arch)}
    lists = {name: asdict(inspect_mode(name, arch)) for name in LIST_KERNELS}
    print(json.dumps({"exact": exact, "lists": lists}))


if __name__ == "__main__":
    main(sys.argv[1])
