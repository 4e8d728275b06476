"""Low-rank models with kernels of matrices, and with kernels that decay."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForMaskedLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from itnet_kernels import Coordinates
from modeling_itnet import Domain, ITNetConfig, ITNetForMaskedLM, ITNetModel
from modeling_itnet.analysis.costs import model_costs
from modeling_itnet.training.lora import lora_config

MATRIX = {"integration_mode": "low_rank", "rank": 3, "factor_form": "matrix"}
DECAY = {"integration_mode": "low_rank", "rank": 3, "factor_decay": True, "is_causal": True, "position_dim": 1}
FORMS = {"vector": MATRIX | {"factor_form": "vector"}, "matrix": MATRIX}
DECAYING = {form: DECAY | {"factor_form": form} for form in FORMS}
LINE = {"is_causal": True, "position_dim": 1}


@pytest.fixture
def problem(tiny_config, shake):
    """problem(**overrides): factors of a signal model, heads [2, 7, 2, 8] and their domain, in float64."""

    def make(**overrides):
        torch.manual_seed(0)
        config = tiny_config("signal", **overrides)
        operator = shake(ITNetModel(config).layers[0].operator).double()
        measure = torch.rand(2, 7, dtype=torch.float64) + 0.2
        measure[1, -2:] = 0
        measure = measure / measure.sum(1, keepdim=True)
        size = config.position_dim
        positions = torch.rand(2, 7, size, dtype=torch.float64).cumsum(1)
        domain = Domain(positions, measure, torch.randn(3, size, dtype=torch.float64))
        return operator, torch.randn(2, 7, 2, 8, dtype=torch.float64), domain

    return make


@pytest.mark.parametrize("settings", [*FORMS.values(), *DECAYING.values()], ids=["vector", "matrix", *"vm"])
def test_a_layer_integrates_its_own_kernel(problem, low_rank_kernels, settings):
    operator, heads, domain = problem(**settings)
    omega = domain.measure.unsqueeze(1).expand(-1, 7, -1)
    if operator.is_causal:
        omega = omega.tril() / omega.tril().sum(-1, keepdim=True)
    kernels = low_rank_kernels(operator.factors, heads, domain, heads, domain)
    expected = torch.einsum("bij,bijhac,bjhc->biha", omega, kernels, heads)
    actual = operator.integral(heads.flatten(2), domain).unflatten(2, (2, 8))
    real = domain.measure > 0
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_queries_on_a_domain_of_their_own(problem, low_rank_kernels, form):
    operator, heads, domain = problem(**FORMS[form])
    queries, positions = torch.randn(2, 4, 2, 8, dtype=torch.float64), torch.rand(2, 4, 2, dtype=torch.float64)
    where = Domain(positions, torch.full((2, 4), 0.25), domain.frequencies)
    kernels = low_rank_kernels(operator.factors, heads, domain, queries, where)
    expected = torch.einsum("bj,bijhac,bjhc->biha", domain.measure, kernels, heads)
    for query_domain in (where, Coordinates(positions, domain.frequencies)):
        actual, state = operator.factors(heads, domain, queries=queries, query_domain=query_domain)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(state.moments, operator.factors(heads, domain)[1].moments)  # of the keys alone
    with pytest.raises(ValueError, match="`queries` and `query_domain` go together"):
        operator.factors(heads, domain, queries=queries)


def test_edges(problem, low_rank_kernels):
    """1[edge] + lambda times the kernel."""
    operator, heads, domain = problem(**MATRIX)
    edges = torch.zeros(7, 7, dtype=torch.float64)
    edges[:, [1, 3]] = 1
    gate = torch.tensor(0.4, dtype=torch.float64)
    kernels = low_rank_kernels(operator.factors, heads, domain, heads, domain)
    expected = torch.einsum("bj,ij,bijhac,bjhc->biha", domain.measure, edges + gate, kernels, heads)
    gated = domain.replaced(neighbors=torch.tensor([1, 3, -1]).expand(2, 7, 3), edge_gate=gate)
    torch.testing.assert_close(operator.integral(heads.flatten(2), gated), expected.flatten(2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [MATRIX | LINE, *DECAYING.values()], ids=["matrix", *DECAYING])
def test_token_by_token_with_a_state(problem, settings):
    operator, heads, domain = problem(**settings)
    expected, last = operator.factors(heads, domain)
    state, outs = None, []
    for i in range(7):
        one = slice(i, i + 1)
        token = Domain(domain.positions[:, one], domain.measure[:, one], domain.frequencies)
        out, state = operator.factors(heads[:, one], token, state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("settings", [MATRIX, *DECAYING.values()], ids=["matrix", *DECAYING])
def test_a_new_head_is_the_mean_and_learns(tiny_config, settings):
    """Up to kernel_init_scale; the gradient of no parameter is 0."""
    torch.manual_seed(0)
    operator = ITNetModel(tiny_config("signal", **settings | {"kernel_init_scale": 1e-3})).layers[0].operator
    features = torch.randn(2, 9, 16)
    positions = torch.rand(9, operator.config.position_dim).sort(0).values
    domain = Domain(positions, torch.full((2, 9), 1 / 9), torch.randn(3, operator.config.position_dim))
    mean = features.mean(1, keepdim=True).expand_as(features)
    if operator.is_causal:
        mean = features.cumsum(1) / torch.arange(1, 10).unsqueeze(-1)
    integral = operator.integral(features, domain)
    assert (integral - mean).norm() < 2e-2 * mean.norm()
    integral.backward(torch.randn_like(integral))
    for name, parameter in operator.factors.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    if operator.factors.log_decay is not None:
        rates = operator.factors.log_decay.exp()
        assert rates.min() == 1 and (rates.diff(dim=1) > 0).all()


TEXT = {"vector": DECAYING["vector"], "matrix": DECAYING["matrix"], "complete": MATRIX}


@pytest.mark.parametrize("name", TEXT)
class TestModels:
    @pytest.fixture
    def model(self, tiny_model, name):
        return tiny_model("masked-lm", **TEXT[name])

    def test_padding_does_not_count(self, model, tiny_inputs):
        ids = tiny_inputs("masked-lm")["input_ids"][:1]
        expected = model(input_ids=ids).logits
        padding, zeros = torch.zeros(1, 3, dtype=ids.dtype), torch.zeros(1, 3, dtype=torch.long)
        for sides in ((padding, ids), (ids, padding)):
            mask = torch.cat([zeros if side is padding else torch.ones_like(ids) for side in sides], 1)
            actual = model(input_ids=torch.cat(sides, 1), attention_mask=mask).logits[mask == 1]
            torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-5)

    def test_saved_and_reloaded(self, model, tiny_inputs, tmp_path):
        model.save_pretrained(tmp_path, with_code=True)
        plain = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
        reference = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["auto_map"][
            "AutoModelForMaskedLM"
        ]
        exported = get_class_from_dynamic_module(reference, str(tmp_path)).from_pretrained(tmp_path).eval()
        assert isinstance(plain, ITNetForMaskedLM) and not isinstance(exported, ITNetForMaskedLM)
        inputs = tiny_inputs("masked-lm")
        for loaded in (plain, exported):
            torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)

    def test_compiled(self, model, tiny_inputs, tiny_labels):
        inputs = tiny_inputs("masked-lm") | {"labels": tiny_labels("masked-lm")}
        torch._dynamo.reset()
        expected = model(**inputs).loss
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).loss
        torch.testing.assert_close(actual, expected)
        parameters = [*model.itnet.layers[0].operator.factors.parameters()]
        gradients = [torch.autograd.grad(loss, parameters) for loss in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)

    def test_lora(self, model, tiny_inputs, tiny_labels, tmp_path):
        peft = pytest.importorskip("peft")
        inputs = tiny_inputs("masked-lm")
        base, before = copy.deepcopy(model), model(**inputs).logits
        adapted = peft.get_peft_model(model, lora_config(model, r=2, init_lora_weights=False))
        after = adapted(**inputs).logits
        assert not torch.allclose(after, before)
        adapted.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        torch.testing.assert_close(again(**inputs).logits, after, rtol=1e-4, atol=1e-5)


class TestFit:
    @pytest.mark.parametrize("settings", [{}, LINE, LINE | {"factor_decay": True}], ids=["all", "causal", "decaying"])
    def test_matrices_are_solved_for(self, tiny_config, shake, settings):
        """With random f and g, no other matrices and constant come closer; a decay is kept as it is."""
        torch.manual_seed(0)
        model = shake(ITNetModel(tiny_config("signal", **settings))).eval()
        positions = torch.rand(4, 9, model.config.position_dim).sort(1).values
        data = {"inputs_embeds": torch.randn(4, 9, 16), "positions": positions}
        errors = []
        for rank in (1, 2, 8):
            fitted = copy.deepcopy(model)
            errors.append(fitted.to_low_rank(rank, data, steps=0, distillation_steps=0, factor_form="matrix"))
            assert (fitted.config.factor_form, fitted.config.rank) == ("matrix", rank)
            assert fitted.layers[0].operator.factors.matrices.shape == (2, rank, 8, 8)
        for few, more in pairwise(errors):
            assert all(b < a < 1 for a, b in zip(few.layer_errors, more.layer_errors, strict=True))
        assert errors[-1].layer_errors[0] < 0.02  # 8 matrices of 8 x 8 for at most 4 x 9 x 8 equations

    def test_a_constant_kernel_is_found(self, tiny_config, shake):
        torch.manual_seed(0)
        model = shake(ITNetModel(tiny_config("signal", kernel_inputs=()))).eval()
        data = {"inputs_embeds": torch.randn(4, 9, 16), "positions": torch.rand(4, 9, 2)}
        report = model.to_low_rank(1, data, steps=0, distillation_steps=0, factor_form="matrix")
        assert max(report.layer_errors) < 1e-3

    def test_both_forms_of_a_trained_fit_are_saved(self, tiny_model, tiny_inputs, tmp_path):
        for form in FORMS:
            model = tiny_model("masked-lm", factor_form=form)
            model.to_low_rank(2, tiny_inputs("masked-lm"), steps=3, distillation_steps=3)
            model.save_pretrained(tmp_path / form)
            loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / form)
            assert loaded.config.factor_form == form
            outputs = [each(**tiny_inputs("masked-lm")).logits for each in (loaded, model)]
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
def test_flops_are_those_of_the_formula(is_causal):
    """Two per multiply-add: per position r d_h of either product where all see all, r d_h^2 more if causal."""
    sizes = {"modality": "signal", "position_dim": 1, "is_causal": is_causal, "rank": 4}
    given = {form: ITNetConfig.from_preset("itnet-tiny", factor_form=form, **sizes) for form in FORMS}
    config = given["matrix"]
    count, heads, size, width, rank = 64, config.num_attention_heads, config.head_dim, config.factor_hidden_size, 4
    hidden = 2 * width * (config.position_size + heads * size) + 2 * width * heads * rank
    around = 2 * heads * size**2 / count  # the bias, and M on the state, once per sample
    products = 2 * heads * rank * size + rank * around / 2
    if is_causal:  # blocks of 16: the state of a block and M on it, its pairs and M on their sums, the bias everywhere
        around = 2 * heads * size**2 / 2
        products = heads * rank * (2 * size + size**2 / 16 + 16 * size + size**2)
        products += heads * size * (rank * 4 / 16 + 32)  # running sums: of four blocks, and of values by 32
    dense = 2 * config.hidden_size * (config.hidden_size + config.intermediate_size)
    expected = 2 * config.num_hidden_layers * count * (hidden + products + around / 2 + dense)
    cost = {form: model_costs(given[form], [count], ("low_rank",))[0].forward_flops for form in FORMS}
    assert cost["matrix"] == pytest.approx(expected, rel=0.01)
    assert cost["vector"] != cost["matrix"]


def test_what_decays(tiny_config):
    for settings in ({"is_causal": False, "position_dim": 1}, {"is_causal": True, "position_dim": 2}):
        with pytest.raises(ValueError, match=r"`factor_decay` \(True\) needs a causal kernel on one coordinate"):
            tiny_config("signal", factor_decay=True, **settings)
