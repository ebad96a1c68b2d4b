"""Fetch the packages that settings.toml names: wheels, sdists and crates, through pip and cargo."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Fetch into a folder; a package that cannot be fetched is named and left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("settings.toml"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    fetch = tomllib.loads(args.settings.read_text())["fetch"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d"]
    for kind, flag in (("wheels", "--only-binary=:all:"), ("sdists", "--no-binary=:all:")):
        for name in fetch[kind]:
            done = subprocess.run([*pip, str(args.out / kind), flag, name], check=False)
            if done.returncode:
                print(f"left out: {kind} {name}", file=sys.stderr)
    crates = args.out / "crates"
    (crates / "src").mkdir(parents=True, exist_ok=True)
    (crates / "src/main.rs").write_text("fn main() {}\n")
    wanted = "".join(f'{name} = "*"\n' for name in fetch["crates"])
    manifest = (
        f'[package]\nname = "corpus-fetch"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n[dependencies]\n{wanted}'
    )
    (crates / "Cargo.toml").write_text(manifest)
    subprocess.run(["cargo", "fetch", "--manifest-path", str(crates / "Cargo.toml")], check=True)


if __name__ == "__main__":
    main()
