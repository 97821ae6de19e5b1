"""Task 11a: the tree: the longest prefix to the token, edges that part in the right places, leaves that go in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from grader.judge.radix_schedules import FlatPrefixes
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(11)

PROMPT = [7, 0, 60, 31, 31, 2, 44, 19, 5, 8]
"""Two blocks of 4 and a tail of 2."""


def anything(block: int) -> bool:
    """No block is in use."""
    return True


def unused(*busy: int) -> Callable[[int], bool]:
    """These blocks are in use."""
    return lambda block: block not in busy


def stored(lab: Any, *sequences: tuple[list[int], list[int]], block_size: int = 4) -> Any:
    """A tree with these sequences of tokens and blocks."""
    tree = lab.RadixTree(block_size)
    for tokens, blocks in sequences:
        tree.insert(tokens, blocks)
    return tree


def check_found(tree: Any, tokens: list[int], blocks: list[int], length: int, when: str) -> None:
    """What `match` says."""
    found = tree.match(tokens)
    assert found == (blocks, length), f"{when}: match of {tokens} found {found}, right is {(blocks, length)}"


def test_the_longest_prefix_is_found_token_by_token(lab: Any) -> None:
    tree = stored(lab, (PROMPT, [5, 9, 3]))
    for shared in range(len(PROMPT) + 1):
        wanted = [5, 9, 3][: -(-shared // 4)]
        check_found(tree, [*PROMPT[:shared], 50, 51, 52, 53, 54], wanted, shared, f"{shared} tokens are shared")
        check_found(tree, PROMPT[:shared], wanted, shared, f"the prompt ends after {shared} shared tokens")


def test_of_several_branches_the_longest_counts(lab: Any) -> None:
    tree = stored(
        lab,
        ([1, 2, 3, 4, 5, 9, 9, 9], [0, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 9], [2, 3]),
        ([1, 2, 3, 4, 5, 6, 9], [4, 5]),
        ([1, 2, 9], [6]),
    )
    for tokens, blocks, length in (
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 3], 7),
        ([1, 2, 3, 4, 5, 6, 9, 9], [0, 5], 7),
        ([1, 2, 3, 4, 5, 9, 9], [0, 1], 7),
        ([1, 2, 3, 9], [0], 3),
        ([1, 2, 9, 9], [6], 3),
        ([2, 1], [], 0),
    ):
        check_found(tree, tokens, blocks, length, "four prompts share their start")


def test_edges_part_where_prompts_part(lab: Any) -> None:
    tree = lab.RadixTree(2)
    assert tree.num_nodes == 0, f"an empty tree has {tree.num_nodes} edges"
    for tokens, blocks, nodes, what in (
        ([1, 2, 3, 4, 5, 6], [0, 1, 2], 1, "three whole blocks without a fork are one edge"),
        ([1, 2, 3, 4, 7, 8], [0, 1, 3], 3, "behind the second block the edge splits: what is common, and two branches"),
        ([1, 2, 9], [0, 4], 5, "a tail is an edge, and splits what is common behind its first block"),
        ([1, 2, 3, 4, 5, 6], [5, 6, 7], 5, "what is stored adds no edge"),
    ):
        tree.insert(tokens, blocks)
        assert tree.num_nodes == nodes, f"{what}: after {tokens} there are {tree.num_nodes} edges, should be {nodes}"
    assert tree.num_blocks == 5, f"the tree has {tree.num_blocks} blocks, should have 5: splitting adds none"
    for tokens, blocks in (
        ([1, 2, 3, 4, 5, 6], [0, 1, 2]),
        ([1, 2, 3, 4, 7, 8], [0, 1, 3]),
        ([1, 2, 9], [0, 4]),
        ([1, 2, 3, 4], [0, 1]),
    ):
        check_found(tree, tokens, blocks, len(tokens), "after all edges were split")


def test_what_is_stored_stays_where_it_is(lab: Any) -> None:
    tree = stored(lab, (PROMPT, [5, 9, 3]))
    for tokens, blocks, taken in (
        (PROMPT, [10, 11, 12], []),
        (PROMPT[:6], [10, 11], []),
        (PROMPT[:8], [10, 11], []),
        (PROMPT[:1], [10], []),
        ([*PROMPT[:6], 1, 1], [10, 11], [11]),
        ([*PROMPT[:4], 1], [10, 13], [13]),
    ):
        got = tree.insert(tokens, blocks)
        assert got == (taken, []), f"insert of {tokens} in {blocks} took and gave up {got}, right is {(taken, [])}"
    check_found(tree, PROMPT, [5, 9, 3], 10, "after other sequences with the same start")
    assert tree.num_blocks == 5, f"the tree has {tree.num_blocks} blocks, should have 5: equal content is stored once"


def test_a_longer_tail_takes_the_place_of_a_shorter(lab: Any) -> None:
    tree = stored(lab, ([1, 2, 3, 4, 5], [0, 1]), ([1, 2, 3, 4, 6], [0, 2]))
    for tokens, blocks, right in (
        ([1, 2, 3, 4, 5, 7], [8, 3], ([3], [1])),
        ([1, 2, 3, 4, 5, 7, 8, 9, 9], [8, 4, 5], ([4, 5], [3])),
        ([1, 2, 3, 4, 6, 6, 6, 6], [8, 6], ([6], [2])),
        ([9], [7], ([7], [])),
        ([9, 9, 9, 9], [9], ([9], [7])),
    ):
        got = tree.insert(tokens, blocks)
        assert got == right, (
            f"insert of {tokens} took and gave up {got}, right is {right}: a tail that the sequence continues is of no "
            "use any more, any other stays"
        )
        needed = -(-len(tokens) // 4)
        check_found(tree, tokens, [0, *blocks[1:needed]] if needed > 1 else blocks, len(tokens), "just inserted")
    assert tree.num_blocks == 5, f"the tree has {tree.num_blocks} blocks, should have 5"


def test_namespaces_have_their_own_trees(lab: Any) -> None:
    tree = lab.RadixTree(4)
    tree.insert(PROMPT, [0, 1, 2])
    tree.insert(PROMPT, [3, 4, 5], ("x", None))
    tree.insert(PROMPT[:4], [6], (None, "x"))
    for namespace, blocks, length in ((None, [0, 1, 2], 10), (("x", None), [3, 4, 5], 10), ((None, "x"), [6], 4)):
        found = tree.match(PROMPT, namespace)
        assert found == (blocks, length), f"namespace {namespace} found {found}, right is {(blocks, length)}"
    assert tree.match(PROMPT, "x") == ([], 0), "an unknown namespace holds nothing"
    gone = tree.evict(9, anything)
    assert gone == [2, 1, 0, 5, 4, 3, 6], f"evicted are {gone}: the age decides over all namespaces"
    tree.insert([1], [7], ("x", None))
    assert tree.match([1], ("x", None)) == ([7], 1) and tree.match([1]) == ([], 0), "a namespace can be used again"


def test_the_end_of_the_oldest_leaf_goes_first(lab: Any) -> None:
    tree = stored(lab, (PROMPT, [0, 1, 2]), ([*PROMPT[:4], 9, 9, 9, 9], [8, 3]), ([9, 9, 9, 9, 9], [4, 5]))
    tree.touch(PROMPT)
    gone = [tree.evict(1, anything) for _ in range(7)]
    assert gone == [[3], [5], [4], [2], [1], [0], []], (
        f"a prompt in blocks 0, 1, 2, a branch in 3 behind 0, another prompt in 4, 5; then the first was used again: "
        f"evicted one by one are {gone}, right is 3, 5, 4, 2, 1, 0"
    )
    assert (tree.num_nodes, tree.num_blocks) == (0, 0), f"{tree.num_nodes} edges are left of an empty tree"
    check_found(tree, PROMPT, [], 0, "everything is evicted")
    tree.insert(PROMPT, [6, 7, 8])
    check_found(tree, PROMPT, [6, 7, 8], 10, "an emptied tree can be used again")


def test_what_a_hit_did_not_reach_stays_old(lab: Any) -> None:
    tree = stored(lab, ([1, 2, 3, 4, 5, 6], [0, 1, 2]), ([7, 8], [3]), ([9, 9], [4]), block_size=2)
    assert tree.match([7, 8, 1]) == ([3], 2), "looking is no use"
    tree.touch([1, 2, 3, 9])
    gone = tree.evict(9, anything)
    assert gone == [2, 3, 4, 1, 0], (
        f"of three blocks 0, 1, 2 the first and half of the second were used again, then 3 and 4 are older: evicted "
        f"are {gone}, right is [2, 3, 4, 1, 0]"
    )
    tree = stored(lab, ([1, 2, 3, 4], [0, 1]), ([7, 8], [2]), block_size=2)
    tree.insert([1, 2, 3, 4], [5, 6])
    assert tree.evict(1, anything) == [2], "an insert of what is stored is a use of it"
    tree.insert([1, 2], [5])
    tree.insert([7, 8], [3])
    tree.insert([1, 2, 9], [5, 4])
    gone = tree.evict(9, anything)
    assert gone == [1, 3, 4, 0], f"evicted are {gone}, right is [1, 3, 4, 0]: only the front of the edge was used again"
    tree = stored(lab, ([1, 2], [0]), ([7, 8], [1]), ([1, 2, 9], [5, 2]), block_size=2)
    assert tree.evict(1, unused(1)) == [2], "block 1 is in use, and 2 the only other end of a leaf"
    gone = tree.evict(2, anything)
    assert gone == [1, 0], f"evicted are {gone}, right is [1, 0]: who was built on block 0 used it, after block 1"


def test_blocks_in_use_keep_those_before_them(lab: Any) -> None:
    tree = stored(lab, (PROMPT, [0, 1, 2]), ([*PROMPT[:4], 9, 9, 9, 9], [8, 3]))
    for busy, right in (((1,), [2, 3]), ((2, 3), []), ((3,), [2, 1]), ((0,), [2, 1, 3]), ((), [2, 1, 3, 0])):
        can = tree.num_evictable(unused(*busy))
        assert can == len(right), (
            f"blocks 0, 1, 2 and a branch 3 behind 0; in use are {list(busy)}: {right} could go, num_evictable is {can}"
        )
    gone = tree.evict(9, unused(1))
    assert sorted(gone) == [2, 3], f"block 1 is in use, evicted are {gone}; 2 and 3 may go"
    check_found(tree, PROMPT, [0, 1], 8, "the tail is evicted")
    check_found(tree, [*PROMPT[:4], 9], [0], 4, "the branch is evicted")
    assert tree.num_evictable(unused(0)) == 1 and tree.evict(1, unused(0)) == [1], "only the first block is in use"
    assert tree.num_evictable(anything) == 1, "one block is left, and not in use"


def test_refused_insertions_leave_the_tree_whole(lab: Any) -> None:
    tree = stored(lab, (PROMPT, [0, 1, 2]), ([9, 9, 9, 9], [3]))
    for what, tokens, blocks in (
        ("10 tokens in 2 blocks", [9, 9, *PROMPT[2:]], [5, 6]),
        ("5 tokens in 1 block", [*PROMPT[:4], 1], [5]),
        ("no tokens", [], []),
        ("a token -1", [9, 9, 9, 9, -1], [5, 6]),
    ):
        check_refused(what, lambda t=tokens, b=blocks: tree.insert(t, b))
        assert (tree.num_nodes, tree.num_blocks) == (3, 4), f"insert of {what} was refused, but the tree changed"
    check_refused("evict(-1)", lambda: tree.evict(-1, anything))
    check_refused("blocks of 0 tokens", lambda: lab.RadixTree(0))
    gone = tree.evict(9, anything)
    assert gone == [2, 1, 0, 3], f"refused calls are no uses: evicted are {gone}, right is [2, 1, 0, 3]"


def test_random_trees_agree_with_a_flat_model(lab: Any) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        size = rng.choice([1, 2, 3, 4])
        tree, flat = lab.RadixTree(size), FlatPrefixes(size)
        free = list(range(40))
        for step in range(30):
            where = f"seed {seed}, step {step}, blocks of {size}"
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3 * size + 2))]
            found = tree.match(tokens)
            try:
                flat.check_match(tokens, found)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
            if rng.random() < 0.3:
                tree.touch(tokens)
                flat.touch(found[0])
            else:
                blocks = [free.pop() for _ in range(-(-len(tokens) // size))]
                got, right = tree.insert(tokens, blocks), flat.insert(tokens, blocks, found)
                assert got == right, f"{where}: insert of {tokens} took and gave up {got}, right is {right}"
                free += (set(blocks) - set(got[0])) | set(got[1])
            while len(free) < 12 or rng.random() < 0.2:
                oldest = flat.oldest(set())
                gone = tree.evict(1, anything)
                assert gone == ([] if oldest is None else [oldest]), f"{where}: evicted {gone}, due was {oldest}"
                if oldest is None:
                    break
                flat.forget(oldest)
                free += gone
            assert tree.num_blocks == len(flat.block_of), (
                f"{where}: {tree.num_blocks} blocks, should be {len(flat.block_of)}"
            )
