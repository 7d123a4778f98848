import pytest

from ortolan.cli import main
from ortolan.export.hf_config import read_hf_config
from ortolan.retrieval import shipped_model


def test_demo_answers_and_shows_the_cost(capsys):
    assert main(["demo", "--length", "3000", "--budget", "256", "--depth", "0.2", "--seed", "1"]) == 0
    output = capsys.readouterr().out
    assert "(right)" in output
    assert "evicted once" in output
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    layers = read_hf_config(shipped_model()).get("layer_types")
    assert [row[1] for row in rows] == ["full" if kind == "full_attention" else "ring" for kind in layers]
    for row in rows:
        held = int(row[-1])
        assert held < 3000
        assert row[1] != "full" or 256 <= held <= 256 + 12


def test_demo_within_the_budget_evicts_nothing(capsys):
    assert main(["demo", "--length", "600", "--budget", "1024"]) == 0
    assert "nothing to evict" in capsys.readouterr().out


def test_kept_folder_is_an_exported_model_and_is_used_again(tmp_path, capsys):
    folder = tmp_path / "kept"
    assert main(["demo", "--length", "600", "--keep-dir", str(folder)]) == 0
    written = (folder / "ortolan.json").stat().st_mtime_ns
    assert main(["demo", "--length", "700", "--keep-dir", str(folder)]) == 0
    assert (folder / "ortolan.json").stat().st_mtime_ns == written
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--length", "100"],
        ["--length", "10000000"],
        ["--depth", "1.5"],
        ["--budget", "5"],
        ["--device", "tpu"],
        ["--keep-dir", __file__],
    ],
)
def test_bad_option_is_one_line(arguments, refused):
    refused("demo", *arguments)
