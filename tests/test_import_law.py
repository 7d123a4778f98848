"""The layers of the package import only what stands below them."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

BASE = {"errors", "element_types", "contract", "manifest", "policies", "version", "folders", "hub"}
ALLOWED = {
    "policies": BASE,
    "custom_ops": BASE,
    "graphs": BASE | {"custom_ops"},
    "export": BASE | {"custom_ops", "graphs"},
    "runtime": BASE | {"custom_ops"},
    "serving": {"errors"},  # and the facade itself
}
OPTIONAL = {"cupy", "netron", "starlette", "uvicorn"}  # of an extra, and asked for by name where it is used
FORBIDDEN = {  # at any depth
    "policies": {"torch", "transformers", "onnx", "onnx_graphsurgeon", "onnxruntime"},
    "runtime": {"torch", "transformers", "onnx_graphsurgeon"},
    "serving": {"torch", "transformers", "onnx", "onnx_graphsurgeon", "onnxruntime"},
}


def imported_modules(path: Path) -> set[str]:
    """Collect every absolute module name that a source file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources_of(name: str) -> list[Path]:
    folders = importlib.import_module(f"ortolan.{name}").__path__
    return sorted({path.resolve() for folder in folders for path in Path(folder).rglob("*.py")})


def is_allowed(module: str, layer: str) -> bool:
    parts = module.split(".")
    if parts[0] != "ortolan":
        return parts[0] not in FORBIDDEN.get(layer, ())
    inside = ".".join(parts[1:])
    if layer == "serving" and not inside:
        return True
    prefixes = ALLOWED[layer] | {layer}
    return any(inside == prefix or inside.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_layer_imports_only_what_is_below_it(layer):
    sources = sources_of(layer)
    assert sources, f"no sources found for {layer}"
    broken = [
        f"{path}: {module}"
        for path in sources
        for module in sorted(imported_modules(path))
        if not is_allowed(module, layer)
    ]
    assert broken == []


def test_law_notices_a_forbidden_import(tmp_path):
    source = tmp_path / "bad.py"
    source.write_text("def f():\n    from ortolan.export import api\n    import torch\n")
    assert {m for m in imported_modules(source) if not is_allowed(m, "runtime")} == {
        "ortolan.export.api",
        "torch",
    }


def test_import_is_light_and_loading_pulls_no_training_library(tmp_path):
    code = (
        "import sys, ortolan\n"
        "light = {'onnx', 'onnxruntime', 'torch', 'transformers'} & set(sys.modules)\n"
        "ortolan.load, ortolan.Session\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "print(sorted(light), sorted(heavy))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.strip() == "[] []"


def test_what_is_imported_is_declared():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in project["dependencies"]}
    facade = Path(importlib.import_module("ortolan").__path__[0])
    sources = {path for name in ("cli", *ALLOWED) for path in sources_of(name)} | set(facade.glob("*.py"))
    found = {module.split(".")[0] for path in sources for module in imported_modules(path)}
    assert "ml_dtypes" in found
    assert found - declared - sys.stdlib_module_names - {"ortolan", *OPTIONAL} == set()
