"""command/bpe.py: the merges of byte-pair encoding, learned from texts by counting.

It runs once, before the first stage, and the checkpoints keep what it found: {bytes: rank}, which
rollout.Tokenizer takes. A published model brings its own. What is a word, and how many entries are
left for the control tokens, is handed over: this file knows nothing of an agent.

It stands apart from rollout.py because an agent only encodes and decodes. Left out: counting in
parallel. The texts of a run (a few MB) take seconds.
"""

import heapq
from collections import Counter, defaultdict

import regex  # comes with tiktoken


def train_bpe(texts, size, word):
    """Byte-pair encoding by counting -> {bytes: rank}. The most frequent pair of neighbours is
    merged, again and again, until 256 bytes and the merges make `size` entries. word: a regular
    expression, no merge crosses the border of what it finds. Pairs are counted once per distinct
    word. After a merge only the words that it touched are counted again, and the most frequent pair
    is at the top of a heap, so that no merge looks at all pairs."""
    # No merge crosses the border of a word, so each distinct word is kept once, with its number.
    word_counts = Counter()
    for text in texts:
        word_counts.update(regex.findall(word, text))
    pieces = [[bytes([b]) for b in text.encode()] for text in word_counts]
    numbers = list(word_counts.values())

    # How often each pair of neighbours occurs, and in which words.
    counts, where = Counter(), defaultdict(set)
    for i, piece in enumerate(pieces):
        for pair in zip(piece, piece[1:]):
            counts[pair] += numbers[i]
            where[pair].add(i)

    # The heap has an entry for every count that a pair has had. An entry is true if the pair still
    # has this count; the others are passed over when they come to the top.
    heap = [(-count, Largest(pair)) for pair, count in counts.items()]
    heapq.heapify(heap)

    # All single bytes are tokens, so that any text can be encoded.
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < size and heap:
        count, best = heapq.heappop(heap)
        best = tuple(best)
        if counts.get(best) != -count:
            continue
        # Two pairs may spell the same bytes: the rank of the first one stays.
        ranks.setdefault(best[0] + best[1], len(ranks))

        # In the words that hold the pair, the old pairs go and the new ones come.
        changed = set()
        for i in where.pop(best):
            merged = merge_pair(pieces[i], best)
            for pair in zip(pieces[i], pieces[i][1:]):
                counts[pair] -= numbers[i]
                changed.add(pair)
            for pair in zip(merged, merged[1:]):
                counts[pair] += numbers[i]
                where[pair].add(i)
                changed.add(pair)
            pieces[i] = merged
        # No word holds this pair any more.
        del counts[best]
        for pair in changed - {best}:
            if counts[pair] > 0:
                heapq.heappush(heap, (-counts[pair], Largest(pair)))
    return ranks


class Largest(tuple):
    """A pair that is less than the smaller ones: of equally frequent pairs the larger one is
    merged, since the result must not depend on chance."""

    __slots__ = ()

    def __lt__(self, other):
        return tuple.__gt__(self, other)


def merge_pair(piece, pair):
    """The parts of a word, with each occurrence of the pair as one part"""
    merged, i = [], 0
    first, second = pair
    while i < len(piece):
        if piece[i] == first and piece[i + 1 : i + 2] == [second]:
            merged.append(piece[i] + piece[i + 1])
            i += 2
        else:
            merged.append(piece[i])
            i += 1
    return merged
