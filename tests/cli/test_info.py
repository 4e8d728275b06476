"""``itnet info``: counts, costs, JSON, and errors in one line with exit code 2."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
from typer.testing import CliRunner

from configuration_itnet import ITNetConfig
from itnet_kernels import window_blocks
from modeling_itnet import ITNetForImageClassification, ITNetForSignalRegression, ITNetModel
from modeling_itnet.analysis.costs import model_costs, peer_parameters
from modeling_itnet.analysis.parameters import PAPER_BASE, count_parameters, parameter_table
from modeling_itnet.cli import app
from modeling_itnet.integration.proposal import num_loss_queries

SIZE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}  # itnet-tiny


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_base_rows_are_those_of_the_papers_table():
    """The paper's rows are right, only their sum is not: W2 per head makes 148 M, not 86 M."""
    table = parameter_table("itnet-base", ITNetConfig.from_preset("itnet-base"))
    for component, printed in PAPER_BASE.items():
        assert table.components[component] == pytest.approx(printed, rel=0.05), component
    assert table.total > sum(PAPER_BASE.values()) * 0.99
    assert table.paper_total == 86e6


def test_counts_are_the_models(tmp_path):
    config = ITNetConfig.from_preset("itnet-tiny", num_labels=7)
    model = ITNetForImageClassification(config)
    counts = count_parameters(model)
    assert sum(counts.values()) == model.num_parameters()
    assert counts["head"] == 7 * (config.hidden_size + 1)
    assert parameter_table("itnet-tiny", config).total == ITNetModel(config).num_parameters()


def test_near_and_far_parameters_are_counted():
    settings = {"modality": "signal", "position_dim": 2, "near_radius": 0.2, "integration_mode": "near_far"}
    model = ITNetForSignalRegression(ITNetConfig.from_preset("itnet-tiny", **settings))
    counts = count_parameters(model)
    assert sum(counts.values()) == model.num_parameters()
    layers = [layer.operator for layer in model.itnet.layers]
    factors = [*layers, model.decoder]
    assert counts["low-rank factors"] == sum(p.numel() for part in factors for p in part.factors.parameters())
    assert counts["kernel W2"] == sum(part.kernel.w2.numel() for part in factors)


def test_json_and_table_agree(run):
    as_json = json.loads(run("info", "itnet-tiny", "--json").stdout)
    assert as_json["itnet-tiny"]["total"] == 325376
    printed = run("info", "itnet-tiny").stdout
    assert "325,376" in printed and "kernel W2" in printed


def test_checkpoint_folder(run, tmp_path):
    ITNetConfig.from_preset("itnet-tiny", num_hidden_layers=1).save_pretrained(tmp_path)
    total = json.loads(run("info", str(tmp_path), "--json").stdout)[str(tmp_path)]["total"]
    assert total < 325376


def test_head_of_a_checkpoint_counts(run, tmp_path):
    ITNetForImageClassification(ITNetConfig.from_preset("itnet-tiny", num_labels=7)).save_pretrained(tmp_path)
    assert json.loads(run("info", str(tmp_path), "--json").stdout)[str(tmp_path)]["head"] == 7 * 65


class TestCosts:
    @pytest.mark.parametrize("layers", [2, 3])
    def test_exact_flops_are_those_of_the_formula(self, layers):
        """The reassociated operator written with einsum, counted by PyTorch, and the linear layers around it."""
        config = ITNetConfig.from_preset("itnet-tiny", kernel_num_layers=layers)
        count, heads, size, width = 31, config.num_attention_heads, config.head_dim, config.kernel_hidden_size
        u = torch.randn(count, heads, size)
        virtual, hidden = torch.randn(count, heads, width, size), torch.randn(heads, count, count, width)
        with FlopCounterMode(display=False) as counter:
            torch.einsum("ihkc,jhc->hijk", virtual, u)  # logits
            if layers == 3:
                hidden @ torch.randn(width, width)
            moments = torch.einsum("hijk,jhc->ihkc", hidden, u)
            torch.einsum("ihkc,hkca->iha", moments, torch.randn(heads, width, size, size))
            features = u.flatten(1)
            features @ torch.randn(features.shape[1], 2 * features.shape[1])  # W^O and W_theta
            features @ torch.randn(features.shape[1], 2 * config.intermediate_size)  # feed-forward
        (cost, _) = model_costs(config, [count], ("exact",))
        expected = config.num_hidden_layers * counter.get_total_flops()
        assert expected <= cost.forward_flops <= 1.1 * expected  # what is computed per position alone comes on top

    def test_attention_flops_are_those_of_a_whole_model(self):
        config = ITNetConfig.from_preset("itnet-tiny")
        peer = BertModel(BertConfig(**SIZE, vocab_size=9)).eval()
        with FlopCounterMode(display=False) as counter:
            peer(inputs_embeds=torch.randn(1, 50, 64))
        pooler = 2 * 64 * 64
        cost = model_costs(config, [50], ())[0]
        assert cost.forward_flops == counter.get_total_flops() - pooler

    def test_monte_carlo_flops_are_those_of_a_whole_model(self):
        """At 200 positions, where the proposal loss looks at three queries and not at one as in short signals."""
        config = ITNetConfig.from_preset(
            "itnet-tiny", modality="signal", position_dim=2, integration_mode="monte_carlo", num_samples=32
        )
        (cost, _) = model_costs(config, [200], ("monte_carlo",))
        model = ITNetModel(config).train()
        with FlopCounterMode(display=False) as counter:
            model(inputs_embeds=torch.randn(1, 200, 64), positions=torch.rand(200, 2))
        assert num_loss_queries(config, 200) == 3
        assert cost.forward_flops == pytest.approx(counter.get_total_flops(), rel=0.01)

    @pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
    def test_near_flops_are_those_of_the_blocks(self, is_causal):
        """The blocks of windows written with einsum, counted by PyTorch, beside low rank, whose far field it is."""
        settings = {"modality": "text", "near_size": 9, "is_causal": is_causal}
        config = ITNetConfig.from_preset("itnet-tiny", **settings)
        count, heads, size, width = 50, config.num_attention_heads, config.head_dim, config.kernel_hidden_size + 1
        (blocks,) = window_blocks((count,), 8 if is_causal else 4, is_causal=is_causal)
        num_blocks, rows, keys = blocks.pairs.shape[1:]
        assert num_blocks * rows >= count and rows * keys < 0.5 * count**2
        u, virtual = torch.randn(num_blocks, keys, heads, size), torch.randn(num_blocks, rows, heads, width, size)
        hidden = torch.randn(num_blocks, heads, rows, keys, width)  # one unit more, the constant
        with FlopCounterMode(display=False) as counter:
            torch.einsum("nihkc,njhc->nhijk", virtual, u)  # logits
            moments = torch.einsum("nhijk,njhc->nihkc", hidden, u)
            torch.einsum("nihkc,hkca->niha", moments, torch.randn(heads, width, size, size))
        near, low_rank, _ = (cost.forward_flops for cost in model_costs(config, [count], ("near_far", "low_rank")))
        expected = config.num_hidden_layers * counter.get_total_flops()
        assert expected <= near - low_rank <= 1.1 * expected  # what is computed per position alone comes on top

    @pytest.mark.parametrize("modality", ["image", "text", "point_cloud"])
    def test_near_and_far_are_linear(self, modality):
        """Images in several rows of whole blocks, clouds with a ball that shrinks as the number grows."""
        flops = []
        for count in (2049, 4097):
            radius = {"near_radius": 0.2 * (2048 / count) ** (1 / 3)} if modality == "point_cloud" else {}
            config = ITNetConfig.from_preset("itnet-tiny", modality=modality, **radius)
            flops.append(model_costs(config, [count], ("near_far",))[0].forward_flops)
        assert 1.8 < flops[1] / flops[0] < 2.2

    def test_near_fields_that_nothing_is_known_of(self):
        """A signal without `near_radius`, a graph without edges: no figure, and no guess."""
        for settings in ({"modality": "signal", "position_dim": 2}, {"modality": "graph"}):
            config = ITNetConfig.from_preset("itnet-tiny", **settings)
            assert "near_far" not in [cost.model for cost in model_costs(config, [16])]
            with pytest.raises(ValueError, match=r"`near_radius` \(None\) must be given"):
                model_costs(config, [16], ("near_far",))

    @pytest.mark.parametrize("mode", ["exact", "near_far", "monte_carlo", "low_rank"])
    def test_memory_is_what_a_model_keeps(self, mode):
        """Extrapolated from 24 positions to 200, beside a whole model that runs there."""
        settings = {"modality": "signal", "position_dim": 2, "near_radius": 0.2, "integration_mode": mode}
        config = ITNetConfig.from_preset("itnet-tiny", **settings)
        (cost, _) = model_costs(config, [200], (mode,))
        model, kept = ITNetModel(config).train(), {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(inputs_embeds=torch.randn(1, 200, 64, requires_grad=True), positions=torch.rand(200, 2))
        own = {parameter.data_ptr() for parameter in model.parameters()}
        total = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
        assert cost.activation_bytes == pytest.approx(total, rel=0.1)

    def test_low_rank_is_linear_and_exact_is_not(self):
        costs = model_costs(ITNetConfig.from_preset("itnet-tiny"), [1000, 2000], ("exact", "low_rank"))
        flops = {(cost.model, cost.positions): cost.forward_flops for cost in costs}
        assert flops["low_rank", 2000] == pytest.approx(2 * flops["low_rank", 1000], rel=1e-3)
        assert 3.5 < flops["exact", 2000] / flops["exact", 1000] < 4

    def test_peers(self):
        text = ITNetConfig.from_preset("itnet-tiny", modality="text", vocab_size=100)
        bert = BertModel(BertConfig(**SIZE, vocab_size=100))
        assert peer_parameters(text) == bert.num_parameters()
        vit = ViTModel(ViTConfig(**SIZE, image_size=32, patch_size=4))
        assert peer_parameters(ITNetConfig.from_preset("itnet-tiny")) == vit.num_parameters()

    def test_printed(self, run):
        as_json = json.loads(run("info", "itnet-tiny", "-n", "65", "-n", "256", "--json").stdout)["itnet-tiny"]
        assert [cost["positions"] for cost in as_json["costs"]] == [65] * 5 + [256] * 5
        assert as_json["peer"] == {"ViT (attention)": 211584}
        assert "low_rank" in run("info", "itnet-tiny", "-n", "65").stdout


def test_unknown_preset_is_one_line(run):
    result = run("info", "itnet-huge")
    assert result.exit_code == 2
    assert result.stderr.startswith("itnet: there is no preset 'itnet-huge'") and result.stderr.count("\n") == 1
