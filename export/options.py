"""What the caller of `export` may choose, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ortolan.element_types import COMPUTE_TYPES, cache_type
from ortolan.errors import ConfigError, one_of, truth
from ortolan.export.folder import LEAST_CONTEXT, CacheOptions, check_numbers
from ortolan.export.quantize import METHODS
from ortolan.graphs.formats.low_bit import InputFormat, Kind
from ortolan.graphs.formats.plan import CHANNEL, GROUP_SIZES, MXFP4_GROUP, HeadFormat, Wish
from ortolan.graphs.options import Fusion, GraphOptions

DENSE = "dense"
QUANTIZED = ("int4", "int8", "fp8", "mxfp4")
WEIGHT_FORMATS = (DENSE, *QUANTIZED)
HEADS = ("int8", "int4", DENSE)
FLOAT_GROUP_SIZES: Mapping[str | None, tuple[int | str, ...]] = {"fp8": (128, CHANNEL), "mxfp4": (MXFP4_GROUP,)}
ACTIVATION_FORMATS = ("fp8",)
WEIGHT_KINDS = ("checkpoint", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(CacheOptions):
    """Options of `export`, checked."""

    dtype: str
    max_context: int | None
    weights: str
    fuse: bool
    weight_format: str | None
    cache_dtype: str | None
    group_size: int | str | None = None
    asymmetric: bool = False
    quantizer: str = METHODS[0]
    calibration: Path | None = None
    head_format: str | None = None
    activation_format: str | None = None

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)  # super() does not work in a class with slots
        one_of("dtype", self.dtype, COMPUTE_TYPES)
        self._check_weights()
        cache_type(self.cache_dtype, self.dtype)
        one_of("weights", self.weights, WEIGHT_KINDS)
        truth("fuse", self.fuse)
        if self.max_context is not None:
            check_numbers(self, max_context=LEAST_CONTEXT)
            if self.sink >= self.max_context:
                raise ConfigError(f"sink {self.sink} must be less than max_context {self.max_context}")

    def _check_weights(self) -> None:
        truth("asymmetric", self.asymmetric)
        one_of("quantizer", self.quantizer, METHODS)
        self._check_calibration()
        if self.head_format is not None:
            one_of("head_format", self.head_format, HEADS)
        if self.weight_format is not None:
            one_of("weight_format", self.weight_format, WEIGHT_FORMATS)
        if self.activation_format is not None:
            one_of("activation_format", self.activation_format, ACTIVATION_FORMATS)
            if self.weight_format not in (None, "fp8"):
                raise ConfigError(
                    f"activation_format='fp8' needs weights of fp8; weight_format is {self.weight_format!r}"
                )
        if self.weight_format not in QUANTIZED:
            rounds = self.quantizer != METHODS[0] and self.head is None
            idle = {"group_size": self.group_size is not None, "asymmetric": self.asymmetric, "quantizer": rounds}
            given = [name for name, is_given in idle.items() if is_given]
            if given:
                raise ConfigError(f"{given[0]} needs a weight_format: {', '.join(QUANTIZED)}")
            return
        sizes = FLOAT_GROUP_SIZES.get(self.weight_format, (*GROUP_SIZES, CHANNEL))
        if self.group_size is not None and self.group_size not in sizes:
            allowed = ", ".join(f'or "{size}"' if size == CHANNEL else str(size) for size in sizes)
            raise ConfigError(f"group_size is {self.group_size!r}; allowed: {allowed}")
        if self.asymmetric and self.weight_format in FLOAT_GROUP_SIZES:
            raise ConfigError(f"asymmetric is for int4 and int8; {self.weight_format} has no zero points")

    def _check_calibration(self) -> None:
        if (self.quantizer == "gptq") != (self.calibration is not None):
            raise ConfigError("quantizer='gptq' and calibration, the path of a text, need each other; give both")
        if self.calibration is None:
            return
        if self.weight_format not in ("int4", "int8"):
            raise ConfigError(f"quantizer='gptq' is for weight_format int4 and int8, not {self.weight_format!r}")
        if self.weights == "random":
            raise ConfigError("quantizer='gptq' needs the weights of a checkpoint; weights is 'random'")

    @property
    def wish(self) -> Wish | None:
        """What is asked of weights that are quantized; None where none are."""
        if self.weight_format not in QUANTIZED:
            return None
        return Wish(
            kind=cast("Kind", self.weight_format),
            group_size=self.group_size,
            zero_points=self.asymmetric,
            input_format=self.input_format,
        )

    @property
    def head(self) -> HeadFormat | None:
        """What the head becomes; None where it stays as the checkpoint has it."""
        chosen = self.head_format or (HEADS[0] if self.weight_format in QUANTIZED else DENSE)
        return None if chosen == DENSE else cast("HeadFormat", chosen)

    @property
    def input_format(self) -> InputFormat:
        """What linear layers of fp8 round their inputs to."""
        return "none" if self.activation_format is None else "fp8"

    def graph(self, fused_for: Fusion | None = None) -> GraphOptions:
        """Return what the graph builder is asked for."""
        return GraphOptions(
            dtype=self.dtype,
            cache_dtype=cache_type(self.cache_dtype, self.dtype),
            sink=self.sink,
            snapkv_window=self.snapkv_window,
            page_size=self.graph_page_size,
            fused_for=fused_for,
        )
