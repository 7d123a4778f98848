"""A new policy is a class and a line of the registry: everything else finds its options, needs and graph there."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from families import tiny_checkpoint

import ortolan
from ortolan.cli import main
from ortolan.errors import ConfigError
from ortolan.policies import POLICIES, Eviction
from ortolan.policies.base import whole
from ortolan.policies.parts import Kept, Parts

LENGTH, BUDGET, WINDOW, SINK, STEP = 150, 40, 8, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Comb(Eviction):
    """Keeps every `step`-th position, the first ones first."""

    summary = "the teeth of a comb"

    policy: str = "comb"
    step: int = field(default=2, metadata=whole("positions from one tooth to the next", shapes_graph=True))

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Score multiples of `step` with 1, and others with 0."""
        kept, graph = {}, parts.graph
        step = graph.constant("int64/step", [self.step], np.int64)
        for i, layer in parts.layers.items():
            path, slots = f"layers.{i}/comb", parts.cache_slots(i)
            rest = graph.node(f"{path}/Mod", "Mod", [parts.positions(path, slots), step])
            tooth = graph.node(f"{path}/Equal", "Equal", [rest, graph.constant("int64/zero", [0], np.int64)])
            lists = graph.node(f"{path}/lists", "Shape", [layer.kv_len])
            shape = graph.node(f"{path}/shape", "Concat", [lists, slots], {"axis": 0})
            score = graph.node(f"{path}/score", "Expand", [parts.cast(f"{path}/teeth", tooth, np.float32), shape])
            kept[i] = parts.keep_best(i, score, parts.budget)
        return kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(POLICIES, "comb", Comb)
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf", seed=5)
    return ortolan.export(checkpoint, tmp_path / "model", max_context=512, chunk_size=16)


def tokens() -> list[int]:
    return np.random.default_rng(0).integers(3, 131, LENGTH).tolist()


def wanted() -> list[int]:
    """Sinks, the first teeth behind them, and the window."""
    teeth = [position for position in range(SINK, LENGTH - WINDOW) if position % STEP == 0]
    return [*range(SINK), *teeth[: BUDGET - SINK - WINDOW], *range(LENGTH - WINDOW, LENGTH)]


def test_a_session_evicts_saves_and_goes_on_by_a_toy_policy(folder, tmp_path):
    model = ortolan.load(folder, device="cpu", num_threads=1)
    eviction = ortolan.Eviction(policy="comb", budget=BUDGET, window=WINDOW, sink=SINK, step=STEP)
    session = model.session(snapkv=eviction)
    session.prefill(tokens())
    for layer in range(len(model.manifest.layers)):
        for positions in session.kept_positions(layer):
            np.testing.assert_array_equal(positions, wanted())
    session.save(tmp_path / "saved")
    restored = model.restore(tmp_path / "saved")
    np.testing.assert_array_equal(restored.step(5), session.step(5))
    np.testing.assert_array_equal(restored.kept_positions(0), session.kept_positions(0))


def test_its_options_are_checked_and_named(folder):
    with pytest.raises(ConfigError, match="eviction step is 0"):
        ortolan.Eviction(policy="comb", step=0)
    with pytest.raises(ConfigError, match=r"'comb' does not have option 'stp'.*did you mean 'step'"):
        ortolan.Eviction(policy="comb", stp=3)
    with pytest.raises(ConfigError, match="policies that have it: comb"):
        ortolan.SnapKv(step=3)


def test_the_command_line_knows_it(folder, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    listing = capsys.readouterr().out.partition("comb: the teeth of a comb\n")[2]
    assert listing.startswith("    step: positions from one tooth to the next (whole number from 1; default: 2)\n")
    arguments = ["generate", str(folder), "--prompt", "x", "--evict", "comb", "--evict-option", "step=none"]
    assert main(arguments) == 2
    assert "--evict-option step is 'none'; it must be a whole number" in capsys.readouterr().err
