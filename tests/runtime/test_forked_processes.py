"""A process that is forked after a model was loaded ends as it should, and what it inherited refuses to be used."""

import subprocess
import sys

import pytest
from families import shared_checkpoint, shared_model

PROGRAM = """
import os, sys, threading
import ortolan
from ortolan.errors import ForkedProcessError

model = ortolan.load({folder!r}, device="cpu", num_threads=2)
session = model.session()
session.prefill([5, 6, 7])
answer = session.generate([8], 8)
engine = ortolan.Engine(model)
engine.submit([5, 6], 3).result()
stream = engine.submit([5, 6], 50)


def refused(call):
    try:
        call()
    except ForkedProcessError:
        return True
    return False


child = os.fork()
if child == 0:
{body}
pid, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), flush=True)
print("parent", len(list(answer)), len(stream.result()), flush=True)
engine.close()
"""
USES = """
    calls = [lambda: session.step(5), lambda: next(answer), session.fork, model.session, lambda: ortolan.Engine(model),
             lambda: engine.submit([5]), engine.stats, engine.memory, lambda: next(stream), stream.result,
             lambda: stream.save("x"), lambda: session.save("x"), lambda: session.rewind(0)]
    stream.cancel()
    engine.close()
    sys.exit(0 if all([refused(call) for call in calls]) else 9)
"""
LOADS = """
    own = ortolan.load({folder!r}, device="cpu", num_threads=2)
    sys.exit(0 if len(list(own.session().generate([5, 6, 7], 4))) else 9)
"""
BODIES = {
    "exits": ("    sys.exit(3)", 3),
    "returns": ("    print('done'); sys.exit()", 0),
    "frees": ("    del engine, stream, answer, session, model; sys.exit()", 0),
    "uses": (USES, 0),
    "loads": (LOADS, 0),
    "raises": ("    raise KeyError('mine')", 1),
    "forks": ("    other = os.fork()\n    sys.exit(0 if other == 0 else os.waitpid(other, 0)[1])", 0),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_forked_process_ends(name):
    checkpoint = shared_checkpoint("llama", seed=5, eos_token_id=None)
    folder = shared_model(checkpoint, max_context=512, chunk_size=16, paged=True, page_size=16)
    body, code = BODIES[name]
    program = PROGRAM.replace("{body}", body).replace("{folder!r}", repr(str(folder)))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [f"child {code}", "parent 8 50"]


def test_multiprocessing_by_fork_ends():
    """Its processes free what they inherited, and end without what runs at the exit of others."""
    checkpoint = shared_checkpoint("llama", seed=5, eos_token_id=None)
    folder = shared_model(checkpoint, max_context=512, chunk_size=16, paged=True, page_size=16)
    program = f"""
import multiprocessing, ortolan
model = ortolan.load({str(folder)!r}, device="cpu", num_threads=2)
session = model.session()
session.prefill([5, 6, 7])
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, range(-4, 0)))
    pool.close()
    pool.join()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "[4, 3, 2, 1]\n"), result.stderr
