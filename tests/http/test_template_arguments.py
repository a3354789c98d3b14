"""
What a client gives to the chat template crosses to the process that renders it.
"""

import pytest

from tests.http.asking import CHAT_URL, chat
from tests.http.harness import LiveGateway


class TestTemplateArguments:
    @pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**300])
    @pytest.mark.parametrize("nested", [False, True])
    def test_integers_that_do_not_go_on_the_wire(self, shell: LiveGateway, number: int, nested: bool) -> None:
        value: object = [{"deep": number}] if nested else number
        body = chat(chat_template_kwargs={"count": value})
        answer = shell.client.post(CHAT_URL, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")

    @pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
    def test_those_that_do(self, shell: LiveGateway, number: int) -> None:
        body = chat(max_tokens=1, chat_template_kwargs={"count": number})
        assert shell.client.post(CHAT_URL, json=body).status_code == 200
