"""Names of the graph's inputs and outputs, shared by the exporter and the runtime."""

TOKEN_IDS = "token_ids"  # [T] int64
POSITIONS = "positions"  # [T] int64, logical
QUERY_START = "query_start"  # [B+1] int32
PAST_LEN = "past_len"  # [B] int32, logical length before this step
ROPE_VARIANT = "rope_variant"  # [T] int64, only where the manifest lists more than one RoPE variant
LOGIT_ROWS = "logit_rows"  # [R] int64, the packed rows whose logits are computed
LOGITS = "logits"  # [R, V] float32, of those rows
MAX_KV_LEN = "max_kv_len"  # [1] int32, in CPU memory: bounds the step's kv lengths; fused graphs only, 0 where not fed
MAX_QUERY_LEN = "max_query_len"  # the same of a sequence's tokens in the step
HIDDEN = "hidden"  # [T, features], what the head before this one made of the token before; draft heads only
HIDDEN_OUT = "hidden_out"  # [T, features], what the model's own head reads, for a draft head

# Inputs of evict.onnx beside the caches, captures and kv_len of each evictable layer; all int64 [1].
EVICT_BUDGET = "budget"
EVICT_WINDOW = "window"
EVICT_SINK = "sink"

LAYER_TABLE = "layer_inputs.embedding.weight"  # per-layer embeddings, an initializer [V, layers * size]

PAGE_SIZES = (16, 32, 64, 128, 256)  # slots per page of a paged export

RECENT_TOKENS = 16  # of a recurrent state, which can be taken back

OUTPUT_SUFFIX = "_out"
OPERATOR_DOMAIN = "ortolan"
OPERATOR_VERSION = 1


def kv_len(layer: int) -> str:
    """Name the physical length input of one evictable layer, [B, Hkv] int32."""
    return f"layer.{layer}.kv_len"


def key_cache(layer: int) -> str:
    """Name the key cache input of one layer, [N, Hkv, P, D]."""
    return f"layer.{layer}.key_cache"


def value_cache(layer: int) -> str:
    """Name the value cache input of one layer, [N, Hkv, P, D]."""
    return f"layer.{layer}.value_cache"


def layer_state(layer: int, role: str) -> str:
    """Name the input of one tensor of what a layer keeps besides keys and values, [N, ...]."""
    return f"layer.{layer}.{role}"


def key_scale(layer: int) -> str:
    """Name the input of the scales of one layer's key codes, [N, Hkv, P] float32; low-bit caches only."""
    return f"layer.{layer}.key_scale"


def value_scale(layer: int) -> str:
    """Name the input of the scales of one layer's value codes, [N, Hkv, P] float32; low-bit caches only."""
    return f"layer.{layer}.value_scale"


def cache_kind(window: int) -> str:
    """Name the kind of the caches of layers that look back `window` positions; -1: all."""
    return "full" if window < 0 else f"window_{window}"


def block_table(kind: str) -> str:
    """Name the block table of one kind of paged caches, [B, M] int32."""
    return f"block_table.{kind}"


def capture(layer: int) -> str:
    """Name the captured queries of one evictable layer, [B, Wq, Hq, D]."""
    return f"layer.{layer}.capture"


def score(layer: int) -> str:
    """Name what pieces of a second reading score in one evictable layer, [B, Hkv, C] float32; some policies only."""
    return f"layer.{layer}.score"


def keep(layer: int) -> str:
    """Name the keep-list output of evict.onnx for one layer, [B, Hkv, K] int32, -1 pads the tail."""
    return f"layer.{layer}.keep"


def output(name: str) -> str:
    """Name the output that aliases a cache input."""
    return name + OUTPUT_SUFFIX
