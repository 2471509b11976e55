"""The flags of a server: how it is asked, and how it is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from roseinfer.bench.load_options import whole_option

APIS: Final = ("completions", "chat")
BUILTIN_TOKENIZER: Final = "builtin"
LIMIT_WORD: Final = "{max_inflight}"
ADMISSION_WORD: Final = "{admission}"
"""These stand for the limit in --target-cmd: its number of requests, or all of it as --admission takes it."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Values are as typed; `target_flags` and the target itself check them."""

    api: Annotated[
        str, typer.Option(help=f"Of a server: {' or '.join(APIS)} (/v1/completions, /v1/chat/completions).")
    ] = "completions"
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VAR", help="Environment variable with the server's API key. It is kept nowhere."
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Of a server's model: builtin, or a folder with tokenizer.json. Completions are then asked for with"
            " exactly --prompt-len token ids, chats with a text of so many. Without it --prompt-len counts words.",
        ),
    ] = None
    target_cmd: Annotated[
        str | None,
        typer.Option(
            metavar="'CMD ...'",
            help="Starts the server that is measured, without a shell, and stops it. {max_inflight} stands for the"
            " limit, {admission} for one of another kind, {port} for that of --target; what is in [[ ]] is left out"
            " where there is no limit:"
            " 'vllm serve M --port {port} [[--max-num-seqs {max_inflight}]]'.",
        ),
    ] = None
    client_workers: Annotated[
        int,
        whole_option(help="Processes that send to a server and share the load; one does thousands a second."),
    ] = 1
