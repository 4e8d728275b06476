"""Properties over configurations, shapes, dtypes and masks: no NaN from finite input, no change by padding, and no
failure but an error that names what is wrong."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from configuration_itnet import KERNEL_INPUTS
from modeling_itnet import ITNetConfig, ITNetModel

SETTINGS = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: None}  # measures are float32 throughout
MODALITIES = ["image", "text", "multimodal", "point_cloud", "graph", "signal"]


@st.composite
def configurations(draw):
    """Arguments of ITNetConfig, small, and mostly but not always consistent."""
    return {
        "modality": draw(st.sampled_from(MODALITIES)),
        "hidden_size": draw(st.sampled_from([8, 12, 15, 16])),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": draw(st.sampled_from([1, 2, 3, 4])),
        "intermediate_size": draw(st.integers(1, 9)),
        "hidden_act": draw(st.sampled_from(["gelu", "relu", "silu"])),
        "position_dim": draw(st.sampled_from([None, None, None, 1, 2, 3])),
        "num_fourier_features": draw(st.integers(0, 3)),
        "fourier_scale": draw(st.sampled_from([0.01, 1.0, 30.0])),
        "kernel_hidden_size": draw(st.integers(1, 6)),
        "kernel_num_layers": draw(st.sampled_from([2, 3])),
        "kernel_init_scale": draw(st.sampled_from([0.0, 1.0, 10.0])),
        "kernel_inputs": draw(st.lists(st.sampled_from(KERNEL_INPUTS), unique=True)),
        "kernel_output_sharing": draw(st.sampled_from(["per_head", "shared"])),
        "integration_mode": draw(st.sampled_from(["exact", "monte_carlo", "low_rank", "auto"])),
        "approximate_mode": draw(st.sampled_from([None, "low_rank", "monte_carlo"])),
        "exact_max_positions": draw(st.integers(0, 12)),
        "num_samples": draw(st.integers(1, 9)),
        "rank": draw(st.integers(1, 5)),
        "proposal_epsilon": draw(st.sampled_from([0.01, 1.0])),
        "measure": draw(st.sampled_from(["uniform", "uniform", "balanced", [3, 1]])),
        "is_causal": draw(st.booleans()),
        "image_size": draw(st.sampled_from([8, 16, (8, 16)])),
        "patch_size": draw(st.sampled_from([4, 8, (4, 8)])),
        "pooling": draw(st.sampled_from([None, "cls", "mean", "max"])),
        "vocab_size": 20,
        "point_feature_size": draw(st.integers(0, 1)),
        "point_embedding": draw(st.sampled_from(["fourier", "raw"])),
        "local_neighbors": draw(st.integers(0, 4)),
        "num_node_types": draw(st.integers(0, 2)),
        "edge_gate": draw(st.booleans()),
        "signal_feature_size": draw(st.integers(0, 2)),
    }


def make_inputs(config, lengths, size, scale, generator):
    """Forward arguments for samples of ``lengths`` positions, padded at the end with garbage to ``size``."""
    batch = len(lengths)

    def normal(*shape):
        return scale * torch.randn(*shape, generator=generator)

    def integers(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
    image = {"pixel_values": normal(batch, config.num_channels, *config.image_shape)}
    text = {"input_ids": integers(20, batch, size), "attention_mask": mask}
    if config.modality == "image":
        return image
    if config.modality == "text":
        return text
    if config.modality == "multimodal":
        return {**image, **text}
    if config.modality == "point_cloud":
        inputs = {"points": normal(batch, size, 3), "attention_mask": mask}
        if config.point_feature_size:
            inputs["point_features"] = normal(batch, size, config.point_feature_size)
        return inputs
    if config.modality == "graph":
        nodes = {"node_features": normal(batch, size, config.node_feature_size)}
        if config.num_node_types:
            nodes = {"node_types": integers(config.num_node_types, batch, size)}
        edges = torch.full((batch, size, 2), -1)
        for row, length in enumerate(lengths):
            edges[row, :length] = integers(length, length, 2)
        return {
            **nodes,
            "positions": normal(batch, size, config.position_dim),
            "neighbors": edges,
            "attention_mask": mask,
        }
    values = {"inputs_embeds": normal(batch, size, config.hidden_size)}
    if config.signal_feature_size:
        values = {"signal_values": normal(batch, size, config.signal_feature_size)}
    return {**values, "positions": normal(batch, size, config.position_dim), "attention_mask": mask}


@SETTINGS
@given(
    arguments=configurations(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_any_configuration(arguments, lengths, padding, dtype, scale, seed):
    """It is refused by an error that names an argument, or it runs: finite outputs and gradients, padding ignored."""
    try:
        config = ITNetConfig(**arguments, hidden_dropout_prob=0.0, embedding_dropout_prob=0.0, drop_path_rate=0.0)
    except (ValueError, StrictDataclassError) as error:
        assert any(f"`{name}`" in str(error) for name in arguments), error
        assume(False)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = ITNetModel(config).to(dtype).eval()
    inputs = make_inputs(config, lengths, max(lengths) + padding, scale, generator)
    inputs = {k: v.to(dtype) if v.is_floating_point() and k != "positions" else v for k, v in inputs.items()}
    output = model(**inputs)
    assert output.last_hidden_state.isfinite().all() and output.pooler_output.isfinite().all()

    model.train()(**inputs).last_hidden_state.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if TOLERANCE[dtype] is None or "attention_mask" not in inputs:
        return
    model.eval()
    for row, length in enumerate(lengths):  # every sample by itself, without padding
        alone = {k: v[row : row + 1] for k, v in inputs.items() if k != "attention_mask"}
        alone = {k: v if k == "pixel_values" else v[:, :length] for k, v in alone.items()}
        expected = model(**alone)
        actual = output.pooler_output[row : row + 1]
        torch.testing.assert_close(actual, expected.pooler_output, rtol=0, atol=TOLERANCE[dtype])


@st.composite
def tensors(draw):
    """A tensor of any shape up to five axes, empty ones too, of any dtype that a user may hand over."""
    shape = draw(st.lists(st.integers(0, 9), max_size=5))
    kind = draw(st.sampled_from(["float", "double", "long", "bool"]))
    if kind in ("float", "double"):
        return torch.randn(shape, dtype=torch.float32 if kind == "float" else torch.float64)
    return torch.randint(0, 2, shape).to(torch.long if kind == "long" else torch.bool)


ARGUMENTS = {
    "image": ["pixel_values"],
    "text": ["input_ids", "attention_mask", "token_type_ids"],
    "multimodal": ["pixel_values", "input_ids", "attention_mask"],
    "point_cloud": ["points", "attention_mask", "point_features"],
    "graph": ["node_features", "positions", "neighbors", "attention_mask"],
    "signal": ["inputs_embeds", "positions", "measure", "attention_mask"],
}


@pytest.mark.parametrize("modality", MODALITIES)
def test_any_tensor(modality):
    """Whatever one argument is, the model runs or says, by a ValueError, what is wrong with which argument."""
    extra = {"position_dim": 2} if modality == "signal" else {}
    config = ITNetConfig(
        modality=modality, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, rank=2, kernel_hidden_size=4,
        num_fourier_features=2, image_size=8, patch_size=4, vocab_size=20, local_neighbors=2, **extra,
    )  # fmt: skip
    model = ITNetModel(config).eval()
    generator = torch.Generator().manual_seed(0)

    @settings(SETTINGS, max_examples=100)
    @given(name=st.sampled_from(ARGUMENTS[modality]), value=tensors())
    def check(name, value):
        inputs = make_inputs(config, [3, 5], 5, 1.0, generator)
        try:
            output = model(**{**inputs, name: value})
        except ValueError as error:
            assert any(f"`{known}`" in str(error) for known in ARGUMENTS[modality]), error
        else:
            assert output.last_hidden_state.isfinite().all()

    check()
