"""The parts of ``bench_gpu.py``: checks of kernels, timings of operators and models, the paper's tables, a page."""
