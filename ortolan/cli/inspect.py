"""`ortolan inspect`: weights, tokenizer, operators by layer, caches against full length, and a check of the graph."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.cli.model_facts import as_json, facts_table, read_facts
from ortolan.cli.report import print_warning
from ortolan.cli.table import format_bytes, format_table
from ortolan.errors import ConfigError

if TYPE_CHECKING:
    from ortolan.graphs import StoredWeights
    from ortolan.manifest import Manifest

DEVICES = ("cuda", "cpu")
EPILOG = """examples:
  ortolan inspect ./llama
  ortolan inspect ./llama --context 8192 32768
  ortolan inspect ./llama --netron --graph cpu          # the graph that the CPU runs
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "inspect",
        help="show a model's weights, operators and caches",
        description="Show an exported model's weights, tokenizer, operators by layer and cache plan, and check its "
        "graph.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", help="folder that `ortolan export` made, or the Hub id of one (owner/name)")
    parser.add_argument("--context", type=int, nargs="+", help="context lengths to plan for (default: the export's)")
    parser.add_argument("--chunk-size", type=int, help="prompt tokens per step (default: the export's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--netron", action="store_true", help="open the graph in Netron (`pip install netron`)")
    parser.add_argument(
        "--graph", choices=("plain", *DEVICES), help="with --netron: model.onnx, or a device's own (default: plain)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the description; the weights' file is not needed."""
    from ortolan.graphs import summarize_model, verify_model
    from ortolan.graphs.summary import load_structure
    from ortolan.hub import model_folder
    from ortolan.manifest import MODEL_FILE, read_description
    from ortolan.runtime import plan_caches

    folder = model_folder(options.model_dir, weights=False)
    manifest = read_description(folder)  # unlike a run, an inspection does not need every file
    shown = _shown_graph(folder, manifest, options)
    path = folder / MODEL_FILE
    plain = load_structure(path)
    verify_model(plain)
    summary, facts = summarize_model(path), read_facts(folder, manifest, plain)
    fused = {device: _inspect_fused(folder, manifest.fused_file(device), plain) for device in DEVICES}
    head = _inspect_head(folder, manifest)
    plans = [plan_caches(manifest, c, options.chunk_size) for c in options.context or [manifest.max_context]]
    if options.json:
        found = {**_as_json(manifest, summary, plans), **as_json(facts)}
        found |= {"fused": fused["cuda"], "cpu": fused["cpu"], "draft_head": head}
        print(json.dumps(found, indent=2))
    else:
        kinds = manifest.dtype + (f", caches {manifest.cache_dtype}" if manifest.has_code_caches else "")
        print(f"{manifest.architecture}, {kinds}, {len(manifest.layers)} layers, {summary.num_nodes} nodes")
        print(facts_table(facts))
        _print(summary, facts.layer_weights, fused)
        _print_head(head)
        _print_kinds(manifest)
        _print_plans(plans)
    if shown is not None:
        _open_netron(shown)
    return 0


def _shown_graph(folder: Path, manifest: Manifest, options: argparse.Namespace) -> Path | None:
    """Return the graph that Netron is to show; None where it is not asked for.

    Raises:
        ConfigError: Netron is not installed, or there is no fused graph.
    """
    from ortolan.manifest import MODEL_FILE

    if not options.netron:
        if options.graph:
            print_warning("--graph has no effect without --netron")
        return None
    if importlib.util.find_spec("netron") is None:
        raise ConfigError("--netron needs Netron, which is not installed; run `pip install netron`")
    if options.graph in (None, "plain"):
        return folder / MODEL_FILE
    name = manifest.fused_file(options.graph)
    if name is None or not os.path.isfile(folder / name):
        raise ConfigError(
            f"{folder} has no fused graph for {options.graph.upper()}; export the model again without --no-fuse, or "
            "leave --graph out"
        )
    return folder / name


def _inspect_fused(folder: Path, name: str | None, plain: Any) -> dict[str, Any] | None:
    """Check and count a fused graph; None where the manifest names none."""
    from ortolan.graphs import count_fusions, verify_fused_pair, verify_model
    from ortolan.graphs.summary import default_inputs, load_structure

    if name is None:
        return None
    if not os.path.isfile(folder / name):
        return {"file": name, "graph": "missing"}
    fused = load_structure(folder / name)
    verify_model(fused)
    verify_fused_pair(plain, fused)
    found = {"file": name, "graph": "ok", "nodes": len(fused.graph.node), "operators": count_fusions(fused)}
    return found | {"default_inputs": list(default_inputs(fused.graph))}


def _inspect_head(folder: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Check and count the draft head's graph; None where the model has none."""
    from ortolan.graphs import verify_model
    from ortolan.graphs.summary import load_structure
    from ortolan.manifest import HEAD_FILE
    from ortolan.runtime.caches.plan import plan_caches

    if manifest.draft_head is None:
        return None
    graph = load_structure(folder / HEAD_FILE)
    verify_model(graph)
    plan = plan_caches(manifest.draft_head)
    return {"file": HEAD_FILE, "graph": "ok", "nodes": len(graph.graph.node), "cache_bytes": plan.bytes}


def _print_head(head: dict[str, Any] | None) -> None:
    if head is not None:
        caches = format_bytes(head["cache_bytes"])
        print(f"\ndraft head (mtp): {head['file']}, {head['nodes']} nodes, caches of at most {caches}")


def _as_json(manifest: Manifest, summary: Any, plans: list[Any]) -> dict[str, Any]:
    return {
        "architecture": manifest.architecture,
        "dtype": manifest.dtype,
        "cache_dtype": manifest.cache_dtype,
        "graph": "ok",
        "nodes": summary.num_nodes,
        "operators": dict(summary.operators),
        "layers": [list(layer) for layer in summary.layers],
        "experts": [mixture and dataclasses.asdict(mixture) for mixture in summary.experts],
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
                    {name: getattr(layer, name) for name in ("kind", "window", "capacity", "bytes", "cache_of")}
                    for layer in plan.layers
                ],
            }
            for plan in plans
        ],
    }


def _print(summary: Any, weights: Sequence[Sequence[StoredWeights]], fused: dict[str, Any]) -> None:
    from ortolan.manifest import MODEL_FILE

    print(f"graph: ok (onnx.checker and {MODEL_FILE}'s contract)\n")
    print(format_table(["operator", "count"], [[name, str(count)] for name, count in summary.operators]))
    print()
    print(_layer_table(summary, weights))
    for device in DEVICES:
        _print_fused(device.upper(), fused[device])


def _print_plans(plans: list[Any]) -> None:
    for plan in plans:
        print(f"\ncaches of one sequence of {plan.max_context} tokens, chunks of {plan.chunk_size}")
        print(plan_table(plan))


def _layer_table(summary: Any, weights: Sequence[Sequence[StoredWeights]]) -> str:
    """Format the operators of each layer, how its weights are stored, and its experts where the model has any."""
    count = len(summary.layers)
    columns = {"layer": [str(i) for i in range(count)]}
    columns["weights"] = [", ".join(f"{row.format}: {format_bytes(row.bytes)}" for row in rows) for rows in weights]
    if any(summary.experts):
        columns["experts"] = [_experts(mixture) for mixture in summary.experts]
    columns["operators"] = [", ".join(operators) for operators in summary.layers]
    return format_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def _experts(mixture: Any) -> str:
    if mixture is None:
        return "-"
    return f"{mixture.per_token} of {mixture.count}{' and a shared one' if mixture.shared else ''}"


def _print_fused(device: str, fused: dict[str, Any] | None) -> None:
    if fused is None:
        print(f"\nfused graph for {device}: none; {device} runs the plain one")
        return
    if fused["graph"] == "missing":
        missing = f"{fused['file']}, which the manifest names"
        print(f"\nfused graph for {device}: missing ({missing}); export the model again")
        return
    print(f"\nfused graph for {device}: ok ({fused['file']}, {fused['nodes']} nodes)")
    counts = [[name, str(count)] for name, count in fused["operators"].items() if count]
    print(format_table(["fused operator, or plain one left", "count"], counts))
    if fused["default_inputs"]:
        print(f"inputs that need not be fed: {', '.join(fused['default_inputs'])}")


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
            _pages(layers[kind.layers[0]], manifest.page_size),
        ]
        for kind in manifest.cache_kinds
    ]
    print(f"\npaged caches, {manifest.page_size} slots a page")
    print(format_table(["kind", "layers", "block table", "pages of a sequence"], rows))


def _pages(layer: Any, page_size: int) -> str:
    """Say how many pages of a kind a sequence has; a state without slots takes one."""
    prefix = "up to " if layer.kind == "full" else ""
    return f"{prefix}{max(1, layer.capacity // page_size)}"


def plan_table(plan: Any) -> str:
    """Format a cache plan: a row for each layer, and a total."""
    rows = [
        [
            str(index),
            layer.kind if layer.cache_of is None else f"layer {layer.cache_of}'s",
            str(layer.window) if layer.window > 0 else "-",
            str(layer.capacity) if layer.cache_of is None else "-",
            format_bytes(layer.bytes),
            format_bytes(layer.full_length_bytes),
        ]
        for index, layer in enumerate(plan.layers)
    ]
    rows.append(["all", "", "", "", format_bytes(plan.bytes), format_bytes(plan.full_length_bytes)])
    return format_table(["layer", "kind", "window", "capacity", "cache", "full length"], rows)


def _open_netron(path: Path) -> None:
    import netron

    netron.start(str(path))
    netron.wait()
