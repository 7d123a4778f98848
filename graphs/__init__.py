"""Builds, converts, checks and describes the ONNX graphs: the decoder, and the graph that evicts from its caches."""

from ortolan.graphs.batch_invariance import make_batch_invariant
from ortolan.graphs.cache_types import change_cache_dtype
from ortolan.graphs.decoder import build_model, count_fusions
from ortolan.graphs.evict import build_evict_model, build_score_model
from ortolan.graphs.external_data import ExternalTensor, attach_external_data
from ortolan.graphs.foreign.convert import Conversion, ConversionOptions, convert_model
from ortolan.graphs.foreign.inputs import SourceNames
from ortolan.graphs.foreign.prepare import ForeignBytes, foreign_bytes, is_small
from ortolan.graphs.options import GraphOptions
from ortolan.graphs.stages import Stage, cut_by_layer
from ortolan.graphs.summary import ModelSummary, summarize_model
from ortolan.graphs.verify import verify_model
from ortolan.graphs.verify_fused import verify_fused_pair
from ortolan.graphs.weight_summary import StoredWeights, summarize_layer_weights, summarize_weights

__all__ = [
    "Conversion",
    "ConversionOptions",
    "ExternalTensor",
    "ForeignBytes",
    "GraphOptions",
    "ModelSummary",
    "SourceNames",
    "Stage",
    "StoredWeights",
    "attach_external_data",
    "build_evict_model",
    "build_model",
    "build_score_model",
    "change_cache_dtype",
    "convert_model",
    "count_fusions",
    "cut_by_layer",
    "foreign_bytes",
    "is_small",
    "make_batch_invariant",
    "summarize_layer_weights",
    "summarize_model",
    "summarize_weights",
    "verify_fused_pair",
    "verify_model",
]
