"""Traces of requests for the cache: read from a file, or generated.

The format is that of the traces published with Mooncake (FAST'25): one JSON object a line with
``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and ``hash_ids``, one per 512
tokens of the prompt, where equal ids are equal prefixes. ``python -m bench.traces`` writes the
small trace that lies in the repository: of the same shape, and the same with every run.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 512
SMALL = Path(__file__).parent / "data" / "small_trace.jsonl"

_CONVERSATIONS = 700
_SCANS = 30  # long prompts that nobody asks again
_DOCUMENTS = 12  # long prompts that several conversations begin with
_SPAN_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Request:
    """The ids of a prompt's full blocks; a hit is at most ``hit_max`` of them."""

    blocks: tuple[int, ...]
    hit_max: int


def load(path: Path) -> list[Request]:
    """Return the requests in order. Raises ValueError naming the line that is none."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            one = json.loads(line)
            tokens, ids = int(one["input_length"]), one["hash_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no request ({error!r})") from error
        # The last token is always computed.
        requests.append(Request(tuple(ids[: tokens // BLOCK_TOKENS]), (tokens - 1) // BLOCK_TOKENS))
    return requests


@dataclass(order=True, slots=True)
class _Turn:
    """The next request of a conversation; ``tokens`` of it are those of the turns before."""

    at_ms: int
    number: int
    document_blocks: int
    document: int
    tokens: int
    last: bool = False

    def blocks(self) -> list[tuple[str, int, int]]:
        """Whose each block is: everybody's, a document's or the conversation's own."""
        count = -(-self.tokens // BLOCK_TOKENS)
        chain = [("system", 0, 0)]
        chain += [("document", self.document, at) for at in range(self.document_blocks)]
        chain += [("own", self.number, at) for at in range(len(chain), count)]
        return chain[:count]


def generated(seed: int = 1) -> Iterator[dict[str, object]]:
    """Yield the requests of a generated trace, in order of time.

    Conversations over an hour: each begins with the same system prompt, a third of them goes on
    with a document that others have too, and every turn's prompt is all of the turns before and
    more. Now and then comes a long prompt that is never asked again.
    """
    random = np.random.default_rng(seed)
    names: dict[tuple[str, int, int], int] = {}
    waiting: list[_Turn] = []
    for number in range(_CONVERSATIONS + _SCANS):
        scan = number >= _CONVERSATIONS
        document = min(int(random.zipf(1.6)), _DOCUMENTS)
        blocks = 8 + 2 * document if number % 3 == 0 and not scan else 0
        tokens = (1 + blocks) * BLOCK_TOKENS + (24_000 if scan else int(random.lognormal(8, 1)))
        at_ms = int(random.uniform(0, _SPAN_MS))
        heapq.heappush(waiting, _Turn(at_ms, number, blocks, document, tokens, last=scan))
    while waiting:
        turn = heapq.heappop(waiting)
        turn.tokens += int(random.lognormal(6.8, 1.0))
        output = int(random.lognormal(5.6, 0.8))
        yield {
            "timestamp": turn.at_ms,
            "input_length": turn.tokens,
            "output_length": output,
            "hash_ids": [names.setdefault(block, len(names)) for block in turn.blocks()],
        }
        if not turn.last and random.random() < 0.5:
            turn.at_ms += 20_000 + int(random.exponential(180_000))
            turn.tokens += output
            heapq.heappush(waiting, turn)


def main() -> None:
    """Write the small trace."""
    lines = (json.dumps(one, separators=(",", ":")) for one in generated())
    SMALL.parent.mkdir(exist_ok=True)
    SMALL.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
