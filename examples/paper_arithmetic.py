"""Sums, ratios and counts of the paper that follow from its own figures, recomputed beside what it prints.

python examples/paper_arithmetic.py
"""

GLUE = {  # Table glue: eight scores, printed average
    "BERT-base": ((52.1, 93.5, 88.9, 85.8, 71.2, 84.6, 90.5, 66.4), 79.1),
    "BERT-large": ((60.5, 94.9, 89.3, 86.5, 72.1, 86.7, 92.7, 70.1), 81.6),
    "GPT": ((45.4, 91.3, 75.7, 80.0, 68.5, 82.1, 88.1, 56.0), 73.4),
    "ELECTRA-base": ((59.7, 93.4, 86.7, 87.7, 79.1, 85.8, 92.7, 73.1), 82.3),
    "DeBERTa-base": ((59.6, 94.7, 90.1, 88.9, 73.4, 87.5, 93.1, 72.5), 82.5),
    "RoBERTa-base": ((63.6, 94.8, 90.2, 91.2, 73.9, 87.6, 92.8, 78.7), 84.1),
    "ITNet-S": ((53.8, 93.1, 88.4, 85.9, 70.8, 83.9, 89.7, 67.2), 79.1),
    "ITNet-B": ((57.4, 94.2, 90.1, 87.9, 72.7, 86.1, 91.8, 71.6), 81.5),
    "ITNet-L": ((60.2, 94.7, 91.0, 89.3, 74.3, 87.8, 93.1, 74.3), 83.1),
}
WALL_CLOCK = {  # Table wallclock: baseline throughput, then (throughput, printed ratio)
    "ImageNet": (1820, ((1480, 0.81), (2240, 1.23), (3900, 2.14), (1050, 0.58), (2800, 1.54))),
    "GLUE": (4100, ((3200, 0.78), (7800, 1.90), (2400, 0.59), (5800, 1.41))),
    "ModelNet40": (1280, ((860, 0.67), (1520, 1.19), (2200, 1.72))),
    "VQA": (520, ((410, 0.79), (680, 1.31), (890, 1.71))),
}
MEMORY = {"exact": ((4.2, 8.4, 5.2, 1.2), 19.0), "MC": ((2.1, 1.2, 2.8, 1.2), 7.3), "LR": ((1.8, 0.6, 2.2, 1.2), 5.8)}
PROFILING = {"exact": (604, 61), "LR": (831, 84), "FlashAttention-2": (870, 88)}

# ITNet-B
LAYERS, D, HEADS, D_H, WIDTH, INPUTS = 12, 768, 12, 64, 128, 6 * 64 + 1 + 3 * 64
MODELS = {"ITNet-S": (12, 384, 6, 4.8), "ITNet-B": (12, 768, 12, 17.9), "ITNet-L": (24, 1024, 16, 61.6)}


def row(what: str, printed: str, recomputed: str, agrees: bool) -> None:
    print(f"| {what} | {printed} | {recomputed} | {'yes' if agrees else 'NO'} |")


def parameters() -> None:
    """Table app_param_breakdown: its rows are right, their sum is not what it prints."""
    kernel = WIDTH * INPUTS + WIDTH + (D_H**2 * WIDTH + D_H**2) * HEADS
    layer = kernel + 2 * D * D + 4 * D + 8 * D * D + 5 * D  # W^O, W_theta, layer norms, FFN
    for what, printed, count in (("a layer", 7.2, layer), ("12 layers, no embeddings", 86, LAYERS * layer)):
        agrees = abs(count / 1e6 - printed) < 0.05 * printed
        row(f"parameters of ITNet-B, {what}", f"{printed}M", f"{count / 1e6:.1f}M", agrees)


def multiply_adds() -> None:
    """Table imagenet at n = 197. Its GFLOPs are multiply-adds, as those of DeiT-S (4.6) show."""
    for name, (layers, width, heads, printed) in MODELS.items():
        pairs = layers * heads * 197**2
        for what, count in (
            ("kernels by Algorithm 1", pairs * (WIDTH * INPUTS + WIDTH * D_H**2 + D_H**2)),
            ("kernels, reassociated", pairs * 2 * WIDTH * D_H),
            ("all but the kernels (W^O, W_θ, FFN)", layers * 197 * 10 * width**2),
        ):
            row(f"{name}, G multiply-adds: {what}", f"{printed} in all", f"{count / 1e9:,.1f}", count / 1e9 <= printed)


def main() -> None:
    print("| what | printed | recomputed | agrees |\n|---|---|---|---|")
    for name, (scores, printed) in GLUE.items():
        mean = sum(scores) / len(scores)
        row(f"GLUE average, {name}", f"{printed}", f"{mean:.2f}", abs(mean - printed) <= 0.0501)
    for name, (baseline, entries) in WALL_CLOCK.items():
        good = [abs(rate / baseline - printed) <= 0.0051 for rate, printed in entries]
        row(f"throughput ratios, {name}", f"{len(entries)} of them", f"{sum(good)} follow", all(good))
    for name, (parts, printed) in MEMORY.items():
        row(f"peak memory, {name} (sum)", f"{printed} GB", f"{sum(parts):.1f} GB", abs(sum(parts) - printed) < 0.051)
    matrix = 512**2 * HEADS * D_H**2 * 2 / 2**30
    row(
        "the n²d² kernel matrix that dominates it: one layer, one sample, bf16",
        "8.4 GB",
        f"{matrix:.0f} GiB",
        matrix <= 8.4,
    )
    for name, (achieved, printed) in PROFILING.items():
        row(
            f"utilisation, {name}",
            f"{printed}%",
            f"{100 * achieved / 989:.1f}%",
            abs(achieved / 9.89 - printed) < 0.51,
        )
    for what, size in (
        ("features of a tile, (64 + 64) · 768", (64 + 64) * D),
        ("kernel values of a tile, 64 · 64 · 64²", 64**2 * D_H**2),
        ("W2 of one head", D_H**2 * WIDTH),
    ):
        kibibytes = 2 * size / 2**10
        row(f"shared memory, bf16: {what}", "fits in 228 KB", f"{kibibytes:,.0f} KiB", kibibytes <= 228)
    boundary = 100 * (1 - (218 / 224) ** 2)
    row("boundary of 224 × 224 for k = 7", "< 6 %", f"{boundary:.1f} %", boundary < 6)
    parameters()
    multiply_adds()
    d, count = 384, 196
    bound = (12 * d**2 + 2 * count * d) / (8 * d**2)
    row("LR-64 over ViT-S; a mixer that costs nothing would give", "2.14 ×", f"{bound:.2f} ×", bound >= 2.14)
    bound = (count * D_H) ** 0.5 / 32**0.5
    row("relative error at r = 32; ‖K‖_*/(√r ‖K‖_F) of equal singular values", "< 1 %", f"{bound:.0f}", bound < 0.01)


if __name__ == "__main__":
    main()
