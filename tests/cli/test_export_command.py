import json

import pytest

from ortolan.cli import main
from ortolan.retrieval import shipped_model


def test_options_reach_the_manifest(tmp_path, capsys):
    target = tmp_path / "model"
    options = ["--max-context", "1024", "--chunk-size", "128", "--sink", "4", "--snapkv-window", "32"]
    assert main(["export", str(shipped_model()), str(target), "--weights", "random", *options]) == 0
    manifest = json.loads((target / "ortolan.json").read_text())
    wanted = {"max_context": 1024, "chunk_size": 128, "sink": 4, "snapkv_window": 32, "dtype": "float32"}
    assert {key: manifest[key] for key in wanted} == wanted
    assert capsys.readouterr().out == f"{target}\n"


def test_caches_of_codes_are_exported_and_shown(tmp_path, capsys):
    target = tmp_path / "model"
    options = ["--weights", "random", "--max-context", "512", "--cache-dtype", "fp8"]
    assert main(["export", str(shipped_model()), str(target), *options]) == 0
    assert main(["inspect", str(target)]) == 0
    assert "float32, caches float8_e4m3fn" in capsys.readouterr().out


def test_overwrite_is_needed_and_works(model_dir, tmp_path, capsys):
    target = tmp_path / "model"
    arguments = ["export", str(shipped_model()), str(target), "--weights", "random"]
    assert main([*arguments, "--max-context", "512"]) == 0
    assert main([*arguments, "--max-context", "768"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert json.loads((target / "ortolan.json").read_text())["max_context"] == 512
    assert main([*arguments, "--max-context", "768", "--overwrite"]) == 0
    assert json.loads((target / "ortolan.json").read_text())["max_context"] == 768


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dtype", "int3"], "int3"),
        (["--weights", "none"], "none"),
        (["--cache-dtype", "int4"], "cache_dtype"),
        (["--max-context", "0"], "max_context"),
        (["--sink", "-1"], "sink"),
        (["--paged", "--page-size", "20"], "page_size"),
        (["--chunk-size", "x"], "--chunk-size"),
    ],
)
def test_bad_option_is_one_line_and_writes_nothing(arguments, named, tmp_path, refused):
    assert named in refused("export", str(shipped_model()), str(tmp_path / "model"), *arguments)
    assert list(tmp_path.iterdir()) == []


def test_folder_without_a_checkpoint(tmp_path, capsys):
    assert main(["export", str(tmp_path), str(tmp_path / "model")]) == 2
    assert "config.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
