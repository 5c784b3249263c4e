"""Reading one stream of a connection takes nothing from the others."""

from pathlib import Path

from tests.builders.checksum import tokens
from tests.builders.engine import greedy, oracle, socket_engine


def test_three_streams_of_one_connection_read_out_of_order(tmp_path: Path) -> None:
    with socket_engine(tmp_path) as served, served.client() as client:
        prompts = [tokens(5, start=40 * i) for i in range(3)]
        streams = [client.stream_generate(tokens=prompt, sampling=greedy(30)) for prompt in prompts]
        for i in (1, 0, 2):
            events = list(streams[i])
            sampled = [token for event in events for token in event.tokens]
            assert sampled == oracle(prompts[i], greedy(30))
            assert streams[i].result is events[-1].result
            assert "".join(event.text for event in events) == events[-1].result.text
            assert list(events[-1].result.tokens) == sampled


def test_streams_read_in_turns(tmp_path: Path) -> None:
    with socket_engine(tmp_path) as served, served.client() as client:
        prompts = [tokens(5, start=40 * i) for i in range(3)]
        streams = [client.stream_generate(tokens=prompt, sampling=greedy(30)) for prompt in prompts]
        sampled: list[list[int]] = [[], [], []]
        open_streams = set(range(3))
        while open_streams:
            for i in sorted(open_streams):
                event = next(streams[i], None)
                if event is None:
                    open_streams.remove(i)
                else:
                    sampled[i] += event.tokens
        assert sampled == [oracle(prompt, greedy(30)) for prompt in prompts]
