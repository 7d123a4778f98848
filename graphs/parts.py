"""The small pieces that every part of the decoder is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ortolan.graphs.builder import FLOAT, GraphBuilder, Tensor
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.options import GraphOptions


@dataclass(frozen=True, slots=True)
class Parts:
    """A graph under construction with the model it is made for."""

    graph: GraphBuilder
    config: ModelConfig
    options: GraphOptions
    shapes: Mapping[str, tuple[int, ...]]

    def weight(self, name: str) -> Tensor:
        """Refer to a weight by its canonical name."""
        return self.graph.weight(name, self.options.onnx_type, self.shapes[name])

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Cast float32 to the model's type; nothing where that is float32."""
        if self.options.onnx_type == FLOAT:
            return tensor
        return self.graph.node(name, "Cast", [tensor], {"to": self.options.onnx_type})

    def scalar(self, name: str, value: float) -> Tensor:
        """Make a scalar constant of the model's type."""
        return self.cast(f"{name}/Cast", self.graph.constant(name, value, np.float32))

    def norm(self, path: str, tensor: Tensor) -> Tensor:
        """Add an RMSNorm over the last axis, whose weight is named by the path."""
        weight = self.weight(path.replace("/", ".") + ".weight")
        attributes = {"axis": -1, "epsilon": self.config.norm_epsilon, "stash_type": FLOAT}
        return self.graph.node(f"{path}/RMSNormalization", "RMSNormalization", [tensor, weight], attributes)

    def linear(self, path: str, tensor: Tensor) -> Tensor:
        """Add a linear layer [T, in] -> [T, out] with the checkpoint's [out, in] weight."""
        name = path.replace("/", ".")
        inputs = [tensor, self.weight(f"{name}.weight")]
        if f"{name}.bias" in self.shapes:
            inputs.append(self.weight(f"{name}.bias"))
        return self.graph.node(f"{path}/Gemm", "Gemm", inputs, {"transB": 1})

    def reshape(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reshape; 0 keeps a dimension."""
        key = "shapes/" + "x".join(str(dim) for dim in shape)
        return self.graph.node(name, "Reshape", [tensor, self.graph.constant(key, shape, np.int64)])
