"""The block allocator against a model of it in plain Python, and the rules one by one."""

import doctest
import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attn_ext._C import BlockAllocator, OutOfBlocks


@dataclass(frozen=True)
class Published:
    number: int  # the same tokens published again are another publication: what hung on the first is not found again
    parent: int
    tokens: tuple
    whole_prefix: (
        tuple  # every token from the beginning to the block's end; not used to search, but to judge what is found
    )


class AllocatorModel:
    """The same rules, written for clarity: dicts, lists and linear searches."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.refs = {}  # used block -> references
        self.published = {}  # block -> Published
        self.publications = 0
        self.eviction_order = []  # cached blocks, first to go first
        self.free_blocks = set(range(num_blocks))

    def available(self):
        return len(self.free_blocks) + len(self.eviction_order)

    def took(self, blocks):
        """The allocator says it handed out these blocks: is that allowed?"""
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            if self.free_blocks:
                assert block in self.free_blocks, "a cached block was evicted, or a used one given, before a free one"
                self.free_blocks.remove(block)
            else:
                assert block == self.eviction_order.pop(0), "not the least recently used block"
                del self.published[block]
            self.refs[block] = 1

    def add_reference(self, block):
        if block in self.eviction_order:
            self.eviction_order.remove(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    def drop_reference(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            if block in self.published:
                self.eviction_order.append(block)
            else:
                self.free_blocks.add(block)

    def find(self, parent, tokens):
        wanted = (self.published[parent].number if parent is not None else 0, tuple(tokens))
        return next((block for block, p in self.published.items() if (p.parent, p.tokens) == wanted), None)

    def match(self, tokens):
        blocks = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.find(blocks[-1] if blocks else None, tokens[end - self.block_size : end])
            if block is None:
                break
            assert self.published[block].whole_prefix == tuple(tokens[:end]), "the keys of another prompt"
            blocks.append(block)
        for block in blocks:
            self.add_reference(block)
        return blocks

    def publish(self, block, tokens, parent):
        known = self.find(parent, tokens)
        if known is None:
            self.publications += 1
            above = self.published[parent] if parent is not None else Published(0, 0, (), ())
            self.published[block] = Published(
                self.publications, above.number, tuple(tokens), (*above.whole_prefix, *tokens)
            )
            return block
        if known != block:
            self.add_reference(known)
            self.drop_reference(block)
        return known


def run_allocator_machine(num_blocks, block_size):
    """A state machine whose sequences act as a cache's do, over a pool small enough for everything to go wrong.

    Two different tokens and a handful of buckets make prefixes repeat and hashes collide all the time.
    """

    class AllocatorMachine(RuleBasedStateMachine):
        @initialize()
        def start(self):
            self.allocator = BlockAllocator(num_blocks, block_size)
            self.model = AllocatorModel(num_blocks, block_size)
            self.tables = []  # [blocks, how many of them are published], one per sequence

        def check_exhausted(self, call, needed):
            """Whether `call` must fail; if so, it fails and changes nothing."""
            if needed <= self.model.available():
                return False
            with pytest.raises(OutOfBlocks, match=r"^BlockAllocator\.\w+: \d+ blocks asked for, \d+ of \d+ are"):
                call()
            return True

        @rule(count=st.integers(0, num_blocks + 1))
        def allocate(self, count):
            if not self.check_exhausted(lambda: self.allocator.allocate(count), count):
                blocks = self.allocator.allocate(count)
                self.model.took(blocks)
                self.tables.append([blocks, 0])

        @rule(tokens=st.lists(st.integers(0, 1), max_size=4 * block_size))
        def match(self, tokens):
            expected = self.model.match(tokens)
            assert self.allocator.match(tokens) == expected
            if expected:
                self.tables.append([expected, len(expected)])

        @precondition(lambda self: self.tables)
        @rule(data=st.data())
        def publish(self, data):
            table = data.draw(st.sampled_from(self.tables))
            blocks, published = table
            if published == len(blocks):
                return
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=block_size, max_size=block_size))
            block, parent = blocks[published], blocks[published - 1] if published else None
            if parent is not None and parent not in self.model.published:  # clear_prefixes cut the chain
                with pytest.raises(ValueError, match=f"parent {parent} is not published"):
                    self.allocator.publish(block, tokens, parent)
            elif block in self.model.published and self.model.find(parent, tokens) != block:
                with pytest.raises(ValueError, match="already published under other tokens"):
                    self.allocator.publish(block, tokens, parent)
            else:
                expected = self.model.publish(block, tokens, parent)
                assert self.allocator.publish(block, tokens, parent) == expected
                table[:] = [*blocks[:published], expected, *blocks[published + 1 :]], published + 1

        @precondition(lambda self: self.tables)
        @rule(data=st.data())
        def fork(self, data):
            blocks, published = data.draw(st.sampled_from(self.tables))
            self.allocator.fork(blocks)
            for block in blocks:
                self.model.add_reference(block)
            self.tables.append([list(blocks), published])

        @precondition(lambda self: self.tables)
        @rule(data=st.data(), count=st.integers(0, 2))
        def make_writable(self, data, count):
            tables = data.draw(st.lists(st.sampled_from(range(len(self.tables))), unique=True, max_size=3))
            targets = [self.tables[i] for i in tables if self.tables[i][0]]
            blocks = [table[0][-1] for table in targets]
            holders, copied = dict(self.model.refs), []
            for block in blocks:  # the last holder of an unpublished block keeps it
                copied.append(block in self.model.published or holders[block] > 1)
                holders[block] -= 1
            needed = sum(copied) + count
            if self.check_exhausted(lambda: self.allocator.make_writable(blocks, count), needed):
                return
            writable, fresh = self.allocator.make_writable(blocks, count)
            assert len(fresh) == count
            assert [new != old for new, old in zip(writable, blocks, strict=True)] == copied
            replaced = [new for new, old in zip(writable, blocks, strict=True) if new != old]
            in_order_taken = fresh + replaced[::-1]  # copies are cut from the end of what was taken
            self.model.took(in_order_taken)
            for table, old, new in zip(targets, blocks, writable, strict=True):
                if new != old:
                    self.model.drop_reference(old)
                    table[0][-1] = new
                    table[1] = min(table[1], len(table[0]) - 1)
            if fresh:
                self.tables.append([fresh, 0])

        @precondition(lambda self: self.tables)
        @rule(data=st.data())
        def free(self, data):
            blocks, *_ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.allocator.free(blocks)
            for block in reversed(blocks):
                self.model.drop_reference(block)

        @precondition(lambda self: self.tables)
        @rule(data=st.data())
        def free_the_beginning(self, data):
            """No cache does this: what was published after the freed block may outlive it and must not be found."""
            table = data.draw(st.sampled_from(self.tables))
            beginning, table[0] = table[0][:1], table[0][1:]
            table[1] = max(0, table[1] - 1)
            self.allocator.free(beginning)
            for block in beginning:
                self.model.drop_reference(block)

        @precondition(lambda self: self.model.refs)
        @rule(data=st.data())
        def free_too_often(self, data):
            block = data.draw(st.sampled_from(sorted(self.model.refs)))
            with pytest.raises(ValueError, match="listed more often"):
                self.allocator.free([block] * (self.model.refs[block] + 1))

        @precondition(lambda self: len(self.model.refs) < num_blocks)
        @rule(data=st.data())
        def touch_what_is_not_allocated(self, data):
            block = data.draw(st.sampled_from(sorted(set(range(num_blocks)) - set(self.model.refs))))
            used = sorted(self.model.refs)
            for call in (self.allocator.free, self.allocator.fork, self.allocator.make_writable):
                with pytest.raises(ValueError, match=f"block {block} is not allocated"):
                    call([*used, block])

        @rule()
        def clear_prefixes(self):
            self.allocator.clear_prefixes()
            self.model.free_blocks |= set(self.model.eviction_order)
            self.model.eviction_order, self.model.published = [], {}

        @invariant()
        def agree(self):
            if not hasattr(self, "model"):
                return
            a, m = self.allocator, self.model
            a.check_invariants()
            assert [a.ref_count(block) for block in range(num_blocks)] == [m.refs.get(b, 0) for b in range(num_blocks)]
            assert {block for block in range(num_blocks) if a.is_published(block)} == set(m.published)
            assert (a.num_free, a.num_cached, a.num_used) == (len(m.free_blocks), len(m.eviction_order), len(m.refs))
            assert a.num_shared == sum(refs > 1 for refs in m.refs.values())
            assert a.num_available == m.available()
            assert a.num_published == len(m.published) <= num_blocks

        def teardown(self):
            for blocks, *_ in self.tables:
                self.allocator.free(blocks)
            assert self.allocator.num_used == 0 and self.allocator.num_available == num_blocks

    AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    AllocatorMachine.TestCase("runTest").runTest()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (2, 2), (3, 1), (5, 2), (8, 3)])
def test_state_machine(num_blocks, block_size):
    run_allocator_machine(num_blocks, block_size)


def publish_chain(allocator, tokens):
    """Allocate and publish the full blocks of `tokens`, as a sequence that computed them would."""
    size = allocator.block_size
    blocks = allocator.allocate(len(tokens) // size)
    for i in range(len(blocks)):
        parent = blocks[i - 1] if i else None
        blocks[i] = allocator.publish(blocks[i], tokens[i * size : (i + 1) * size], parent)
    return blocks


def test_blocks_are_handed_out_once_and_come_back():
    allocator = BlockAllocator(5, 4)
    assert sorted(allocator.allocate(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(OutOfBlocks, match=r"^BlockAllocator\.allocate: 1 blocks asked for, 0 of 5 are free or cached$"):
        allocator.allocate()
    allocator.free([3, 1])
    assert sorted(allocator.allocate(2)) == [1, 3]


def test_exhaustion_evicts_nothing():
    allocator = BlockAllocator(4, 1)
    allocator.free(publish_chain(allocator, [7, 8]))
    held = allocator.allocate(1)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(4)
    with pytest.raises(OutOfBlocks):
        allocator.make_writable(held, 4)
    assert allocator.num_cached == 2 and allocator.match([7, 8]) == [0, 1]


def test_h17_a_recycled_block_is_not_found_under_its_old_tokens():
    allocator = BlockAllocator(2, 4)
    allocator.free(publish_chain(allocator, [1, 2, 3, 4]))
    assert allocator.num_cached == 1
    others = publish_chain(allocator, [5, 6, 7, 8]), publish_chain(allocator, [9, 10, 11, 12])
    for blocks in others:
        allocator.free(blocks)
    assert allocator.match([1, 2, 3, 4]) == []
    assert allocator.match([5, 6, 7, 8]) == others[0]


def test_h17_the_index_never_outgrows_the_pool():
    allocator, rng = BlockAllocator(2, 4), random.Random(0)
    for _ in range(10_000):
        tokens = rng.choices(range(50), k=4 * rng.randint(1, 2))
        held = allocator.match(tokens)
        if not held:
            held = publish_chain(allocator, tokens)
        assert allocator.num_published <= 2
        allocator.free(held)
    allocator.check_invariants()
    assert allocator.num_available == 2


def test_equal_blocks_after_different_beginnings_are_different_prefixes():
    allocator = BlockAllocator(6, 2)
    first, second = publish_chain(allocator, [1, 2, 9, 9]), publish_chain(allocator, [3, 4, 9, 9])
    assert first[1] != second[1]
    assert allocator.match([1, 2, 9, 9]) == first and allocator.match([3, 4, 9, 9]) == second
    assert allocator.match([9, 9]) == []


def test_what_followed_an_evicted_beginning_does_not_follow_another_one():
    allocator = BlockAllocator(3, 1)
    a, b = publish_chain(allocator, [1, 2])
    allocator.free([a])  # the order a cache never uses: the beginning goes first
    assert a in allocator.allocate(2)  # takes the free block, then evicts a
    assert allocator.match([1, 2]) == []
    allocator.publish(a, [9])
    assert allocator.match([9, 2]) == [a]  # b holds the keys of 2 after 1
    allocator.free([b])
    assert allocator.num_cached == 1
    allocator.check_invariants()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    allocator = BlockAllocator(3, 1)
    blocks = publish_chain(allocator, [1, 2, 3])
    allocator.free(blocks)
    for left in (2, 1, 0):
        allocator.allocate()
        held = allocator.match([1, 2, 3])
        assert held == blocks[:left]
        allocator.free(held)


def test_the_least_recently_used_prefix_is_evicted_first():
    allocator = BlockAllocator(3, 1)
    for token in (1, 2, 3):
        allocator.free(publish_chain(allocator, [token]))
    allocator.free(allocator.match([1]))  # used again: 2 is now the oldest
    allocator.allocate()
    assert [len(allocator.match([token])) for token in (1, 2, 3)] == [1, 0, 1]


def test_the_same_prefix_computed_twice_ends_in_one_block():
    allocator = BlockAllocator(4, 2)
    first, second = publish_chain(allocator, [1, 2]), allocator.allocate()
    assert allocator.publish(second[0], [1, 2]) == first[0]
    assert allocator.ref_count(first[0]) == 2 and allocator.ref_count(second[0]) == 0
    assert allocator.publish(first[0], [1, 2]) == first[0]  # once more changes nothing
    assert allocator.ref_count(first[0]) == 2


def test_make_writable_copies_for_all_holders_but_the_last():
    allocator = BlockAllocator(4, 2)
    (block,) = allocator.allocate()
    allocator.fork([block, block])
    writable, fresh = allocator.make_writable([block] * 3)
    assert writable[2] == block and len({*writable}) == 3 and fresh == []
    assert [allocator.ref_count(b) for b in writable] == [1, 1, 1]


def test_make_writable_leaves_a_published_block_as_it_is():
    allocator = BlockAllocator(2, 2)
    (block,) = publish_chain(allocator, [1, 2])
    ((copy,), _) = allocator.make_writable([block])
    assert copy != block and allocator.match([1, 2]) == [block]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: BlockAllocator(0, 4), r"^BlockAllocator: num_blocks must be between 1 and 2147483647, got 0$"),
        (lambda a: BlockAllocator(2**31, 4), r"^BlockAllocator: num_blocks must be .* got 2147483648$"),
        (lambda a: BlockAllocator(4, 0), r"^BlockAllocator: block_size must be at least 1, got 0$"),
        (lambda a: BlockAllocator(2**31 - 1, 2**60), r"^BlockAllocator: num_blocks \* block_size is too large"),
        (lambda a: a.allocate(-1), r"^BlockAllocator\.allocate: count must be at least 0, got -1$"),
        (lambda a: a.make_writable([], -1), r"^BlockAllocator\.make_writable: count must be at least 0, got -1$"),
        (lambda a: a.free([4]), r"^BlockAllocator\.free: block must be between 0 and 3, got 4$"),
        (lambda a: a.free([0, -1]), r"^BlockAllocator\.free: block must be between 0 and 3, got -1$"),
        (lambda a: a.free([0, 0]), r"^BlockAllocator\.free: block 0 is listed more often than its 1 reference\(s\)$"),
        (lambda a: a.free([0, 2]), r"^BlockAllocator\.free: block 2 is not allocated$"),
        (lambda a: a.fork([0, 2]), r"^BlockAllocator\.fork: block 2 is not allocated$"),
        (lambda a: a.make_writable([0, 0]), r"^BlockAllocator\.make_writable: block 0 is listed more often"),
        (lambda a: a.publish(2, [1, 2]), r"^BlockAllocator\.publish: block 2 is not allocated$"),
        (lambda a: a.publish(0, [1]), r"^BlockAllocator\.publish: tokens must fill the block \(2\), got 1$"),
        (lambda a: a.publish(0, [1, 2], 1), r"^BlockAllocator\.publish: parent 1 is not published$"),
        (lambda a: a.publish(0, [1, 2], 9), r"^BlockAllocator\.publish: block must be between 0 and 3, got 9$"),
        (
            lambda a: a.ref_count(2**40),
            r"^BlockAllocator\.ref_count: block must be between 0 and 3, got 1099511627776",
        ),
    ],
)
def test_misuse_is_one_line_and_changes_nothing(call, message):
    allocator = BlockAllocator(4, 2)
    assert allocator.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match=message) as error:
        call(allocator)
    assert "\n" not in str(error.value)
    allocator.check_invariants()
    assert [allocator.ref_count(block) for block in range(4)] == [1, 1, 0, 0] and allocator.num_published == 0


def test_an_object_that_was_never_initialised_is_an_error_and_no_crash():
    allocator = BlockAllocator.__new__(BlockAllocator)
    for call in (lambda: allocator.num_blocks, allocator.allocate, lambda: allocator.match([1])):
        with pytest.raises(RuntimeError, match="^BlockAllocator: __init__ has not been called$"):
            call()


def test_out_of_blocks_is_a_runtime_error():
    assert issubclass(OutOfBlocks, RuntimeError) and OutOfBlocks.__doc__


def test_documentation_examples():
    tests = doctest.DocTestFinder().find(BlockAllocator, "BlockAllocator", globs={})
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(r.attempted for r in results) > 10 and sum(r.failed for r in results) == 0
