"""Tool scenarios of the synthetic conversations: a definition, a request, its calls, results and the answer.

Names, argument names and descriptions vary from seed to seed, so that a model has to read the offered
definitions rather than remember one set. Every result and answer is computed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

import chat_words as words

Json = dict[str, Any]


@dataclass
class Step:
    """One assistant move: thoughts, the calls made at once and what each returned."""

    thought: str
    calls: list[tuple[str, Json]]
    results: list[str]


@dataclass
class Scenario:
    """One request that the offered tools can serve."""

    tools: list[Json]
    request: str
    steps: list[Step] = field(default_factory=list)
    thought: str = ""
    answer: str = ""


def tool(name: str, description: str, properties: Json, required: list[str] | None = None) -> Json:
    """Build a tool definition."""
    keys = list(properties) if required is None else required
    parameters = {"type": "object", "properties": properties, "required": keys}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def number_text(value: float) -> str:
    """Write a number without needless digits."""
    return str(int(value)) if value == int(value) else f"{value:.2f}".rstrip("0").rstrip(".")


def path_of(r: random.Random, suffix: str | None = None) -> str:
    """Draw a file path."""
    folder = r.choice(words.FOLDERS)
    if r.random() < 0.3:
        folder += "/" + r.choice(words.STEMS)
    return f"{folder}/{r.choice(words.STEMS)}{suffix or r.choice(words.SUFFIXES)}"


def weather(r: random.Random) -> Scenario:
    """Ask for the weather of one or several places."""
    name = r.choice(["get_weather", "weather", "current_weather", "weather_lookup", "fetch_weather"])
    place = r.choice(["city", "location", "place"])
    with_unit = r.random() < 0.4
    properties: Json = {place: {"type": "string"}}
    if with_unit:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    offered = tool(name, r.choice(["Current weather of a place.", "Get the weather.", "Weather now."]), properties)
    cities = r.sample(words.CITIES, r.choice([1, 1, 1, 2, 2, 3]))
    unit = r.choice(["celsius", "fahrenheit"])
    listed = " and ".join([", ".join(cities[:-1]), cities[-1]] if len(cities) > 1 else cities)
    request = r.choice(
        [f"What is the weather in {listed}?", f"How is the weather in {listed} now?", f"Weather in {listed}, please."]
    )
    if with_unit:
        request += f" Use {unit}."
    calls, results, answers = [], [], []
    for city in cities:
        degrees = r.randint(-9, 38) if unit == "celsius" else r.randint(20, 99)
        sky = r.choice(words.SKIES)
        calls.append((name, {place: city, **({"unit": unit} if with_unit else {})}))
        results.append(json.dumps({"temperature": degrees, "sky": sky}))
        answers.append(f"In {city} it is {degrees} degrees and {sky}.")
    thought = f"The user asks for the weather in {listed}. I call {name}" + (
        "." if len(cities) == 1 else f" {len(cities)} times."
    )
    return Scenario([offered], request, [Step(thought, calls, results)], "I have the data.", " ".join(answers))


def calculator(r: random.Random) -> Scenario:
    """Compute an expression."""
    a, b, c = r.randint(2, 99), r.randint(2, 99), r.randint(2, 30)
    text = r.choice([f"{a} + {b}", f"{a} * {b}", f"{a} - {b}", f"({a} + {b}) * {c}", f"{a} * {b} + {c}"])
    value = eval(text, {"__builtins__": {}})
    name = r.choice(["calculate", "calculator", "evaluate", "compute", "eval_expression"])
    key = r.choice(["expression", "expr", "formula"])
    offered = tool(
        name, r.choice(["Evaluate an arithmetic expression.", "Compute a formula."]), {key: {"type": "string"}}
    )
    request = r.choice([f"What is {text}?", f"Compute {text}.", f"Please work out {text}.", f"Calculate {text}"])
    thought = f"I need the value of {text}. I use {name}."
    step = Step(thought, [(name, {key: text})], [r.choice([str(value), json.dumps({"result": value})])])
    return Scenario([offered], request, [step], f"The result is {value}.", f"{text} = {value}")


def adder(r: random.Random) -> Scenario:
    """Call a function with number arguments."""
    verb, sign = r.choice([("add", "+"), ("multiply", "*"), ("subtract", "-")])
    a, b = r.randint(1, 999), r.randint(1, 99)
    value = {"+": a + b, "*": a * b, "-": a - b}[sign]
    names = r.choice([("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")])
    kind = r.choice(["integer", "number"])
    offered = tool(verb, f"{verb.title()} two numbers.", {names[0]: {"type": kind}, names[1]: {"type": kind}})
    request = r.choice([f"What is {a} {sign} {b}?", f"Use {verb} on {a} and {b}.", f"{verb.title()}: {a} and {b}"])
    step = Step(f"I call {verb} with {a} and {b}.", [(verb, {names[0]: a, names[1]: b})], [str(value)])
    return Scenario([offered], request, [step], f"{verb} gave {value}.", f"The result is {value}.")


UNITS: tuple[tuple[str, str, float], ...] = (
    ("km", "m", 1000.0),
    ("m", "cm", 100.0),
    ("kg", "g", 1000.0),
    ("h", "min", 60.0),
    ("min", "s", 60.0),
)
UNITS += (("mile", "km", 1.6), ("inch", "cm", 2.54), ("l", "ml", 1000.0), ("day", "h", 24.0), ("gb", "mb", 1024.0))


def convert(r: random.Random) -> Scenario:
    """Convert a value between units."""
    source, target, factor = r.choice(UNITS)
    value = r.choice([r.randint(1, 200), r.randint(1, 99) / 2])
    result = number_text(value * factor)
    name = r.choice(["convert", "convert_units", "unit_convert", "to_unit"])
    keys = r.choice([("value", "from_unit", "to_unit"), ("amount", "source", "target"), ("value", "from", "to")])
    properties: Json = {keys[0]: {"type": "number"}, keys[1]: {"type": "string"}, keys[2]: {"type": "string"}}
    offered = tool(name, r.choice(["Convert between units.", "Unit conversion."]), properties)
    shown = number_text(value)
    request = r.choice(
        [
            f"Convert {shown} {source} to {target}.",
            f"How many {target} are {shown} {source}?",
            f"{shown} {source} in {target}?",
        ]
    )
    step = Step(
        f"I convert {shown} from {source} to {target}.",
        [(name, dict(zip(keys, (value, source, target), strict=True)))],
        [result],
    )
    return Scenario([offered], request, [step], "The conversion is done.", f"{shown} {source} is {result} {target}.")


def read_file(r: random.Random) -> Scenario:
    """Read a file and answer a question on it."""
    path = path_of(r, ".py")
    functions = r.sample(words.FUNCTIONS, r.choice([1, 1, 2]))
    text = "\n\n".join(f"def {name}({args}):\n    {body}" for _, name, args, body in functions)
    name = r.choice(["read_file", "open_file", "cat", "view_file", "file_read"])
    key = r.choice(["path", "file", "filename"])
    offered = tool(name, r.choice(["Read a text file.", "Return the content of a file."]), {key: {"type": "string"}})
    listed = " and ".join(f[1] for f in functions)
    request, answer = r.choice(
        [
            (f"Which functions does {path} define?", f"{path} defines {listed}."),
            (f"What does {path} do?", f"It defines {listed}. The first one {functions[0][0]}."),
            (f"How many lines has {path}?", f"{path} has {len(text.splitlines())} lines."),
            (f"Read {path} and tell me what is in it.", f"The file defines {listed}."),
        ]
    )
    thought = f"I read {path} first."
    return Scenario([offered], request, [Step(thought, [(name, {key: path})], [text])], f"I see {listed}.", answer)


def search(r: random.Random) -> Scenario:
    """Search a pattern, sometimes open the first hit."""
    symbol = r.choice([r.choice(words.STEMS).title(), f"{r.choice(words.VERBS)}_{r.choice(words.NOUNS)}", "TODO"])
    name = r.choice(["search", "grep", "search_code", "find_text", "ripgrep"])
    keys = r.choice([("pattern", "path"), ("query", "folder"), ("regex", "directory")])
    with_path = r.random() < 0.6
    folder = r.choice(words.FOLDERS)
    properties: Json = {keys[0]: {"type": "string"}}
    if with_path:
        properties[keys[1]] = {"type": "string"}
    offered = [tool(name, r.choice(["Search text in files.", "Find a pattern in the repository."]), properties)]
    hits = [f"{path_of(r, '.py')}:{r.randint(1, 300)}" for _ in range(r.choice([0, 1, 1, 2, 3]))]
    where = f" in {folder}" if with_path else ""
    request = r.choice([f"Where is {symbol} used{where}?", f"Find {symbol}{where}.", f"Search for {symbol}{where}."])
    call = {keys[0]: symbol, **({keys[1]: folder} if with_path else {})}
    steps = [Step(f"I search for {symbol}{where}.", [(name, call)], ["\n".join(hits) or "no matches"])]
    if not hits:
        return Scenario(offered, request, steps, "Nothing was found.", f"I found no use of {symbol}{where}.")
    if r.random() < 0.4:
        reader = r.choice(["read_file", "open_file", "view_file"])
        offered.append(tool(reader, "Read a text file.", {"path": {"type": "string"}}))
        _, function, args, body = r.choice(words.FUNCTIONS)
        path = hits[0].split(":")[0]
        request += r.choice([" Then open the first file.", " Read the first hit."])
        text = f"# {symbol}\ndef {function}({args}):\n    {body}"
        steps.append(Step(f"The first hit is {path}. I open it.", [(reader, {"path": path})], [text]))
        return Scenario(
            offered, request, steps, "I have read it.", f"{symbol} is in {hits[0]}. The file defines {function}."
        )
    listed = ", ".join(hits)
    return Scenario(offered, request, steps, f"There are {len(hits)} hits.", f"{symbol} is used in {listed}.")


def run_tests(r: random.Random) -> Scenario:
    """Run tests and report the outcome."""
    target = r.choice(["tests", path_of(r, ".py"), "tests/" + r.choice(words.STEMS)])
    name = r.choice(["run_tests", "pytest", "test", "execute_tests"])
    verbose = r.random() < 0.4
    properties: Json = {"path": {"type": "string"}}
    call: Json = {"path": target}
    request = r.choice([f"Run the tests in {target}.", f"Do the tests in {target} pass?", f"Test {target}, please."])
    if verbose:
        properties["verbose"] = {"type": "boolean"}
        call["verbose"] = r.random() < 0.7
        request += " Be verbose." if call["verbose"] else " Keep the output short."
    passed, failed = r.randint(1, 90), r.choice([0, 0, 0, 1, 2, 5])
    failing = f"test_{r.choice(words.STEMS)}"
    output = f"{passed} passed" + (f", {failed} failed: {failing}" if failed else "")
    answer = (
        f"All {passed} tests pass." if not failed else f"{failed} of {passed + failed} tests fail, first {failing}."
    )
    step = Step(f"I run the tests in {target}.", [(name, call)], [output])
    return Scenario(
        [tool(name, "Run the tests of a path.", properties)], request, [step], f"The output says {output}.", answer
    )


def list_files(r: random.Random) -> Scenario:
    """List a folder."""
    folder = r.choice(words.FOLDERS)
    files = sorted({r.choice(words.STEMS) + r.choice(words.SUFFIXES) for _ in range(r.randint(1, 6))})
    name = r.choice(["list_dir", "ls", "list_files", "list_folder"])
    key = r.choice(["path", "folder", "directory"])
    request, answer = r.choice(
        [
            (f"Which files are in {folder}?", f"{folder} holds {', '.join(files)}."),
            (f"How many files are in {folder}?", f"There are {len(files)} files in {folder}."),
            (f"List {folder}.", f"The files are {', '.join(files)}."),
        ]
    )
    step = Step(f"I list {folder}.", [(name, {key: folder})], [r.choice(["\n".join(files), json.dumps(files)])])
    return Scenario(
        [tool(name, "List the files of a folder.", {key: {"type": "string"}})],
        request,
        [step],
        f"I count {len(files)} files.",
        answer,
    )


def write_file(r: random.Random) -> Scenario:
    """Write a small function to a file, sometimes running the tests after."""
    question, function, args, body = r.choice(words.FUNCTIONS)
    path = path_of(r, ".py")
    name = r.choice(["write_file", "create_file", "save_file"])
    offered = [tool(name, "Write a text file.", {"path": {"type": "string"}, "content": {"type": "string"}})]
    text = f"def {function}({args}):\n    {body}\n"
    request = f"Write a function that {question} to {path}."
    steps = [Step(f"I write {function} to {path}.", [(name, {"path": path, "content": text})], ["ok"])]
    answer = f"I wrote {function} to {path}."
    if r.random() < 0.4:
        offered.append(tool("run_tests", "Run the tests.", {}))
        request += " Then run the tests."
        count = r.randint(1, 40)
        steps.append(Step("Now the tests.", [("run_tests", {})], [f"{count} passed"]))
        answer += f" All {count} tests pass."
    return Scenario(offered, request, steps, "It is done.", answer)


def days(r: random.Random) -> Scenario:
    """Count days between dates."""
    start = date(2020, 1, 1) + timedelta(days=r.randint(0, 2000))
    gap = r.randint(1, 400)
    end = start + timedelta(days=gap)
    name = r.choice(["days_between", "date_diff", "count_days"])
    keys = r.choice([("start", "end"), ("from", "to"), ("first", "second")])
    offered = tool(name, "Days between two dates.", {k: {"type": "string", "format": "date"} for k in keys})
    request = r.choice([f"How many days are between {start} and {end}?", f"Days from {start} to {end}?"])
    step = Step(f"I count from {start} to {end}.", [(name, {keys[0]: str(start), keys[1]: str(end)})], [str(gap)])
    return Scenario([offered], request, [step], f"It is {gap}.", f"There are {gap} days between {start} and {end}.")


def draw_value(r: random.Random, kind: str) -> Any:
    """Draw an argument value of a JSON type."""
    draws: dict[str, Callable[[], Any]] = {
        "string": lambda: r.choice(
            [
                r.choice(words.NAMES),
                r.choice(words.NOUNS),
                f"{r.choice(words.ADJECTIVES)} {r.choice(words.NOUNS)}",
                str(r.randint(100, 99999)),
            ]
        ),
        "integer": lambda: r.randint(0, 5000),
        "number": lambda: r.randint(1, 999) / 4,
        "boolean": lambda: r.random() < 0.5,
        "array": lambda: r.sample(words.NOUNS, r.randint(1, 3)),
        "object": lambda: {r.choice(words.ADJECTIVES): r.randint(1, 9), "name": r.choice(words.NAMES)},
    }
    return draws[kind]()


def random_tool(r: random.Random) -> tuple[Json, dict[str, str]]:
    """Draw a tool with a made-up name and arguments."""
    noun = r.choice(words.NOUNS)
    verb = r.choice(words.VERBS)
    name = r.choice([f"{verb}_{noun}", f"{verb}_{noun}s", f"{noun}_{verb}", f"{verb}{noun.title()}"])
    names = r.sample(
        [
            "id",
            "name",
            "count",
            "limit",
            "color",
            "size",
            "owner",
            "tags",
            "active",
            "price",
            "note",
            "options",
            "level",
        ],
        r.choice([0, 1, 1, 2, 2, 3]),
    )
    fixed = {"tags": "array", "options": "object", "active": "boolean", "price": "number"}
    kinds = {
        n: fixed.get(n) or r.choice(["string", "integer"] if n in ("id", "level", "size") else ["string"])
        for n in names
    }
    kinds.update({n: "integer" for n in names if n in ("count", "limit")})
    properties: Json = {
        n: {"type": k, **({"items": {"type": "string"}} if k == "array" else {})} for n, k in kinds.items()
    }
    return tool(name, f"{verb.title()} the {noun}.", properties), kinds


def generic(r: random.Random) -> Scenario:
    """Call a made-up tool with the values that the request names."""
    offered, kinds = random_tool(r)
    name = offered["function"]["name"]
    call = {key: draw_value(r, kind) for key, kind in kinds.items()}
    listed = ", ".join(f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in call.items())
    request = r.choice([f"Call {name}", f"Please use {name}", f"Run {name}", f"Use the function {name}"])
    request += f" with {listed}." if call else "."
    status = r.choice(["ok", "done", "accepted", "not found", "failed"])
    step = Step(
        f"The user wants {name}" + (f" with {listed}." if call else "."),
        [(name, call)],
        [json.dumps({"status": status})],
    )
    return Scenario([offered], request, [step], f"The status is {status}.", f"{name} answered: {status}.")


SCENARIOS = (
    weather,
    calculator,
    adder,
    convert,
    read_file,
    search,
    run_tests,
    list_files,
    write_file,
    days,
    generic,
    generic,
)
