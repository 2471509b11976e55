"""The flags of the load: when requests are sent, and what they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from roseinfer.bench.retries import BUDGET_RESERVE, MOST_TRIES

DEFAULT_BURST_SIZE: Final = 128
DEFAULT_PROMPT_LEN: Final = 32
DEFAULT_OUTPUT_LEN: Final = 4
ARRIVALS: Final = ("burst", "constant", "poisson", "gamma", "trace")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no whole number") from None


def _decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number") from None


def whole_option(*names: str, help: str) -> Any:  # noqa: A002
    # The command line's own parser does not name the value that it refuses.
    return typer.Option(*names, help=help, parser=_whole, metavar="INT")


def decimal_option(*names: str, help: str) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, parser=_decimal, metavar="NUMBER")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Values are as typed; `load.load_of` checks them."""

    prompt: Annotated[
        str | None, typer.Option(help="Text that every request sends, instead of --prompt-len.")
    ] = None
    prompt_repeats: Annotated[int, whole_option(help="Copies of --prompt, joined without a space.")] = 1
    prompt_len: Annotated[
        str | None,
        typer.Option(
            "--prompt-len",
            "--input-len",
            help=f"Tokens of prompts made up for the run, each its own text. Default {DEFAULT_PROMPT_LEN}.",
        ),
    ] = None
    pretok: Annotated[bool, typer.Option("--pretok", help="Send token ids instead of text.")] = False
    prompt_len_dist: Annotated[
        str,
        typer.Option(
            metavar="DIST",
            help="How prompt lengths vary around --prompt-len: fixed, uniform:R (within a share R of it on both sides)"
            " or lognormal:S (it is the median, S the standard deviation of the logarithm). Cut to what fits, which at"
            " most 1 % of the lengths may need.",
        ),
    ] = "fixed"
    prefix_len: Annotated[
        int, whole_option(help="Tokens at the start of every prompt that all prompts share; 0 is none.")
    ] = 0
    max_new_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-new-tokens",
            "--output-len",
            help=f"Tokens to generate per request. Default {DEFAULT_OUTPUT_LEN}, or the trace's.",
        ),
    ] = None
    output_len_dist: Annotated[
        str, typer.Option(metavar="DIST", help="How they vary, as for --prompt-len-dist.")
    ] = "fixed"

    priority_mix: Annotated[
        str | None,
        typer.Option(
            metavar="high:0.1,low:0.9",
            help="Classes of requests, the highest first, and the share of each. A server gets a request's class as the"
            " whole number `priority`, 0 for the first.",
        ),
    ] = None
    ttft_deadline: Annotated[
        str | None,
        typer.Option(
            metavar="2s",
            help="How long after it was sent a request's first token is of use, also by class, high:250ms,low:5s; what"
            " cannot make it is dropped from the queue. Not for a server.",
        ),
    ] = None

    arrival: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(ARRIVALS[:-1])} or {ARRIVALS[-1]}. Default: burst; with --request-rate or --load"
            " poisson (with --burstiness gamma); with --trace trace."
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        whole_option(help="Requests in all; the same as --burst-size unless they are spaced in time."),
    ] = None
    duration: Annotated[
        float | None,
        decimal_option(
            help="Seconds after which nothing more is sent; what is outstanding is waited for. A closed loop that it"
            " alone ends has 65,536 requests to send; one that runs out of them is invalid."
        ),
    ] = None
    burst_size: Annotated[
        str | None,
        typer.Option(help=f"Requests that arrive at once. Default {DEFAULT_BURST_SIZE}, or --num-requests."),
    ] = None
    burst_interval: Annotated[
        float | None,
        decimal_option(
            help="Seconds between bursts. With --request-rate the bursts come on top of that load, the first after"
            " this time."
        ),
    ] = None
    request_rate: Annotated[
        str | None, typer.Option(help="Requests per second, whatever the server does; any number > 0.")
    ] = None
    load: Annotated[
        str | None,
        typer.Option(
            help="The same as a share of the capacity that the cost model implies, such as 0.8 (--target sim only)."
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        decimal_option(help="Shape of gamma gaps between requests: 1 is Poisson, below 1 burstier."),
    ] = None
    ramp: Annotated[
        float | None,
        decimal_option(
            help="Seconds in which the rate (or the number of users of a closed loop) rises from nothing to its value."
        ),
    ] = None
    submit_interval_ms: Annotated[
        float,
        decimal_option(
            help="Space the requests: number i is sent at i times this, whatever the server does."
        ),
    ] = 0.0
    max_concurrency: Annotated[
        int | None,
        whole_option(
            help="Requests that the client keeps outstanding. With a schedule (rate, burst, trace) it is a cap, and"
            " latency still counts from the schedule; without one it is a closed loop of that many users, each of whom"
            " sends the next request when the last has ended, or 50 ms after it was refused."
        ),
    ] = None
    timeout: Annotated[
        float | None,
        decimal_option(
            help="Seconds from its sending after which the client gives a request up. Default: 600 for a server, else"
            " never."
        ),
    ] = None
    retry: Annotated[
        str,
        typer.Option(
            help="What the client does with a request that was refused: none, immediate, exponential (full jitter) or"
            f" retry-after (the same, not before what the refusal asks for); at most {MOST_TRIES} tries."
        ),
    ] = "none"
    retry_budget: Annotated[
        float | None,
        decimal_option(
            help="Retries per request sent, over all requests of the client, such as 0.1; it starts with"
            f" {BUDGET_RESERVE} and saves up no more. Default: no budget."
        ),
    ] = None
    per_try_timeout: Annotated[
        float | None,
        decimal_option(
            help="Seconds after which the client gives one try up, to try again as --retry has it; --timeout counts"
            " over all tries."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arrivals and lengths from a trace: Azure LLM 2023 CSV, Mooncake JSONL or CSV, BurstGPT CSV.",
        ),
    ] = None
    time_scale: Annotated[float, decimal_option(help="Stretches the trace's time: 2 halves its rate.")] = 1.0
    length_scale: Annotated[
        float, decimal_option(help="Multiplies the trace's token counts; at least 1 token stays.")
    ] = 1.0
    keep_ticks: Annotated[
        bool,
        typer.Option(
            "--keep-ticks",
            help="Replay a trace whose clock ticks in seconds as it is, with a burst at every tick.",
        ),
    ] = False
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay a workload.parquet: its arrivals, lengths and prompts, instead of the flags for them.",
        ),
    ] = None
