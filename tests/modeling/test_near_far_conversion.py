"""``to_near_far``: from a trained exact model to near and far fields, in every kind of domain."""

import copy

import pytest
import torch

from modeling_itnet import (
    ITNetConfig,
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForMaskedLM,
    ITNetForPointCloudClassification,
    ITNetForSignalRegression,
)
from modeling_itnet.integration.fitted import _least_squares
from modeling_itnet.operator import find_operators

TEXT = {"modality": "text"}
SIGNAL = {"modality": "signal", "position_dim": 2, "signal_feature_size": 2}
# name -> (class, configuration, a small neighbourhood, one that holds everything)
CASES = {
    "image": (ITNetForImageClassification, {"image_size": 64}, {"near_size": 9}, {"near_size": 225}),
    "text": (ITNetForMaskedLM, TEXT, {"near_size": 5}, {"near_size": 63}),
    "causal": (ITNetForMaskedLM, TEXT | {"is_causal": True}, {"near_size": 5}, {"near_size": 63}),
    "one W2": (ITNetForMaskedLM, TEXT | {"kernel_output_sharing": "shared"}, {"near_size": 5}, {"near_size": 63}),
    "own W1": (ITNetForMaskedLM, TEXT | {"kernel_input_sharing": "per_head"}, {"near_size": 5}, {"near_size": 63}),
    "directions": (ITNetForMaskedLM, TEXT | {"kernel_directions": True}, {"near_size": 5}, {"near_size": 63}),
    "points": (
        ITNetForPointCloudClassification,
        {"modality": "point_cloud"},
        {"near_radius": 0.25},
        {"near_radius": 9},
    ),
    "signal": (ITNetForSignalRegression, SIGNAL, {"near_radius": 0.25}, {"near_radius": 9}),
}


def batches(modality, is_causal=False, count=2, size=8):
    generator = torch.Generator().manual_seed(3)

    def one():
        if modality == "image":
            return {"pixel_values": torch.randn(size, 3, 64, 64, generator=generator)}
        if modality == "text":
            mask = torch.ones(size, 24, dtype=torch.long)
            mask[1, 20:] = 0
            return {"input_ids": torch.randint(1, 40, (size, 24), generator=generator), "attention_mask": mask}
        points = torch.rand(size, 30, 3, generator=generator)
        if modality == "point_cloud":
            return {"points": points}
        values = torch.randn(size, 30, 2, generator=generator)
        given = {"signal_values": values, "positions": points[..., :2]}
        return given if is_causal else given | {"query_positions": torch.rand(size, 12, 2, generator=generator)}

    return [one() for _ in range(count)]


@pytest.fixture(scope="module")
def make(tiny_sizes, shake):
    """make(case, **overrides): an exact model that was moved off its start, and data for it."""

    def build(case, is_short=False, **overrides):
        model_class, values, *_ = CASES[case]
        torch.manual_seed(0)
        model = shake(model_class(ITNetConfig(**{**tiny_sizes, **values, **overrides}))).eval()
        if is_short:  # hidden units that are 0 beyond a distance of about 0.2
            for module in model.modules():
                if hasattr(module, "kernel") and module.kernel is not None:
                    with torch.no_grad():
                        module.kernel.w1[..., 0] = -40
                        module.kernel.b1 += 4
        return model, batches(model.config.modality, model.config.is_causal)

    return build


class TestErrors:
    @pytest.mark.parametrize("case", CASES)
    def test_a_short_kernel_is_nearer_to_near_and_far_than_to_low_rank(self, make, case):
        model, data = make(case, is_short=True, kernel_inputs=["distance", "u_y", "u_x*u_y"])
        settings = {"rank": 2, "steps": 10, "distillation_steps": 10}
        low_rank = copy.deepcopy(model).to_low_rank(calibration_data=data, factor_form="matrix", **settings)
        report = model.to_near_far(data, **CASES[case][2], **settings)
        for error, other in zip(report.layer_errors, low_rank.layer_errors, strict=True):
            assert error < 0.6 * other
        if case != "signal":  # there the query layer is converted too, which to_low_rank leaves exact
            assert report.output_error < 0.6 * low_rank.output_error
            assert report.held_out_error < low_rank.held_out_error

    @pytest.mark.parametrize("case", CASES)
    def test_a_neighbourhood_that_holds_everything_is_exact(self, make, case):
        """By least squares alone: T is the identity and B is b2, or the far field's constant."""
        model, data = make(case, num_hidden_layers=1)
        report = model.to_near_far(data, rank=1, steps=0, distillation_steps=0, **CASES[case][3])
        assert max(report.layer_errors) < 1e-3
        if case != "signal":  # whose query layer interpolates over fewer positions
            assert max(report.output_error, report.held_out_error) < 1e-3

    def test_a_constant_kernel_is_the_far_fields(self, make):
        model, data = make("points", kernel_inputs=())
        report = model.to_near_far(data, rank=1, near_radius=0.2, steps=0, distillation_steps=0)
        assert max(report.layer_errors) < 1e-3

    @torch.no_grad()
    def test_held_out_samples(self, make):
        model, data = make("signal")
        exact = copy.deepcopy(model)
        report = model.to_near_far(data, rank=2, near_radius=0.3, steps=5, distillation_steps=5)
        states = []
        for part in (exact, model):
            part.decoder.register_forward_hook(lambda *call: states.append(call[2]))
            for batch in data:
                part(**{name: value[-1:] for name, value in batch.items()})
        wanted, actual = torch.cat(states[:2]), torch.cat(states[2:])
        assert report.num_held_out == 2
        assert report.held_out_error == pytest.approx(float((actual - wanted).norm() / wanted.norm()), rel=1e-4)
        assert "query layer" in str(report) and "2 held-out samples" in str(report)

    def test_training_together_helps(self, make):
        reports = []
        for steps in (0, 40):
            model, data = make("text")
            reports.append(model.to_near_far(data, near_size=5, rank=2, steps=20, distillation_steps=steps))
        assert reports[0].layer_errors == reports[1].layer_errors
        assert reports[1].output_error < 0.9 * reports[0].output_error


class TestModel:
    @pytest.mark.parametrize("case", CASES)
    def test_what_changes_and_what_is_saved(self, make, case, tmp_path):
        model, data = make(case)
        before, small = copy.deepcopy(model), CASES[case][2]
        model.train()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.to_near_far(data, rank=3, steps=2, distillation_steps=2, **small)
        assert all(module.training for module in model.modules())
        config = model.config
        assert (config.integration_mode, config.rank, config.factor_form) == ("near_far", 3, "matrix")
        assert all(getattr(config, name) == value for name, value in small.items())
        old = before.state_dict()
        for key, value in model.state_dict().items():
            assert ".factors." in key or ".kernel." in key or torch.equal(value, old[key]), key
        for key, parameter in model.named_parameters():
            is_new = ".factors." in key or ".kernel." in key
            assert is_new == (parameter.grad is None), key
            assert parameter.requires_grad
        model.save_pretrained(tmp_path)
        reloaded = type(model).from_pretrained(tmp_path)
        name = "predictions" if case == "signal" else "logits"
        with torch.no_grad():
            torch.testing.assert_close(reloaded(**data[0])[name], model.eval()(**data[0])[name], rtol=1e-4, atol=1e-5)

    def test_a_causal_signal(self, make):
        model, data = make("signal", is_causal=True)
        report = model.to_near_far(data, near_size=63, rank=1, steps=0, distillation_steps=0)
        assert max(*report.layer_errors, report.query_error, report.output_error) < 1e-3  # one interpolation for both

    def test_a_graph(self, tiny_sizes, shake):
        """Edges say what is near: a graph whose nodes are all joined has one neighbourhood."""
        torch.manual_seed(0)
        config = ITNetConfig(**{**tiny_sizes, "modality": "graph", "position_dim": 2, "num_hidden_layers": 1})
        model = shake(ITNetForGraphClassification(config)).eval()
        generator = torch.Generator().manual_seed(3)
        data = {"node_features": torch.randn(8, 6, 1, generator=generator)}
        data |= {"positions": torch.randn(8, 6, 2, generator=generator)}
        data |= {"neighbors": torch.tensor([[j for j in range(6) if j != i] for i in range(6)]).expand(8, -1, -1)}
        report = model.to_near_far(data, rank=1, steps=0, distillation_steps=0)
        assert max(report.layer_errors) < 1e-3

    def test_stopping_leaves_the_model_as_it_was(self, make):
        model, data = make("signal")
        expected = model(**data[0]).predictions
        calls = []

        def stop(*_):
            calls.append(model.decoder.factors is not None)
            if calls[-1]:
                raise KeyboardInterrupt

        hook = model.itnet.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model.to_near_far(data, near_radius=0.3, rank=2, steps=1, distillation_steps=1)
        hook.remove()
        assert model.config.near_radius is None and model.config.integration_mode == "auto"
        assert torch.equal(model(**data[0]).predictions, expected)

    def test_frozen_kernels_stay_frozen(self, make):
        model, data = make("text")
        for operator in find_operators(model):
            operator.kernel.requires_grad_(False)
        model.to_near_far(data, near_size=5, rank=2, steps=1, distillation_steps=1)
        for operator in find_operators(model):
            assert not any(parameter.requires_grad for parameter in operator.kernel.parameters())
            assert all(parameter.requires_grad for parameter in operator.factors.parameters())


class TestMistakes:
    def test_neighbourhoods(self, make):
        model, data = make("signal")
        with pytest.raises(ValueError, match=r"`near_radius` \(None\) must be given"):
            model.to_near_far(data)
        model, data = make("image")
        with pytest.raises(ValueError, match=r"`near_size` \(8\) must be the square of an odd number"):
            model.to_near_far(data, near_size=8)

    def test_no_exact_kernels(self, make):
        model, data = make("text")
        model.to_near_far(data, near_size=5, rank=1, steps=0, distillation_steps=0)
        for convert in (lambda: model.to_near_far(data), lambda: model.to_low_rank(2, data)):
            with pytest.raises(ValueError, match="no exact kernels to start from: it has near kernels"):
                convert()


def test_shared_unknowns_of_least_squares():
    """Beside one system for all heads, with the unknowns that they share written once."""
    torch.manual_seed(0)
    heads, own, shared, outputs = 3, 4, 2, 5
    regressors = torch.randn(heads, 50, own + shared, dtype=torch.float64)
    targets = torch.randn(heads, 50, outputs, dtype=torch.float64)
    gram, right = regressors.mT @ regressors, regressors.mT @ targets
    solution = _least_squares(gram, right, [own, 1, 1], shared)
    rows = [
        torch.cat([regressors[h, :, :own] if k == h else torch.zeros(50, own) for k in range(heads)], 1)
        for h in range(heads)
    ]
    whole = torch.cat([torch.cat([row, regressors[h, :, own:]], 1) for h, row in enumerate(rows)])
    expected = torch.linalg.lstsq(whole.double(), targets.flatten(0, 1)).solution
    for h in range(heads):
        torch.testing.assert_close(solution[h, :own], expected[h * own : (h + 1) * own], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(solution[h, own:], expected[heads * own :], rtol=1e-5, atol=1e-6)
