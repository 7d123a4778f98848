"""Read a long document, evict most of the cache, and answer the question at the document's end.

python examples/long_document.py
python examples/long_document.py --model MODEL --file report.txt --question "Who wrote this report?"

Without arguments it makes a text for the small model that comes with Ortolan.
"""

import argparse
import tempfile
from pathlib import Path

import ortolan
from ortolan.retrieval import Task, load_corpus, make_sample, shipped_model


def main() -> None:
    """Print the answer, and what the caches take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder that `ortolan export` made")
    parser.add_argument("--file", type=Path, help="document")
    parser.add_argument("--question", help="what to ask about the document")
    parser.add_argument("--budget", type=int, default=1024, help="tokens that each full-attention layer keeps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or ortolan.export(shipped_model(), Path(folder) / "model", chunk_size=512)
        answer(ortolan.load(path), make_prompt(options), ortolan.SnapKv(budget=options.budget))


def make_prompt(options: argparse.Namespace) -> str:
    """Return the document and the question behind it."""
    if options.file is None:
        return make_sample(load_corpus(), Task(length=8192, depth=0.3)).prompt
    return f"{options.file.read_text()}\n{options.question or ''}"


def answer(model: ortolan.Model, prompt: str, eviction: ortolan.SnapKv) -> None:
    """Read the prompt, evict behind it, and print what follows."""
    session = model.session(eviction=eviction)
    print(prompt.splitlines()[-1], end="")
    for text in session.stream_text(prompt, max_new_tokens=32, stop=["\n"]):
        print(text, end="", flush=True)
    print(f"\n{session.logical_length} tokens were read")
    print(f"{session.plan.full_length_bytes:>12,} bytes: caches of full length for the longest context")
    print(f"{session.plan.bytes:>12,} bytes: caches that the session may take while it reads")
    print(f"{session.cache_bytes:>12,} bytes: caches after the eviction")


if __name__ == "__main__":
    main()
