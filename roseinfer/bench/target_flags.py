"""Which flags mean something to which target: no flag is accepted that nothing would read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from importlib.util import find_spec
from typing import Final

from roseinfer.admission_spec import AdmissionSpec
from roseinfer.bench.flag_values import admissions, wrong
from roseinfer.bench.http_options import APIS, HttpOptions
from roseinfer.bench.options import TARGETS, RunOptions, flag, is_url
from roseinfer.errors import InputError
from roseinfer.policies import check_policy
from roseinfer.waiting import SCHEDULINGS

OF_ENGINES: Final = (
    "model",
    "device",
    "dtype",
    "num_threads",
    "prompt",
    "prefix_len",
    "pretok",
    "tokenize_workers",
    "stop_at_eos",
    "warmup_runs",
    "prefix_cache",
    "paged_attn",
    "cuda_graph",
    "nvtx",
)
"""Flags that a simulated engine has no use for: it has no weights, and no text."""

NOT_OF_SERVERS: Final = (
    "device",
    "dtype",
    "max_model_len",
    "num_threads",
    "pretok",
    "tokenize_workers",
    "max_active_requests",
    "max_batch_size",
    "max_num_batched_tokens",
    "kv_cache_tokens",
    "prefix_cache",
    "paged_attn",
    "cuda_graph",
    "nvtx",
    "cost_model",
    "scheduling",
)
"""Flags of an engine, real or simulated, that its own server would have to be started with."""

OF_SIMULATIONS: Final = {
    "no_token_times": "needs --target sim: what was measured is kept whole",
    "load": "needs --target sim: a capacity is implied by a cost model only",
    "shards": "needs --target sim: an engine or a server is one machine, which measured cells may not share",
}
"""Flags of a simulated engine only, and why."""

OF_SERVERS: Final = tuple(HttpOptions.__dataclass_fields__)

MOST_CLIENT_WORKERS: Final = 64

_RAY_ADDRESS: Final = re.compile(r"local|(ray://)?([\w.-]+|\[[\da-fA-F:]+\]):\d{1,5}")


def unread(target: str) -> Collection[str]:
    """The fields that a run on this target has no use for."""
    if is_url(target):
        return (*NOT_OF_SERVERS, "load", "no_token_times")
    return (*OF_SERVERS, *OF_ENGINES) if target == "sim" else (*OF_SERVERS, "load", "no_token_times")


def check_target(o: RunOptions, given: Collection[str]) -> None:
    """Raises InputError naming the flag; `given` names the fields that the user set."""
    if is_url(o.target):
        _check_server(o, given)
        return
    if o.target not in TARGETS:
        raise wrong("target", o, f"must be {', '.join(TARGETS)} or the http:// or https:// URL of a server")
    for field in OF_SERVERS:
        if field in given and getattr(o, field) is not None:
            raise wrong(field, o, f"needs a server as --target, not {o.target}")
    _check_ray(o)
    if o.scheduling not in SCHEDULINGS:
        raise wrong("scheduling", o, f"must be {', '.join(SCHEDULINGS)}")
    for spec in admissions(o, given):
        check_policy(spec, o.scheduling, has_cost_model=o.cost_model is not None, name="--admission")
    if o.target == "engine":
        _check_not_simulated(o)
        if o.cost_model is not None and not engine_reads_cost_model(o, given):
            why = "needs --target sim, --ttft-deadline, or a policy of --admission that weighs costs"
            raise wrong("cost_model", o, why)
        return
    if o.cost_model is None:
        raise wrong("target", o, "needs --cost-model")
    if o.ray is not None and o.shards > 1:
        raise wrong("ray", o, f"contradicts --shards {o.shards}: the cluster says how many share the cells")
    for field in OF_ENGINES:
        if field in given and getattr(o, field) not in (None, False):
            raise wrong(field, o, "contradicts --target sim, which has no model and no text")


def engine_reads_cost_model(o: RunOptions, given: Collection[str]) -> bool:
    """Its policies go by what requests will cost."""
    return o.ttft_deadline is not None or any(spec.needs_cost_model for spec in admissions(o, given))


def _check_ray(o: RunOptions) -> None:
    if o.ray is None:
        return
    if not _RAY_ADDRESS.fullmatch(o.ray):
        raise wrong("ray", o, "must be local, HOST:PORT or ray://HOST:PORT")
    if find_spec("ray") is None:
        raise wrong("ray", o, "needs Ray: pip install 'roseinfer[ray]'")


def _check_not_simulated(o: RunOptions) -> None:
    for field, why in OF_SIMULATIONS.items():
        if getattr(o, field) != RunOptions.__dataclass_fields__[field].default:
            raise wrong(field, o, why)


def _check_server(o: RunOptions, given: Collection[str]) -> None:
    from roseinfer.bench.http.address import Address
    from roseinfer.bench.http.server_process import check_command, check_place

    address = Address.parse(o.target)
    for field in NOT_OF_SERVERS:
        value = getattr(o, field)
        is_off = value is False and RunOptions.__dataclass_fields__[field].default is False
        if field in given and value is not None and not is_off:
            raise wrong(field, o, "is for an engine: a server is told so where it is started (--target-cmd)")
    _check_not_simulated(o)
    if o.ray is not None:
        raise wrong("ray", o, "contradicts a server as --target, which is measured from one place")
    if o.api not in APIS:
        raise wrong("api", o, f"must be {' or '.join(APIS)}")
    if o.model == "":
        raise wrong("model", o, "is empty")
    if not 1 <= o.client_workers <= MOST_CLIENT_WORKERS:
        raise wrong("client_workers", o, f"must be a whole number from 1 to {MOST_CLIENT_WORKERS}")
    if o.client_workers > 1 and o.max_concurrency is not None:
        raise wrong("client_workers", o, "cannot share --max-concurrency: its permits are one queue")
    limits = admissions(o, given)
    if o.target_cmd is None:
        if limits != [AdmissionSpec()]:
            field = "max_inflight" if o.admission is None else "admission"
            raise wrong(field, o, f"is the server's to set: needs {flag('target_cmd')} with {{{field}}}")
    else:
        check_place(address)
        check_command(o.target_cmd, limits)
    api_key(o)


def api_key(o: RunOptions) -> str | None:
    """The key that --api-key-env names. Raises InputError where there is none, which never shows a key."""
    if o.api_key_env is None:
        return None
    key = os.environ.get(o.api_key_env, "").strip()
    if not key:
        raise InputError("--api-key-env", o.api_key_env, "is no environment variable that is set")
    if not (key.isascii() and key.isprintable()):
        raise InputError("--api-key-env", o.api_key_env, "holds characters that no header takes")
    return key
