"""The SDK that most clients are."""

from __future__ import annotations

import openai
import pytest

from tests.server.serving import served, until


def test_the_openai_sdk_streams_and_sees_a_rate_limit() -> None:  # case J10
    with (
        served(max_inflight_requests=1) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="roseinfer", prompt="x", max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "abcde"
        until(lambda: server.manager.inflight == 0)
        said = client.chat.completions.create(
            model="roseinfer", messages=[{"role": "user", "content": "x"}], max_tokens=3
        )
        assert said.choices[0].message.content == "abc"
        until(lambda: server.manager.inflight == 0)
        ticket = server.manager.admission.reserve(0.0, 1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="roseinfer", prompt="x")
        server.manager.admission.release(ticket, 0.0)
        assert caught.value.code == "max_inflight"
