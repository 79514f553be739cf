"""A radix tree over token sequences, in which every distinct prefix is stored once."""

from __future__ import annotations

import numpy as np

from moepass.runtime.serving.requests.request import Tokens

_TOKEN_BYTES = 4


class TokenTrie:
    """A radix tree whose nodes are runs of tokens without a branch.

    Nodes are numbered in the order of their creation, and each list has one entry per node: the index into `tokens` of
    its first token, the node above it, -1 for a root, and the positions in the sequence at which it begins and ends. A
    sequence is inserted as a range of `tokens` [n] below an existing node, so a caller that knows the shared prefix
    skips it. Whole runs are compared at once, not token by token.
    """

    def __init__(self, tokens: Tokens) -> None:
        # Slices of bytes are compared faster than slices of arrays.
        self._bytes = np.asarray(tokens, np.int32).tobytes()
        self.tokens: Tokens = np.frombuffer(self._bytes, np.int32)
        self._token_numbers = self.tokens.view(np.uint32).data
        self.starts: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.ends: list[int] = []
        # The child of a node that begins with a token, by `node << 32 | token`.
        self._children: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def add_root(self) -> int:
        """Return a new root, a node without tokens."""
        return self._add_node(0, -1, 0, 0)

    def insert(self, node: int, start: int, stop: int) -> int:
        """Insert `tokens[start:stop]` below `node` and return the node that ends with them.

        Later insertions may split a returned node. It still ends with the same token then, and begins later.
        """
        while start < stop:
            name = self._child_name(node, start)
            child = self._children.get(name)
            if child is None:
                end = self.ends[node] + stop - start
                self._children[name] = child = self._add_node(start, node, self.ends[node], end)
                return child
            length = self.ends[child] - self.depths[child]
            shared = self._shared_length(self.starts[child], start, min(length, stop - start))
            node = child if shared == length else self._split(child, name, shared)
            start += shared
        return node

    def children(self) -> list[list[int]]:
        """Return the children of every node, in the order in which their first tokens were inserted."""
        children: list[list[int]] = [[] for _ in self.starts]
        for child in self._children.values():
            children[self.parents[child]].append(child)
        return children

    def depth_first(self) -> list[int]:
        """Return all nodes in depth-first order, parents first."""
        children = self.children()
        order: list[int] = []
        stack = [node for node in reversed(range(len(self))) if self.parents[node] < 0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += reversed(children[node])
        return order

    def node_tokens(self, node: int) -> Tokens:
        """Return the tokens of `node`."""
        start = self.starts[node]
        return self.tokens[start : start + self.ends[node] - self.depths[node]]

    def _add_node(self, start: int, parent: int, depth: int, end: int) -> int:
        self.starts.append(start)
        self.parents.append(parent)
        self.depths.append(depth)
        self.ends.append(end)
        return len(self.starts) - 1

    def _child_name(self, node: int, start: int) -> int:
        return node << 32 | self._token_numbers[start]

    def _shared_length(self, left: int, right: int, limit: int) -> int:
        """Return how many of `limit` tokens from index `left` on equal those from index `right` on."""
        width = _TOKEN_BYTES
        if self._bytes[left * width : (left + limit) * width] == self._bytes[right * width : (right + limit) * width]:
            return limit
        return int(np.argmax(self.tokens[left : left + limit] != self.tokens[right : right + limit]))

    def _split(self, node: int, name: int, count: int) -> int:
        """Move the first `count` tokens of `node` to a new parent, so that `node` still ends with the same token."""
        start, parent, depth = self.starts[node], self.parents[node], self.depths[node]
        upper = self._children[name] = self._add_node(start, parent, depth, depth + count)
        self.starts[node], self.parents[node], self.depths[node] = start + count, upper, depth + count
        self._children[self._child_name(upper, start + count)] = node
        return upper
