"""Wire format: round trips, and refusal of invalid content with a named reason."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from pdsl.peer.messages import (
    MAX_CONTROL,
    PROTOCOL,
    Answer,
    Header,
    Receipt,
    RefusedError,
    Request,
    decode,
    encode,
    max_message_bytes,
    split,
)
from tests.helpers.organisations import pickled

D = 5
HEADER = Header(plan="a" * 64, round=3, phase=1, sender=0, receiver=2)
V = torch.tensor([1.0, -2.5, 0.0, 3e5, 1e-30])
few = settings(max_examples=100, deadline=None)


def reason(content: bytes, expected: Header = HEADER) -> str:
    with pytest.raises(RefusedError) as caught:
        decode(content, expected, D)
    return caught.value.reason


def test_message_round_trip_as_a_safetensors_file() -> None:
    content = encode(HEADER, V)
    assert torch.equal(decode(content, HEADER, D), V)
    assert torch.equal(load(content)["v"], V)  # as read by safetensors
    assert len(content) <= max_message_bytes(D)


@pytest.mark.parametrize("name", ["plan", "round", "phase", "sender", "receiver"])
def test_a_wrong_header_field_is_the_reason(name: str) -> None:
    other = {"plan": "b" * 64}.get(name, 7)
    assert reason(encode(replace(HEADER, **{name: other}), V)) == name


def test_wrong_dtype_shape_size_and_values() -> None:
    metadata = HEADER.as_metadata()
    assert reason(save({"v": V.half()}, metadata)) == "dtype"
    assert reason(save({"v": V.view(torch.int32)}, metadata)) == "dtype"
    assert reason(save({"v": V[:, None]}, metadata)) == "shape"
    assert reason(save({"v": V[:4]}, metadata)) == "shape"
    assert reason(save({"v": V, "w": V.clone()}, metadata)) == "header"
    assert reason(save({"v": V}, {**metadata, "more": ""})) == "header"
    assert reason(save({"v": V})) == "header"
    assert reason(encode(HEADER, V) + b"\0") == "size"
    assert reason(encode(HEADER, V)[:-1]) == "size"
    assert reason(b"") == reason(bytes(10**6)) == "size"
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert reason(encode(HEADER, torch.full((D,), bad))) == "not finite"
    assert reason(encode(HEADER, torch.full((D,), 1e30))) == "too large"


def test_pickle_is_not_loaded(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    assert reason(pickled(witness)) == "header"
    with pytest.raises(RefusedError):
        Request.decode(pickled(witness), HEADER.plan)
    assert not witness.exists()


def test_invalid_headers() -> None:
    header = json.dumps({"__metadata__": HEADER.as_metadata(), "v": "[" * 10}).encode()
    assert reason(struct.pack("<Q", len(header)) + header + bytes(4 * D)) == "header"
    deep = b"[" * 900
    assert reason(struct.pack("<Q", len(deep)) + deep) == "header"
    assert reason(struct.pack("<Q", 2**63) + bytes(16)) == "header"


@few
@given(st.integers(0, len(encode(HEADER, V)) - 1), st.binary(min_size=1, max_size=4))
def test_fuzz_a_damaged_message_is_refused_or_differs_in_its_numbers(at: int, junk: bytes) -> None:
    content = bytearray(encode(HEADER, V))
    content[at : at + len(junk)] = junk
    try:
        vector = decode(bytes(content), HEADER, D)
    except RefusedError as e:
        assert len(e.reason) < 20
    else:
        assert torch.isfinite(vector).all() and vector.shape == (D,)
        assert torch.equal(load(bytes(content))["v"], vector)


@few
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_fuzz_any_bytes_are_refused(content: bytes) -> None:
    for read in (
        lambda: decode(content, HEADER, D),
        lambda: Request.decode(content, HEADER.plan),
        lambda: Answer.decode(content, HEADER.plan),
    ):
        with pytest.raises(RefusedError):
            read()
    if content[:1] not in (b"\0", b"\1"):
        with pytest.raises(RefusedError):
            split(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.just("a" * 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@few
@given(json_values, json_values, json_values, json_values)
def test_fuzz_requests_and_answers_of_any_values(a: object, b: object, c: object, d: object) -> None:
    for kind, values in (
        (Request, {"plan": HEADER.plan, "round": a, "phase": b, "served": [0, 0, ""]}),
        (
            Answer,
            {
                "plan": HEADER.plan,
                "state": a,
                "round": b,
                "gathering": c,
                "waiting": d,
                "held": d,
                "served": [0, 0, ""],
            },
        ),
        (Request, {"plan": a, "round": 1, "phase": 1, "served": [0, 0, ""]}),
        (Request, {"plan": HEADER.plan, "round": 1, "phase": 1, "served": [a, b, c]}),
        (Request, {"plan": HEADER.plan, "round": 1, "phase": 1, "served": c}),
    ):
        try:
            read = kind.decode(json.dumps({"protocol": PROTOCOL, **values}).encode(), HEADER.plan)
        except RefusedError:
            continue
        assert kind.decode(read.encode(), HEADER.plan) == read
        assert len(read.encode()) <= MAX_CONTROL


def test_request_and_answer_round_trip() -> None:
    receipt = Receipt(2, 3, "c" * 64)
    for sent in (
        Request(HEADER.plan, 10**9, -1, receipt),
        Answer(HEADER.plan, "here", 3, True, False, True, receipt),
    ):
        assert type(sent).decode(sent.encode(), HEADER.plan) == sent
        with pytest.raises(RefusedError, match="plan"):
            type(sent).decode(sent.encode(), "b" * 64)


@pytest.mark.parametrize("kind", [Request(HEADER.plan, 12, 0), Answer(HEADER.plan, "ahead", 12, False, False, False)])
def test_a_round_after_the_last_one_is_refused(kind: Request | Answer) -> None:
    assert type(kind).decode(kind.encode(), HEADER.plan, last=11) == kind
    with pytest.raises(RefusedError, match="round"):
        type(kind).decode(kind.encode(), HEADER.plan, last=10)


@pytest.mark.parametrize("other", [PROTOCOL - 1, PROTOCOL + 1, float(PROTOCOL), str(PROTOCOL), None])
def test_another_protocol_is_refused_by_name(other: object) -> None:
    for sent in (Request(HEADER.plan, 1, 0), Answer(HEADER.plan, "here", 3, True, False, True)):
        values = {**json.loads(sent.encode()), "protocol": other, "setting of a later version": 1}
        reason = f"protocol {other} instead of {PROTOCOL}" if isinstance(other, int) else "protocol"
        with pytest.raises(RefusedError, match=f"^{reason}$"):
            type(sent).decode(json.dumps(values).encode(), HEADER.plan)
