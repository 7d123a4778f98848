"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """What an engine did since it was made.

    Attributes:
        steps: runs of the scheduler that fed something.
        fed_tokens: prompts' and generated ones, those read anew included.
        generated_tokens: tokens chosen.
        reused_tokens: tokens of prompts that were not read because pages held them already.
        restored_pages: pages that came back from host memory or files.
        snapshots: copies of rings and recurrent states that were kept for prompts that begin alike.
        evictions: sequences evicted.
        reread_tokens: tokens of prompts that were read a second time, for evictions that need it.
        preemptions: times a sequence gave its pages back for an older one.
        most_running: most requests that had pages at once.
        finished: requests that ended by themselves.
        failed: requests that ended by an error or a cancel.
        drafted_tokens: tokens of drafts that were checked.
        accepted_tokens: of these, those that were right.
        drafts_without_room: drafts that were not made, as the caches of drafts were full.
    """

    steps: int = 0
    fed_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    restored_pages: int = 0
    snapshots: int = 0
    evictions: int = 0
    reread_tokens: int = 0
    preemptions: int = 0
    most_running: int = 0
    finished: int = 0
    failed: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts_without_room: int = 0
