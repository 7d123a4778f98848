"""The examples run on the model that comes with Ortolan, give right answers, and pass a strict type check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from tolerances import FLOAT32_SUMS, LOGITS_RELATIVE

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "bounded_caches.ipynb"


def run(script: Path | str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    environment = os.environ | {"MPLBACKEND": "Agg"}  # draws without a display
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers(output: str) -> list[tuple[str, str]]:
    """Return what was answered to each question, and what the document says."""
    lines = [line for line in output.splitlines() if line.startswith("Q: ")]
    pairs = [line.removesuffix(")").split("? A: ")[1].split(" (in the document: ") for line in lines]
    return [(given, right) for given, right in pairs]


@pytest.mark.slow
def test_a_long_document_is_answered_from_a_small_cache(tmp_path):
    question, read, *costs = run("long_document.py", folder=tmp_path).splitlines()
    assert question.startswith("Q: ")
    assert read.split()[0] == str(8192 + len(question.split("A: ")[1]))
    full, planned, kept = (int(line.split()[0].replace(",", "")) for line in costs)
    assert kept * 10 < planned * 2 < full


def test_a_document_and_a_question_of_ones_own_are_read(tmp_path, exported):
    (tmp_path / "report.txt").write_text("# The port of ABCD is 48213.\n", encoding="utf-8")
    options = ["--model", str(exported), "--file", "report.txt", "--question", "Q: port of ABCD? A: "]
    assert run("long_document.py", *options, folder=tmp_path).splitlines()[0] == "Q: port of ABCD? A: 48213"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "count"), [("many_questions.py", 4), ("engine_asyncio.py", 6)])
def test_questions_are_answered_right(script, count, tmp_path):
    found = answers(run(script, folder=tmp_path))
    assert [given for given, _ in found] == [right for _, right in found]
    assert len(found) == count


def test_the_operators_compute_what_attention_over_all_keys_does(tmp_path):
    *_, difference = run("operators_alone.py", folder=tmp_path).split()
    assert 0 < float(difference) < FLOAT32_SUMS


def test_a_converted_model_agrees_with_its_source(tmp_path, foreign_folder):
    first, text, *_ = run("convert_model.py", str(foreign_folder), "--prompt", "Once", folder=tmp_path).splitlines()
    *_, difference, _, _, spread = first.replace(";", "").split()
    assert float(difference) < LOGITS_RELATIVE * float(spread)
    assert text.startswith("Once")


@pytest.mark.slow
def test_the_notebook_runs_and_draws(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    count = "import matplotlib.pyplot as plt\nprint(len(plt.get_fignums()), 'figures')"
    (tmp_path / "notebook.py").write_text("\n\n".join([*cells, count]), encoding="utf-8")
    shown = run(tmp_path / "notebook.py", folder=tmp_path).splitlines()
    assert shown[-1] == "3 figures"
    ((given, right),) = answers("\n".join(shown))
    assert given == right


def test_the_notebook_is_kept_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_the_examples_pass_a_strict_type_check(tmp_path):
    scripts = sorted(map(str, EXAMPLES.glob("*.py")))
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, *scripts]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"Success: no issues found in {len(scripts)} source files"), done.stdout + done.stderr
