"""Sums, ratios and counts of the paper that follow from its own figures, recomputed beside what it prints.

python examples/paper/arithmetic.py

A row says which table or section of the paper a figure is from, by its label. "NO" means that two figures of the paper
contradict each other, or that a statement of its text contradicts its tables.
"""

import torch

from itnet_kernels import kernel_matrices
from modeling_itnet import ITNetConfig, ITNetModel
from modeling_itnet.operator import find_operators

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
IMAGENET = {  # Table imagenet: top-1 of models other than ITNet
    "ResNet-50": 79.8, "ConvNeXt-T": 82.1, "ConvNeXt-B": 83.8, "DeiT-S": 79.8, "DeiT-B": 83.4, "Swin-T": 81.3,
    "Swin-B": 83.5, "Swin-V2-B": 84.2, "DeiT-III-B": 83.8, "ConvNeXt-V2-B": 84.2, "BiFormer-B": 84.4,
    "EfficientVMamba-B": 84.0,
}  # fmt: skip
IMAGENET_SMALL = (
    "ResNet-50",
    "ConvNeXt-T",
    "DeiT-S",
    "Swin-T",
)  # 22M to 28M parameters, as ITNet-S; the rest 85M to 89M
KERNEL_INPUTS = {  # Table ablation_kernel_full: ImageNet-1K, ModelNet40, GLUE, VQA v2, NLVR2
    "content only": (82.3, 93.6, 79.8, 75.2, 80.5),
    "position only": (81.0, 93.0, 78.5, 74.0, 79.1),
    "only absolute": (79.5, 91.8, 77.5, 73.2, 78.3),
    "only relative": (76.6, 88.8, 74.8, 71.0, 76.1),
    "no relative": (83.1, 93.6, 80.1, 76.1, 80.8),
    "full": (83.9, 94.6, 81.5, 78.4, 82.1),
}
RANK_SWEEP = {
    24: (4200, 0.38),
    48: (3900, 0.45),
    96: (3400, 0.55),
    192: (2800, 0.72),
    384: (2100, 0.89),
}  # img/s, FLOPs
EFFICIENT = {
    "Performer": (78.2, 3400),
    "Linear Attention": (76.5, 3800),
    "Nyströmformer": (79.1, 2900),
}  # top-1, img/s
LOW_RANK = {96: (83.4, 3400), 192: (83.7, 2800)}  # the same, Table baseline_comparison
WIDTH_ABLATION = {64: (0.4, 21.6), 128: (0.8, 22.0), 256: (1.6, 22.8), 512: (3.2, 24.4)}  # M kernel, total parameters
FOURIER = {(0, 0): 79.2, (16, 10): 80.6, (32, 10): 81.0, (64, 10): 81.4, (64, 1): 80.1, (64, 100): 80.8}  # (L, sigma)
POINT_CLOUDS = {"raw": 92.7, "Fourier": 93.2, "K = 8": 93.7, "K = 16": 94.0, "K = 32": 94.0}  # Table ablation_pc
DEPTH = {6: (12, 79.6), 8: (16, 80.7), 12: (22, 81.4), 16: (28, 81.7), 24: (40, 81.8)}  # M parameters, top-1
MEASURES = {"uniform": 76.8, "balanced": 77.4, "3:1": 77.1, "1:3": 76.4}  # Table ablation_measure_full, VQA v2
MULTIMODAL = {"ITNet-B": (78.4, 82.1), "ViLT": (71.3, 75.9), "BLIP (ViT-B)": (77.6, 82.3)}  # Table multimodal
MODELNET = {"PointMLP": 94.1, "PCT": 93.2, "PointNeXt-S": 93.2, "DGCNN": 92.9, "PointNet++": 91.9, "PointNet": 89.2}
WALL_CLOCK_MEMORY = 17.8  # GB of exact ITNet-B at n = 512, Table wallclock
EPSILON = {1e-1: None, 1e-2: 80.9, 1e-3: 81.4, 1e-4: 81.3}  # App. init: top-1; the first one "diverges"
PROFILING = {"exact": (604, 61), "LR": (831, 84), "FlashAttention-2": (870, 88)}

# ITNet-B
LAYERS, D, HEADS, D_H, WIDTH, INPUTS = 12, 768, 12, 64, 128, 6 * 64 + 1 + 3 * 64
MODELS = {"ITNet-S": (12, 384, 6, 4.8), "ITNet-B": (12, 768, 12, 17.9), "ITNet-L": (24, 1024, 16, 61.6)}


def row(what: str, printed: str, recomputed: str, agrees: bool) -> None:
    print(f"| {what} | {printed} | {recomputed} | {'yes' if agrees else 'NO'} |")


def parameters() -> None:
    """Checks table app_param_breakdown: its rows are right, their sum is not what it prints."""
    kernel = WIDTH * INPUTS + WIDTH + (D_H**2 * WIDTH + D_H**2) * HEADS
    layer = kernel + 2 * D * D + 4 * D + 8 * D * D + 5 * D  # W^O, W_theta, layer norms, FFN
    for what, printed, count in (("a layer", 7.2, layer), ("12 layers, no embeddings", 86, LAYERS * layer)):
        agrees = abs(count / 1e6 - printed) < 0.05 * printed
        row(f"parameters of ITNet-B, {what}", f"{printed}M", f"{count / 1e6:.1f}M", agrees)


def multiply_adds() -> None:
    """Checks table imagenet at n = 197. Its GFLOPs are multiply-adds, as those of DeiT-S (4.6) show."""
    for name, (layers, width, heads, printed) in MODELS.items():
        pairs = layers * heads * 197**2
        for what, count in (
            ("kernels by Algorithm 1", pairs * (WIDTH * INPUTS + WIDTH * D_H**2 + D_H**2)),
            ("kernels, reassociated", pairs * 2 * WIDTH * D_H),
            ("all but the kernels (W^O, W_θ, FFN)", layers * 197 * 10 * width**2),
        ):
            row(f"{name}, G multiply-adds: {what}", f"{printed} in all", f"{count / 1e9:,.1f}", count / 1e9 <= printed)


def claims() -> None:
    """Checks statements of the text against the tables that they are about."""
    small = [name for name in IMAGENET_SMALL if IMAGENET[name] > 81.4]
    large = [name for name in IMAGENET if name not in IMAGENET_SMALL and IMAGENET[name] > 83.9]
    better = f"{', '.join(small)} above S (81.4); {', '.join(large)} above B (83.9)"
    row(
        "Table imagenet: ITNet improves over convolution and attention across scales", "all", better, not small + large
    )
    above = max(MODELNET.values())
    row("Table modelnet: ITNet outperforms the others", "B: 94.6", f"best of the others {above}", above < 94.6)
    vqa, nlvr = MULTIMODAL["BLIP (ViT-B)"]
    row(
        "Table multimodal: ITNet-B is competitive with specialised models",
        "78.4 and 82.1",
        f"BLIP (ViT-B) {vqa} and {nlvr}",
        abs(82.1 - nlvr) < 1 and vqa < 78.4,
    )
    inputs = KERNEL_INPUTS
    row(
        "Table ablation_kernel_full: spatial cues dominate in vision (ImageNet-1K)",
        "position > content",
        f"position only {inputs['position only'][0]}, content only {inputs['content only'][0]}",
        inputs["position only"][0] > inputs["content only"][0],
    )
    wins = sum(r > a for r, a in zip(inputs["only relative"], inputs["only absolute"], strict=True))
    row(
        "Table ablation_kernel_full: relative terms outperform absolute-only inputs",
        "relative > absolute",
        f"alone, in {wins} of 5 columns (ImageNet-1K: 76.6 against 79.5)",
        wins == 5,
    )
    wins = sum(f > n for f, n in zip(inputs["full"], inputs["no relative"], strict=True))
    row("Table ablation_kernel_full: relative terms help where absolute ones are", "yes", f"in {wins} of 5", wins == 5)
    row(
        "VQA v2 of ITNet-B with the balanced measure, Tables multimodal and ablation_measure_full",
        "78.4",
        f"{MEASURES['balanced']}",
        MEASURES["balanced"] == MULTIMODAL["ITNet-B"][0],
    )
    best = max(MEASURES, key=MEASURES.get)
    row("Table ablation_measure_full: balanced is best", "balanced", best, best == "balanced")
    for mode, entry, large in (("exact", 0, 1480), ("M = 128", 1, 2240)):  # Table rank_sweep has ITNet-B's
        speed = WALL_CLOCK["ImageNet"][1][entry][0]
        row(
            f"ITNet-S (Table wallclock) and ITNet-B (Table rank_sweep), {mode}: 4.8 and 17.9 GFLOPs an image",
            f"{speed:,} img/s for S",
            f"{large:,} img/s for B",
            speed > large,
        )
    ranks = [f"{rank}/12 = {rank / 12:.2f}" for rank in (16, 32, 64, 128) if rank % 12]
    row("App. efficiency: rank per head r/H of r = 16, 32, 64, 128, H = 12", "an integer", ", ".join(ranks), not ranks)
    gains = [ours - theirs for ours, _ in LOW_RANK.values() for theirs, _ in EFFICIENT.values()]
    printed, found = "+3.6 to +6.9", f"+{min(gains):.1f} to +{max(gains):.1f}"
    row("Table baseline_comparison: points of low rank above the others", printed, found, printed == found)
    fastest, theirs = max(speed for _, speed in LOW_RANK.values()), max(speed for _, speed in EFFICIENT.values())
    row(
        "Table baseline_comparison: low rank matches or exceeds the throughput of linear attention",
        f"{fastest:,} img/s",
        f"{theirs:,} img/s",
        fastest >= theirs,
    )
    total = MEMORY["exact"][1]
    row(
        "Tables memory_breakdown and wallclock: exact ITNet-B, n = 512",
        f"{total} GB",
        f"{WALL_CLOCK_MEMORY} GB",
        total == WALL_CLOCK_MEMORY,
    )
    kernels = {mode: parts[1] for mode, (parts, _) in MEMORY.items()}
    printed, found = "7 × and 14 ×", " and ".join(f"{kernels['exact'] / kernels[mode]:.0f} ×" for mode in ("MC", "LR"))
    row("Table memory_breakdown: MC and LR reduce kernel memory", printed, found, printed == found)
    rest = LAYERS * 197 * 10 * D**2 / 1e9
    for rank, (_, share) in RANK_SWEEP.items():
        printed = f"{share} × 17.9 = {share * 17.9:.1f} G"
        row(
            f"Table rank_sweep, r = {rank}: all of it, against W^O, W_θ and FFN alone",
            printed,
            f"{rest:.1f} G",
            share * 17.9 >= rest,
        )
    for width, (kernel, _) in WIDTH_ABLATION.items():
        first, second = 12 * width * (INPUTS + 1) / 1e6, 12 * 6 * D_H**2 * (width + 1) / 1e6
        found = f"{first:.1f}M in W1 and b1, {second:.1f}M in W2 and b2"
        row(
            f"Table ablation_kappa: kernel parameters at w = {width}",
            f"{kernel}M",
            found,
            abs(first + second - kernel) < 0.1,
        )
    growth = [total - kernel for kernel, total in WIDTH_ABLATION.values()]
    row(
        "Table ablation_kappa: total less kernel",
        "the same",
        f"{min(growth):.1f} to {max(growth):.1f}M",
        max(growth) - min(growth) < 0.05,
    )
    for (frequencies, sigma), printed in (((64, 1), 1.3), ((64, 100), 0.6)):
        found = FOURIER[64, 10] - FOURIER[frequencies, sigma]
        row(f"Table ablation_fourier: loss at σ = {sigma}", f"{printed}", f"{found:.1f}", abs(found - printed) < 0.01)
    found = POINT_CLOUDS["Fourier"] - POINT_CLOUDS["raw"]
    row("Table ablation_pc: gain of Fourier features", "+0.5", f"+{found:.1f}", abs(found - 0.5) < 0.01)
    layer = (WIDTH * (INPUTS + 1) + 6 * D_H**2 * (WIDTH + 1) + 2 * 384**2 + 8 * 384**2 + 9 * 384) / 1e6
    steps = (DEPTH[24][0] - DEPTH[12][0]) / 12
    row(
        "Table ablation_layers: parameters per layer of ITNet-S",
        f"{steps:.1f}M",
        f"{layer:.1f}M",
        abs(steps - layer) < 0.1,
    )
    row("App. init: values of ε that were compared", "3", f"{len(EPSILON)} in its table", len(EPSILON) == 3)


@torch.no_grad()
def initialisation() -> None:
    """Checks App. init: the norm of the initial kernel without b2, ITNet-B on random features and positions."""
    torch.manual_seed(0)
    model = ITNetModel(ITNetConfig.from_preset("itnet-base", modality="signal", position_dim=2, num_hidden_layers=1))
    weights = find_operators(model)[0].kernel(model.fourier.frequencies)
    u, x = torch.randn(1, 32, 12, 64), torch.rand(1, 32, 2)
    matrices = kernel_matrices(u, u, x, x, weights._replace(b2=torch.zeros_like(weights.b2)))
    norms = torch.linalg.matrix_norm(matrices)
    found = f"{norms.mean():.4f} on average, {norms.min():.4f} to {norms.max():.4f}"
    row("App. init: ‖K‖_F of the initial kernel, measured", "0.064", found, bool(abs(norms.mean() - 0.064) < 0.0064))


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
    claims()
    initialisation()
    for what, count in (("by Algorithm 1", 1682.8 + 3.5), ("reassociated", 45.8 + 3.5)):  # G multiply-adds, as above
        needed = 1480 * 2 * count / 1e3
        row(f"exact ITNet-S at 1,480 img/s, {what}: TFLOPS", "peak 989", f"{needed:,.0f}", needed <= 989)
    d, count = 384, 196
    bound = (12 * d**2 + 2 * count * d) / (8 * d**2)
    row("LR-64 over ViT-S; a mixer that costs nothing would give", "2.14 ×", f"{bound:.2f} ×", bound >= 2.14)
    bound = (count * D_H) ** 0.5 / 32**0.5
    row("relative error at r = 32; ‖K‖_*/(√r ‖K‖_F) of equal singular values", "< 1 %", f"{bound:.0f}", bound < 0.01)


if __name__ == "__main__":
    main()
