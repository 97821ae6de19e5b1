"""The module's diagrams, and those of its mechanisms that a picture tells faster than words."""

from __future__ import annotations

from collections.abc import Callable

from .drawing import Drawing


def request_path() -> str:
    """From a client's request to its stream of tokens."""
    d = Drawing(720, 250, "The path of a request: router, scheduler, prefill, paged KV cache, decode, sampler")
    d.box(10, 20, 90, 44, "client")
    d.box(140, 20, 120, 44, "router\nprefix-aware", "c")
    d.box(292, 20, 146, 44, "scheduler\ncontinuous batching", "c")
    d.box(520, 20, 190, 44, "prefill\ncompute-bound, sets TTFT", "a")
    d.box(520, 180, 190, 44, "decode step\nmemory-bound, sets TPOT", "b")
    d.box(545, 100, 140, 44, "paged KV cache", "d")
    d.box(200, 180, 210, 44, "sampler\ntemperature, top-p, grammar")
    d.arrow((100, 42), (138, 42))
    d.arrow((260, 42), (290, 42))
    d.arrow((438, 42), (518, 42))
    d.text(478, 28, "new prompt", "middle", "small")
    d.arrow((365, 64), (365, 122), (500, 122), (500, 194), (518, 194))
    d.text(375, 110, "running", "start", "small")
    d.arrow((600, 64), (600, 98))
    d.arrow((585, 144), (585, 178))
    d.arrow((615, 178), (615, 146))
    d.arrow((520, 212), (412, 212))
    d.arrow((200, 202), (55, 202), (55, 66))
    d.text(64, 140, "token stream", "start", "small")
    return d.svg()


def roofline() -> str:
    """Where the phases stand under the two roofs."""
    d = Drawing(640, 300, "The roofline: decode under the slope of the bandwidth, prefill under the compute roof")
    d.arrow((50, 270), (620, 270))
    d.arrow((50, 270), (50, 16))
    d.text(52, 288, "arithmetic intensity, FLOP/byte →", "start", "small")
    d.text(60, 18, "FLOP/s", "start", "small")
    d.line((60, 258), (420, 60), (610, 60), kind="roof")
    d.text(515, 44, "compute roof", "middle", "small")
    d.text(205, 160, "slope = bandwidth", "end", "small")
    d.line((420, 60), (420, 270), kind="dashed")
    d.text(420, 288, "ridge", "middle", "small")
    for x, y, name, anchor, kind in (
        (90, 244, "decode, batch 1", "start", "b"),
        (330, 112, "decode, batch 256", "start", "b"),
        (530, 66, "prefill", "middle", "a"),
    ):
        d.dot(x, y, kind)
        d.text(x + (12 if anchor == "start" else 0), y + (4 if anchor == "start" else 22), name, anchor)
    return d.svg()


def batching() -> str:
    """The same eight steps with static and with continuous batching."""
    d = Drawing(700, 190, "Static batching leaves slots idle; continuous batching fills them with waiting requests")
    plans = {
        "static batching": ("AAAAAAAA", "BB......", "CCC....."),
        "continuous batching": ("AAAAAAAA", "BBDDDEEE", "CCCFFFFG"),
    }
    kinds = dict(zip("ABCDEFG", "abcdabc", strict=True))
    for side, (title, rows) in enumerate(plans.items()):
        left = 30 + side * 345
        d.text(left, 20, title, kind="strong")
        for step in range(8):
            d.text(left + 18 + step * 38, 48, str(step + 1), "middle", "small")
        for row, places in enumerate(rows):
            for step, owner in enumerate(places):
                idle = owner == "."
                d.box(left + step * 38, 60 + row * 38, 36, 34, "" if idle else owner, "faint" if idle else kinds[owner])
    d.text(30, 182, "one column a decode step; empty places are computed for nobody", kind="small")
    return d.svg()


def paging() -> str:
    """A sequence's block table, and the pool behind it."""
    d = Drawing(700, 240, "Block tables map the logical blocks of two sequences to physical blocks of one pool")
    d.text(20, 20, "logical blocks of A", kind="strong")
    for index, name in enumerate(("tokens 0–15", "tokens 16–31", "tokens 32–37")):
        d.box(20, 36 + index * 44, 130, 36, name, "a")
    d.text(20, 190, "block table of A: [0, 3, 5]")
    d.text(550, 20, "logical blocks of B", kind="strong")
    d.box(550, 36, 130, 36, "tokens 0–15", "b")
    d.text(550, 92, "block table of B: [2]")
    d.text(250, 90, "physical blocks", kind="strong")
    for block, owner in enumerate(("A", "", "B", "A", "", "A")):
        kind = {"A": "a", "B": "b", "": "faint"}[owner]
        d.box(250 + block * 46, 132, 42, 42, owner, kind)
        d.text(271 + block * 46, 188, str(block), "middle", "small")
    d.arrow((150, 54), (225, 54), (225, 116), (271, 116), (271, 130))
    d.arrow((150, 98), (215, 98), (215, 215), (409, 215), (409, 198))
    d.arrow((150, 142), (190, 142), (190, 228), (501, 228), (501, 198))
    d.arrow((550, 54), (363, 54), (363, 130))
    return d.svg()


def copy_on_write() -> str:
    """Two samples share the prompt's blocks until one writes."""
    d = Drawing(640, 190, "Two samples share blocks; the one that writes first into a shared block gets a copy")
    for side, title in enumerate(("fork", "first write")):
        left = 20 + side * 320
        d.text(left, 18, title, kind="strong")
        d.text(left, 60, "sample 1")
        d.text(left, 150, "sample 2")
        d.box(left + 90, 84, 60, 40, "prompt\n×2", "d")
        d.box(left + 170, 84, 60, 40, "partial\n×2" if side == 0 else "partial\n×1", "d" if side == 0 else "a")
        d.arrow((left + 60, 66), (left + 110, 82))
        d.arrow((left + 60, 60), (left + 190, 82))
        d.arrow((left + 60, 146), (left + 110, 126))
        if side == 0:
            d.arrow((left + 60, 150), (left + 190, 126))
        else:
            d.box(left + 170, 140, 60, 40, "copy", "b")
            d.arrow((left + 60, 154), (left + 168, 160))
            d.arrow((left + 200, 124), (left + 200, 138), kind="dashed")
    return d.svg()


def chunked_prefill() -> str:
    """A long prompt beside decodes, whole and in chunks."""
    d = Drawing(700, 210, "A whole prefill stalls every decode; in chunks it fills what is left of each step's budget")
    d.text(20, 18, "whole prompt", kind="strong")
    d.box(20, 34, 50, 26, "D D D", "b")
    d.box(74, 34, 330, 26, "prefill of 4,000 tokens", "a")
    d.box(408, 34, 50, 26, "D D D", "b")
    d.box(462, 34, 50, 26, "D D D", "b")
    d.arrow((74, 72), (404, 72), kind="dashed")
    d.text(240, 86, "every running answer waits", "middle", "small")
    d.text(20, 126, "chunked", kind="strong")
    for step in range(5):
        left = 20 + step * 134
        d.box(left, 142, 42, 26, "D D D", "b")
        d.box(left + 44, 142, 84, 26, "chunk", "a")
    d.text(20, 190, "each step: one token for everyone who decodes, then prompt tokens up to the budget", kind="small")
    return d.svg()


def prefix_tree() -> str:
    """A radix tree over prompts that begin alike."""
    d = Drawing(640, 200, "A radix tree of cached prompts: shared beginnings are stored once")
    d.box(20, 80, 150, 40, "system prompt", "d")
    d.box(240, 20, 150, 40, "document", "d")
    d.box(240, 140, 150, 40, "tool schemas", "d")
    d.box(460, 4, 150, 34, "question 1", "a")
    d.box(460, 46, 150, 34, "question 2", "b")
    d.box(460, 143, 150, 34, "question 3", "c")
    for start, end in (((170, 92), (238, 42)), ((170, 108), (238, 158)), ((390, 34), (458, 22)), ((390, 46), (458, 62)),
                       ((390, 160), (458, 160))):  # fmt: skip
        d.arrow(start, end)
    return d.svg()


def speculation() -> str:
    """A round: drafts, one pass of the target, a rejection."""
    d = Drawing(700, 210, "A round of speculation: four drafts, one pass of the target, two kept and one drawn anew")
    d.text(20, 20, "draft", kind="strong")
    d.text(20, 92, "verify", kind="strong")
    d.text(20, 164, "text", kind="strong")
    for index, (judged, kind) in enumerate(
        (("u < p/q", "a"), ("u < p/q", "a"), ("u ≥ p/q", "c"), ("not read", "faint"))
    ):
        left = 130 + index * 110
        d.box(left, 4, 90, 34, f"x{index + 1} ~ q", "plain")
        d.box(left, 76, 90, 34, judged, kind)
        d.arrow((left + 45, 38), (left + 45, 74))
    d.text(575, 93, "one pass, k + 1 rows", kind="small")
    for index, text in enumerate(("x1", "x2", "~ (p − q)⁺")):
        left = 130 + index * 110
        d.box(left, 148, 90, 34, text, "a" if index < 2 else "b")
        d.arrow((left + 45, 110), (left + 45, 146))
    return d.svg()


def draft_tree() -> str:
    """A tree of drafts and the mask that goes with it."""
    d = Drawing(660, 230, "A draft tree, and its attention mask: each draft sees itself and its ancestors")
    places = [(60, 90), (180, 40), (180, 140), (300, 20), (300, 70), (300, 140)]
    parents = [-1, 0, 0, 1, 1, 2]
    names = "abcdef"
    for index, parent in enumerate(parents):
        if parent >= 0:
            (x0, y0), (x1, y1) = places[parent], places[index]
            d.arrow((x0 + 22, y0), (x1 - 24, y1))
    for (x, y), name in zip(places, names, strict=True):
        d.box(x - 22, y - 16, 44, 32, name, "plain")
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}]
    left, top, cell = 430, 34, 30
    for row in range(6):
        d.text(left - 14, top + row * cell + 14, names[row], "middle", "small")
        d.text(left + row * cell + 14, top - 12, names[row], "middle", "small")
        for column in range(6):
            seen = column in ancestors[row]
            d.box(left + column * cell, top + row * cell, cell - 2, cell - 2, "", "a" if seen else "faint")
    d.text(60, 200, "siblings stand at the same position", kind="small")
    return d.svg()


def disaggregation() -> str:
    """Prefill and decode in pools of their own."""
    d = Drawing(680, 170, "Disaggregated serving: a prefill pool sends keys and values to a decode pool")
    d.text(20, 20, "prefill pool", kind="strong")
    d.text(450, 20, "decode pool", kind="strong")
    for row in range(2):
        d.box(20, 40 + row * 56, 180, 44, "prefill\nits own TP, its own batch", "a")
        d.box(450, 40 + row * 56, 210, 44, "decode\nits own TP, its own batch", "b")
        d.arrow((200, 62 + row * 56), (448, 62 + row * 56))
    d.text(324, 48, "KV of the prompt", "middle", "small")
    d.text(324, 90, "320 KiB a token (Llama-3-70B)", "middle", "small")
    d.text(20, 160, "neither phase ever waits for the other; the network carries what the cache holds", kind="small")
    return d.svg()


def flash_tiles() -> str:
    """FlashAttention's tiles beside the matrix that never exists."""
    d = Drawing(660, 230, "FlashAttention: a tile of queries stays on chip while tiles of keys and values pass by")
    d.text(30, 18, "scores, T × T, never stored", kind="strong")
    for row in range(4):
        for column in range(4):
            current = (row, column) == (2, 1)
            kind = "faint" if column > row else "a" if current else "plain"
            d.box(30 + column * 44, 36 + row * 44, 42, 42, "", kind)
    d.text(300, 18, "on chip", kind="strong")
    d.box(300, 36, 90, 42, "Q tile", "b")
    d.box(300, 90, 90, 42, "K, V tile", "c")
    d.box(430, 62, 200, 44, "m, ℓ, acc\nrescaled with each tile", "a")
    d.arrow((390, 57), (428, 78))
    d.arrow((390, 111), (428, 92))
    d.text(300, 170, "bytes: Θ(T²d²/M) in place of Θ(Td + T²)")
    d.text(300, 196, "extra memory: Θ(T) in place of Θ(T²)")
    return d.svg()


def quantization_groups() -> str:
    """One outlier sets the scale of all that share it."""
    d = Drawing(660, 170, "One outlier per tensor costs all weights their resolution; in groups only its neighbours")
    values = [3, 5, 2, 4, 60, 6, 3, 5, 4, 2, 5, 3]
    for side, (title, size) in enumerate((("one scale for all", 12), ("one scale a group of 4", 4))):
        left = 20 + side * 330
        d.text(left, 18, title, kind="strong")
        for index, value in enumerate(values):
            height = 4 + value * 1.3
            group = index // size
            spoiled = max(values[group * size : (group + 1) * size]) > 10
            d.box(left + index * 24 + group * 4, 120 - height, 18, height, "", "c" if spoiled else "a")
        d.text(left, 142, "12 of 12 lose resolution" if size == 12 else "4 of 12 lose resolution", kind="small")
    return d.svg()


def split_kv() -> str:
    """FlashDecoding: the context in chunks, merged by the softmax's own rule."""
    d = Drawing(660, 180, "FlashDecoding splits the context over blocks and merges their partial softmax results")
    d.text(20, 18, "one query, long context", kind="strong")
    for index in range(4):
        left = 20 + index * 120
        d.box(left, 36, 112, 34, f"keys, chunk {index}", "d")
        d.box(left, 96, 112, 34, "m, ℓ, acc", "a")
        d.arrow((left + 56, 70), (left + 56, 94))
        d.line((left + 56, 130), (left + 56, 146))
    d.arrow((76, 146), (540, 146))
    d.box(542, 96, 100, 64, "merge", "b")
    d.text(20, 170, "as many blocks as the chip has processors, also at batch 1", kind="small")
    return d.svg()


def cuda_graphs() -> str:
    """Launches one by one, and replayed as one."""
    d = Drawing(660, 180, "Without a graph the GPU waits for launches; a replayed graph has one launch a step")
    for row, (title, step, width) in enumerate((("launched one by one", 56, 22), ("replayed graph", 26, 22))):
        top = 14 + row * 84
        d.text(20, top, title, kind="strong")
        d.text(20, top + 26, "CPU", kind="small")
        d.text(20, top + 54, "GPU", kind="small")
        for index in range(9):
            if row == 0:
                d.box(70 + index * step, top + 14, 50, 22, "launch", "c")
            d.box((122 if row == 0 else 124) + index * step, top + 42, width, 22, "", "b")
        if row == 1:
            d.box(70, top + 14, 50, 22, "replay", "c")
    return d.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "request-path": request_path,
    "roofline": roofline,
    "batching": batching,
    "paging": paging,
    "copy-on-write": copy_on_write,
    "chunked-prefill": chunked_prefill,
    "prefix-tree": prefix_tree,
    "speculation": speculation,
    "draft-tree": draft_tree,
    "disaggregation": disaggregation,
    "flash-tiles": flash_tiles,
    "quantization-groups": quantization_groups,
    "split-kv": split_kv,
    "cuda-graphs": cuda_graphs,
}
"""Every diagram by its name in `{diagram}`."""
