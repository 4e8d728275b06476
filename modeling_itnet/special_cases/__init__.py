# SPDX-License-Identifier: Apache-2.0
"""Convolution, attention and recurrence as ITNet operators: Theorems 1 to 3 of the paper as code.

``from_module(module)`` gives the operator that equals a module of torch.nn or Transformers, with the module's weights.
"""

from .attention import AttentionKernel, LinearAttention, TransformersAttentionOperator
from .convert import Conversion, convertible, from_module, register, swap_modules
from .convolution import ConvolutionKernel
from .kernel import FunctionKernel, Kernel, MLPKernel, Pairs
from .operator import IntegralOperator
from .recurrence import secant_slope, tangent_slope
from .state_space import ExponentialKernel, LinearStateSpace, SelectiveScanKernel, Trajectory, TransitionKernel
