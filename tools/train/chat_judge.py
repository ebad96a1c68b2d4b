"""Judge answers in the chat format: thinking, tool calls, the end of the turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import chat_samples

CALL = re.compile(
    r"<tool_call>([^<>\s]+)((?:<arg_key>[^<>]+</arg_key><arg_value>(?:(?!<arg_key>|</arg_value>|<tool_call>).)*</arg_value>)*)"
    r"</tool_call>",
    re.DOTALL,
)
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def judge(answer: str, tools: list[dict[str, Any]], expected: dict[str, Any]) -> Counter[str]:
    """Count what is right about one answer."""
    counts: Counter[str] = Counter(answers=1)
    end = next((e for e in ENDS if answer.endswith(e)), "")
    counts["ended"] += bool(end)
    body = answer.removesuffix(end)
    if "<think>" in body or "</think>" in body:
        counts["thinking"] += 1
        well = body.count("<think>") == body.count("</think>") == 1 and re.match(r"<think>.+?</think>", body, re.DOTALL)
        counts["thinking_well"] += bool(well)
    if "tool_call>" in body:
        counts["calling"] += 1
        calls = CALL.findall(body)
        names = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in tools}
        well = (
            len(calls) == body.count("<tool_call>") == body.count("</tool_call>")
            and CALL.sub("", body).count("<arg_") == 0
        )
        counts["calling_well"] += well
        counts["calling_offered"] += well and all(name in names for name, _ in calls)
        keys = [(name, set(re.findall(r"<arg_key>(.*?)</arg_key>", rest))) for name, rest in calls]
        counts["calling_known_arguments"] += well and all(k <= set(names.get(n, {})) for n, k in keys)
        counts["call_ends_in_observation"] += end == "<|observation|>"
    wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in expected.get("tool_calls", [])]
    if wanted:
        counts["call_wanted"] += 1
        written = "".join(
            f"<tool_call>{n}"
            + "".join(
                f"<arg_key>{k}</arg_key><arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>"
                for k, v in a.items()
            )
            + "</tool_call>"
            for n, a in wanted
        )
        counts["call_wanted_and_equal"] += written in body
    return counts


def load_prompts(template: Path, first: int, count: int) -> list[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """Return rendered prompts with their tools and the turn that the generator would give, shortest first."""
    render = chat_samples.renderer(template)
    prompts = []
    for seed in range(first, first + count):
        cut = chat_samples.prompt(seed)
        expected = chat_samples.conversation(seed)["messages"][len(cut["messages"])]
        prompts.append((render.render(**cut, add_generation_prompt=True), cut["tools"], expected))
    return sorted(prompts, key=lambda p: len(p[0]))
