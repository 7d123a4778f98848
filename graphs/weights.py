"""Lists the weights of a decoder: names, shapes, and which of them a graph may read as one."""

from __future__ import annotations

from collections.abc import Iterator

from ortolan.graphs import layer_inputs
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.kinds import LayerKind, Shapes
from ortolan.graphs.mixers import MIXERS
from ortolan.graphs.mlps import MLPS

KINDS = ("weight", "bias")


def norm_names(config: ModelConfig, index: int) -> tuple[str, ...]:
    """Name the hidden-size norms of one layer."""
    before = ("attention_norm", "mlp_norm")
    after = ("attention_post_norm", "mlp_post_norm")
    names = {"pre": before, "post": after, "sandwich": before + after, "parallel": before[:1]}
    return names[config.placement(index)]


def weight_shapes(config: ModelConfig) -> Shapes:
    """List every weight of the model by its canonical name, with its shape ([out, in] for linear layers).

    Those that a draft head shares with its model are not its own; see `shared_shapes`.
    """
    hidden = config.hidden_size
    shared: Shapes = {} if config.drafts else shared_shapes(config)
    shapes = {name: shape for name, shape in shared.items() if name == "embedding.weight"}
    if config.drafts:
        shapes |= {"mtp.embedding_norm.weight": (hidden,), "mtp.hidden_norm.weight": (hidden,)}
        shapes |= {"mtp.input.weight": (hidden, 2 * hidden)}
    shapes |= layer_inputs.model_shapes(config)
    for index, layer in enumerate(config.layers):
        mixer, mlp = MIXERS[layer.mixer.kind], MLPS[layer.mlp.kind]
        inside = mixer.weights(layer.mixer, hidden) | mlp.weights(layer.mlp, hidden)
        inside |= {f"{name}.weight": (hidden,) for name in norm_names(config, index)} | layer_inputs.layer_shapes(
            config
        )
        inside |= {"scale": (1,)} if layer.scaled else {}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in inside.items()}
    return shapes | {"final_norm.weight": (hidden,)} | shared


def shared_shapes(config: ModelConfig) -> Shapes:
    """List the weights that a model and its draft head share."""
    names = ("embedding.weight",) if config.tied_embeddings else ("embedding.weight", "head.weight")
    return dict.fromkeys(names, (config.vocab_size, config.hidden_size))


def joint_weights(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """List the weights that a graph may read as one, by the name of the whole."""
    shapes = weight_shapes(config)
    found = {}
    for whole, members in _joints(config, shapes):
        for kind in KINDS:
            names = tuple(f"{member}.{kind}" for member in members)
            if all(name in shapes for name in names):
                found[f"{whole}.{kind}"] = names
    return found


def joint_shapes(config: ModelConfig) -> Shapes:
    """List the shapes of what `joint_weights` lists."""
    shapes = weight_shapes(config)
    return {
        whole: (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
        for whole, names in joint_weights(config).items()
    }


def weight_groups(config: ModelConfig) -> list[tuple[str, ...]]:
    """List the weights in the order of the file; those of a group have no padding between them."""
    group_of = {name: names for names in joint_weights(config).values() for name in names}
    return list(dict.fromkeys(group_of.get(name, (name,)) for name in weight_shapes(config)))


def _joints(config: ModelConfig, shapes: Shapes) -> Iterator[tuple[str, list[str]]]:
    for index, layer in enumerate(config.layers):
        kinds: tuple[LayerKind, ...] = (MIXERS[layer.mixer.kind], MLPS[layer.mlp.kind])
        for kind in kinds:
            taken: set[str] = set()
            for whole, members in kind.joint.items():
                stems = [f"layers.{index}.{member}" for member in members]
                if taken.isdisjoint(stems) and all(f"{stem}.weight" in shapes for stem in stems):
                    taken.update(stems)
                    yield f"layers.{index}.{whole}", stems
