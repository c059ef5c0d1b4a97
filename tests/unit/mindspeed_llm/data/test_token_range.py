"""Tokens outside a vocabulary are found wherever they are, and nothing else is."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.data import token_range
from mindspeed_llm.data.token_range import TokenFile, find_outside

VOCABULARY = 120


@pytest.mark.parametrize("is_labels", [False, True])
@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<u2", "<i2", "u1"])
@given(data=st.data())
def test_the_plain_definition(tmp_path_factory, dtype, is_labels, data):
    least, greatest = np.iinfo(dtype).min, np.iinfo(dtype).max
    edges = [-101, -100, -99, -1, 0, VOCABULARY - 1, VOCABULARY, VOCABULARY + 99, least, greatest]
    values = st.sampled_from([one for one in edges if least <= one <= greatest])
    tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1) | values, max_size=12))
    path = Path(tmp_path_factory.mktemp("tokens") / "x.bin")
    np.array(tokens, dtype).tofile(path)
    right = {*range(VOCABULARY), *([-100] if is_labels else [])}
    wrong = [(place, token) for place, token in enumerate(tokens) if token not in right]
    file = TokenFile(path, np.dtype(dtype), is_labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_range, "BLOCK", 5)
        assert find_outside(file, VOCABULARY) == (wrong[0] if wrong else None)
        shares = [find_outside(file, VOCABULARY, (number, 3)) for number in range(3)]
    assert [one for one in shares if one][:1] == wrong[:1]
