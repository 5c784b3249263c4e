"""In a forked child a client gives a clear error; the parent's goes on; a new one works."""

from __future__ import annotations

import subprocess
import sys

from tests.builders.fake_engine import FakeEngine, short_endpoint

# The fork happens in a process of its own: pytest's has threads of its own.
SCRIPT = """
import multiprocessing, sys
from sessionkv.client import Client
from sessionkv.errors import EngineClosed

def child(client, session, stream, endpoint, answers):
    for call in (client.stats, lambda: session.turn("x"), lambda: next(stream)):
        try:
            answers.put(repr(call()))
        except EngineClosed as error:
            answers.put(error.message)
    client.close()
    with Client(endpoint) as fresh:
        answers.put(fresh.generate(prompt="fresh").text)

endpoint = sys.argv[1]
client = Client(endpoint)
session = client.open("a")
stream = session.stream("hold")
fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
process = fork.Process(target=child, args=(client, session, stream, endpoint, answers))
process.start()
for _ in range(4):
    print(answers.get())
process.join()
print(process.exitcode)
print(stream.cancel(keep=True).text)
print(session.turn("parent").text)
client.close()
"""


def test_child_gets_a_clear_error_and_parent_goes_on():
    with short_endpoint() as endpoint, FakeEngine(endpoint):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, endpoint],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    refusal = "this client was made before a fork; make a new one in the child"
    assert done.stdout.splitlines() == [refusal] * 3 + ["fresh", "0", "kept", "parent"]


EMBEDDED = """
import multiprocessing, sys
from sessionkv import Engine, EngineConfig, SamplingParams, launch
from sessionkv.errors import EngineClosed
SAMPLING = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

def child(engine, handle, client, session, answers):
    for call in (engine.stats, client.stats, lambda: session.turn("x")):
        try:
            answers.put(repr(call()))
        except EngineClosed as error:
            answers.put(error.message)
    engine.close()
    client.close()
    with handle.client() as fresh:
        answers.put(str(len(fresh.generate("x", sampling=SAMPLING).tokens)))

engine = Engine(EngineConfig(model="checksum"))
session = engine.open("a")
handle = launch("checksum")
client = handle.client()
fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
process = fork.Process(target=child, args=(engine, handle, client, session, answers))
process.start()
for _ in range(4):
    print(answers.get())
process.join()
print(process.exitcode)
print(len(session.turn("parent", sampling=SAMPLING).tokens))
print(len(client.generate("parent", sampling=SAMPLING).tokens))
handle.close()
engine.close()
"""


def test_engines_and_their_clients_stay_with_the_parent():
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    refusal = "this client was made before a fork; make a new one in the child"
    assert done.stdout.splitlines() == [refusal] * 3 + ["3", "0", "3", "3"]
