"""The sampling parameters as keywords, for type checkers."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """The keywords of `SamplingParams`, which documents them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int]
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
