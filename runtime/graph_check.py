"""Compares a graph that was opened with the manifest of its folder."""

from __future__ import annotations

from typing import Any

from ortolan import contract
from ortolan.errors import ContractMismatchError
from ortolan.manifest import MANIFEST_METADATA, Manifest

# What the graph was built for. Other fields, such as chunk_size, say how it is run.
BUILT_FOR = (
    "dtype",
    "weight_format",
    "cache_dtype",
    "vocab_size",
    "sink",
    "paged",
    "page_size",
    "layers",
)


def check_graph(ort_session: Any, manifest: Manifest, file_name: str) -> None:
    """Check that the graph in `file_name` is the one that the manifest describes.

    Raises:
        ContractMismatchError: it is another one.
    """
    _check_inputs(ort_session, manifest, file_name)
    _check_shapes(ort_session, manifest, file_name)
    _check_metadata(ort_session, manifest, file_name)


def _check_inputs(ort_session: Any, manifest: Manifest, file_name: str) -> None:
    """Check that the graph has the inputs that the manifest promises, and no others."""
    inputs = {i.name for i in ort_session.get_inputs()}
    wanted = {contract.TOKEN_IDS, contract.QUERY_START, contract.PAST_LEN, contract.LOGIT_ROWS}
    for index, layer in enumerate(manifest.layers):
        if layer.cache_of is not None:
            continue
        wanted |= {contract.key_cache(index), contract.value_cache(index)}
        if layer.evictable:
            wanted |= {contract.kv_len(index), contract.capture(index)}
    wanted |= {kind.block_table for kind in manifest.cache_kinds}
    if len(manifest.rope_limits) > 1:
        wanted.add(contract.ROPE_VARIANT)
    extra = inputs - wanted - {contract.POSITIONS}
    if not wanted <= inputs or extra:
        raise ContractMismatchError(
            f"{file_name} lacks the inputs {sorted(wanted - inputs)} and has unknown ones {sorted(extra)}; "
            "export the model again"
        )


def _check_shapes(ort_session: Any, manifest: Manifest, file_name: str) -> None:
    """Check the sizes that the graph fixes."""
    shapes = {i.name: i.shape for i in [*ort_session.get_inputs(), *ort_session.get_outputs()]}
    if shapes[contract.LOGITS][-1] != manifest.vocab_size:
        raise ContractMismatchError(
            f"{file_name}: {contract.LOGITS} has the shape {shapes[contract.LOGITS]}, the manifest says a vocabulary "
            f"of {manifest.vocab_size}; export the model again"
        )
    for index, layer in enumerate(manifest.layers):
        if layer.cache_of is not None:
            continue
        for name in (contract.key_cache(index), contract.value_cache(index)):
            _, heads, slots, size = shapes[name]
            fits = not manifest.paged or slots == manifest.page_size
            if not fits or [heads, size] != [layer.num_kv_heads, layer.head_size]:
                raise ContractMismatchError(
                    f"{file_name}: {name} has the shape {shapes[name]}, the manifest says "
                    f"{layer.num_kv_heads} kv heads of size {layer.head_size}"
                    f"{f' in pages of {manifest.page_size}' if manifest.paged else ''}; export the model again"
                )


def _check_metadata(ort_session: Any, manifest: Manifest, file_name: str) -> None:
    """Check what neither inputs nor shapes tell, as windows and sinks, by the manifest in the graph."""
    text = ort_session.get_modelmeta().custom_metadata_map.get(MANIFEST_METADATA)
    if text is None:
        return
    recorded = Manifest.from_json(text, f"{file_name}'s metadata")
    different = [name for name in BUILT_FOR if getattr(recorded, name) != getattr(manifest, name)]
    if different:
        raise ContractMismatchError(
            f"{file_name} was built for another {', '.join(different)} than the manifest says; export the model again"
        )
