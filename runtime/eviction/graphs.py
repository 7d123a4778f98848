"""Opens the eviction graphs of a model: the folder's own, or one that is built for other options."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.manifest import EVICT_FILE, Manifest
from ortolan.policies import Eviction
from ortolan.policies.eviction import STRUCTURE_METADATA
from ortolan.runtime.device.opening import Device

EvictBuilder = Callable[[Manifest, Eviction], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChanges:
    """What a decoder graph is to be, whatever the folder's is.

    Attributes:
        manifest: of the caches that it is to have.
        batch_invariant: whether its rows must not depend on each other.
        cuda: whether it runs on CUDA; else on the CPU.
    """

    manifest: Manifest
    batch_invariant: bool = False
    cuda: bool = False


DecoderBuilder = Callable[[Path, GraphChanges], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBuilders:
    """What builds graphs that a model folder lacks.

    Attributes:
        evict: an eviction graph for options other than the folder's; None: nothing does.
        score: the graph that scores by a piece of a second reading, for policies that have one; None: nothing does.
        decoder: the decoder graph that is wanted, of the folder's graph; None: that is it.
    """

    evict: EvictBuilder | None = None
    score: EvictBuilder | None = None
    decoder: DecoderBuilder | None = None


class EvictionGraphs:
    """The eviction graphs of one model, each opened once."""

    def __init__(self, folder: Path, manifest: Manifest, device: Device, builders: GraphBuilders) -> None:
        """Take the model's folder, and what builds graphs for options, or caches, other than the folder's."""
        self._folder, self._manifest, self._device = folder, manifest, device
        self._builder, self._score_builder = builders.evict, builders.score
        self._sessions: dict[str, Any] = {}
        self._recorded: dict[str, Any] | None = None
        self._has_read = builders.decoder is not None  # then the folder's graph may be for other caches
        if self._builder is None:
            self._read_recorded()  # now, as `check` may be called in any thread

    def check(self, options: object) -> None:
        """Refuse, by ConfigError, options that `open` would."""
        check_eviction(options, self._manifest)
        if self._builder is None and isinstance(options, Eviction) and options.structure != self._read_recorded():
            raise self._no_graph(options)

    def open(self, options: Eviction) -> Any:
        """Return the session of the eviction graph for these options. Raises ConfigError where there is none."""
        key = json.dumps(options.structure, sort_keys=True)
        if key not in self._sessions and self._read_recorded() != options.structure:
            if self._builder is None:
                raise self._no_graph(options)
            self._sessions[key] = self._device.open(self._builder(self._manifest, options), self._folder)
        return self._sessions[key]

    def open_score(self, options: Eviction) -> Any:
        """Return the session of the graph that scores by a piece of a second reading; None where there is none.

        Raises:
            ConfigError: the policy needs one, and nothing builds it.
        """
        if options.second_reading is None:
            return None
        key = json.dumps([options.structure, "score"], sort_keys=True)
        if key not in self._sessions:
            if self._score_builder is None:
                raise self._no_graph(options)
            self._sessions[key] = self._device.open(self._score_builder(self._manifest, options), self._folder)
        return self._sessions[key]

    def _read_recorded(self) -> dict[str, Any] | None:
        """Return the options that the folder's graph was built for; None where it has none."""
        path = self._folder / EVICT_FILE
        if not self._has_read and path.is_file():
            session = self._device.open(str(path), self._folder)
            text = session.get_modelmeta().custom_metadata_map.get(STRUCTURE_METADATA, "{}")
            try:
                self._recorded = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ContractMismatchError(
                    f"{path} has metadata that is not valid JSON; export the model again"
                ) from error
            self._sessions[json.dumps(self._recorded, sort_keys=True)] = session
        self._has_read = True
        return self._recorded

    def _no_graph(self, options: Eviction) -> ConfigError:
        return ConfigError(
            f"{self._folder / EVICT_FILE} was built for {json.dumps(self._recorded)}, not "
            f"{json.dumps(options.structure)}; open the model with ortolan.load, which can build others"
        )


def check_eviction(options: object, manifest: Manifest) -> None:
    """Check that eviction options are such, and that a model has what they need. Raises ConfigError."""
    if options is None:
        return
    if not isinstance(options, Eviction):
        raise ConfigError(f"eviction is {options!r}; it must be an ortolan.Eviction or ortolan.SnapKv, or None")
    options.check(manifest)


def one_eviction(eviction: Eviction | None, snapkv: Eviction | None) -> Eviction | None:
    """Return the options of two arguments that mean the same. Raises ConfigError where both are given."""
    if eviction is not None and snapkv is not None:
        raise ConfigError("eviction and snapkv are the same option; give one of them")
    return snapkv if eviction is None else eviction
