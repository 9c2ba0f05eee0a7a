"""What a stream has decoded piece by piece is what the whole reply begins with."""

from __future__ import annotations

import numpy as np

from molt_hpc.rollout.chat_stream import EventStream
from molt_hpc.rollout.dialect import Dialect
from tests.chat_templates import make_tokenizer


def test_pieces_add_up_to_the_whole_text_whatever_the_tokens_are_cut_at():
    dialect, rng = Dialect(make_tokenizer("chatml")), np.random.default_rng(0)
    for _ in range(40):
        ids = dialect.ids("héllo wörld 你好 the answer ") * 2 + rng.integers(40, 600, 12).tolist() + dialect.ids("é end")
        stream, decoded = EventStream(None, None, None, 0, dialect), ""
        while ids:
            count = int(rng.integers(0, 4))
            stream.ids, ids = stream.ids + ids[:count], ids[count:]
            before, decoded = decoded, stream._decode()
            assert decoded.startswith(before) and dialect.text(stream.ids).startswith(decoded)
        assert decoded == dialect.text(stream.ids)
