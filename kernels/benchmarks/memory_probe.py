"""Prints by how many bytes one forward + backward of the operator raises this process's peak memory.

python -m memory_probe BATCH N
"""

import sys

from operator_speed import Shape, make_inputs
from timing import PeakMemory

from itnet_kernels import integral_transform


def run(batch: int, n: int) -> None:
    inputs = make_inputs(Shape(batch=batch, n=n, heads=4, head_dim=16, width=32, frequencies=16), requires_grad=True)
    integral_transform(*inputs, backend="tiled").sum().backward()


if __name__ == "__main__":
    run(1, 16)  # libraries load and start their threads
    with PeakMemory() as memory:
        run(int(sys.argv[1]), int(sys.argv[2]))
    print(memory.bytes)
