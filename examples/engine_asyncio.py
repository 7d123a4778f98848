"""Answer many requests at once from an event loop, as a service does.

python examples/engine_asyncio.py
"""

import asyncio
import tempfile
from pathlib import Path

import ortolan
from ortolan.retrieval import Sample, Task, load_corpus, make_sample, shipped_model


async def main() -> None:
    """Make an engine, and send it six requests."""
    samples = [make_sample(load_corpus(), Task(length=1024 + 256 * i, depth=0.5, seed=i)) for i in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        path = ortolan.export(shipped_model(), Path(folder) / "model", max_context=8192, paged=True)
        model = ortolan.load(path)
        with ortolan.Engine(model, max_sequences=4, chunk_tokens=256) as engine:
            await asyncio.gather(*(answer(engine, model, sample) for sample in samples))
            stats = engine.stats()
            print(f"{len(samples)} requests in {stats.steps} steps, {stats.generated_tokens} tokens generated")


async def answer(engine: ortolan.Engine, model: ortolan.Model, sample: Sample) -> None:
    """Submit a prompt, and print its answer when the last token is there."""
    stream = engine.submit(model.tokenizer.encode(sample.prompt), max_new_tokens=12, stop=["\n"])
    async for _ in stream:  # other requests go on meanwhile; leaving the loop early cancels this one
        pass
    print(f"{sample.fact.question.strip()} {stream.text} (in the document: {sample.answer})")


if __name__ == "__main__":
    asyncio.run(main())
