"""Models to compare with, of the layers, width, heads and dropout of an ITNetConfig.

Those of Transformers come as functions from an ITNetConfig to their own configuration; the rest are small modules that
take an ITNetConfig and the same batches as ITNet, and return a loss and logits as Transformers' models do.
"""

from .convnet import ConvNet
from .egnn import EGNN
from .gin import GIN
from .interaction_network import InteractionNetwork
from .pixel_mlp import PixelMLP
from .point_net import PointNet
from .point_transformer import PointTransformer
from .signal_attention import SignalLinearAttention, Transolver
from .signal_fno import SignalFNO
from .signal_gno import SignalGNO, SignalPointTransformer
from .signal_peer import PointwiseMLP, SignalPointNet
from .signal_transformer import SignalTransformer
from .transformers_configs import bert_config, vilt_config, vit_config

__all__ = [
    "EGNN",
    "GIN",
    "ConvNet",
    "InteractionNetwork",
    "PixelMLP",
    "PointNet",
    "PointTransformer",
    "PointwiseMLP",
    "SignalFNO",
    "SignalGNO",
    "SignalLinearAttention",
    "SignalPointNet",
    "SignalPointTransformer",
    "SignalTransformer",
    "Transolver",
    "bert_config",
    "vilt_config",
    "vit_config",
]
