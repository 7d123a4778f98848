"""What a session is made of, and what it asks of the model that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortolan.policies import Eviction
from ortolan.runtime.device.memory import MemoryReport
from ortolan.runtime.saved.fingerprint import Fingerprint
from ortolan.runtime.speculation.drafter import Drafter
from ortolan.runtime.speculation.options import Speculation
from ortolan.runtime.steps.feeder import FeederParts
from ortolan.runtime.text.tokenizer import Detokenize, Tokenizer

if TYPE_CHECKING:
    from ortolan.runtime.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What a session is made of.

    Attributes:
        feeder: the sequence's state, caches, room and stepper.
        eviction: options; None never evicts.
        evict_session: ONNX Runtime's session of the eviction graph; None without options.
        score_session: that of the graph that scores by a second reading; None where the policy has none.
        identify: says what model this is, for saved sessions.
        tokenizer: returns the model's. Raises ContractMismatchError where there is none.
        detokenize: starts to decode token ids. Raises ConfigError where there is no tokenizer.
        open_drafter: makes what drafts for the session. Raises ConfigError where the model cannot have it.
        report: says what holds how many bytes.
        make_another: makes an empty session of the same plan and options, with caches of these slots.
    """

    feeder: FeederParts
    eviction: Eviction | None
    evict_session: Any
    score_session: Any
    identify: Callable[[], Fingerprint]
    tokenizer: Callable[[], Tokenizer]
    detokenize: Detokenize
    open_drafter: Callable[[Speculation], Drafter]
    report: Callable[[Session], MemoryReport]
    make_another: Callable[[list[int]], Session]
