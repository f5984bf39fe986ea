"""Who protects whom: sets of ranks that do not fail together. Only arithmetic.

Owns:    sets for parity, and which ranks hold a copy of which shard; what may be lost of them.
Not:     the parity itself (codes), moving bytes.
Holds:   every rank is in one set or unprotected; no set has two ranks of one failure domain, no copy lies in the domain
         of its owner; the same domains always give the same answer, so ranks need not agree on it.

A domain is what fails as one: the name of a node, or a key of the user's such as a rack. The more combinations of
domains share a set, the more combinations are fatal when they fail together; so domains are first put into groups, and
sets are made within a group. Where every domain has equally many ranks that is SCR's way: ranks at the same place in
their domains form a line, and lines are cut into sets.

No division into such sets can do without leaving ranks out where one domain has more ranks than all others together:
each set takes at most one of them, and needs somebody else. These ranks, and no others, are unprotected.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.errors import ConfigError

Domain = list[int]
"""The ranks of one failure domain, in order."""


def make_sets(domains: Sequence[str], size: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Sets of at least `size` ranks for parity, and the ranks that can be in no set.

    Sets are smaller, and never of one, where there are not enough domains, or where one of them has so many ranks that
    the others cannot fill its sets. Of one group of domains they differ by one rank at most.
    """
    if size < 2:
        raise ConfigError(f"a set has at least 2 ranks, not {size}", size=size)
    kept, unprotected = _split(domains)
    # Each domain's ranks go to different sets, so the largest one tells how many there have to be.
    sets = [members for group in _group(kept, size) for members in _deal(group, len(group[0]))]
    return sorted(sets), unprotected


def pairs(domains: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """For every rank the one that holds a copy of its shard: two hold each other's, or three in a ring if the number is
    odd. None for a rank that is unprotected.
    """
    kept, unprotected = _split(domains)
    holders: dict[int, tuple[int, ...]] = dict.fromkeys(unprotected, ())
    for group in _even(_group(kept, 2)):
        for members in _deal(group, _count(group) // 2):
            for rank, holder in zip(members, (*members[1:], members[0]), strict=True):
                holders[rank] = (holder,)
    return dict(sorted(holders.items()))


def ring(domains: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """For every rank the one that holds a copy of its shard: the next of its line, as SCR's partner. None for a rank
    that is unprotected.

    Each rank holds one copy. At the same storage `pairs` survives more: there half as many pairs of losses are fatal.
    """
    kept, unprotected = _split(domains)
    holders: dict[int, tuple[int, ...]] = dict.fromkeys(unprotected, ())
    line = [rank for domain in kept for rank in domain]
    # By the length of the longest domain: that leads out of every domain, and does not lead back into it, because no
    # domain has more than half of the ranks.
    step = len(kept[0]) if kept else 0
    for place, rank in enumerate(line):
        holders[rank] = (line[(place + step) % len(line)],)
    return dict(sorted(holders.items()))


def losses_allowed(members: int, parity: int) -> int:
    """How many members a set of this many may lose; a set that came out small has room for less parity."""
    return min(parity, members - 1)


def _split(domains: Sequence[str]) -> tuple[list[Domain], list[int]]:
    """The domains with the ranks that can be protected, the largest first; and the ranks that cannot."""
    by_name: dict[str, Domain] = {}
    for rank, name in enumerate(domains):
        by_name.setdefault(name, []).append(rank)
    found = sorted(by_name.values(), key=lambda domain: (-len(domain), domain))
    if not found:
        return [], []
    others = len(domains) - len(found[0])
    first, unprotected = found[0][:others], found[0][others:]
    return [domain for domain in (first, *found[1:]) if domain], unprotected


def _count(group: Sequence[Domain]) -> int:
    return sum(map(len, group))


def _group(found: Sequence[Domain], size: int) -> list[list[Domain]]:
    """Domains that make sets with each other, the largest of each group first.

    A group is as small as it can be with `size` ranks for each of its sets. What is left makes the groups larger, all
    of them alike; if there is none, it is one, and has smaller sets.
    """
    groups: list[list[Domain]] = []
    open_group: list[Domain] = []
    for domain in found:
        open_group.append(domain)
        if _count(open_group) >= size * len(open_group[0]):
            groups.append(open_group)
            open_group = []
    if not groups:
        return [open_group] if open_group else []
    for number, domain in enumerate(open_group):
        groups[number % len(groups)].append(domain)
    return groups


def _even(groups: Sequence[list[Domain]]) -> list[list[Domain]]:
    """The same domains, with an odd number of ranks in one group at most: two odd groups become one."""
    odd = [group for group in groups if _count(group) % 2]
    merged = [left + right for left, right in zip(odd[::2], odd[1::2], strict=False)]
    return [group for group in groups if _count(group) % 2 == 0] + merged + odd[len(merged) * 2 :]


def _deal(group: Sequence[Domain], count: int) -> list[tuple[int, ...]]:
    """Sets of a group, like cards: `count` is not below the largest domain, so none gets two of one domain."""
    dealt = [rank for domain in group for rank in domain]
    return [tuple(sorted(dealt[number::count])) for number in range(count)]
