"""Cut the shipped held-out sample from packages that are never trained on, with its attribution."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from corpus import archives, load


def main() -> None:
    """Write heldout.txt and heldout.attribution.txt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("settings.toml"))
    parser.add_argument("--sdists", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sample = tomllib.loads(args.settings.read_text())["corpus"]["sample"]
    texts, notes = [], ["heldout.txt joins these files, in this order, each package under its own licence:\n"]
    for package in archives(args.sdists, "sdist"):
        left = sample.get(package.name, 0)
        if not left:
            continue
        package = load(package)
        notes.append(f"\n{package.name} {package.version} ({package.licence})")
        for doc in sorted(package.docs, key=lambda d: d.path):
            if doc.kind == "code" and doc.path.startswith("src/") and left > 0 and len(doc.text) < 40_000:
                texts.append(doc.text)
                notes.append(f"  {doc.path}")
                left -= len(doc.text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "heldout.txt").write_text("\n".join(texts), "utf-8")
    (args.out / "heldout.attribution.txt").write_text("\n".join(notes) + "\n", "utf-8")


if __name__ == "__main__":
    main()
