"""Checks what only a paged graph has: that operators reach their caches through the right block tables."""

from __future__ import annotations

import onnx

from ortolan import contract
from ortolan.contract import OPERATOR_DOMAIN
from ortolan.errors import ContractMismatchError

# Index of the key cache among the outputs; the value cache follows.
APPENDS = {"RingKvAppend": 0, "QkvRopeAppend": 1, "QkvAttention": 1}
_ATTENDS = ("SwaAttention", "QkvAttention")
# Where an operator takes its key cache and its block table.
_PORTS = {"RingKvAppend": (2, 6), "QkvRopeAppend": (1, 5), "QkvAttention": (1, 5), "SwaAttention": (1, 5)}
_TABLE_PREFIX = contract.block_table("")


def check_pages(graph: onnx.GraphProto) -> None:
    """Check that caches are all paged or none is, and that each layer's operators read one block table of its window.

    Raises:
        ContractMismatchError: a table is missing, or an operator takes another layer's.
    """
    tables = {i.name for i in graph.input if i.name.startswith(_TABLE_PREFIX)}
    _check_page_size(graph, paged=bool(tables))
    of_cache: dict[str, str] = {}
    for node in graph.node:
        if node.domain != OPERATOR_DOMAIN or node.op_type not in _PORTS:
            continue
        cache, table = (node.input[port] if port < len(node.input) else "" for port in _PORTS[node.op_type])
        if bool(tables) != bool(table) or (table and table not in tables):
            raise _mismatch(node, f"takes the block table '{table}'; the graph's inputs are {sorted(tables)}")
        if node.op_type in _ATTENDS:
            _check_window(node, table)
        if node.op_type in APPENDS:  # attention reads what the append returned
            of_cache[node.output[APPENDS[node.op_type]]] = table
        else:
            _check_same(node, of_cache, cache, table)


def _check_page_size(graph: onnx.GraphProto, *, paged: bool) -> None:
    """A paged cache says how many slots its pages have, and all say the same."""
    caches = [i for i in graph.input if i.name.endswith((".key_cache", ".value_cache"))]
    sizes = {i.type.tensor_type.shape.dim[2].dim_value for i in caches}
    if paged and (len(sizes) != 1 or not sizes <= set(contract.PAGE_SIZES)):
        raise ContractMismatchError(
            f"rule 8: paged caches have {sorted(sizes)} slots per page (0: not said); allowed: one of "
            f"{contract.PAGE_SIZES}"
        )


def _check_window(node: onnx.NodeProto, table: str) -> None:
    window = next((a.i for a in node.attribute if a.name == "window"), -1)
    wanted = contract.block_table(contract.cache_kind(window))
    if table and table != wanted:
        raise _mismatch(node, f"has window {window} and the block table '{table}'; it must be '{wanted}'")


def _check_same(node: onnx.NodeProto, of_cache: dict[str, str], cache: str, table: str) -> None:
    appended = of_cache.get(cache, table)
    if appended != table:
        raise _mismatch(node, f"reads through '{table}' a cache that was appended to through '{appended}'")


def _mismatch(node: onnx.NodeProto, problem: str) -> ContractMismatchError:
    return ContractMismatchError(f"rule 8: node '{node.name}', a {node.op_type}, {problem}")
