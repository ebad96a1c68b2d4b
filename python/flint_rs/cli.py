"""The command line.

Text is UTF-8 on standard input and output, whatever the locale. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted, 128 + N ended by signal N.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import flint_rs
from flint_rs._core import check_synthetic_request
from flint_rs._flint import synthetic_source
from flint_rs._log import logger, write
from flint_rs._progress import Bar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from flint_rs import Result
    from flint_rs._options import SamplingOptions

_COMMANDS = ("generate", "inspect", "plan", "convert", "perplexity")
_DEFAULT_MAX_TOKENS = 512
_DEFAULT_WINDOW = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; those of the process when `None`.

    Returns:
        The exit code.
    """
    # A caller may have closed a standard stream, which Python then has as None.
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115, open to the end
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BytesIO())
    if sys.stdout is None:
        write("flint-rs: error: standard output is closed\n")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Prompts are read as UTF-8; a locale without the characters of a result would cost the result.
        sys.stdout.reconfigure(encoding="utf-8")
    if argv is None:
        _catch_signals()
    try:
        return _checked_run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            # It is full or closed. Python flushes it once more on exit, into nothing.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _catch_signals() -> None:
    """Has SIGINT, SIGTERM and SIGHUP, where they are not ignored, end the process as an error does.

    What was begun is taken back, such as the file of a conversion. After the first, another one finds nothing to stop.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    unheard = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    numbers = {getattr(signal, name, None): handler for name, handler in unheard.items()}  # not every system has SIGHUP
    caught = [number for number, handler in numbers.items() if number and signal.getsignal(number) is handler]
    for number in caught:
        signal.signal(number, end)


def _checked_run(argv: list[str]) -> int:
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted. Python flushes standard output once more on exit, into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (flint_rs.FlintError, OSError, TypeError, UnicodeError) as error:
        write(f"flint-rs: error: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, flint_rs.InvalidValueError) else 1
    return status


def _run(argv: list[str]) -> int:
    parser = _parser()
    # `flint-rs "prompt"` is short for `flint-rs generate "prompt"`.
    if argv and argv[0] not in (*_COMMANDS, "-h", "--help", "--version"):
        argv.insert(0, "generate")
    elif not argv and not sys.stdin.isatty():
        argv = ["generate"]
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line; the usage is in --help."""
        self.exit(2, f"flint-rs: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flint-rs",
        description="Runs Recursive's Flint model on this machine.",
        epilog='example: flint-rs "def fibonacci(n):"    is short for    flint-rs generate "def fibonacci(n):"',
    )
    parser.add_argument("--version", action="version", version=f"flint-rs {flint_rs.__version__}")
    commands = parser.add_subparsers(required=True, metavar="{" + ",".join(_COMMANDS) + "}")

    generate = commands.add_parser(
        "generate",
        help="generate text after a prompt, streaming it",
        epilog='example: flint-rs generate "def fibonacci(n):" --max-tokens 100 --temperature 0',
    )
    generate.set_defaults(command=_generate)
    generate.add_argument("prompt", nargs="?", help="the prompt; - reads standard input, as does none in a pipe")
    model = _add_model_options(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end, instead of streaming")
    generate.add_argument("--quiet", action="store_true", help="no device and no figures on standard error")
    model.add_argument(
        "--synthetic",
        choices=["nvfp4", "bf16"],
        help="random weights as large as Flint 40B, 23 or 80 GB, instead of a model: prompt and output are token ids; "
        "a CPU may take a minute to make them",
    )
    _add_sampling_options(generate)

    inspect = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds, from its header",
        epilog="example: flint-rs inspect flint.gguf --json | jq .config",
    )
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("file", metavar="FILE", help="a GGUF file, or a folder of safetensors")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    plan = commands.add_parser(
        "plan",
        help="show what a GPU would do with a checkpoint, from its header and without a GPU",
        epilog="example: flint-rs plan flint.gguf --sequences 8 --context-tokens 32768",
    )
    plan.set_defaults(command=_plan)
    plan.add_argument("file", metavar="FILE", help="a GGUF file, or a folder of safetensors")
    plan.add_argument("--sequences", type=int, default=1, metavar="N", help="at a time, 1 to 256 (default: 1)")
    plan.add_argument("--context-tokens", type=int, metavar="N", help="most of each (default: the model's)")

    convert = commands.add_parser(
        "convert",
        help="write a GGUF from safetensors or GGUF",
        epilog="example: flint-rs convert checkpoint/ flint-nvfp4.gguf --type nvfp4",
    )
    convert.set_defaults(command=_convert)
    convert.add_argument("src", metavar="SRC", help="a GGUF file, or a folder of safetensors")
    convert.add_argument("dst", metavar="DST", help="the GGUF file to write")
    convert.add_argument("--type", choices=["nvfp4", "bf16"], required=True, help="of the matrices")
    convert.add_argument("--overwrite", action="store_true", help="replace DST when it exists")

    perplexity = commands.add_parser(
        "perplexity",
        help="measure how well the model predicts a text",
        description="Cuts the text's tokens into windows that follow each other, and scores every token of a window "
        "but its first, given those before it in the window. Prints exp of the mean negative log-probability.",
        epilog="example: flint-rs perplexity book.txt --window 1024",
    )
    perplexity.set_defaults(command=_perplexity)
    perplexity.add_argument("file", metavar="FILE.txt", help="a text in UTF-8; - reads standard input")
    perplexity.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        help=f"tokens of a window (default: {_DEFAULT_WINDOW}, or the context length where that is shorter)",
    )
    _add_model_options(perplexity)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """The options of loading. Returns the group of what there may be one of: `--model` and what stands in its place."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default=flint_rs.SMALL_MODEL,
        help="a GGUF file, a folder of safetensors, or a repository (default: the small model that ships)",
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, cpu or reference (default: auto)")
    parser.add_argument("--dtype", default="bfloat16", help="of activations: bfloat16 or float32 (default: bfloat16)")
    parser.add_argument("--threads", type=int, help="of the CPU, at most one a core (default: one a core)")
    parser.add_argument(
        "--context-tokens",
        type=int,
        metavar="N",
        help="most tokens of a text, prompt and output (default: the model's, or what the GPU's memory holds)",
    )
    return model


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of SamplingParams; those that are not given keep its defaults."""
    group = parser.add_argument_group("sampling")

    def add(name: str, help_text: str, **options: Any) -> None:
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help_text, **options)

    add("temperature", "0 always takes the most likely token (default: 1.0)", type=float, metavar="T")
    add("top-k", "keep the K most likely tokens, 0 keeps all (default: 20)", type=int, metavar="K")
    add("top-p", "keep the most likely tokens with this mass (default: 0.95)", type=float, metavar="P")
    add("min-p", "drop tokens below this share of the most likely one (default: 0)", type=float, metavar="P")
    add("repetition-penalty", "above 1 makes seen tokens less likely (default: 1)", type=float, metavar="X")
    add("frequency-penalty", "subtracted for each time a token was generated (default: 0)", type=float, metavar="X")
    add("presence-penalty", "subtracted from tokens that were generated (default: 0)", type=float, metavar="X")
    add("logit-bias", "add BIAS to a token's logit; may be repeated", type=_bias, action="append", metavar="ID=BIAS")
    add("allowed-token-ids", "choose among these only", type=int, nargs="+", metavar="ID")
    add("banned-token-ids", "never choose these", type=int, nargs="+", metavar="ID")
    add("seed", "make the result reproducible", type=int, metavar="N")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        default=_DEFAULT_MAX_TOKENS,
        help=f"most tokens to generate (default: {_DEFAULT_MAX_TOKENS})",
    )
    add("min-tokens", "hold off the end until so many tokens stand (default: 0)", type=int, metavar="N")
    add("stop", "end before this text; may be repeated", action="append", metavar="TEXT")
    add("stop-token-ids", "end after one of these", type=int, nargs="+", metavar="ID")
    add("include-stop-str-in-output", "keep the stop text", action="store_true")
    add("ignore-eos", "go on after an end token", action="store_true")
    add("logprobs", "with --json: log-probabilities, and those of the N most likely tokens", type=int, metavar="N")
    add("prompt-logprobs", "with --json: the same for the prompt", type=int, metavar="N")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        msg = f"expected ID=BIAS, found {text!r}"
        raise argparse.ArgumentTypeError(msg) from None


def _sampling_params(args: argparse.Namespace) -> flint_rs.SamplingParams:
    names = [name for name in dir(flint_rs.SamplingParams) if not name.startswith("_")]
    options: SamplingOptions = {name: getattr(args, name) for name in names if hasattr(args, name)}  # type: ignore[assignment]
    if "logit_bias" in options:
        options["logit_bias"] = dict(args.logit_bias)
    return flint_rs.SamplingParams(**options)


def _open_model(args: argparse.Namespace) -> flint_rs.Flint:
    options: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "max_sequences": 1,
        "context_tokens": args.context_tokens,
    }
    if vars(args).get("quiet"):
        logger.setLevel("WARNING")
    if vars(args).get("synthetic"):
        return flint_rs.Flint.synthetic(format=args.synthetic, **options)
    return flint_rs.Flint(args.model, **options)


def _token_ids(text: str) -> list[int]:
    """The prompt of a model that has no tokenizer."""
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        msg = f"prompt: expected token ids with spaces between them, as a synthetic model reads, found {text!r}"
        raise flint_rs.InvalidValueError(msg) from None


def _read_text(source: str | None) -> str:
    """Text of a file, or of standard input, exactly as it stands there."""
    piped = source in (None, "-")
    # As it was given: a path object would make the current folder of an empty one.
    data = sys.stdin.buffer.read() if piped else _read_bytes(str(source))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if piped else source
        msg = f"{name}: expected UTF-8, found byte {data[error.start]:#04x} at position {error.start}"
        raise flint_rs.InvalidValueError(msg) from None


def _read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _generate(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        msg = "logprobs: expected --json with it, found none"
        raise flint_rs.InvalidValueError(msg)
    if args.prompt is None and sys.stdin.isatty():
        msg = "prompt: expected a text, or - and a text on standard input, found none"
        raise flint_rs.InvalidValueError(msg)
    prompt = _read_text(None) if args.prompt in (None, "-") else args.prompt
    if args.synthetic:
        prompt = _token_ids(prompt)
        # What is wrong with it is said before the weights cost time.
        check_synthetic_request(synthetic_source(0, None, args.synthetic), args.context_tokens, prompt, params)
    bar = Bar("reading the prompt")
    with _open_model(args) as flint, bar, flint.stream(prompt, params, bar) as stream:
        ends_line = True
        for event in stream:
            bar.wipe()
            text = f"{event.token_id} " if args.synthetic else event.text
            if text and not args.json:
                sys.stdout.write(text)
                sys.stdout.flush()
                ends_line = text.endswith("\n")
        result = stream.result
    if result is None:
        msg = "the stream ended without a result"
        raise flint_rs.CancelledError(msg)
    if args.json:
        print(json.dumps(_as_json(result)))
    elif not ends_line:
        print()
    if not args.quiet:
        write(f"{_figures(result)}\n")
    return 0


def _figures(result: Result) -> str:
    speed = result.timings.tokens_per_second
    figures = [
        f"{result.usage.prompt_tokens} + {result.usage.completion_tokens} tokens ({result.finish_reason})",
        f"first after {result.timings.time_to_first_token:.3f} s",
    ]
    if speed is not None:
        figures.append(f"then {speed:.1f} tokens/s")
    return f"[{', '.join(figures)}, seed {result.seed}]"


def _as_json(value: Any) -> Any:
    """A result as dicts and lists."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if type(value).__module__ == "flint_rs":
        return {name: _as_json(getattr(value, name)) for name in dir(value) if not name.startswith("_")}
    return value


def _inspect(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(flint_rs.inspect(args.file), indent=2, ensure_ascii=False))
    else:
        print(flint_rs.describe(args.file), end="")
    return 0


def _plan(args: argparse.Namespace) -> int:
    print(flint_rs.plan(args.file, args.sequences, args.context_tokens), end="")
    return 0


def _convert(args: argparse.Namespace) -> int:
    with Bar(f"converting to {args.type}") as bar:
        flint_rs.convert(args.src, args.dst, args.type, args.overwrite, bar)
    write(f"{args.dst}: {Path(args.dst).stat().st_size:,} bytes\n")
    return 0


def _perplexity(args: argparse.Namespace) -> int:
    text = _read_text(args.file)
    with _open_model(args) as flint:
        context = flint.context_tokens
        window = min(_DEFAULT_WINDOW, context) if args.window is None else args.window
        if not 2 <= window <= context:
            msg = f"window: expected 2 to {context} tokens, found {window}"
            raise flint_rs.InvalidValueError(msg)
        ids = flint.tokenize(text)
        windows = [ids[start : start + window] for start in range(0, len(ids), window)]
        total, count = 0.0, 0
        with Bar("scoring") as bar:
            for done, tokens in enumerate(windows):
                bar(done, len(windows))
                # A last window of one token has nothing to score.
                if len(tokens) > 1:
                    scores = flint.score(tokens)
                    total, count = total + float(scores.sum(dtype="float64")), count + len(scores)
    if count == 0:
        msg = f"{args.file}: expected a text of at least 2 tokens, found {len(ids)}"
        raise flint_rs.InvalidValueError(msg)
    print(f"perplexity {math.exp(-total / count):.4f} over {count} tokens, in windows of {window}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
