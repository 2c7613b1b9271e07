"""What is said to an engine process and what it answers: one JSON document per line."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to build the engine; written to a file whose path is the program's argument.

    ``run_dir`` empty: no connector at all. ``connector_extra`` is merged into the connector's
    extra config, ``engine_args`` into vLLM's EngineArgs (last word). ``kv_digests``: results say
    what the engine held of each prompt.
    """

    model_dir: str
    run_dir: str = ""
    kv_cache_bytes: int = 64 << 20
    max_model_len: int = 8192
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 8
    load_failure_policy: str = "recompute"
    module_path: str = "kvferry_connector"
    connector_extra: dict[str, Any] = {}
    engine_args: dict[str, Any] = {}
    kv_digests: bool = False


class Ask(msgspec.Struct, frozen=True):
    """A request: greedy, exactly ``max_tokens`` tokens are generated."""

    request: str
    tokens: list[int]
    max_tokens: int = 8
    cache_salt: str | None = None


# --- commands --------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, tag_field="op", tag="generate"):
    """Run these requests at the same time until all have finished; answered by Finished."""

    asks: list[Ask]


class Start(msgspec.Struct, frozen=True, tag_field="op", tag="start"):
    """Add requests without a step; answered by Progress."""

    asks: list[Ask]


class Step(msgspec.Struct, frozen=True, tag_field="op", tag="step"):
    """Take up to ``count`` engine steps; answered by Progress."""

    count: int = 1


class Finish(msgspec.Struct, frozen=True, tag_field="op", tag="finish"):
    """Step until every request has finished; answered by Finished with all not yet reported."""


class Abort(msgspec.Struct, frozen=True, tag_field="op", tag="abort"):
    """Abort requests between two steps; answered by Progress."""

    requests: list[str]


class Settle(msgspec.Struct, frozen=True, tag_field="op", tag="settle"):
    """Step until the engine would go to sleep (saves reported, pins freed); answered by Idle."""

    deadline_s: float = 60.0


class ResetPrefixCache(msgspec.Struct, frozen=True, tag_field="op", tag="reset"):
    """vLLM's reset_prefix_cache; answered by Done."""

    running: bool = False
    connector: bool = False


class ZeroBlocks(msgspec.Struct, frozen=True, tag_field="op", tag="zero"):
    """Overwrite cached blocks of the KV memory with zeros (a damaged cache); answered by Done."""

    blocks: list[int]


class Inspect(msgspec.Struct, frozen=True, tag_field="op", tag="inspect"):
    """Say what the process holds; answered by State."""

    modules: list[str] = []


class Quit(msgspec.Struct, frozen=True, tag_field="op", tag="quit"):
    """Shut the engine down in order and exit."""


Command = (
    Generate
    | Start
    | Step
    | Finish
    | Abort
    | Settle
    | ResetPrefixCache
    | ZeroBlocks
    | Inspect
    | Quit
)

# --- replies ---------------------------------------------------------------------------------


class Admission(msgspec.Struct, frozen=True):
    """One allocation for a request that was waiting: how many tokens came from where."""

    local_tokens: int
    external_tokens: int
    request_tokens: int
    prompt_tokens: int


class Result(msgspec.Struct, frozen=True):
    """One finished request. ``hit_tokens`` came from kvferry, ``local_tokens`` from vLLM itself.

    ``kv_digest``: of the prompt's whole blocks below its last token, at the first output token.
    ``drafts``: what a drafter proposed, step after step.
    """

    request: str
    prompt_tokens: int
    output: list[int]
    finish: str
    ttft_ms: float
    local_tokens: int
    hit_tokens: int
    preemptions: int
    admissions: list[Admission]
    kv_digest: str = ""
    drafts: list[int] = []


class Running(msgspec.Struct, frozen=True):
    """One request that has not finished. ``blocks`` are its block ids in group 0."""

    request: str
    status: str
    computed_tokens: int
    output_tokens: int
    blocks: list[int]


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    """The engine serves. ``token_bytes``: KV bytes of one token over all layers."""

    pid: int
    block_tokens: int
    num_blocks: int
    token_bytes: int


class Finished(msgspec.Struct, frozen=True, tag_field="kind", tag="finished"):
    """Requests that ended, in the order in which they were added."""

    results: list[Result]


class Progress(msgspec.Struct, frozen=True, tag_field="kind", tag="progress"):
    """Where the unfinished requests stand; finished ones wait for Finish."""

    running: list[Running]
    finished: list[str]
    steps: int


class Idle(msgspec.Struct, frozen=True, tag_field="kind", tag="idle"):
    """Whether the engine went to sleep before the deadline, and after how many steps."""

    asleep: bool
    steps: int


class Done(msgspec.Struct, frozen=True, tag_field="kind", tag="done"):
    """The command was carried out; ``ok`` is vLLM's own answer where it gives one."""

    ok: bool


class State(msgspec.Struct, frozen=True, tag_field="kind", tag="state"):
    """Files of the asked modules ("" when not imported), blocks in use, the connector's state.

    ``connector`` is the scheduler half's "stopped", "away", "refused", "registered" or "ready"
    ("" without a connector), ``epoch`` the sidecar life it is attached to (0: none).
    """

    modules: dict[str, str]
    used_blocks: int
    busy: bool
    connector: str
    epoch: int


class Failure(msgspec.Struct, frozen=True, tag_field="kind", tag="failure"):
    """The command raised; the engine process goes on to exit."""

    message: str


Reply = Ready | Finished | Progress | Idle | Done | State | Failure

setup_decoder = msgspec.json.Decoder(EngineSetup)
command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
encoder = msgspec.json.Encoder()
