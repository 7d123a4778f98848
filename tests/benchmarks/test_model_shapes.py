"""A shape of fewer layers keeps the order of its kinds, and is otherwise the same."""

import json

import pytest
from model_shapes import SHAPES, shape_config, text_config
from random_checkpoints import make_checkpoint


def text_of(config):
    return config.get("text_config", config)


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"gemma4-e2b"}))
def test_only_layers_are_cut(shape):
    cut, whole = text_of(shape_config(shape, 12)), text_config(shape)
    assert cut["num_hidden_layers"] == 12
    differing = {key for key in whole if cut[key] != whole[key]}
    assert differing <= {"num_hidden_layers", "max_window_layers", "layer_types"}
    if "layer_types" in whole:
        assert cut["layer_types"] == whole["layer_types"][:12]


def test_no_number_takes_the_whole_shape():
    assert all(shape_config(shape) == config for shape, config in SHAPES.items())


@pytest.mark.parametrize(
    ("shape", "layers", "period"),
    [("qwen3.5-35b-a3b", 10, 4), ("gpt-oss-20b", 1, 2), ("gemma3-1b", 8, 6), ("llama-1b", 0, 1)],
)
def test_a_pattern_stays_whole(shape, layers, period):
    with pytest.raises(SystemExit, match=f"{layers} was given; {shape} repeats after {period}, so give {period}, "):
        shape_config(shape, layers)


def test_layers_that_share_caches_are_not_cut():
    with pytest.raises(SystemExit, match="layers of gemma4-e2b share caches"):
        shape_config("gemma4-e2b", 5)


def test_a_checkpoint_has_only_so_many_layers(tmp_path):
    saved = []
    make_checkpoint("qwen3.5-35b-a3b", tmp_path, "bfloat16", lambda shapes, _: saved.extend(shapes), layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert len(config["text_config"]["layer_types"]) == config["text_config"]["num_hidden_layers"] == 4
    assert any(".layers.3." in name for name in saved)
    assert not any(".language_model.layers.4." in name for name in saved)
