"""Compares a graph that was opened with the manifest of its folder."""

from __future__ import annotations

from typing import Any

from ortolan import contract
from ortolan.errors import ContractMismatchError
from ortolan.manifest import MANIFEST_METADATA, Manifest
from ortolan.runtime.caches.layer_state import SLOTS, TensorSpec, kind_of, own_layers

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
    "hidden_size",
    "drafts",
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
    wanted |= {spec.name for specs in _tensors(manifest).values() for spec in specs}
    for index, layer in enumerate(manifest.layers):
        if layer.evictable:
            wanted |= {contract.kv_len(index), contract.capture(index)}
    if manifest.drafts:
        wanted.add(contract.HIDDEN)
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
    logits = shapes.get(contract.LOGITS, [])
    if len(logits) != 2 or logits[-1] != manifest.vocab_size:
        raise ContractMismatchError(
            f"{file_name}: {contract.LOGITS} has the shape {logits}, the manifest says a vocabulary "
            f"of {manifest.vocab_size}; export the model again"
        )
    hidden = shapes.get(contract.HIDDEN_OUT, [0])[-1]
    if hidden != manifest.hidden_size:
        raise ContractMismatchError(
            f"{file_name}: {contract.HIDDEN_OUT} has {hidden} features, the manifest says {manifest.hidden_size}; "
            "export the model again"
        )
    for index, layer in enumerate(manifest.layers):
        name = contract.capture(index)
        if layer.evictable and shapes[name][2:] != [layer.num_heads, layer.head_size]:
            raise ContractMismatchError(
                f"{file_name}: {name} has the shape {shapes[name]}, the manifest says {layer.num_heads} heads of "
                f"{layer.head_size}; export the model again"
            )
    for index, specs in _tensors(manifest).items():
        for spec in specs:
            expected = spec.shape(0, manifest.page_size)[1:]
            found = shapes[spec.name][1:]
            fixed = [
                (a, b)
                for a, b, size in zip(found, expected, spec.page_shape, strict=False)
                if size != SLOTS or manifest.paged
            ]
            if len(found) != len(expected) or any(a != b for a, b in fixed):
                paged = f" in pages of {manifest.page_size}" if manifest.paged else ""
                raise ContractMismatchError(
                    f"{file_name}: {spec.name} has the shape {shapes[spec.name]}, the manifest says "
                    f"{list(spec.page_shape)}{paged} for layer {index}; export the model again"
                )


def _tensors(manifest: Manifest) -> dict[int, tuple[TensorSpec, ...]]:
    """Return what holds the state of each layer that has one of its own."""
    layers = manifest.layers
    return {i: kind_of(layers[i]).tensors(i, layers[i], manifest) for i in own_layers(manifest)}


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
