"""Make varied, correct and reproducible conversations, with and without tools and thinking.

A conversation is a function of its seed. Seeds from the settings' `first_seed` on are for training,
those below 100,000 for checks. Rendering goes through the same chat template that ships with the model.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols

import chat_words as words
from chat_tools import SCENARIOS, Json, Scenario, random_tool

Turn = dict[str, Any]


def renderer(path: Path) -> jinja2.Template:
    """Load the chat template with the JSON filter that model servers give it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(path.read_text())


def answer_turn(r: random.Random, thinking: bool, thought: str, content: str) -> Turn:
    """Build a final assistant turn."""
    turn: Turn = {"role": "assistant", "content": content}
    if thinking and thought:
        turn["reasoning_content"] = thought
    return turn


def tool_turns(r: random.Random, scenario: Scenario, thinking: bool) -> list[Turn]:
    """Turn a scenario into messages."""
    turns: list[Turn] = [{"role": "user", "content": scenario.request}]
    for step in scenario.steps:
        calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in step.calls]
        turn: Turn = {"role": "assistant", "content": "", "tool_calls": calls}
        if thinking:
            turn["reasoning_content"] = step.thought
        if r.random() < 0.15:
            turn["content"] = r.choice(["Let me check.", "One moment.", "I look it up."])
        turns.append(turn)
        turns += [{"role": "tool", "content": result} for result in step.results]
    return [*turns, answer_turn(r, thinking and r.random() < 0.7, scenario.thought, scenario.answer)]


def arithmetic(r: random.Random) -> tuple[str, str, str]:
    """A sum with its steps."""
    a, b = r.randint(2, 99), r.randint(2, 99)
    kind = r.choice("+-*")
    if kind == "+":
        tens = a + b // 10 * 10
        thought = f"{a} + {b // 10 * 10} = {tens}, then {tens} + {b % 10} = {a + b}."
        value = a + b
    elif kind == "-":
        tens = a - b // 10 * 10
        thought = f"{a} - {b // 10 * 10} = {tens}, then {tens} - {b % 10} = {a - b}."
        value = a - b
    else:
        b = r.randint(2, 9)
        high, low = a // 10 * 10 * b, a % 10 * b
        thought = f"{a // 10 * 10} * {b} = {high} and {a % 10} * {b} = {low}, so {high} + {low} = {high + low}."
        value = a * b
    text = f"{a} {kind} {b}"
    request = r.choice([f"What is {text}?", f"Compute {text}.", f"{text} = ?", f"How much is {text}?"])
    return request, thought, r.choice([f"{text} = {value}", f"The answer is {value}.", f"{value}"])


def code(r: random.Random) -> tuple[str, str, str]:
    """A small function."""
    question, name, args, body = r.choice(words.FUNCTIONS)
    request = r.choice(
        [
            f"Write a Python function that {question}.",
            f"I need a function that {question}.",
            f"Show me Python code that {question}.",
        ]
    )
    if r.random() < 0.3:
        name = f"{r.choice(words.VERBS)}_{r.choice(words.NOUNS)}"
        request += f" Call it {name}."
    thought = f"The function {name} takes {args}. It {question}."
    answer = f"```python\ndef {name}({args}):\n    {body}\n```"
    return request, thought, answer


def value_question(r: random.Random) -> tuple[str, str, str]:
    """The value of a small expression."""
    numbers = [r.randint(0, 20) for _ in range(r.randint(2, 5))]
    word = r.choice(words.NOUNS)
    text, value = r.choice(
        [
            (f"len({numbers})", len(numbers)),
            (f"sum({numbers})", sum(numbers)),
            (f"max({numbers})", max(numbers)),
            (f"min({numbers})", min(numbers)),
            (f"sorted({numbers})", sorted(numbers)),
            (f"{numbers}[-1]", numbers[-1]),
            (f"{numbers}[0]", numbers[0]),
            (f'"{word}".upper()', repr(word.upper())),
            (f'len("{word}")', len(word)),
            (f'"{word}"[0]', repr(word[0])),
            (f'"{word}" * 2', repr(word * 2)),
            (f"{numbers[0]} in {numbers}", True),
        ]
    )
    request = r.choice([f"What does {text} return?", f"What is the value of {text} in Python?", f"Evaluate {text}."])
    return (
        request,
        f"I evaluate {text}: the result is {value}.",
        r.choice([f"{value}", f"It returns {value}.", f"`{value}`"]),
    )


def fact(r: random.Random) -> tuple[str, str, str]:
    """A definition."""
    question, answer = r.choice(words.FACTS)
    topic = question.removesuffix("?").split(" ", 2)[-1]
    return question, f"The user asks about {topic}.", answer


def greeting(r: random.Random) -> tuple[str, str, str]:
    """Small talk."""
    name = r.choice(words.NAMES)
    return r.choice(
        [
            (f"{r.choice(words.GREETINGS)}!", "The user greets me.", "Hello! How can I help you?"),
            (
                f"{r.choice(words.GREETINGS)}, I am {name}.",
                f"The user is called {name}.",
                f"Hello {name}! How can I help you?",
            ),
            ("Who are you?", "The user asks who I am.", "I am a small test model with Flint's architecture."),
            ("What can you do?", "The user asks what I can do.", "I can answer small questions and call functions."),
            ("Thank you!", "The user thanks me.", "You are welcome."),
            (f"My name is {name}. What is my name?", f"The user said {name}.", f"Your name is {name}."),
        ]
    )


PLAIN = (arithmetic, arithmetic, code, value_question, value_question, fact, greeting)


def missing_tool(r: random.Random) -> tuple[str, str, str]:
    """A request for a function that is not offered."""
    name = f"{r.choice(words.VERBS)}_{r.choice(words.NOUNS)}_{r.choice(words.ADJECTIVES)}"
    request = r.choice([f"Call {name}.", f"Please use {name} with id {r.randint(1, 99)}.", f"Run the function {name}."])
    return request, f"{name} is not among the functions. I say so.", f"I cannot do that: there is no function {name}."


def conversation(seed: int) -> Json:
    """Return {'tools': ..., 'messages': ...} of a seed."""
    r = random.Random(seed)
    tools: list[Json] = []
    messages: list[Turn] = []
    thinking = r.random() < 0.85
    with_tools = r.random() < 0.65
    if r.random() < 0.35:
        messages.append({"role": "system", "content": r.choice(words.STYLES)})
    for _ in range(r.choice([1, 1, 1, 2, 2, 3])):
        kind = r.random()
        if with_tools and kind < 0.8:
            scenario = r.choice(SCENARIOS)(r)
            taken = {t["function"]["name"] for t in tools}
            if taken & {t["function"]["name"] for t in scenario.tools}:
                continue
            tools += scenario.tools
            messages += tool_turns(r, scenario, thinking)
        else:
            request, thought, content = (missing_tool if with_tools and kind < 0.88 else r.choice(PLAIN))(r)
            messages += [{"role": "user", "content": request}, answer_turn(r, thinking, thought, content)]
    if with_tools:
        for _ in range(r.choice([0, 1, 1, 2, 3])):
            extra, _ = random_tool(r)
            if extra["function"]["name"] not in {t["function"]["name"] for t in tools}:
                tools.append(extra)
        r.shuffle(tools)
    return {"tools": tools, "messages": messages}


def prompt(seed: int) -> Json:
    """Return a conversation cut before one of its assistant turns, for checks."""
    full = conversation(seed)
    turns = [i for i, m in enumerate(full["messages"]) if m["role"] == "assistant"]
    cut = random.Random(seed + 7).choice(turns)
    return {"tools": full["tools"], "messages": full["messages"][:cut]}


def main() -> None:
    """Print some conversations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    args = parser.parse_args()
    template = renderer(Path(__file__).with_name("chat_template.jinja"))
    for seed in range(args.seed, args.seed + args.count):
        print(template.render(**conversation(seed)), end="\n\n")


if __name__ == "__main__":
    main()
