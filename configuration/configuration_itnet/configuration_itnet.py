# SPDX-License-Identifier: Apache-2.0
"""The configuration of ITNet models."""

from dataclasses import fields
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict, validated_field
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from itnet_kernels.weights import KERNEL_INPUTS, kernel_group_sizes

from .modalities import find_modality, task_settings
from .rules import check_config, check_kernel_inputs, check_names, check_num_labels

logger = logging.get_logger(__name__)
_GENERATION_DEFAULTS = GenerationConfig()
# What any model's configuration may hold in Transformers beside its fields.
_COMMON_ARGUMENTS = (
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "tie_last_hidden_states",
    "torch_dtype",
)
_UNNAMED = {0: "LABEL_0", 1: "LABEL_1"}  # what Transformers fills in when nobody names or counts the labels


@strict
class ITNetConfig(PreTrainedConfig):
    r"""
    Configuration of an ITNet: a stack of learnable integral operators over a signal `u` on a domain of positions `x`.

    One head of one layer computes, for every query position `x_i` of `n`,

        out_i = Σ_j ω_j K_ij u_j,   K_ij = reshape(W2 GELU(W1 z_ij + b1) + b2)   (d_h × d_h, d_h = hidden_size / heads)

    where `ω` is the measure (it sums to 1) and `z_ij` the kernel input: positions and features of both ends. A layer
    is `W^O concat(heads) + W_θ u`, then a feed-forward network, both pre-norm with a residual connection.

    Types and defaults stand in the signature. The defaults are those of `itnet-base` on images;
    [`ITNetConfig.from_preset`] loads the other sizes. A value out of its range, or two that do not fit together, is a
    `ValueError`; a value of the wrong type, or a string that is not among the listed ones, is the
    `StrictDataclassFieldValidationError` that Transformers uses everywhere.

    Args:
        modality: Which encoder turns the inputs into a signal: `"image"`, `"text"`, `"multimodal"` (image and text on
            one joint domain), `"point_cloud"`, `"graph"`, `"signal"` (features and positions are given directly), or
            one that `modeling_itnet.register_modality` has added.

    Width and depth:
        hidden_size: Features per position, `d`; a multiple of the heads.
        num_hidden_layers: Number of layers, `L`. The two output projections of a layer start scaled by `1/√(2L)`.
        num_attention_heads: Number of heads, `H`: independent kernels, each on its own slice of `d_h = d/H` features.
            For a fixed `d`, kernels have `w_κ d²/H` output weights in all.
        intermediate_size: Hidden units of the feed-forward network. `None` becomes `4 d`.
        hidden_act: Activation of the feed-forward network, by its name in Transformers. Kernels always have the exact
            (erf) GELU.

    Positions:
        position_dim: Coordinates per position, `s`. `None` becomes 2 for images and multimodal input, 1 for text, 3
            for point clouds and 8 for graphs (Laplacian eigenvectors). Only graphs may have another number, and a
            `"signal"` must say its own.
        num_fourier_features: Frequencies `L_f` of the map `γ(x) = [sin(2πBx); cos(2πBx)]` with a frozen `B [L_f, s]`.
            0 turns the map off: `γ(x) = x`.
        fourier_scale: Standard deviation of the entries of `B`, in cycles per unit of length. Kernels vary faster with
            position if it is larger.
        fourier_seed: Seed that draws `B`, which encoder and layers share.

    Kernel:
        kernel_hidden_size: Hidden units of the kernel MLP, `w_κ`, on which the cost of a pair depends linearly.
        kernel_num_layers: Linear layers of the kernel MLP: 2, or 3, at more cost.
        kernel_init_scale: `ε` of the initial `W2 = ε N(0, 1/w_κ)`: how far the kernel starts from the identity. At 0,
            a head starts as the mean of the signal.
        kernel_position_scale: Factor of the initial weights in `W1` by which the kernel sees positions. With 10, say,
            its hidden units tell the places of a short window apart from the start.
        kernel_bias_scale: Standard deviation of the initial `b1`. At 0, as in the paper, all hidden units bend where
            their input is 0; otherwise each bends elsewhere, as a function of the distance alone needs.
        kernel_directions: Let the kernel be affine in the displacement beside what its MLP makes of it:
            `K = K⁰ + Σ_k (x_k − y_k) Kᵏ` with a `W2` and a `b2` for each of the `s` coordinates, as the force of a
            pair has a strength and a direction. Sums then work on heads of `(1 + s) d_h` numbers, in float32.
        kernel_inputs: The groups that the kernel sees, of `"x"`, `"y"`, `"x-y"`, `"distance"`, `"u_x"`, `"u_y"`,
            `"u_x*u_y"`, where `x` is the query end and `y` the key end. They are stored in this order. Without any,
            the kernel is constant.
        kernel_output_sharing: `"per_head"`: `W2 [H, d_h², w_κ]`, `b2 [H, d_h²]`. `"shared"`: all heads of a layer
            share one `W2` and `b2`.
        kernel_input_sharing: `"shared"`: all heads of a layer share `W1` and `b1`. `"per_head"`: each has its own, so
            that a narrow kernel still has `H w_κ` hidden functions; the heads then share no work on positions.

    Integration:
        integration_mode: How the sum over `j` is taken. `"exact"`: over all `n` keys, `O(n²)`. `"near_far"`: over a
            neighbourhood with the full kernel and over all keys with a low-rank one, `O(n)`. `"low_rank"`: over all
            keys with a low-rank kernel alone, `O(n)`. `"monte_carlo"`: over `num_samples` keys per query, `O(n)`,
            which a learned proposal draws from `n²` small scores. `"auto"`: exactly up to `exact_max_positions`, by
            `approximate_mode` above, for every sample by its own number of real positions, and for a causal model by
            `max_position_embeddings`. A model owns the parameters of its modes only.
        approximate_mode: What `"auto"` uses above `exact_max_positions`. `None` is Monte Carlo integration without
            parameters of its own: samples follow the measure in training, and anchors are used at evaluation.
        exact_max_positions: Most real positions that `"auto"` integrates exactly. `None` is 512,
            whatever the device.
        near_size: Positions in the window of `"near_far"`, in text and on grids: an odd number in text, in the past
            alone for a causal model; the square of an odd number on images.
        near_radius: Radius of the neighbourhood of `"near_far"` where positions lie anywhere, in units of the
            positions. `None` is 0.25 for point clouds; signals have no default. The nodes of a graph are near to those
            that an edge joins them to.
        num_samples: Keys sampled per query, `M`, in training with Monte Carlo integration, with replacement; number of
            anchors at evaluation. The variance falls as `1/M`; at evaluation, `M ≥ n` is exact.
        rank: Rank of the low-rank kernel, per head: how many numbers a head keeps of all keys, or with
            `factor_form="matrix"` how many vectors. It may exceed `d_h`: it is the rank of a map between signals.
        factor_form: The low-rank kernel. `"vector"`: `K_ij = Σ_r Φ_i[r] Ψ_j[r]ᵀ`. `"matrix"`:
            `K_ij = Σ_r f_i[r] g_j[r] M_r` with learned matrices `M_r`, which contains linear attention. A causal
            operator pays `rank d_h²` per position for it.
        factor_decay: Let term `r` of the low-rank kernel decay as `exp(-λ_r (x_i − x_j))`, with learned rates
            `λ_r ≥ 0` per head. Causal models on one coordinate only; their positions must not fall.
        output_gate: Multiply the integral of a layer, feature by feature, with `SiLU(W_g u(x))` before `W^O`. The gate
            depends on the query alone, so that this is an integral with another kernel of the same arguments. It is
            for language models, which it makes learn faster.
        factor_hidden_size: Hidden units of each of the MLPs `Φ` and `Ψ`, or `f` and `g`.
        proposal_size: Length of the vectors by which a proposal scores pairs.
        proposal_loss_weight: `λ` of `loss + λ proposal_loss`, by which heads train.
        proposal_epsilon: Share of the measure in the proposal, in (0, 1]. It bounds importance weights by `1/ε`; at 1,
            samples follow the measure, and there is no proposal.
        measure: Weights `ω` of the positions. `"uniform"`: `1/n` each. For multimodal input only, `"balanced"` gives
            image and text the same total weight, and `[a, b]` gives the image `a/(a+b)` and the text `b/(a+b)`.
        is_causal: Each query integrates over keys up to itself, with `ω` normalised over these. Text and signals only.
        backend: Implementation of the exact operator; `"auto"` is Triton on GPUs, and tiled elsewhere. All agree up to
            rounding.

    Images:
        image_size: Pixels along each side, or `(height, width)`; multiples of every patch size.
        patch_size: Pixels along each side of a square patch. A sequence gives one grid of patches per entry, all on
            one joint domain: `(8, 16)` makes 784 + 196 positions of a 224-pixel image.
        num_channels: Channels per pixel.

    Text:
        vocab_size: Number of token ids.
        max_position_embeddings: Longest text in training, in tokens, to which tokenizers cut texts. Longer ones run
            too, as nothing is learned per position: token `k` (from 1) of `n` sits at `k / n`. In a causal model it
            sits at `k / max_position_embeddings`, and above 1 the model extrapolates (a warning says so, once).
        position_init_scale: Factor of the initial `W_pos`, by which `γ(x)` enters the features of a token. At 0 they
            start from the token alone, so that a kernel of `x - y` begins invariant to translations.
        type_vocab_size: Number of segment ids (`token_type_ids`).
        pad_token_id: Token id of padding, which has measure 0.
        bos_token_id: Token id that starts a generated text.
        eos_token_id: Token id, or ids, that end a generated text.
        tie_word_embeddings: Language-model heads reuse the token embeddings as output weights.
        use_cache: Causal models of texts return a cache at evaluation, [`ITNetCache`], so that decoding computes one
            query per step. It holds the features of all tokens if the mode is exact, those of the last ones and a
            state of fixed size in near and far or low-rank integration.

    Point clouds:
        point_feature_size: Features per point beside coordinates (3 for normals).
        point_embedding: What the encoder embeds: `"fourier"` features of the coordinates, or the `"raw"` coordinates.
        local_neighbors: Nearest points pooled around each point; 0 turns it off.

    Graphs:
        node_feature_size: Real features per node.
        num_node_types: If positive, nodes have one of as many types, no features.
        edge_gate: Multiply the kernel by `1[edge] + λ`, with a learned `λ ≥ 0`. `False` ignores the edges.
        edge_gate_init: Initial `λ`. The larger, the less edges matter. 0 integrates over edges only, and stays 0: `λ`
            is learned as a square, whose slope vanishes there.

    Signals:
        signal_feature_size: Features per position of `signal_values`, which a linear layer lifts to `hidden_size`.
            With 0 there is no such layer, and signals come as `inputs_embeds`.
        signal_loss: Loss of [`ITNetForSignalRegression`], averaged over samples: `"mse"`, the mean squared error, or
            `"relative_l2"`, `‖p − y‖ / ‖y‖` over all points of a sample.

    Heads, regularisation, initialisation:
        pooling: What classifiers read: `"cls"`, the features at the [CLS] position (images, text, multimodal),
            `"mean"`, the mean over real positions, or `"max"`, the maximum of each feature over them. `None` becomes
            `"cls"` where there is a [CLS] that sees the whole input, and `"mean"` elsewhere.
        hidden_dropout_prob: Dropout after the operator and in the feed-forward network.
        embedding_dropout_prob: Dropout after the encoder.
        drop_path_rate: Probability `p` of skipping a block of the last layer for a sample (stochastic depth). Layer
            `l` of `L`, counted from 1, uses `l p / L`.
        classifier_dropout: Dropout before a classifier. `None` means `hidden_dropout_prob`.
        layer_norm_eps: Added to the variance in layer normalisation.
        initializer_range: Standard deviation of the normal initial values of embeddings, of `W1` and of classifiers.

    Example:

    ```python
    >>> from configuration_itnet import ITNetConfig

    >>> config = ITNetConfig()  # itnet-base on images
    >>> config.head_dim, config.kernel_input_size
    (64, 577)

    >>> config = ITNetConfig.from_preset("itnet-small", modality="text", kernel_inputs=["distance", "x-y"])
    >>> config.kernel_inputs, config.kernel_input_size
    (('x-y', 'distance'), 129)

    >>> ITNetConfig(hidden_size=100)
    Traceback (most recent call last):
    ValueError: `hidden_size` (100) must be a multiple of `num_attention_heads` (12)

    ```
    """

    model_type: ClassVar[str] = "itnet"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    # Tensor parallelism: the feed-forward network by hidden units, the two projections by input features. Kernels are
    # on every rank.
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.operator.output": "rowwise_rep",
        "layers.*.operator.residual": "rowwise_rep",
        "layers.*.feed_forward.expand": "colwise",
        "layers.*.feed_forward.contract": "rowwise",
    }

    modality: str = validated_field(find_modality, default="image")

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu"

    position_dim: int | None = None
    num_fourier_features: int = 64
    fourier_scale: float | int = 10.0
    fourier_seed: int = 0

    kernel_hidden_size: int = 128
    kernel_num_layers: int = 2
    kernel_init_scale: float | int = 1e-3
    kernel_position_scale: float | int = 1.0
    kernel_bias_scale: float | int = 0.0
    kernel_directions: bool = False
    kernel_inputs: list[str] | tuple[str, ...] = KERNEL_INPUTS
    kernel_output_sharing: Literal["per_head", "shared"] = "per_head"
    kernel_input_sharing: Literal["shared", "per_head"] = "shared"

    integration_mode: Literal["exact", "near_far", "low_rank", "monte_carlo", "auto"] = "auto"
    approximate_mode: Literal["near_far", "low_rank", "monte_carlo"] | None = None
    exact_max_positions: int | None = None
    near_size: int = 49
    near_radius: float | int | None = None
    num_samples: int = 128
    rank: int = 8
    factor_form: Literal["vector", "matrix"] = "vector"
    factor_decay: bool = False
    output_gate: bool = False
    factor_hidden_size: int = 32
    proposal_size: int = 16
    proposal_loss_weight: float | int = 0.1
    proposal_epsilon: float | int = 0.01
    measure: Literal["uniform", "balanced"] | list[float | int] | tuple[float | int, ...] = "uniform"
    is_causal: bool = False
    backend: Literal["auto", "reference", "tiled", "triton"] = "auto"

    image_size: int | list[int] | tuple[int, ...] = 224
    patch_size: int | list[int] | tuple[int, ...] = 16
    num_channels: int = 3

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    position_init_scale: float | int = 1.0
    type_vocab_size: int = 2
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True

    point_feature_size: int = 0
    point_embedding: Literal["fourier", "raw"] = "fourier"
    local_neighbors: int = 16

    node_feature_size: int = 1
    num_node_types: int = 0
    edge_gate: bool = True
    edge_gate_init: float | int = 1.0

    signal_feature_size: int = 0
    signal_loss: Literal["mse", "relative_l2"] = "mse"

    pooling: Literal["cls", "mean", "max"] | None = None
    hidden_dropout_prob: float | int = 0.1
    embedding_dropout_prob: float | int = 0.1
    drop_path_rate: float | int = 0.2
    classifier_dropout: float | int | None = None
    layer_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02

    def __post_init__(self, **kwargs):
        check_names([name for name in kwargs if not _is_common(name)], _own_fields(type(self)), type(self).__name__)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        row = find_modality(self.modality)
        if self.position_dim is None:
            self.position_dim = row.position_dim
        if self.near_radius is None:
            self.near_radius = row.near_radius
        if self.pooling is None:
            self.pooling = "cls" if row.has_cls and not self.is_causal else "mean"
        check_kernel_inputs(self.kernel_inputs)  # before sorting, which would hide unknown and repeated names
        self.kernel_inputs = tuple(group for group in KERNEL_INPUTS if group in self.kernel_inputs)
        # JSON knows no tuples: one form for both keeps a configuration equal to its reloaded self.
        for name in ("image_size", "patch_size", "measure"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, tuple(getattr(self, name)))
        super().__post_init__(**kwargs)
        self._two_labels_wanted = kwargs.get("num_labels") is not None and self.id2label == _UNNAMED
        # `@strict` runs this again, but wraps what it raises in an exception that is no ValueError.
        self.validate_architecture()

    def validate_architecture(self):
        """Checks ranges and combinations of fields. `@strict` calls it at construction and before saving."""
        check_config(self)

    @classmethod
    def from_preset(cls, name: str, task: str | None = None, **overrides) -> "ITNetConfig":
        """
        Returns the configuration of a named model size, with `overrides` in place of the preset's own values.

        Args:
            name (`str`): `"itnet-tiny"`, `"itnet-pc"`, `"itnet-small"`, `"itnet-base"` or `"itnet-large"`.
            task (`str`, *optional*): What the model is for, such as `"causal-lm"` or the Hub's `"text-generation"`:
                the configuration gets the modality and the settings of that task.
            overrides: Any argument of [`ITNetConfig`], such as `modality="text"` or `num_labels=10`.
        """
        try:
            from configuration_itnet.preset_files import read_preset
        except ImportError as error:
            raise ImportError("Presets ship with the itnet package, not with exported code") from error
        values = {**read_preset(name), **({} if task is None else task_settings(task)), **overrides}
        return cls(**{name: value(values) if callable(value) else value for name, value in values.items()})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "ITNetConfig":
        """
        Does what the base class does, except that keyword arguments naming fields of this class take part in
        construction. The base class assigns them afterwards, where nothing derives from them and nothing validates
        them. The configuration of another model is an error, not a warning. Entries that this version does not know,
        as another version of Transformers may have written, become attributes without a meaning here.
        """
        if config_dict.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(
                f"the configuration is that of a model of type {config_dict['model_type']!r}, not {cls.model_type!r}"
            )
        own = _own_fields(cls) - {field.name for field in fields(PreTrainedConfig)}
        given = {name: kwargs.pop(name) for name in own & kwargs.keys()}
        strange = {name for name in config_dict if name not in _own_fields(cls) and not _is_common(name)}
        known = {name: value for name, value in config_dict.items() if name not in strange}
        if "custom_pipelines" in known:
            from transformers.pipelines import PIPELINE_REGISTRY  # late: it imports the world

            # Pipelines that the package has registered need no code from the folder.
            registered = PIPELINE_REGISTRY.get_supported_tasks()
            known["custom_pipelines"] = {t: i for t, i in known["custom_pipelines"].items() if t not in registered}
        result = super().from_dict({**known, **given}, **kwargs)
        for name in sorted(strange):
            logger.warning_once(f"`{name}` of the configuration is unknown to {cls.__name__}, and has no effect.")
            setattr(result[0] if isinstance(result, tuple) else result, name, config_dict[name])
        return result

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Does what the base class does, but a missing or empty file is an error, not a default configuration."""
        values, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not values.keys() - {"_commit_hash", "_name_or_path"}:
            raise OSError(
                f"{str(pretrained_model_name_or_path)!r} has no `config.json`, or an empty one: nothing says what "
                f"{cls.__name__} the weights belong to. `save_pretrained` writes that file"
            )
        return values, kwargs

    def to_dict(self) -> dict[str, Any]:
        """Does what the base class does, and tells two labels that were asked for from the two default ones."""
        values = super().to_dict()
        if values.pop("_two_labels_wanted", False) and self.id2label == _UNNAMED:
            values["num_labels"] = len(_UNNAMED)
        return values

    @property
    def num_labels(self) -> int | None:
        """Number of labels: the length of `id2label`."""
        return None if self.id2label is None else len(self.id2label)

    @num_labels.setter
    def num_labels(self, count: int) -> None:
        check_num_labels(count)
        PreTrainedConfig.num_labels.fset(self, count)
        self._two_labels_wanted = self.id2label == _UNNAMED

    @property
    def labels_are_default(self) -> bool:
        """Whether nobody has named or counted the labels. Transformers fills in two of them then."""
        return self.id2label == _UNNAMED and not self._two_labels_wanted

    @property
    def head_dim(self) -> int:
        """Features per head, `d_h`."""
        return self.hidden_size // self.num_attention_heads

    @property
    def integration_modes(self) -> tuple[str, ...]:
        """The modes that this model can meet: one, or for `"auto"` the exact mode and the approximate one."""
        if self.integration_mode != "auto":
            return (self.integration_mode,)
        return ("exact", self.approximate_mode or "monte_carlo")

    @property
    def has_proposal(self) -> bool:
        """Whether Monte Carlo integration learns where to sample. Otherwise it samples from the measure."""
        chosen = self.approximate_mode if self.integration_mode == "auto" else self.integration_mode
        return chosen == "monte_carlo" and self.proposal_epsilon < 1

    @property
    def position_size(self) -> int:
        """Length of `γ(x)`."""
        return 2 * self.num_fourier_features or self.position_dim

    @property
    def image_shape(self) -> tuple[int, int]:
        """`(height, width)` in pixels."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)

    @property
    def patch_sizes(self) -> tuple[int, ...]:
        """Patch side in pixels, one entry per grid."""
        return (self.patch_size,) if isinstance(self.patch_size, int) else tuple(self.patch_size)

    @property
    def kernel_group_sizes(self) -> dict[str, int]:
        """Columns of `W1` that each kernel input group takes, in their order."""
        sizes = kernel_group_sizes(self.num_fourier_features, self.position_dim, self.head_dim)
        return {group: sizes[group] for group in self.kernel_inputs}

    @property
    def kernel_input_size(self) -> int:
        """Length of the kernel input `z_ij`; `6 L_f + 1 + 3 d_h` with all groups."""
        return sum(self.kernel_group_sizes.values())


def _own_fields(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}


def _is_common(name: str) -> bool:
    """Says whether ``name`` is no field, but something that Transformers gives to or drops from any configuration."""
    return name.startswith("_") or name in _COMMON_ARGUMENTS or hasattr(_GENERATION_DEFAULTS, name)


__all__ = ["ITNetConfig"]
