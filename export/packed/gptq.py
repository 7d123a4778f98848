"""GPTQ and AWQ: integers packed into int32 words, [in, out], with zero points and float16 scales per group.

Sources: AutoGPTQ and GPTQModel (`qweight`, `qzeros`, `scales`, `g_idx`; the first format stores zero points less 1),
AutoAWQ (words hold eight output features in the order 0, 2, 4, 6, 1, 3, 5, 7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.hf_config import HfConfig
from ortolan.export.packed.layouts import Tensors, group_size, unpack_words
from ortolan.export.quantize import pack_nibbles
from ortolan.graphs.formats.low_bit import LowBit

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of output features 0 .. 7


@dataclass(frozen=True, slots=True, kw_only=True)
class WordLayout:
    """Weights of GPTQ or AWQ.

    Attributes:
        bits: 4 or 8.
        awq: words hold output features; else input features.
        zero_offset: what is added to stored zero points.
    """

    bits: int
    awq: bool
    zero_offset: int

    marker = ".qweight"
    idle = ()

    @classmethod
    def of(cls, config: HfConfig, method: str) -> WordLayout:
        """Read the options of `quantization_config`.

        Raises:
            UnsupportedModelError: other bits, a reordered GPTQ, or another form of AWQ.
        """
        bits = config.integer("bits")
        if bits not in (4, 8) or (method == "awq" and bits != 4):
            raise UnsupportedModelError(f"{method} of {bits} bits is not supported; supported: 4, and 8 of gptq")
        if method == "awq":
            version = str(config.get("version", "gemm")).lower()
            if version != "gemm":
                raise UnsupportedModelError(f"awq in the form {version!r} is not supported; supported: gemm")
            return cls(bits=bits, awq=True, zero_offset=0)
        form = config.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(f"gptq in the form {form!r} is not supported; supported: gptq, gptq_v2")
        return cls(bits=bits, awq=False, zero_offset=1 if form == "gptq" else 0)

    def holds(self, checkpoint: Checkpoint, stem: str) -> bool:
        """Say whether a linear layer is quantized."""
        return stem + self.marker in checkpoint.entries

    def describe(self, tensors: Tensors, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Return a weight's format, and the endings of its tensors."""
        rows, columns = shape
        each = 32 // self.bits
        groups = tensors.shape(".scales")[0] if tensors.shape(".scales") else 0
        size = group_size(columns, groups, tensors.stem)
        packed = (columns, rows // each) if self.awq else (columns // each, rows)
        tensors.expect({".qweight": packed, ".scales": (groups, rows), ".qzeros": (groups, rows // each)})
        tensors.scales(".scales")
        self._check_order(tensors, columns, size or columns)
        zeros = self._zeros(tensors)
        if (zeros >= 1 << self.bits).any():
            raise CheckpointError(
                f"{tensors.stem}.qzeros has zero points of {1 << self.bits}, which {self.bits} bits do not hold"
            )
        centred = bool((zeros == 1 << (self.bits - 1)).all())
        endings = {".qweight", ".scales", ".qzeros"} | ({".g_idx"} if tensors.has(".g_idx") else set())
        if tensors.has(".bias") and not tensors.read(".bias").any():
            endings.add(".bias")  # AutoGPTQ gives zeros to layers that have none
        # A weight has zero points unless all lie in the middle, where the format has them anyway.
        return LowBit(kind="int4" if self.bits == 4 else "int8", group_size=size, zero_points=not centred), endings

    def _check_order(self, tensors: Tensors, columns: int, size: int) -> None:
        if tensors.has(".g_idx"):
            tensors.expect({".g_idx": (columns,)})
            if (tensors.read(".g_idx") != np.arange(columns) // size).any():
                raise UnsupportedModelError(
                    f"{tensors.stem} groups its input features by activation order (desc_act), which is not "
                    "supported; give a checkpoint without"
                )

    def _zeros(self, tensors: Tensors) -> Array:
        """Read zero points [G, N]."""
        words = unpack_words(tensors.read(".qzeros"), self.bits, AWQ_PLACES if self.awq else None)
        return words.reshape(len(words), -1).astype(np.int32) + self.zero_offset

    def read(self, tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return arrays by port of LowBitLinear."""
        rows, columns = shape
        words = tensors.read(".qweight")
        if self.awq:
            codes = unpack_words(words, self.bits, AWQ_PLACES).reshape(columns, rows).T
        else:
            codes = unpack_words(np.ascontiguousarray(words.T), self.bits).reshape(rows, columns)
        found = {"codes": self._packed(codes), "scales": tensors.scales(".scales").T}
        stored, _ = self.describe(tensors, shape)
        return found | ({"zero_points": self._packed(self._zeros(tensors).T)} if stored.zero_points else {})

    def _packed(self, codes: Array) -> Array:
        narrow = np.ascontiguousarray(codes, np.uint8)
        return pack_nibbles(narrow) if self.bits == 4 else narrow
