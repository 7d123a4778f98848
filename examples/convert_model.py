"""Convert a model that another exporter made, compare it with its source, and generate text.

python examples/convert_model.py SOURCE [--prompt TEXT]

SOURCE is a folder that onnxruntime-genai's model builder wrote, for example by
python -m onnxruntime_genai.models.builder -i ./checkpoint -o ./source -p int4 -e cpu
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

import ortolan


def main() -> None:
    """Convert, compare and generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with model.onnx")
    parser.add_argument("--prompt", default="Once upon a time", help="(default: %(default)s)")
    parser.add_argument("--max-context", type=int, default=1024, help="(default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = ortolan.convert(options.source, Path(folder) / "model", max_context=options.max_context)
        model = ortolan.load(path, device="cpu")
        compare(model, options.source, model.tokenizer.encode(options.prompt))
        print(options.prompt, end="")
        for text in model.stream(options.prompt, max_new_tokens=32):
            print(text, end="", flush=True)
        print()


def compare(model: ortolan.Model, source: Path, tokens: list[int]) -> None:
    """Print how far the logits after a prompt are from the source's."""
    mine = model.session().prefill(tokens)
    theirs = source_logits(source, tokens)
    print(f"largest difference of logits: {np.abs(mine - theirs).max():.1e}; their spread: {theirs.std():.1e}")


def source_logits(source: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Run the source itself on a prompt, without a past; returns the logits [V] of the last token."""
    session = onnxruntime.InferenceSession(source / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name == "position_ids":
            feeds[value.name] = np.arange(len(tokens))[None]
        elif value.name.startswith("past_key_values"):
            _, kv_heads, _, head_size = value.shape
            dtype = np.float16 if "float16" in value.type else np.float32
            feeds[value.name] = np.zeros((1, kv_heads, 0, head_size), dtype)
    logits: npt.NDArray[np.float32] = session.run(["logits"], feeds)[0][0, -1].astype(np.float32)
    return logits


if __name__ == "__main__":
    main()
