"""Read a document once, save the session, and ask questions about it, each with an eviction of its own.

python examples/many_questions.py

The document is read without eviction, because an eviction keeps only what the question in front of it asks for.
"""

import random
import tempfile
from pathlib import Path

import ortolan
from ortolan.retrieval import Fact, draw_facts, hide, load_corpus, shipped_model


def main() -> None:
    """Read, save, and ask."""
    document, facts = make_document(random.Random(3))
    with tempfile.TemporaryDirectory() as folder:
        model = ortolan.load(ortolan.export(shipped_model(), Path(folder) / "model", chunk_size=512))
        saved = Path(folder) / "document.session"
        read(model, document, saved)
        for fact in facts:
            print(f"{fact.question.strip()} {ask(model, saved, fact.question)} (in the document: {fact.value})")


def make_document(rng: random.Random) -> tuple[str, list[Fact]]:
    """Return 4 KB of Python sources, and the four facts that are hidden in it."""
    facts = draw_facts(rng, 4, ("passkey",))
    text, _ = hide(load_corpus().lines(rng, 4000), facts, [0.1, 0.35, 0.6, 0.85])
    return text, facts


def read(model: ortolan.Model, document: str, path: Path) -> None:
    """Read the document without eviction, and save the session."""
    session = model.session()
    session.prefill(model.tokenizer.encode(document))
    session.save(path, rewind_tokens=64)  # questions shorter than the eviction's window look back on the document
    print(f"read {session.logical_length} tokens once; the file takes {path.stat().st_size:,} bytes")


def ask(model: ortolan.Model, path: Path, question: str) -> str:
    """Restore the document, evict behind the question, and return the answer."""
    session = model.restore(path, eviction=ortolan.SnapKv(budget=512, window=64))
    return "".join(session.stream_text(question, max_new_tokens=12, stop=["\n"])).strip()


if __name__ == "__main__":
    main()
