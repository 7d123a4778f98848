"""Times onnxruntime-genai for model_cpu.py: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai


def run(model: Any, prompt: list[int], fed: list[int]) -> dict[str, float | int]:
    """Read a prompt, then feed tokens one by one; both append, so no sampling is timed."""
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + len(fed) + 1, do_sample=False)
    generator = genai.Generator(model, parameters)
    start = time.perf_counter()
    generator.append_tokens(np.array([prompt], np.int32))
    logits = np.asarray(generator.get_logits()).reshape(-1)
    prefill = time.perf_counter() - start
    best = int(np.argmax(logits))
    result = {"best_token": best, "best_logit": float(logits[best]), "prefill_seconds": prefill}
    steps = []
    for token in fed:
        start = time.perf_counter()
        generator.append_tokens(np.array([[token]], np.int32))
        int(np.argmax(np.asarray(generator.get_logits())))
        steps.append(time.perf_counter() - start)
    return result | {"token_seconds": statistics.median(steps)}


def main() -> None:
    """Answer until the input ends."""
    model = genai.Model(sys.argv[1])
    print(json.dumps({"onnxruntime_genai": genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
