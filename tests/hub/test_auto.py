"""Auto classes once the package is imported."""

import pytest
import torch
import transformers
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoModel, AutoProcessor

import modeling_itnet
from modeling_itnet import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor
from modeling_itnet.modalities import find_heads


def test_every_model_class_has_an_auto_class():
    """A class that is added to the package must be added to the table."""
    classes = {getattr(modeling_itnet, name) for name in modeling_itnet.__all__}
    models = {cls for cls in classes if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)}
    models.discard(modeling_itnet.ITNetPreTrainedModel)
    assert models == {modeling_itnet.ITNetModel, *(cls for cls, _, _ in find_heads())}


def test_round_trip(tmp_path, cases, make_model, make_inputs, predictions):
    for name, case in cases.items():
        model, inputs = make_model(name), make_inputs(name)
        model.save_pretrained(tmp_path / name)
        again = getattr(transformers, case.auto_class).from_pretrained(tmp_path / name)
        assert type(again) is case.model_class
        expected = predictions(model(**inputs))
        for key, value in predictions(again(**inputs)).items():
            # Not bit by bit: weights from a file lie elsewhere in memory, which changes how products are summed.
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
        assert type(AutoModel.from_pretrained(tmp_path / name)) is modeling_itnet.ITNetModel


@pytest.mark.parametrize("processor", [ITNetGraphProcessor(num_positions=3), ITNetPointCloudProcessor(num_points=9)])
def test_feature_extractors(tmp_path, make_model, processor):
    make_model("image").config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    for auto_class in (AutoFeatureExtractor, AutoProcessor):
        again = auto_class.from_pretrained(tmp_path)
        assert type(again) is type(processor)
        assert again.to_dict() == processor.to_dict()


def test_processor_of_an_image_folder_is_its_image_processor(tmp_path, make_model):
    config = make_model("image").config
    config.save_pretrained(tmp_path)
    ITNetImageProcessor.from_model_config(config).save_pretrained(tmp_path)
    for auto_class in (AutoImageProcessor, AutoProcessor):
        assert type(auto_class.from_pretrained(tmp_path)) is ITNetImageProcessor
