"""`ortolan inspect`: operators by layer, caches against full length, and a check of the graph."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from ortolan.cli.table import format_bytes, format_table
from ortolan.errors import OrtolanError
from ortolan.manifest import MODEL_FILE, Manifest, read_description

EPILOG = """examples:
  ortolan inspect ./llama
  ortolan inspect ./llama --context 8192 32768
  ortolan inspect ./llama --netron
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "inspect",
        help="show a model's operators and caches",
        description="Show an exported model's operators by layer and its cache plan, and check its graph.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", type=Path, help="folder that `ortolan export` made")
    parser.add_argument("--context", type=int, nargs="+", help="context lengths to plan for (default: the export's)")
    parser.add_argument("--chunk-size", type=int, help="prompt tokens per step (default: the export's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--netron", action="store_true", help="open the graph in Netron")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the description; the weights' file is not needed."""
    from ortolan.graphs import summarize_model, verify_model
    from ortolan.graphs.summary import load_structure
    from ortolan.runtime import plan_caches

    manifest = read_description(options.model_dir)  # unlike a run, an inspection does not need every file
    path = options.model_dir / MODEL_FILE
    plain = load_structure(path)
    verify_model(plain)
    summary = summarize_model(path)
    fused = _inspect_fused(options.model_dir, manifest, plain)
    plans = [plan_caches(manifest, c, options.chunk_size) for c in options.context or [manifest.max_context]]
    if options.json:
        print(json.dumps({**_as_json(manifest, summary, plans), "fused": fused}, indent=2))
    else:
        _print(manifest, summary, fused, plans)
    if options.netron:
        _open_netron(path)
    return 0


def _inspect_fused(folder: Path, manifest: Manifest, plain: Any) -> dict[str, Any] | None:
    """Check and count the fused graph; None where the manifest names none."""
    from ortolan.graphs import count_fusions, verify_fused_pair, verify_model
    from ortolan.graphs.summary import load_structure

    name = manifest.fused_model
    if name is None:
        return None
    if not os.path.isfile(folder / name):
        return {"file": name, "graph": "missing"}
    fused = load_structure(folder / name)
    verify_model(fused)
    verify_fused_pair(plain, fused)
    return {"file": name, "graph": "ok", "nodes": len(fused.graph.node), "operators": count_fusions(fused)}


def _as_json(manifest: Manifest, summary: Any, plans: list[Any]) -> dict[str, Any]:
    return {
        "architecture": manifest.architecture,
        "dtype": manifest.dtype,
        "graph": "ok",
        "nodes": summary.num_nodes,
        "operators": dict(summary.operators),
        "layers": [list(layer) for layer in summary.layers],
        "experts": [pair and {"count": pair[0], "per_token": pair[1]} for pair in summary.experts],
        "paged": manifest.paged,
        "page_size": manifest.page_size,
        "cache_kinds": [dataclasses.asdict(kind) for kind in manifest.cache_kinds],
        "plans": [
            {
                "max_context": plan.max_context,
                "chunk_size": plan.chunk_size,
                "bytes": plan.bytes,
                "full_length_bytes": plan.full_length_bytes,
                "layers": [
                    {"kind": x.kind, "window": x.window, "capacity": x.capacity, "bytes": x.bytes} for x in plan.layers
                ],
            }
            for plan in plans
        ],
    }


def _print(manifest: Manifest, summary: Any, fused: dict[str, Any] | None, plans: list[Any]) -> None:
    print(f"{manifest.architecture}, {manifest.dtype}, {len(manifest.layers)} layers, {summary.num_nodes} nodes")
    print(f"graph: ok (onnx.checker and {MODEL_FILE}'s contract)\n")
    print(format_table(["operator", "count"], [[name, str(count)] for name, count in summary.operators]))
    print()
    print(_layer_table(summary))
    _print_fused(fused)
    _print_kinds(manifest)
    for plan in plans:
        print(f"\ncaches of one sequence of {plan.max_context} tokens, chunks of {plan.chunk_size}")
        print(plan_table(plan))


def _layer_table(summary: Any) -> str:
    """Format the operators of each layer, and its experts where the model has any."""
    columns = {"layer": [str(i) for i in range(len(summary.layers))]}
    if any(summary.experts):
        columns["experts"] = [f"{pair[1]} of {pair[0]}" if pair else "-" for pair in summary.experts]
    columns["operators"] = [", ".join(operators) for operators in summary.layers]
    return format_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def _print_fused(fused: dict[str, Any] | None) -> None:
    if fused is None:
        print("\nfused graph: none; CUDA runs the plain one")
        return
    if fused["graph"] == "missing":
        print(f"\nfused graph: missing ({fused['file']}, which the manifest names); export the model again")
        return
    print(f"\nfused graph: ok ({fused['file']}, {fused['nodes']} nodes), which CUDA runs")
    counts = [[name, str(count)] for name, count in fused["operators"].items() if count]
    print(format_table(["fused operator, or plain one left", "count"], counts))


def _print_kinds(manifest: Manifest) -> None:
    """Print the kinds of paged caches, and the pages that a sequence has of each."""
    if not manifest.paged:
        return
    from ortolan.runtime import plan_caches

    layers = plan_caches(manifest).layers
    rows = [
        [
            kind.name,
            ", ".join(map(str, kind.layers)),
            kind.block_table,
            f"{'up to ' if kind.window < 0 else ''}{layers[kind.layers[0]].capacity // manifest.page_size}",
        ]
        for kind in manifest.cache_kinds
    ]
    print(f"\npaged caches, {manifest.page_size} slots a page")
    print(format_table(["kind", "layers", "block table", "pages of a sequence"], rows))


def plan_table(plan: Any) -> str:
    """Format a cache plan: a row for each layer, and a total."""
    rows = [
        [
            str(index),
            layer.kind,
            str(layer.window) if layer.window > 0 else "-",
            str(layer.capacity),
            format_bytes(layer.bytes),
            format_bytes(layer.full_length_bytes),
        ]
        for index, layer in enumerate(plan.layers)
    ]
    rows.append(["all", "", "", "", format_bytes(plan.bytes), format_bytes(plan.full_length_bytes)])
    return format_table(["layer", "kind", "window", "capacity", "cache", "full length"], rows)


def _open_netron(path: Path) -> None:
    if importlib.util.find_spec("netron") is None:
        raise OrtolanError("netron is not installed; run `pip install netron`")
    import netron

    netron.start(str(path))
    netron.wait()
