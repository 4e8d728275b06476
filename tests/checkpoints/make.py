"""Writes the checkpoints of this folder. They were written once, by the code of commit 667ea95, and stay as they are.

    git worktree add ../then 667ea95
    PYTHONPATH=../then:../then/configuration:../then/kernels .venv/bin/python tests/checkpoints/make.py

Later code must load them and compute the same (`test_saved_before.py`). Each folder holds a model of one layer with
eight features, its processor where the modality has one, and `example.safetensors`: the inputs and labels of a batch,
and the outputs and the loss that the model had for it, in evaluation mode and float32. The weights of `image-early`
have the names that classifiers had in the first checkpoints. `with-code.zip` is a folder that was saved with its code.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import modeling_itnet as itnet

HERE = Path(__file__).resolve().parent
LENGTH, VOCABULARY = 7, 20
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "num_fourier_features": 2,
    "fourier_scale": 1.0,
    "kernel_hidden_size": 6,
    "kernel_init_scale": 1.0,
    "factor_hidden_size": 6,
    "rank": 3,
    "proposal_size": 4,
    "num_samples": 4,
    "image_size": 8,
    "patch_size": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "num_labels": 3,
}
EXACT, LOW_RANK, MONTE_CARLO = ({"integration_mode": mode} for mode in ("exact", "low_rank", "monte_carlo"))
AUTO = {"integration_mode": "auto", "exact_max_positions": 4}
NODES = {"num_node_types": 5}
SIGNAL = {"position_dim": 2, "signal_feature_size": 2}
# Name -> (class, modality, what its configuration changes).
CASES = {
    "image-exact": ("ITNetForImageClassification", "image", EXACT),
    "image-low-rank": ("ITNetForImageClassification", "image", {**LOW_RANK, "pooling": "mean"}),
    "image-monte-carlo": ("ITNetForImageClassification", "image", {**MONTE_CARLO, "pooling": "max"}),
    "image-early": ("ITNetForImageClassification", "image", EXACT),
    "image-bare": ("ITNetModel", "image", {**AUTO, "patch_size": [2, 4], "num_hidden_layers": 2}),
    "text-masked": ("ITNetForMaskedLM", "text", {**EXACT, "kernel_output_sharing": "shared"}),
    "text-sequence": ("ITNetForSequenceClassification", "text", {**LOW_RANK, "is_causal": True}),
    "text-token": ("ITNetForTokenClassification", "text", {**MONTE_CARLO, "is_causal": True}),
    "text-answer": ("ITNetForQuestionAnswering", "text", {**AUTO, "approximate_mode": "low_rank"}),
    "multimodal-answer": ("ITNetForVisualQuestionAnswering", "multimodal", {**EXACT, "measure": "balanced"}),
    "multimodal-pairs": ("ITNetForImagesAndTextClassification", "multimodal", {**MONTE_CARLO, "measure": [3, 1]}),
    "points-exact": ("ITNetForPointCloudClassification", "point_cloud", {**EXACT, "local_neighbors": 3}),
    "points-auto": (
        "ITNetForPointCloudClassification",
        "point_cloud",
        {**AUTO, "approximate_mode": "monte_carlo", "local_neighbors": 0, "point_embedding": "raw"},
    ),
    "graph-exact": ("ITNetForGraphClassification", "graph", {**EXACT, **NODES}),
    "graph-low-rank": ("ITNetForGraphClassification", "graph", {**LOW_RANK, "node_feature_size": 2}),
    "signal-exact": ("ITNetForSignalRegression", "signal", {**EXACT, **SIGNAL, "kernel_num_layers": 3}),
    "signal-low-rank": ("ITNetForSignalRegression", "signal", {**LOW_RANK, **SIGNAL, "is_causal": True}),
    "signal-monte-carlo": ("ITNetForSignalRegression", "signal", {**MONTE_CARLO, **SIGNAL, "num_fourier_features": 0}),
}
WITH_CODE = "with-code"


def wave(*shape: int) -> np.ndarray:
    """Numbers between -1 and 1 that no two places share."""
    return np.sin(1.7 * np.arange(1, 1 + np.prod(shape))).astype(np.float32).reshape(shape)


def pictures(count: int) -> list[np.ndarray]:
    """Images of 10 x 9 pixels, which the processor has to resize."""
    return list((127.5 + 127.5 * wave(count, 10, 9, 3)).astype(np.uint8))


def raw_inputs(name: str) -> dict:
    """What the processor of a case is called with, for modalities that have one."""
    modality = CASES[name][1]
    texts = ["what is it", "is it red or is it blue"]
    if modality == "image":
        return {"images": pictures(2)}
    if modality == "multimodal":
        first, second, *others = pictures(4)
        images = [[first, second], others] if name == "multimodal-pairs" else [first, second]
        return {"images": images, "text": texts, "padding": True}
    if modality == "point_cloud":
        return {"points": [wave(LENGTH, 3), wave(4, 3)]}
    edges = [[[0, 1, 2, 2], [1, 2, 3, 4]], [[0, 1, 2], [1, 2, 3]]]
    counts = [5, 4]
    features = [wave(count, 2) if name == "graph-low-rank" else np.arange(count) for count in counts]
    return {
        "graphs": [
            {"edge_index": np.array(edge), "node_features" if value.ndim == 2 else "node_types": value}
            for edge, value in zip(edges, features, strict=True)
        ]
    }


def make_processor(name: str, config):
    modality = CASES[name][1]
    image = itnet.ITNetImageProcessor.from_model_config(config)
    if modality == "image":
        return image
    if modality == "multimodal":
        vocabulary = ["[PAD]", "[UNK]", "[MASK]", "what", "is", "it", "red", "or", "blue"]
        tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
        tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, model_max_length=16, **special)
        return itnet.ITNetProcessor(image, tokenizer)
    makers = {"point_cloud": itnet.ITNetPointCloudProcessor, "graph": itnet.ITNetGraphProcessor}
    return makers[modality]() if modality in makers else None


def make_inputs(name: str, processor) -> dict[str, torch.Tensor]:
    if processor is not None:
        return dict(processor(**raw_inputs(name), return_tensors="pt"))
    if CASES[name][1] == "text":  # the second text is shorter
        ids = 1 + torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % (VOCABULARY - 1)
        return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [4]])).long()}
    inputs = {"signal_values": torch.tensor(wave(2, LENGTH, 2)), "positions": torch.tensor(wave(LENGTH, 2))}
    if name == "signal-exact":  # other points, another measure
        inputs |= {"query_positions": torch.tensor(wave(3, 2)) * 0.5, "measure": torch.tensor(wave(2, LENGTH)).abs()}
    return inputs


def make_labels(name: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if name == "text-answer":
        return {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([4, 2])}
    if name in ("text-masked", "text-token"):
        return {"labels": (torch.arange(2 * LENGTH).view(2, LENGTH) % 3).where(inputs["attention_mask"] > 0, -100)}
    if name.startswith("signal"):
        return {"labels": torch.tensor(wave(2, 3 if "query_positions" in inputs else LENGTH, 3))}
    if name == "multimodal-answer":
        return {"labels": torch.tensor([[0.3, 1.0, 0.0], [0.6, 0.0, 0.9]])}
    return {} if name == "image-bare" else {"labels": torch.tensor([2, 0])}


def make_case(name: str, folder: Path, with_code: bool = False) -> None:
    model_class, modality, changes = CASES[name]
    torch.manual_seed(0)
    model = getattr(itnet, model_class)(itnet.ITNetConfig(**{**SMALL, "modality": modality, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    processor = make_processor(name, model.config)
    if with_code:
        model.eval().save_pretrained(folder, with_code=True, processor=processor)
    else:
        model.eval().save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
    inputs = make_inputs(name, processor)
    labels = make_labels(name, inputs)
    with torch.no_grad():
        outputs = {key: value for key, value in model(**inputs, **labels).items() if isinstance(value, torch.Tensor)}
    parts = {"inputs": inputs, "labels": labels, "outputs": outputs}
    tensors = {f"{part}.{key}": value.contiguous() for part, values in parts.items() for key, value in values.items()}
    save_file(tensors, folder / "example.safetensors")


def main() -> None:
    for name in CASES:
        make_case(name, HERE / name)
    path = HERE / "image-early" / "model.safetensors"
    weights = load_file(path)
    early = {key.replace("classifier.", "classifier.linear."): value for key, value in weights.items()}
    save_file(early, path, metadata={"format": "pt"})
    make_case("image-exact", HERE / WITH_CODE, with_code=True)
    shutil.make_archive(str(HERE / WITH_CODE), "zip", HERE / WITH_CODE)
    shutil.rmtree(HERE / WITH_CODE)


if __name__ == "__main__":
    sys.exit(main())
