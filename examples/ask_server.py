"""Starts `qinfer serve`, asks one chat question over HTTP, prints the answer as it comes, stops the server.

    python examples/ask_server.py MODEL "What is the capital of France? Answer in one sentence."

`make demo` runs it. Standard library only: what it does by hand, any OpenAI client does for you. The exit
code is 0 only if the server started, answered with text, and ended cleanly.
"""

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

ANSWER_SECONDS = END_SECONDS = 120


def main(model: str, question: str) -> int:
    """Serves `model` on a free port and asks it the question; returns the exit code."""
    command = [sys.executable, "-m", "qinfer", "serve", model, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            ready = read_document(server)
            print(f"\n$ ask {ready['url']}/v1/chat/completions\n> {question}", flush=True)
            answered = stream_chat(ready["url"], ready["model"], question)
        finally:
            server.send_signal(signal.SIGTERM)
        code = ended(server)
    if code != 0:
        print(f"the server ended with exit code {code}", file=sys.stderr)
    return 0 if answered and code == 0 else 1


def ended(server: "subprocess.Popen[str]") -> int:
    """The exit code of a server that was told to end; it is killed where it does not."""
    try:
        return server.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def read_document(server: "subprocess.Popen[str]") -> dict[str, Any]:
    """The one JSON document that `serve --json` prints when it is ready; it prints nothing after it."""
    assert server.stdout
    lines = []
    for line in server.stdout:
        lines.append(line)
        if line.rstrip() == "}":
            return dict(json.loads("".join(lines)))
    raise SystemExit(f"the server did not start (exit code {server.wait()})")


def stream_chat(url: str, model: str, question: str) -> bool:
    """Prints the streamed answer; whether there was any text."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
    body |= {"max_tokens": 64, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                print(piece, end="", flush=True)
    print("\n")
    return bool(text.strip())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit('usage: python examples/ask_server.py MODEL "QUESTION"')
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
