"""One plain Transformer decoder, GPT-2- or Llama-shaped by its configuration.

The model knows nothing of other devices. Parallel modules take it and return it transformed; all
they need to know of a parameter is written on the module that holds it (`ParameterSpec`).

Read `config` (shapes), `decoder` (the model), `counting` (parameters and FLOPs), `randomness`
(initial values and dropout by position), `generation` (KV cache and sampling), in this order.
"""

from course_lib.model.config import ModelConfig
from course_lib.model.counting import count_flops, count_parameters
from course_lib.model.decoder import MLP, Attention, Block, Transformer, attend, build, rotate
from course_lib.model.generation import KVCache, generate
from course_lib.model.randomness import Noise, ParameterSpec, declare, initial_rows, parameter_spec

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "KVCache",
    "ModelConfig",
    "Noise",
    "ParameterSpec",
    "Transformer",
    "attend",
    "build",
    "count_flops",
    "count_parameters",
    "declare",
    "generate",
    "initial_rows",
    "parameter_spec",
    "rotate",
]
