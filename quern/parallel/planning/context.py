"""Plans context parallelism: which tokens of a row each rank holds, and which keys its queries attend to.

The ranks of ``cp`` share the rows of a micro-batch. Of each row a rank holds an equal number of tokens. Some of these
ranks, ``heads``, exchange tokens for heads (Ulysses: Jacobs et al. 2023): between attention and the rest of a layer
each gets all tokens of their common *shard* for its share of the heads. There are ``cp / heads`` shards; their queries
attend to keys of all shards, which are gathered or go round in a ring.

A shard is the first and the last of equal chunks, then the second and the last but one, and so on (head-tail), so that
under a causal mask all have the same work. Documents upset that: then a row is cut into more chunks, and each goes to
the shard that has the least to do.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, get_args

__all__ = ["RULE", "Context", "Method"]

RULE = 1
"""Of how tokens are dealt (:func:`quern.parallel.planning.segments.deal`): another number where equal documents are
dealt otherwise."""

Method = Literal["ulysses", "allgather", "usp", "ring"]


@dataclass(frozen=True)
class Context:
    """How the ranks of ``cp`` share a row. A rank's place among them is shard · heads + its place in the exchange."""

    method: Method = "ulysses"
    ranks: int = 1
    heads: int = 1
    """Ranks that exchange tokens for heads."""

    def to_dict(self) -> dict[str, Any]:
        """As a ledger tells it, with the number of the rule by which tokens are dealt."""
        return {"ranks": self.ranks, "method": self.method, "heads": self.heads, "rule": RULE}

    @staticmethod
    def from_dict(told: Any) -> Context | None:
        """None where it is not told, or of another rule."""
        if not isinstance(told, dict) or told.get("rule") != RULE or told.get("method") not in get_args(Method):
            return None
        rule, ranks, heads = told["rule"], told.get("ranks"), told.get("heads")
        if type(rule) is not int or type(ranks) is not int or type(heads) is not int:  # true equals 1
            return None
        return Context(told["method"], ranks, heads) if 0 < heads <= ranks and ranks % heads == 0 else None

    @property
    def shards(self) -> int:
        return self.ranks // self.heads

    @property
    def ring(self) -> bool:
        """Keys go round, and are not gathered."""
        return self.method == "ring"

    @property
    def unit(self) -> int:
        """What the tokens of a row have to be a multiple of."""
        return lcm(self.ranks, 2 * self.shards if self.shards > 1 else 1)
