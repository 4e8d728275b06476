"""Tables profiling and wallclock of the paper, row by row, as it printed them."""

from typing import NamedTuple

#: Method, TFLOPS, share of the peak: n = 512, d = 768, w = 128 on an H200 whose peak is 989.
PAPER_PEAK = 989
PROFILING = (
    ("ITNet-Exact", 604, 0.61),
    ("ITNet-LR (r = 64)", 831, 0.84),
    ("FlashAttention-2 (reference)", 870, 0.88),
)
PROFILING_MODES = {
    "ITNet-Exact": "exact",
    "ITNet-LR (r = 64)": "low rank, vector",
    "FlashAttention-2 (reference)": "SDPA",
}


class Row(NamedTuple):
    """A row of Table wallclock, and what is timed for it."""

    method: str
    benchmark: str
    throughput: int  # samples per second: images, sequences, clouds, pairs of image and text
    peak_gb: float
    relative: float  # to the first row of the benchmark
    modality: str
    mode: str  # of models.MODES, or "peer"
    model: str  # S, B or L


IMAGENET, GLUE, MODELNET, VQA = "ImageNet-1K", "GLUE (pretrain)", "ModelNet40", "VQA v2"
WALLCLOCK = (
    Row("DeiT-S + FlashAttn-2", IMAGENET, 1820, 11.6, 1.00, "image", "peer", "S"),
    Row("ITNet-S (exact)", IMAGENET, 1480, 14.2, 0.81, "image", "exact", "S"),
    Row("ITNet-S (MC-128)", IMAGENET, 2240, 8.8, 1.23, "image", "monte_carlo", "S"),
    Row("ITNet-S (LR-64)", IMAGENET, 3900, 4.6, 2.14, "image", "low_rank", "S"),
    Row("ITNet-L (exact)", IMAGENET, 1050, 21.4, 0.58, "image", "exact", "L"),
    Row("ITNet-L (LR-64)", IMAGENET, 2800, 7.2, 1.54, "image", "low_rank", "L"),
    Row("BERT-base + FlashAttn-2", GLUE, 4100, 14.8, 1.00, "text", "peer", "B"),
    Row("ITNet-B (exact)", GLUE, 3200, 17.8, 0.78, "text", "exact", "B"),
    Row("ITNet-B (LR-64)", GLUE, 7800, 6.2, 1.90, "text", "low_rank", "B"),
    Row("ITNet-L (exact)", GLUE, 2400, 25.6, 0.59, "text", "exact", "L"),
    Row("ITNet-L (LR-64)", GLUE, 5800, 8.4, 1.41, "text", "low_rank", "L"),
    Row("PCT", MODELNET, 1280, 6.8, 1.00, "point_cloud", "peer", "S"),
    Row("ITNet-S (exact)", MODELNET, 860, 14.2, 0.67, "point_cloud", "exact", "S"),
    Row("ITNet-S (MC-128)", MODELNET, 1520, 8.2, 1.19, "point_cloud", "monte_carlo", "S"),
    Row("ITNet-S (LR-64)", MODELNET, 2200, 4.2, 1.72, "point_cloud", "low_rank", "S"),
    Row("ViLT", VQA, 520, 11.2, 1.00, "multimodal", "peer", "B"),
    Row("ITNet-B (exact)", VQA, 410, 14.6, 0.79, "multimodal", "exact", "B"),
    Row("ITNet-B (MC-128)", VQA, 680, 8.4, 1.31, "multimodal", "monte_carlo", "B"),
    Row("ITNet-B (LR-64)", VQA, 890, 5.2, 1.71, "multimodal", "low_rank", "B"),
)
