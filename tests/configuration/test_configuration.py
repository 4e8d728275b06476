"""ITNetConfig: presets, derived values, serialisation and validation."""

import dataclasses
import doctest
import json
import re

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import PreTrainedConfig

from configuration_itnet import KERNEL_INPUTS, ITNetConfig, preset_names
from configuration_itnet.preset_files import read_preset

OWN_FIELDS = {f.name for f in dataclasses.fields(ITNetConfig)} - {f.name for f in dataclasses.fields(PreTrainedConfig)}

# Table app_configs (L, d, H, d_h, w_κ, ℓ_κ); App. regularization and Table hp_modelnet (dropout, drop path).
PAPER = {
    "itnet-pc": ((6, 128, 4, 32, 64, 2), (0.0, 0.1)),
    "itnet-small": ((12, 384, 6, 64, 128, 2), (0.1, 0.1)),
    "itnet-base": ((12, 768, 12, 64, 128, 2), (0.1, 0.2)),
    "itnet-large": ((24, 1024, 16, 64, 128, 2), (0.1, 0.3)),
}


class TestPresets:
    def test_names(self):
        assert preset_names() == tuple(sorted(["itnet-tiny", *PAPER]))

    @pytest.mark.parametrize("name", PAPER)
    def test_agrees_with_the_paper(self, name):
        config = ITNetConfig.from_preset(name)
        sizes, rates = PAPER[name]
        assert sizes == (
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.kernel_hidden_size,
            config.kernel_num_layers,
        )
        assert rates == (config.hidden_dropout_prob, config.drop_path_rate)
        assert config.embedding_dropout_prob == 0.1
        assert config.intermediate_size == 4 * config.hidden_size
        assert (config.num_fourier_features, config.fourier_scale) == (64, 10.0)

    def test_point_cloud_preset(self):
        config = ITNetConfig.from_preset("itnet-pc")
        assert (config.modality, config.position_dim, config.pooling) == ("point_cloud", 3, "mean")
        assert config.local_neighbors == 16

    def test_defaults_are_itnet_base(self):
        assert ITNetConfig() == ITNetConfig.from_preset("itnet-base")

    def test_tiny_is_deterministic_in_training_mode(self):
        config = ITNetConfig.from_preset("itnet-tiny")
        assert config.hidden_dropout_prob == config.embedding_dropout_prob == config.drop_path_rate == 0

    @pytest.mark.parametrize("name", preset_names())
    def test_files_hold_known_fields_only(self, name):
        # An unknown key would become an attribute that nothing reads.
        assert read_preset(name).keys() <= OWN_FIELDS

    def test_overrides_take_part_in_derivation(self):
        config = ITNetConfig.from_preset("itnet-base", modality="text", hidden_size=96, num_labels=5)
        assert (config.position_dim, config.intermediate_size, config.head_dim) == (1, 384, 8)
        assert config.num_labels == 5

    def test_overrides_are_validated(self):
        with pytest.raises(ValueError, match=re.escape("`hidden_size` (768) must be a multiple of")):
            ITNetConfig.from_preset("itnet-base", num_attention_heads=7)

    def test_unknown_name_lists_the_presets(self):
        with pytest.raises(ValueError, match=r"'itnet-huge'.*itnet-base, itnet-large, itnet-pc"):
            ITNetConfig.from_preset("itnet-huge")


class TestDerivedValues:
    @pytest.mark.parametrize(
        ("modality", "position_dim", "pooling"),
        [
            ("image", 2, "cls"),
            ("text", 1, "cls"),
            ("multimodal", 2, "cls"),
            ("point_cloud", 3, "mean"),
            ("graph", 8, "mean"),
        ],
    )
    def test_by_modality(self, modality, position_dim, pooling):
        config = ITNetConfig(modality=modality)
        assert (config.position_dim, config.pooling) == (position_dim, pooling)

    def test_position_dim_is_free_for_graphs_and_signals(self):
        assert ITNetConfig(modality="graph", position_dim=4).position_dim == 4
        assert ITNetConfig(modality="signal", position_dim=5).position_dim == 5

    def test_causal_models_do_not_pool_the_first_token(self):
        assert ITNetConfig(modality="text", is_causal=True).pooling == "mean"

    def test_explicit_values_win(self):
        config = ITNetConfig(intermediate_size=10, pooling="mean")
        assert (config.intermediate_size, config.pooling) == (10, "mean")

    def test_kernel_inputs_take_the_canonical_order(self):
        assert ITNetConfig(kernel_inputs=tuple(reversed(KERNEL_INPUTS))).kernel_inputs == KERNEL_INPUTS
        assert ITNetConfig(kernel_inputs=["u_x*u_y", "x"]).kernel_inputs == ("x", "u_x*u_y")

    @pytest.mark.parametrize(
        ("kwargs", "size"),
        [
            ({}, 6 * 64 + 1 + 3 * 64),  # Eq. kernel_input
            ({"num_fourier_features": 0}, 3 * 2 + 1 + 3 * 64),  # Eq. kernel_input_raw
            ({"kernel_inputs": ()}, 0),
            ({"kernel_inputs": ("x-y", "distance")}, 2 * 64 + 1),
            ({"kernel_inputs": ("u_x", "u_y"), "num_attention_heads": 24}, 2 * 32),
        ],
    )
    def test_kernel_input_size(self, kwargs, size):
        assert ITNetConfig(**kwargs).kernel_input_size == size

    def test_kernel_group_sizes_keep_the_order_of_the_columns(self):
        config = ITNetConfig(kernel_inputs=["u_y", "distance", "y"], num_fourier_features=5)
        assert list(config.kernel_group_sizes.items()) == [("y", 10), ("distance", 1), ("u_y", 64)]

    def test_image_and_patch_shapes(self):
        config = ITNetConfig(image_size=[64, 32], patch_size=[8, 16])
        assert (config.image_shape, config.patch_sizes) == ((64, 32), (8, 16))
        assert (ITNetConfig().image_shape, ITNetConfig().patch_sizes) == ((224, 224), (16,))


# Every field that may hold a sequence, a None or an integer where a float is usual.
UNUSUAL = [
    {"image_size": (64, 32), "patch_size": (8, 16)},
    {"image_size": [64, 32], "patch_size": [8, 16]},
    {"kernel_inputs": ["distance", "x"]},
    {"kernel_inputs": ()},
    {"modality": "multimodal", "measure": [3, 1.0]},
    {"modality": "text", "eos_token_id": [1, 2], "pad_token_id": None, "classifier_dropout": 0.3},
    {"modality": "signal", "position_dim": 4, "fourier_scale": 1, "is_causal": True},
]


class TestSerialisation:
    @pytest.mark.parametrize("kwargs", UNUSUAL)
    def test_json_round_trip(self, kwargs):
        config = ITNetConfig(**kwargs)
        reloaded = ITNetConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert {name: getattr(reloaded, name) for name in OWN_FIELDS} == {
            name: getattr(config, name) for name in OWN_FIELDS
        }

    @pytest.mark.parametrize("kwargs", UNUSUAL)
    def test_disk_round_trip(self, kwargs, tmp_path):
        config = ITNetConfig(**kwargs)
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_type"] == "itnet"
        assert ITNetConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()

    def test_list_and_tuple_make_the_same_configuration(self):
        assert ITNetConfig(patch_size=[8, 16]) == ITNetConfig(patch_size=(8, 16))

    def test_loading_overrides_are_normalised_and_validated(self, tmp_path):
        ITNetConfig().save_pretrained(tmp_path)
        config, unused = ITNetConfig.from_pretrained(
            tmp_path, kernel_inputs=["y", "x"], num_labels=7, other=1, return_unused_kwargs=True
        )
        assert (config.kernel_inputs, config.num_labels, unused) == (("x", "y"), 7, {"other": 1})
        with pytest.raises(ValueError, match=re.escape("`drop_path_rate` (1.0)")):
            ITNetConfig.from_pretrained(tmp_path, drop_path_rate=1.0)

    def test_saving_validates_what_was_assigned(self, tmp_path):
        config = ITNetConfig()
        config.num_attention_heads = 7
        with pytest.raises(StrictDataclassClassValidationError, match="`num_attention_heads` \\(7\\)"):
            config.save_pretrained(tmp_path)


# Arguments, and the message in full.
BROKEN = [
    ({"hidden_size": 100}, "`hidden_size` (100) must be a multiple of `num_attention_heads` (12)"),
    ({"kernel_num_layers": 4}, "`kernel_num_layers` (4) must be 2 or 3"),
    ({"proposal_epsilon": 0}, "`proposal_epsilon` (0) must be in (0, 1]"),
    ({"proposal_epsilon": 1.5}, "`proposal_epsilon` (1.5) must be in (0, 1]"),
    (
        {"kernel_inputs": ["x", "z", "u"]},
        "`kernel_inputs` has unknown groups ['z', 'u']; allowed are "
        "['x', 'y', 'x-y', 'distance', 'u_x', 'u_y', 'u_x*u_y']",
    ),
    ({"kernel_inputs": ["y", "x", "y"]}, "`kernel_inputs` (['y', 'x', 'y']) names ['y'] more than once"),
    (
        {"image_size": 225},
        "`image_size` (225) must be a multiple of `patch_size` (16) along each side, for every patch size",
    ),
    (
        {"image_size": [32, 40], "patch_size": [8, 16]},
        "`image_size` ((32, 40)) must be a multiple of `patch_size` ((8, 16)) along each side, for every patch size",
    ),
    ({"image_size": [32, 32, 3]}, "`image_size` ((32, 32, 3)) must be one number or (height, width)"),
    ({"image_size": 0}, "`image_size` (0) must be positive"),
    ({"patch_size": ()}, "`patch_size` (()) must hold at least one patch size"),
    ({"patch_size": [8, 0]}, "`patch_size` ((8, 0)) must be positive"),
    ({"modality": "signal"}, "`position_dim` (None) must be given for `modality` ('signal')"),
    ({"position_dim": 3}, "`position_dim` (3) must be 2 for `modality` ('image')"),
    ({"modality": "text", "position_dim": 2}, "`position_dim` (2) must be 1 for `modality` ('text')"),
    ({"modality": "multimodal", "position_dim": 3}, "`position_dim` (3) must be 2 for `modality` ('multimodal')"),
    ({"modality": "point_cloud", "position_dim": 2}, "`position_dim` (2) must be 3 for `modality` ('point_cloud')"),
    (
        {"modality": "graph", "pooling": "cls"},
        "`pooling` ('cls') needs a [CLS] position, which `modality` ('graph') does not have; "
        "only image, text, multimodal do",
    ),
    (
        {"is_causal": True},
        "`is_causal` (True) needs ordered positions, which `modality` ('image') does not have; only text, signal do",
    ),
    (
        {"modality": "text", "measure": "balanced"},
        "`measure` ('balanced') weighs modalities against each other, so `modality` ('text') must be 'multimodal'; "
        "a single modality takes 'uniform'",
    ),
    (
        {"measure": [1.0, 3.0]},
        "`measure` ((1.0, 3.0)) weighs modalities against each other, so `modality` ('image') must be 'multimodal'; "
        "a single modality takes 'uniform'",
    ),
    (
        {"modality": "multimodal", "measure": [1.0, 0.0]},
        "`measure` ((1.0, 0.0)) must hold one positive weight for each of image, text",
    ),
    (
        {"modality": "multimodal", "measure": [1.0]},
        "`measure` ((1.0,)) must hold one positive weight for each of image, text",
    ),
]
NOT_POSITIVE = [
    ("hidden_size", 0),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("intermediate_size", -1),
    ("position_dim", 0),
    ("fourier_scale", 0.0),
    ("fourier_scale", float("nan")),
    ("fourier_scale", float("inf")),
    ("kernel_hidden_size", 0),
    ("num_samples", 0),
    ("rank", 0),
    ("num_channels", 0),
    ("vocab_size", 0),
    ("max_position_embeddings", 0),
    ("type_vocab_size", 0),
    ("node_feature_size", 0),
    ("layer_norm_eps", 0.0),
    ("initializer_range", -0.02),
]
NEGATIVE = [
    ("num_fourier_features", -1),
    ("fourier_seed", -1),
    ("kernel_init_scale", -1e-3),
    ("exact_max_positions", -1),
    ("proposal_loss_weight", -0.1),
    ("point_feature_size", -1),
    ("local_neighbors", -1),
    ("num_node_types", -1),
    ("edge_gate_init", -1.0),
]
NO_PROBABILITY = [
    (name, value)
    for name in ("hidden_dropout_prob", "embedding_dropout_prob", "drop_path_rate", "classifier_dropout")
    for value in (-0.1, 1)
]
BROKEN += [({name: value}, f"`{name}` ({value}) must be positive and finite") for name, value in NOT_POSITIVE]
BROKEN += [({name: value}, f"`{name}` ({value}) must be zero or more, and finite") for name, value in NEGATIVE]
BROKEN += [({name: value}, f"`{name}` ({value}) must be in [0, 1)") for name, value in NO_PROBABILITY]


class TestValidation:
    @pytest.mark.parametrize(("kwargs", "message"), BROKEN, ids=lambda part: str(part)[:60])
    def test_message(self, kwargs, message):
        with pytest.raises(ValueError) as error:
            ITNetConfig(**kwargs)
        assert str(error.value) == message

    def test_unknown_activation_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"`hidden_act` \('gelo'\) must be one of \[.*'gelu'"):
            ITNetConfig(hidden_act="gelo")

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"rank": 65},
            {"kernel_num_layers": 3},
            {"proposal_epsilon": 1},
            {"exact_max_positions": 0},
            {"num_fourier_features": 0},
            {"local_neighbors": 0},
            {"kernel_init_scale": 0},
            {"modality": "multimodal", "measure": "balanced"},
            {"modality": "text", "is_causal": True},
        ],
        ids=str,
    )
    def test_values_at_the_edge_of_a_range_pass(self, kwargs):
        config = ITNetConfig(**kwargs)
        assert {name: getattr(config, name) for name in kwargs} == kwargs

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("hidden_size", 768.0),
            ("is_causal", 1),
            ("modality", "audio"),
            ("kernel_output_sharing", "none"),
            ("integration_mode", "fast"),
            ("approximate_mode", "exact"),
            ("backend", "cuda"),
            ("point_embedding", "linear"),
            ("pooling", "sum"),
            ("measure", "random"),
        ],
    )
    def test_wrong_types_and_unlisted_strings(self, name, value):
        with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}'"):
            ITNetConfig(**{name: value})


class TestNames:
    @pytest.mark.parametrize(("name", "nearest"), [("rnk", "rank"), ("hiden_size", "hidden_size"), ("foo", "")])
    def test_unknown_argument(self, name, nearest):
        with pytest.raises(ValueError, match=rf"`{name}` is no argument of ITNetConfig; the nearest .* `{nearest}"):
            ITNetConfig(**{name: 3})
        with pytest.raises(ValueError, match=f"`{name}` is no argument"):
            ITNetConfig.from_preset("itnet-tiny", **{name: 3})

    def test_what_transformers_gives_to_any_configuration(self):
        common = {
            "num_labels": 4,
            "output_attentions": False,
            "torch_dtype": "float32",
            "name_or_path": "here",
            "auto_map": {"AutoConfig": "a.B"},
            "attn_implementation": "eager",
            "_commit_hash": None,
            "temperature": 0.5,
            "architectures": ["ITNetModel"],
        }
        assert ITNetConfig(**common).num_labels == 4
        config = ITNetConfig(modality="text", **common)
        assert ITNetConfig(**config.to_dict()).to_dict() == config.to_dict()

    def test_files_of_other_versions(self, tmp_path):
        """A key that nobody here knows does not stop a checkpoint from loading."""
        ITNetConfig(rank=3).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {"pruned_heads": {}, "a_field_of_2030": 5}
        path.write_text(json.dumps(values), encoding="utf-8")
        config, unused = ITNetConfig.from_pretrained(tmp_path, num_samples=7, strange=1, return_unused_kwargs=True)
        assert (config.rank, config.num_samples, config.a_field_of_2030, unused) == (3, 7, 5, {"strange": 1})
        config.save_pretrained(tmp_path)
        assert ITNetConfig.from_pretrained(tmp_path) == config

    @pytest.mark.parametrize("content", [None, "{}"])
    def test_no_configuration_file(self, tmp_path, content):
        if content is not None:
            (tmp_path / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(OSError, match=r"config\.json"):
            ITNetConfig.from_pretrained(tmp_path)


class TestLabels:
    @pytest.mark.parametrize("count", [0, -1, "3", 2.5, True])
    def test_bad_counts(self, count):
        for make in (lambda: ITNetConfig(num_labels=count), lambda: setattr(ITNetConfig(), "num_labels", count)):
            with pytest.raises(ValueError, match=r"`num_labels` \(.*\) must be a whole number, at least 1"):
                make()

    def test_no_label(self):
        with pytest.raises(ValueError, match=r"`num_labels` \(0\)"):
            ITNetConfig(id2label={})

    def test_two_labels_by_default_or_by_choice(self, tmp_path):
        """Transformers fills in two labels; whoever asks for two is told from whoever does not care."""
        chosen, default = ITNetConfig(num_labels=2), ITNetConfig()
        assigned = ITNetConfig()
        assigned.num_labels = 2
        for config, is_default in ((chosen, False), (assigned, False), (default, True)):
            config.save_pretrained(tmp_path)
            again = [ITNetConfig.from_pretrained(tmp_path), ITNetConfig.from_dict(config.to_dict())]
            assert all(each.labels_are_default == is_default for each in [config, *again])
            assert all(each.to_dict() == config.to_dict() for each in again)
        assert ITNetConfig(id2label={0: "no", 1: "yes"}).labels_are_default is False


class TestDocstring:
    def test_documents_exactly_the_fields(self):
        assert re.findall(r"^ {8}(\w+): ", ITNetConfig.__doc__, re.MULTILINE) == [
            field.name for field in dataclasses.fields(ITNetConfig) if field.name in OWN_FIELDS
        ]

    def test_example_runs(self):
        parsed = doctest.DocTestParser().get_doctest(ITNetConfig.__doc__, {}, "ITNetConfig", None, None)
        assert parsed.examples
        assert doctest.DocTestRunner().run(parsed).failed == 0
