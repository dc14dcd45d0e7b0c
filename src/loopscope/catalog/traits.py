"""What may be unusual about a visit's routing or tokens, and which columns then mean nothing.

The usual: every token takes the k experts of its highest scores, all of them run, and sequences are told apart. A
column names the traits under which it has no meaning (`Column.undefined_for`); it is then null, with the
trait's clause.
"""

from collections.abc import Mapping
from types import MappingProxyType

TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "soft": "soft routing mixes every token into every expert and assigns it to none",
        "expert_choice": "experts choose their tokens",
        "variable_k": "the number of experts differs from token to token",
        "unranked": "the choice is drawn, or made by something else than the scores",
        "drops": "a capacity drops assignments, and the counts are of those that ran",
        "null_experts": "the scores are also over experts that compute nothing",
        "grouped": "the choice is limited to groups of experts",
        "no_alternative": "the groups of a token hold no more experts than it takes",
        "chunks": "each call of the block sees a part of the tokens",
        "flat": "tokens come one behind the other, and nothing says which make up a sequence",
    }
)
"""Trait → why a column is null, in the order of the partial vectors."""

NAMES = tuple(TRAITS)

OPEN_CHOICE = frozenset({"expert_choice", "variable_k", "drops", "null_experts"})
"""Traits under which −1 in `topk_idx` stands for no expert."""

NO_SETS = OPEN_CHOICE | {"soft"}
"""Traits under which a token has no set of k experts that could be compared with another."""
