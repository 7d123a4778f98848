"""compressed-tensors and `fp8`: weights [out, in] packed into words or bytes, float8 codes with scales, or NVFP4.

Sources: vllm-project/compressed-tensors (pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized), and
DeepSeek-V3's `weight_scale_inv`, a float scale for each block of 128 x 128. Static scales of activations are checked,
used or not, since a checkpoint without them is not what its config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import ml_dtypes
import numpy as np

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.hf_config import HfConfig
from ortolan.export.packed.layouts import Tensors, group_size, unpack_words
from ortolan.export.quantize import pack_nibbles
from ortolan.graphs.formats.low_bit import InputFormat, LowBit

_SCALES = (".weight_scale", ".weight_scale_inv")
_INPUT_SCALES = (".input_scale", ".activation_scale")  # of vLLM and compressed-tensors, and of transformers


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Weights of compressed-tensors or `fp8`; each layer's tensors say how it is stored.

    Attributes:
        static_inputs: every quantized layer has one scale of its inputs, `input_scale` or `activation_scale`.
        input_format: what layers of fp8 round their inputs to.
    """

    static_inputs: bool = False
    input_format: InputFormat = "none"

    marker: ClassVar[str] = ".weight_scale"
    idle: ClassVar[tuple[str, ...]] = (
        *_INPUT_SCALES,
        ".input_global_scale",
        ".input_zero_point",
        ".k_scale",
        ".v_scale",
        ".output_scale",
    )

    @classmethod
    def of(cls, config: HfConfig, method: str) -> TensorLayout:
        """Read the options of `quantization_config`. Raises UnsupportedModelError."""
        return cls(static_inputs=_scheme(config) if method == "fp8" else _groups(config))

    def holds(self, checkpoint: Checkpoint, stem: str) -> bool:
        """Say whether a linear layer is quantized."""
        if stem + ".weight_packed" in checkpoint.entries:
            return True
        entry = checkpoint.entries.get(stem + ".weight")
        return entry is not None and entry.element_type in ("F8_E4M3", "F8_E5M2", "I8")

    def describe(self, tensors: Tensors, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Return a weight's format, and the endings of its tensors."""
        input_scale = _read_input_scale(tensors) if self.static_inputs else 0.0
        if not tensors.has(".weight_packed"):
            stored, endings = self._describe_bytes(tensors, shape)
            if stored.kind == "fp8" and self.input_format != "none":
                stored = replace(stored, input_format=self.input_format, input_scale=input_scale)
            return stored, endings
        if tensors.element(".weight_packed") == "U8":
            return self._describe_nvfp4(tensors, shape)
        return self._describe_words(tensors, shape)

    def _describe_words(self, tensors: Tensors, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        rows, columns = shape
        width = tensors.shape(".weight_packed")[-1]
        bits = next((b for b in (4, 8) if -(-columns * b // 32) == width), None)
        if bits is None:
            raise CheckpointError(
                f"{tensors.stem}.weight_packed has {width} words a row, which do not hold {columns} input features "
                "of 4 or 8 bits"
            )
        groups = tensors.shape(".weight_scale")[-1]
        size = group_size(columns, groups, tensors.stem)
        tensors.expect({".weight_packed": (rows, width), ".weight_scale": (rows, groups)})
        tensors.scales(".weight_scale")
        endings = {".weight_packed", ".weight_scale"} | self._order(tensors, columns, size or columns)
        if tensors.has(".weight_zero_point"):
            tensors.expect({".weight_zero_point": (-(-rows * bits // 32), groups)})
            endings.add(".weight_zero_point")
        zero_points = ".weight_zero_point" in endings
        return LowBit(kind="int4" if bits == 4 else "int8", group_size=size, zero_points=zero_points), endings

    @staticmethod
    def _order(tensors: Tensors, columns: int, size: int) -> set[str]:
        """Return the endings of tensors that say what the shapes say already. Raises UnsupportedModelError."""
        if tensors.has(".weight_g_idx") and (tensors.read(".weight_g_idx") != np.arange(columns) // size).any():
            raise UnsupportedModelError(
                f"{tensors.stem} groups its input features by activation order (actorder), which is not supported; "
                "give a checkpoint without"
            )
        return {ending for ending in (".weight_shape", ".weight_g_idx") if tensors.has(ending)}

    def _describe_nvfp4(self, tensors: Tensors, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        rows, columns = shape
        tensors.expect({".weight_packed": (rows, columns // 2), ".weight_scale": (rows, columns // 16)})
        tensors.scales(".weight_global_scale")
        if not np.isfinite(tensors.read(".weight_scale").astype(np.float32)).all():
            raise CheckpointError(f"{tensors.stem}.weight_scale has scales that are not finite; it is damaged")
        return LowBit(kind="nvfp4", group_size=16), {".weight_packed", ".weight_scale", ".weight_global_scale"}

    def _describe_bytes(self, tensors: Tensors, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Describe codes of 8 bits: float8, or int8 by channel."""
        element, ending = tensors.element(".weight"), self._scale(tensors)
        tensors.expect({".weight": shape})
        tensors.scales(ending)
        if element == "F8_E5M2":
            raise UnsupportedModelError(f"{tensors.stem}.weight is float8 e5m2; supported: e4m3")
        if element == "F8_E4M3" and np.isnan(tensors.read(".weight").astype(np.float16)).any():
            raise CheckpointError(f"{tensors.stem}.weight has codes that are NaN; the checkpoint is damaged")
        by_row = tensors.shape(ending) in ((), (1,), (1, 1), (shape[0], 1), (shape[0],))
        endings = {".weight", ending}
        if element == "I8":
            if tensors.has(".weight_zero_point"):
                raise UnsupportedModelError(f"{tensors.stem}: int8 with zero points, not packed, is not supported")
            groups = 1 if by_row else tensors.shape(ending)[-1]
            size = group_size(shape[1], groups, tensors.stem)
            if not by_row:
                tensors.expect({ending: (shape[0], groups)})
            return LowBit(kind="int8", group_size=size), endings
        if by_row:
            return LowBit(kind="fp8"), endings
        side = 128
        tensors.expect({ending: (-(-shape[0] // side), -(-shape[1] // side))})
        if shape[1] % side:
            raise UnsupportedModelError(f"{tensors.stem}: blocks of {side} do not divide {shape[1]} input features")
        return LowBit(kind="fp8", group_size=side, scale_rows=side), endings

    @staticmethod
    def _scale(tensors: Tensors) -> str:
        """Return the ending of a weight's scales. Raises CheckpointError."""
        found = [ending for ending in _SCALES if tensors.has(ending)]
        if not found:
            raise CheckpointError(f"the checkpoint lacks the tensor {tensors.stem}{_SCALES[0]}")
        return found[0]

    def read(self, tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return arrays by port of LowBitLinear."""
        stored, _ = self.describe(tensors, shape)
        rows, columns = shape
        if stored.kind == "nvfp4":
            one = np.float32(1) / tensors.scales(".weight_global_scale").reshape(-1)[0]
            scale_codes = tensors.read(".weight_scale").view(np.uint8)
            codes = np.ascontiguousarray(tensors.read(".weight_packed"))
            return {"codes": codes, "scale_codes": scale_codes, "float_scales": np.full((rows, 1), one, np.float32)}
        if tensors.has(".weight_packed"):
            return self._read_words(tensors, stored, shape)
        scales = tensors.scales(self._scale(tensors))
        if scales.size == 1:
            scales = np.full((rows, 1), scales.reshape(-1)[0], np.float32)
        weight = np.ascontiguousarray(tensors.read(".weight"))
        if stored.kind == "int8":  # codes are shifted so that 128 stands for 0
            return {"codes": weight.view(np.uint8) ^ np.uint8(128), "scales": scales.reshape(rows, -1)}
        codes = weight.view(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return {"codes": codes, "float_scales": scales.reshape(-1, stored.groups(columns))}

    @staticmethod
    def _read_words(tensors: Tensors, stored: LowBit, shape: tuple[int, ...]) -> dict[str, Array]:
        rows, columns = shape
        bits = stored.bits

        def packed(codes: Array) -> Array:
            return pack_nibbles(codes) if bits == 4 else np.ascontiguousarray(codes)

        codes = unpack_words(tensors.read(".weight_packed"), bits).reshape(rows, -1)[:, :columns]
        found = {"codes": packed(codes), "scales": tensors.scales(".weight_scale")}
        if stored.zero_points:
            words = np.ascontiguousarray(tensors.read(".weight_zero_point").T)  # [G, words]
            zeros = unpack_words(words, bits).reshape(len(words), -1)[:, :rows]
            found["zero_points"] = packed(np.ascontiguousarray(zeros.T))
        return found


def _scheme(config: HfConfig) -> bool:
    """Say whether an `fp8` checkpoint has static scales of inputs. Raises UnsupportedModelError."""
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModelError(
            f"config.json: activation_scheme {scheme!r} is not supported; supported: dynamic, static"
        )
    return bool(scheme == "static")


def _groups(config: HfConfig) -> bool:
    """Say whether every group of layers of compressed-tensors has static scales of inputs of 8 bits."""
    groups = config.get("config_groups")
    return isinstance(groups, Mapping) and bool(groups) and all(_is_static(group) for group in groups.values())


def _is_static(group: object) -> bool:
    """Say whether a group rounds inputs to 8 bits by a stored scale; `dynamic` is false where it is left out."""
    inputs = group.get("input_activations") if isinstance(group, Mapping) else None
    return isinstance(inputs, Mapping) and inputs.get("num_bits") == 8 and not inputs.get("dynamic", False)


def _read_input_scale(tensors: Tensors) -> float:
    """Read the static scale of a layer's inputs, checked. Raises CheckpointError."""
    ending = next((ending for ending in _INPUT_SCALES if tensors.has(ending)), _INPUT_SCALES[0])
    shape = tensors.shape(ending)
    if shape not in ((), (1,), (1, 1)):
        raise CheckpointError(f"{tensors.stem}{ending} has shape {list(shape)}, expected one scale: [] or [1]")
    scale = float(tensors.scales(ending).reshape(-1)[0])
    if scale < 0:
        raise CheckpointError(f"{tensors.stem}{ending} is {scale}, a scale below 0; the checkpoint is damaged")
    return scale
