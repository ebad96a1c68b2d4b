"""Word lists and small code samples that the synthetic conversations are made of."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """Split a text at its spaces."""
    return text.split()


CITIES = listed(
    "Oslo Lima Cairo Paris Tokyo Delhi Quito Rome Berlin Madrid Lisbon Vienna Dublin Prague Warsaw Athens Seoul "
    "Hanoi Bangkok Nairobi Accra Lagos Tunis Rabat Boston Denver Seattle Austin Chicago Toronto Montreal Havana "
    "Bogota Santiago Sydney Perth Auckland Helsinki Stockholm Copenhagen Zurich Geneva Munich Hamburg Porto Naples"
)
SKIES = ("clear", "cloudy", "rainy", "windy", "foggy", "sunny", "snowy", "stormy")
NAMES = listed(
    "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jon Kate Leo Mia Nina Omar Pia Rosa Sam Tara Uma Vera Will Yara Zoe"
)
NOUNS = listed(
    "apple book cable chair clock coin cup desk door drum fork game glass key lamp map mirror note paper pen phone "
    "plate radio ring rope shelf shoe spoon stamp table ticket tool train watch wheel window order invoice user "
    "account server queue report image message record session token"
)
VERBS = listed(
    "get list find fetch create update delete check query count lock open close send archive merge rename tag "
    "assign export import validate schedule cancel restart"
)
ADJECTIVES = listed("red blue green small large old new fast slow heavy light quiet bright cold warm round")
FOLDERS = ("src", "lib", "app", "core", "tests", "tools", "docs", "pkg", "server", "client", "utils", "api")
STEMS = listed(
    "main config parser lexer cache models views routes auth session storage client server worker queue logger "
    "metrics helpers errors types schema loader writer reader index search tokens batch planner retry"
)
SUFFIXES = (".py", ".py", ".py", ".rs", ".toml", ".md")

# Question, function name, arguments and body of small Python functions.
FUNCTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("returns the sum of a list of numbers", "total", "values", "return sum(values)"),
    ("returns the largest item of a list", "largest", "values", "return max(values)"),
    ("returns the smallest item of a list", "smallest", "values", "return min(values)"),
    ("returns the mean of a list", "mean", "values", "return sum(values) / len(values)"),
    ("reverses a string", "reverse", "text", "return text[::-1]"),
    ("checks whether a string is a palindrome", "is_palindrome", "text", "return text == text[::-1]"),
    ("checks whether a number is even", "is_even", "n", "return n % 2 == 0"),
    ("checks whether a number is odd", "is_odd", "n", "return n % 2 == 1"),
    ("returns the square of a number", "square", "n", "return n * n"),
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("swaps two values", "swap", "a, b", "return b, a"),
    ("counts the words of a text", "count_words", "text", "return len(text.split())"),
    ("counts the lines of a text", "count_lines", "text", "return len(text.splitlines())"),
    ("counts the vowels of a text", "count_vowels", "text", 'return sum(ch in "aeiou" for ch in text.lower())'),
    ("removes duplicates from a list and keeps the order", "unique", "items", "return list(dict.fromkeys(items))"),
    ("flattens a list of lists", "flatten", "rows", "return [item for row in rows for item in row]"),
    ("reads a text file", "read_text", "path", 'with open(path, encoding="utf-8") as f:\n        return f.read()'),
    (
        "writes a text to a file",
        "write_text",
        "path, text",
        'with open(path, "w", encoding="utf-8") as f:\n        f.write(text)',
    ),
    ("loads a JSON file", "load_json", "path", "with open(path) as f:\n        return json.load(f)"),
    (
        "computes the factorial of n",
        "factorial",
        "n",
        "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    (
        "computes the n-th Fibonacci number",
        "fibonacci",
        "n",
        "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    (
        "computes the greatest common divisor",
        "gcd",
        "a, b",
        "while b:\n        a, b = b, a % b\n    return a",
    ),
    (
        "checks whether a number is prime",
        "is_prime",
        "n",
        "if n < 2:\n        return False\n    return all(n % d for d in range(2, int(n**0.5) + 1))",
    ),
    (
        "counts how often each item occurs",
        "count_items",
        "items",
        "counts = {}\n    for item in items:\n        counts[item] = counts.get(item, 0) + 1\n    return counts",
    ),
    (
        "splits a list into chunks of a given size",
        "chunks",
        "items, size",
        "return [items[i : i + size] for i in range(0, len(items), size)]",
    ),
    (
        "does a binary search in a sorted list",
        "binary_search",
        "items, target",
        (
            "low, high = 0, len(items)\n    while low < high:\n        mid = (low + high) // 2\n"
            "        if items[mid] < target:\n            low = mid + 1\n"
            "        else:\n            high = mid\n    return low"
        ),
    ),
    ("merges two dictionaries", "merge", "a, b", "return {**a, **b}"),
    ("inverts a dictionary", "invert", "mapping", "return {value: key for key, value in mapping.items()}"),
    ("converts Celsius to Fahrenheit", "to_fahrenheit", "c", "return c * 9 / 5 + 32"),
    ("converts Fahrenheit to Celsius", "to_celsius", "f", "return (f - 32) * 5 / 9"),
    ("returns the last item of a list or None", "last", "items", "return items[-1] if items else None"),
    ("clamps a value to a range", "clamp", "value, low, high", "return max(low, min(value, high))"),
    ("sorts words by their length", "by_length", "words", "return sorted(words, key=len)"),
    ("removes the spaces from a text", "strip_spaces", "text", 'return text.replace(" ", "")'),
    ("checks whether a key is in a dictionary", "has_key", "mapping, key", "return key in mapping"),
    ("returns the even numbers of a list", "evens", "values", "return [v for v in values if v % 2 == 0]"),
    ("returns the squares of the first n numbers", "squares", "n", "return [i * i for i in range(n)]"),
    ("joins words with commas", "join_words", "words", 'return ", ".join(words)'),
    ("prints each item of a list", "show", "items", "for item in items:\n        print(item)"),
)
FACTS: tuple[tuple[str, str], ...] = (
    ("What is a list in Python?", "A list is an ordered, mutable sequence of items."),
    ("What is a tuple in Python?", "A tuple is an ordered sequence that cannot be changed after it is made."),
    ("What is a dict in Python?", "A dict maps keys to values and keeps the order of insertion."),
    ("What is a set in Python?", "A set holds unique items without an order."),
    ("What is a generator?", "A generator yields values one at a time and computes each when it is asked for."),
    ("What is a decorator?", "A decorator is a function that takes a function and returns a changed one."),
    ("What does KeyError mean?", "A key was looked up in a mapping that does not hold it."),
    ("What does IndexError mean?", "A sequence was indexed beyond its end."),
    ("What does TypeError mean?", "An operation was applied to a value of the wrong type."),
    ("What does ValueError mean?", "A value has the right type but is not acceptable."),
    ("What is ownership in Rust?", "Each value has one owner, and it is dropped when the owner leaves scope."),
    ("What is a borrow in Rust?", "A borrow is a reference to a value that someone else owns."),
    ("What is a trait in Rust?", "A trait names methods that a type can implement."),
    ("What is Option in Rust?", "Option is either Some value or None."),
    ("What is Result in Rust?", "Result is either Ok with a value or Err with an error."),
    ("What is a unit test?", "A unit test checks one small part of a program on its own."),
    ("What is a hash table?", "A hash table finds values by the hash of their key, in constant time on average."),
    ("What is recursion?", "Recursion is when a function calls itself on a smaller problem."),
    ("What is a stack?", "A stack returns the item that was added last first."),
    ("What is a queue?", "A queue returns the item that was added first first."),
    ("What is JSON?", "JSON is a text format for objects, arrays, strings, numbers, booleans and null."),
    ("What is a regular expression?", "A regular expression is a pattern that describes a set of strings."),
    ("What is an API?", "An API is the set of calls that a program offers to other programs."),
    ("What is a token?", "A token is a piece of text that a language model reads or writes as one unit."),
)
GREETINGS = ("Hello", "Hi", "Hi there", "Good morning", "Hey", "Good evening", "Hello there")
STYLES = (
    "You are a helpful assistant.",
    "You are a coding assistant. Keep answers short.",
    "Answer briefly.",
    "Be precise and polite.",
    "You help with files and tests in a repository.",
    "Use the functions when they help.",
    "You are Flint, a small model for tests.",
    "Today is a normal working day. Help the user.",
)
