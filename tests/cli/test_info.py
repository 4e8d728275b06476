"""``itnet info``: counts, costs, JSON, and errors in one line with exit code 2."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
from typer.testing import CliRunner

from configuration_itnet import ITNetConfig
from modeling_itnet import ITNetForImageClassification, ITNetModel
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

    @pytest.mark.parametrize("mode", ["exact", "monte_carlo", "low_rank"])
    def test_memory_is_what_a_model_keeps(self, mode):
        """Extrapolated from 24 positions to 200, beside a whole model that runs there."""
        config = ITNetConfig.from_preset("itnet-tiny", modality="signal", position_dim=2, integration_mode=mode)
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
        assert [cost["positions"] for cost in as_json["costs"]] == [65] * 4 + [256] * 4
        assert as_json["peer"] == {"ViT (attention)": 211584}
        assert "low_rank" in run("info", "itnet-tiny", "-n", "65").stdout


def test_unknown_preset_is_one_line(run):
    result = run("info", "itnet-huge")
    assert result.exit_code == 2
    assert result.stderr.startswith("itnet: unknown preset 'itnet-huge'") and result.stderr.count("\n") == 1
