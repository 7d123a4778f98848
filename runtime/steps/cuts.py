"""Says where a sequence's tokens may be cut into steps, so that each token's bits are the same however it was read.

On CUDA different families of attention kernels read a sequence's few new tokens and its many, and sum in different
orders. Within a family the bits follow from a token's position alone. So each token must always meet the same family:

 1. A prompt of at most `FEW_TOKENS` tokens is read whole.
 2. A longer one is cut into pieces of more than `FEW_TOKENS` tokens, whatever their number.
 3. Tokens that were generated, each in a step of its own, are read again in pieces of at most `STEP_TOKENS`, and never
    in one piece with the prompt.
 4. Another sequence's beginning takes the place of rule 2's pieces where it was read by that rule, and where more than
    `FEW_TOKENS` tokens of the prompt are left, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ortolan.errors import ConfigError

FEW_TOKENS = 64  # of a sequence; more are read by the kernels of long chunks at every head size
STEP_TOKENS = 16  # of a sequence; as many are read by the kernels of decode at every head size
LEAST_STEP = 2 * (FEW_TOKENS + 1)  # tokens of a step that any prompt can be cut for


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Where a sequence may be cut.

    Attributes:
        by_family: whether each token must meet the same family of kernels; else anywhere.
    """

    by_family: bool = False

    def check(self, name: str, tokens: int, max_sequences: int = 1) -> None:
        """Refuse, by ConfigError, steps of so few tokens that some prompt could not be cut for them."""
        least = LEAST_STEP if max_sequences == 1 else LEAST_STEP + max_sequences
        if self.by_family and tokens < least:
            many = "" if max_sequences == 1 else f", for max_sequences = {max_sequences}"
            raise ConfigError(
                f"{name} is {tokens}; with batch_invariant=True on CUDA it must be at least {least}{many}, as longer "
                f"prompts are read in pieces of more than {FEW_TOKENS} tokens; raise it, or load the model without "
                "batch_invariant"
            )

    @property
    def least_step(self) -> int:
        """Tokens of a step that any prompt can be cut for."""
        return LEAST_STEP if self.by_family else 1

    def prompt_piece(self, left: int, room: int) -> int:
        """Return how many of a prompt's `left` unread tokens the next step reads, at most `room`; 0: it must wait."""
        if not self.by_family or left <= room:
            return min(left, room)
        if left <= FEW_TOKENS:
            return 0
        piece = min(room, left - FEW_TOKENS - 1)
        return piece if piece > FEW_TOKENS else 0

    def answer_piece(self, left: int, room: int) -> int:
        """Return how many of `left` generated tokens that are read again the next step reads."""
        return min(left, room, STEP_TOKENS) if self.by_family else min(left, room)

    def piece(self, *, fed: int, prompt: int, known: int, room: int) -> int:
        """Return how many tokens of a sequence the next step reads.

        Args:
            fed: tokens read before.
            prompt: of `known`, those of the prompt; they come first.
            known: tokens of the sequence.
            room: the most to read.
        """
        if self.by_family and fed >= prompt:
            return self.answer_piece(known - fed, room)
        return self.prompt_piece((min(prompt, known) if self.by_family else known) - fed, room)

    def may_end(self, end: int, *, fed: int, prompt: int) -> bool:
        """Say whether a piece of a prompt that begins at `fed` may end at `end`."""
        if not self.by_family or end == prompt:
            return True
        return end < prompt and end - fed > FEW_TOKENS and prompt - end > FEW_TOKENS

    def last_begin(self, *, prompt: int, known: int) -> int:
        """Return the most tokens of a sequence after which a longer one that begins alike may begin."""
        return max(0, prompt - FEW_TOKENS - 1) if self.by_family else known - 1

    def may_begin(self, length: int, *, prompt: int, known: int) -> bool:
        """Say whether `length` tokens may come from another sequence, which has read them as `shared` allows."""
        if not self.by_family or length == 0:
            return True
        return prompt - length > FEW_TOKENS or (length == prompt < known and prompt > FEW_TOKENS)

    def shared(self, prompt: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence may serve others."""
        if not self.by_family:
            return length
        return min(prompt, length) if prompt > FEW_TOKENS else 0

    def pieces(self, count: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield half-open ranges of at most `most` tokens that cover a prompt of `count`."""
        begin = 0
        while begin < count:
            end = begin + self.prompt_piece(count - begin, most)
            yield begin, end
            begin = end


ANYWHERE = Cuts()
