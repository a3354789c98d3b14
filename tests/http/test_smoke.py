from tests.http.harness import LiveGateway


def test_chat(shell: LiveGateway) -> None:
    answer = shell.client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    )
    print(answer.headers, answer.text)
    rec = shell.record(answer.headers["x-request-id"])
    print(rec)
    with shell.client.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True},
    ) as r:
        print(r.headers)
        print("".join(r.iter_text()))
    print(shell.record(r.headers["x-request-id"]))
    print(shell.client.get("/nope").text, shell.client.put("/v1/models").text, shell.client.get("/v1/models/tiny").text)
    print(shell.client.get("/debug/requests").text[:500])
    print(shell.client.get("/metrics").text[:300])
