"""Checks the rules between rooms: imports go upwards only, pyo3 and cudarc stay in their rooms."""

import re
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
# Who may name a crate; everything else may not.
OWNERS = {"cudarc": ("gpu",), "pyo3": ("python",), "numpy": ("python",)}


def rooms() -> list[str]:
    """The rooms in the order of lib.rs, which is the order in which they may import."""
    return re.findall(r"^(?:pub )?mod (\w+);", (SRC / "lib.rs").read_text(), re.MULTILINE)


def uses(source: str) -> set[str]:
    """The rooms that a file imports from the crate, wherever a path or a `use` tree names them."""
    found: set[str] = set()
    for match in re.finditer(r"\bcrate::(?:(\w+)|\{)", source):
        if match[1]:
            found.add(match[1])
            continue
        depth, start = 1, match.end()
        for piece in re.finditer(r"[{}]|\w+", source[start:]):
            if piece[0] == "{":
                depth += 1
            elif piece[0] == "}":
                depth -= 1
                if depth == 0:
                    break
            # The first name of each branch at the outer level, not the path below it.
            elif depth == 1 and not source[: start + piece.start()].rstrip().endswith("::"):
                found.add(piece[0])
    return found


def main() -> int:
    """Prints what breaks a rule, and returns 1 if anything does."""
    order = rooms()
    problems = []
    for path in sorted(SRC.rglob("*.rs")):
        name = path.relative_to(SRC)
        room = name.parts[0].removesuffix(".rs")
        if room == "lib":
            continue
        if room not in order:
            problems.append(f"{name}: not named by lib.rs")
            continue
        source = re.sub(r"//.*", "", path.read_text())
        above = order[: order.index(room) + 1]
        for used in sorted(uses(source) & set(order)):
            if used not in above:
                problems.append(f"{name}: imports {used}, which stands below {room} in lib.rs")
        for crate, owners in OWNERS.items():
            if room not in owners and re.search(rf"\b{crate}::|\buse {crate}\b", source):
                problems.append(f"{name}: names {crate}, which belongs to {', '.join(owners)}")
    print("\n".join(problems) or f"{len(order)} rooms in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
