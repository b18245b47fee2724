"""What a compiled step keeps from forward for backward: the rules of PyTorch's min-cut partitioner.

    forward values ──► which may be computed again ──► the cheapest set of values that backward can start from

Everything backward needs is either kept or computed again from what is kept. Keeping costs bytes, more so the
further a value is from backward; some values may not be computed again. The cheapest choice is a minimum cut.
The rules are those of torch 2.11 and 2.13 at their defaults. Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from foretell.trace.inductor.graph import BACKWARD, INPUT, RECOMPUTE, Node

FAR = 10**9
MOST_DISTANCE = 100
"""Distances from backward beyond this count no more."""
DISTANCE_FACTOR = 1.1
"""A value one op further from backward costs this much more to keep."""
CHAIN = 100
"""Ops in a chain of fusible ones after which a value is not computed again."""
REDUCES = 4
"""A node whose result is this much smaller than what it reads is a reduction, and kept."""
INFINITE = 1 << 62


@dataclass(frozen=True)
class Partition:
    """Which nodes run where."""

    saved: list[Node]
    """Kept from forward to backward, inputs of the graph included."""
    forward: list[Node]
    backward: list[Node]
    """In the order they run, values computed again where they are first needed."""


def partition(nodes: Sequence[Node], outputs: Sequence[Node], gradients: Sequence[Node], free: set[int]) -> Partition:
    """Split a graph; `free` are the indices of inputs that live on anyway (parameters and buffers)."""
    needed = _ancestors(outputs)
    late = _after_tangents(nodes)
    returned = {node.index for node in outputs}
    saved = _saved(nodes, needed, late, gradients, free, returned)
    backward = _backward_order(nodes, gradients, {node.index for node in saved}, late)
    read = {given.index for node in backward for given in node.inputs} | {node.index for node in gradients}
    saved = [node for node in saved if node.index in read]
    forward_indices = _ancestors([*outputs, *saved])
    forward = [node for node in nodes if node.index in forward_indices and node.kind != INPUT]
    return Partition(saved=saved, forward=forward, backward=backward)


def _ancestors(roots: Iterable[Node]) -> set[int]:
    found: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node.index not in found:
            found.add(node.index)
            stack.extend(node.inputs)
    return found


def _after_tangents(nodes: Sequence[Node]) -> set[int]:
    """Nodes that can only run in backward: they depend on the gradient of an output, or are computed again by wish."""
    late: set[int] = set()
    for node in nodes:
        tangent = node.kind == INPUT and node.phase == BACKWARD
        if tangent or node.phase == RECOMPUTE or any(given.index in late for given in node.inputs):
            late.add(node.index)
    return late


def _backward_order(nodes: Sequence[Node], gradients: Sequence[Node], saved: set[int], late: set[int]) -> list[Node]:
    """Backward's nodes in order, each with what it needs computed again right before it."""
    wanted: set[int] = set()
    stack = list(gradients)
    while stack:
        node = stack.pop()
        if node.index not in wanted and node.index not in saved and node.kind != INPUT:
            wanted.add(node.index)
            stack.extend(node.inputs)
    order: list[Node] = []
    done: set[int] = set()
    roots = [node for node in nodes if node.index in wanted and node.index in late]
    for root in [*roots, *gradients]:
        missing: list[Node] = []
        stack = [root]
        while stack:
            node = stack.pop()
            if node.index in wanted and node.index not in done:
                done.add(node.index)
                missing.append(node)
                stack.extend(node.inputs)
        order.extend(sorted(missing, key=lambda node: node.index))
    return order


# ---------------------------------------------------------------- which nodes may be computed again


def fusible(first: Node, second: Node) -> bool:
    """Whether the partitioner expects these two to be one kernel."""
    return second.op == "cat" or (first.fusible and second.fusible)


class _Rules:
    """Bans on computing nodes again, and what it costs to keep them."""

    def __init__(
        self, nodes: Sequence[Node], needed: set[int], late: set[int], free: set[int], returned: set[int]
    ) -> None:  # fmt: skip
        self.nodes, self.needed, self.late, self.free, self.returned = nodes, needed, late, free, returned
        self.forward = [node for node in nodes if node.index in needed and node.index not in late]
        self.order = {node.index: position for position, node in enumerate(self.forward)}
        self.distance = self._distances()
        self.banned: set[int] = set()
        for node in nodes:
            if node.index in late:
                continue
            if node.kind == INPUT or (node.index in self.order and self._must_keep(node)):
                self._ban(node)
        self._ban_used_far_apart()
        self._ban_long_chains()

    def _distances(self) -> list[int]:
        distance = [0] * len(self.nodes)
        for node in reversed(self.nodes):
            if node.index in self.order:
                distance[node.index] = min((distance[user.index] + 1 for user in node.users), default=FAR)
        return distance

    def _ban(self, node: Node) -> None:
        if not node.is_view:
            self.banned.add(node.index)

    def _must_keep(self, node: Node) -> bool:
        if node.op == "item":
            return False
        if not node.fusible or self._materialized_in_backward(node):
            return True
        return node.size * REDUCES < sum(given.size for given in dict.fromkeys(node.inputs)) and node.op != "cat"

    def _materialized_in_backward(self, node: Node) -> bool:
        """Whether backward reads it, or a view of it, from memory, or it is returned: then computing it again is not free."""
        if node.is_view:
            return False
        stack, seen = [node], {node.index}
        while stack:
            current = stack.pop()
            if current.index in self.returned:
                return True
            for user in current.users:
                if user.index not in self.order and not fusible(current, user):
                    return True
                if user.is_view and user.index not in seen:
                    seen.add(user.index)
                    stack.append(user)
        return False

    def _ban_used_far_apart(self) -> None:
        """A value used near and far is not the start of two recomputations that will not fuse."""
        for used in self.forward:
            users = [user for user in used.users if user.index in self.order]
            if not users:
                continue
            last = max(self.order[user.index] for user in users)
            first = self._first_unfusible(users, last)
            for user in users:
                if self.order[user.index] > first and fusible(used, user):
                    self._ban(user)

    def _first_unfusible(self, starts: Sequence[Node], last: int) -> int:
        """Position of the first node down the line, up to `last`, that does not fuse with what it reads."""
        heap: list[tuple[int, bool]] = []
        seen: set[tuple[int, bool]] = set()
        for node in starts:
            heappush(heap, (self.order[node.index], True))
        while heap:
            position, fuses = heappop(heap)
            if not fuses:
                return position
            node = self.forward[position]
            for user in node.users:
                where = self.order.get(user.index)
                if where is None or where > last:
                    continue
                entry = (where, fusible(node, user))
                if entry not in seen:
                    seen.add(entry)
                    heappush(heap, entry)
        return last

    def _ban_long_chains(self) -> None:
        visited: set[int] = set()
        for begin in range(len(self.forward)):
            heap = [begin]
            while heap:
                position = heappop(heap)
                if position in visited:
                    continue
                visited.add(position)
                node = self.forward[position]
                if position > begin + CHAIN and not heap:
                    self._ban(node)
                    break
                for user in node.users:
                    where = self.order.get(user.index)
                    if where is not None and fusible(node, user) and user.index not in self.banned:
                        heappush(heap, where)

    def cost(self, node: Node) -> int:
        """Of keeping a node; twice for one that need not exist in memory otherwise."""
        if node.index in self.free:
            return 0
        if node.multi:
            return INFINITE
        steps = max(min(self.distance[node.index], MOST_DISTANCE), 1)
        cost = int(node.size * DISTANCE_FACTOR**steps)
        materialized = node.kind == INPUT or node.index in self.returned or not all(fusible(node, user) for user in node.users)
        return cost if materialized else 2 * cost


# ---------------------------------------------------------------- the cut


def _saved(
    nodes: Sequence[Node], needed: set[int], late: set[int], gradients: Sequence[Node], free: set[int],
    returned: set[int],
) -> list[Node]:  # fmt: skip
    """Cut every connected piece of the graph between what cannot be computed again and backward."""
    rules = _Rules(nodes, needed, late, free, returned)
    ends = {node.index for node in gradients if node.index not in late}
    inside = _reaching_backward(nodes, late, rules.banned, ends)
    kept: list[Node] = []
    for piece in _pieces(nodes, inside, rules.banned):
        kept.extend(_cut(piece, rules, late, ends, inside))
    return sorted(kept, key=lambda node: node.index)


def _reaching_backward(nodes: Sequence[Node], late: set[int], banned: set[int], ends: set[int]) -> set[int]:
    """Nodes that backward needs, directly or through nodes that may be computed again."""
    inside: set[int] = set()
    for node in reversed(nodes):
        if node.index not in late and (
            node.index in ends
            or any(user.index in late or (user.index in inside and user.index not in banned) for user in node.users)
        ):
            inside.add(node.index)
    return inside


def _pieces(nodes: Sequence[Node], inside: set[int], banned: set[int]) -> list[list[Node]]:
    """The nodes in question, those together that hang together."""
    parent = {index: index for index in inside}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for node in nodes:
        if node.index in inside:
            for user in node.users:
                if user.index in inside and user.index not in banned:
                    parent[root(user.index)] = root(node.index)
    pieces: dict[int, list[Node]] = {}
    for node in nodes:
        if node.index in inside:
            pieces.setdefault(root(node.index), []).append(node)
    return list(pieces.values())


def _cut(piece: list[Node], rules: _Rules, late: set[int], ends: set[int], inside: set[int]) -> list[Node]:
    """The nodes of a piece that a minimum cut goes through; of several such cuts, the one nearest backward."""
    place = {node.index: position for position, node in enumerate(piece)}
    size = len(piece)
    source, sink = 2 * size, 2 * size + 1
    flow = _Flow(2 * size + 2)
    for position, node in enumerate(piece):
        flow.edge(2 * position, 2 * position + 1, rules.cost(node))
        if node.index in rules.banned:
            flow.edge(source, 2 * position, INFINITE)
        to_sink = node.index in ends
        for user in node.users:
            if user.index in late:
                to_sink = True
            elif user.index in inside and user.index not in rules.banned:
                flow.edge(2 * position + 1, 2 * place[user.index], INFINITE)
        if to_sink:
            flow.edge(2 * position + 1, sink, INFINITE)
    flow.run(source, sink)
    after = flow.can_reach(sink)
    return [node for position, node in enumerate(piece) if 2 * position not in after and 2 * position + 1 in after]


class _Flow:
    """Largest flow through a network (Dinic 1970), for graphs of a few thousand nodes."""

    def __init__(self, count: int) -> None:
        self.head: list[list[int]] = [[] for _ in range(count)]
        self.to: list[int] = []
        self.left: list[int] = []

    def edge(self, start: int, end: int, capacity: int) -> None:
        self.head[start].append(len(self.to))
        self.to.append(end)
        self.left.append(capacity)
        self.head[end].append(len(self.to))
        self.to.append(start)
        self.left.append(0)

    def run(self, source: int, sink: int) -> None:
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return
            self._block(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        level = [-1] * len(self.head)
        level[source] = 0
        queue = [source]
        for vertex in queue:
            for edge in self.head[vertex]:
                end = self.to[edge]
                if level[end] < 0 and self.left[edge] > 0:
                    level[end] = level[vertex] + 1
                    queue.append(end)
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """Push along shortest paths until none is left."""
        head, to, left = self.head, self.to, self.left
        following = [0] * len(head)
        path: list[int] = []
        vertex = source
        while True:
            if vertex == sink:
                pushed = min(left[edge] for edge in path)
                for edge in path:
                    left[edge] -= pushed
                    left[edge ^ 1] += pushed
                stop = next(i for i, edge in enumerate(path) if left[edge] == 0)
                vertex = to[path[stop] ^ 1]
                del path[stop:]
                continue
            edges = head[vertex]
            while following[vertex] < len(edges):
                edge = edges[following[vertex]]
                if left[edge] > 0 and level[to[edge]] == level[vertex] + 1:
                    break
                following[vertex] += 1
            else:
                if not path:
                    return
                level[vertex] = -1
                vertex = to[path.pop() ^ 1]
                continue
            path.append(edge)
            vertex = to[edge]

    def can_reach(self, sink: int) -> set[int]:
        """Vertices with room left on some way to the sink."""
        found = {sink}
        queue = [sink]
        for vertex in queue:
            for edge in self.head[vertex]:
                start = self.to[edge]
                if start not in found and self.left[edge ^ 1] > 0:
                    found.add(start)
                    queue.append(start)
        return found
