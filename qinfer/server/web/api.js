"use strict";
/* This server's API: JSON, and streams of server-sent events that are read from a POST. */
const Api = (() => {
  class ApiError extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  }

  function headers() {
    const key = Store.key();
    return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  }

  async function request(path, options = {}) {
    const answer = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
    if (answer.ok) return answer;
    let message = `${answer.status} ${answer.statusText}`;
    try {
      message = (await answer.json()).error.message;
    } catch {
      /* not ours: what stands in front of the server has answered */
    }
    throw new ApiError(answer.status, message);
  }

  const get = async (path) => (await request(path)).json();

  /* Calls `take` with every event of a chat; an error event is thrown. */
  async function chat(body, signal, take) {
    const answer = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "the answer broke off");
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
        take(chunk);
      }
    }
  }

  return { ApiError, get, chat };
})();
