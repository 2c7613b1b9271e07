"""Compare the identity facts of ranks and engines, and say what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvferry_connector.wire.attach import FieldRefusal

ABSENT = "(absent)"
MODEL = "model"  # the fact that names the model (the connector's identity.py)

# First match on the field's name wins: what an operator can do about it.
_REMEDIES = (
    ("seed", "set PYTHONHASHSEED to the same value for both engines"),
    ("hash", "give both engines the same --prefix-caching-hash-algo and block sizes"),
    ("version", "run the same version of vLLM in both engines"),
    ("format", "run the same version of kvferry in both engines"),
    ("revision", "serve the same --revision of the model"),
    ("weights", "load the same weight files, or give both engines the same weights_version"),
    ("model", "serve the same model"),
    ("layout", "give both engines the same VLLM_KV_CACHE_LAYOUT"),
    ("drafter", "give both engines the same --speculative-config"),
    ("lora", "give both engines the same LoRA settings"),
    ("_size", "give both engines the same parallel sizes"),
    ("dtype", "give both engines the same --dtype and --kv-cache-dtype"),
    ("quant", "give both engines the same --quantization"),
    ("backend", "give both engines the same attention backend"),
)
_REMEDY = "start both engines with the same arguments"


class NearMiss(NamedTuple):
    """A registered session that shares no bytes only because of a few identity fields."""

    session: str
    fields: tuple[FieldRefusal, ...]

    @property
    def text(self) -> str:
        """One line for the log and the status: what differs, from whom, and the remedy."""
        names = " and ".join(f"{field.field} ({field.theirs} against {field.ours})"
                             for field in self.fields)  # fmt: skip
        verb = "differs" if len(self.fields) == 1 else "differ"
        remedies = "; ".join(dict.fromkeys(field.remedy for field in self.fields))
        return (
            f"{names} {verb} from session {self.session}: no hits will be shared. "
            f"To share them, {remedies}."
        )


def compare_identity(a: Mapping[str, str], b: Mapping[str, str]) -> list[FieldRefusal]:
    """Return one refusal per field that differs: ``a`` is theirs (new), ``b`` is ours (known)."""
    return [
        FieldRefusal(name, a.get(name, ABSENT), b.get(name, ABSENT), _remedy_for(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def nearest_namespace(
    identity: Mapping[str, str],
    others: Mapping[str, Mapping[str, str]],
    fields_max: int = 2,
) -> NearMiss | None:
    """Return the session that differs from ``identity`` in the fewest fields, 1 to fields_max.

    ``others`` maps a session's name to the identity of its ranks. None when no session is that
    near; a session with equal identity is no near miss, and neither is one of another model: that
    those share nothing surprises nobody.
    """
    best: NearMiss | None = None
    for session, other in others.items():
        if identity.get(MODEL) != other.get(MODEL):
            continue
        fields = compare_identity(identity, other)
        if 1 <= len(fields) <= fields_max and (best is None or len(fields) < len(best.fields)):
            best = NearMiss(session, tuple(fields))
    return best


def _remedy_for(name: str) -> str:
    return next((remedy for word, remedy in _REMEDIES if word in name.lower()), _REMEDY)
