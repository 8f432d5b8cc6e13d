"use strict";
/* The conversation: ask, watch the answer come, stop it, edit a question, ask again. */
const Chat = (() => {
  const { byId, make, problem } = Dom;
  const messages = byId("messages");
  const question = byId("question");
  let chat = null; // the one that is shown
  let running = null; // {controller, stopped} while an answer comes

  function start() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      send(question.value);
    });
    question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send(question.value);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") stop();
    });
    byId("stop").addEventListener("click", stop);
    byId("new-chat").addEventListener("click", () => open(blank()));
    byId("export").addEventListener("click", save);
    stayAtEnd();
    open(Store.chats[0] ?? Store.newChat());
  }

  /* Whoever reads the end still does when the window changes, as when a phone shows its keyboard. */
  function stayAtEnd() {
    let height = messages.clientHeight;
    new ResizeObserver(() => {
      const below = messages.scrollHeight - messages.scrollTop - height;
      height = messages.clientHeight;
      if (below < 40) messages.scrollTop = messages.scrollHeight;
    }).observe(messages);
  }

  const blank = () => Store.chats.find((one) => !one.messages.length) ?? Store.newChat();

  function open(one) {
    stop();
    chat = one;
    show();
    question.focus();
  }

  /* Everything anew: the list of conversations, and the messages of this one. */
  function show() {
    byId("chat-list").replaceChildren(...Store.chats.map(entry));
    const last = chat.messages.length - 1;
    messages.replaceChildren(byId("empty") ?? make("p", { id: "empty", class: "hint" }, "Ask the model something."));
    byId("empty").hidden = last >= 0;
    messages.append(...chat.messages.map((message, at) => Message.element(message, acts(message, at, last))));
    messages.scrollTop = messages.scrollHeight;
  }

  function entry(one) {
    const current = one === chat ? "true" : null;
    const title = make("button", { type: "button", class: "title", "aria-current": current, onclick: () => open(one) }, one.title);
    const remove = () => {
      Store.removeChat(one);
      open(one === chat ? (Store.chats[0] ?? Store.newChat()) : chat);
    };
    const label = `Delete ${one.title}`;
    return make("li", {}, title, make("button", { type: "button", class: "remove", "aria-label": label, title: label, onclick: remove }, "✕"));
  }

  function acts(message, at, last) {
    const found = { Copy: () => navigator.clipboard.writeText(message.content) };
    if (message.role === "user") found.Edit = () => edit(message, at);
    else if (at === last) found["Ask again"] = () => again(at - 1, chat.messages[at - 1].content);
    return found;
  }

  function edit(message, at) {
    if (running) return;
    const found = messages.querySelectorAll(".message")[at];
    Message.edit(found, message, (text) => again(at, text), show);
  }

  /* The question at that place with that text, and nothing that came after it. */
  function again(at, text) {
    if (!cannotSend(text)) send(text, chat.messages.splice(at));
  }

  /* Whether a text cannot be sent now; says why where that is not plain to see. */
  function cannotSend(text) {
    const wrong = Settings.complaint();
    if (running || !text.trim()) return true;
    if (wrong) problem(byId("problem"), wrong);
    return Boolean(wrong);
  }

  /* Asks, in the place of messages that come back where no answer does. */
  async function send(text, replaced = []) {
    if (cannotSend(text)) return;
    if (!replaced.length) question.value = "";
    question.focus();
    if (!chat.messages.length) chat.title = text.trim().slice(0, 60);
    const answer = { role: "assistant", content: "" };
    chat.messages.push({ role: "user", content: text.trim() }, answer);
    show();
    const asked = chat;
    await receive(answer, messages.lastElementChild);
    if (!answer.content && answer.note.end !== "stop") {
      asked.messages.splice(-2, 2, ...replaced);
      if (text !== replaced[0]?.content) question.value ||= text; // back to where it was typed
    }
    Store.saveChats();
    show();
  }

  function body() {
    const system = Settings.system();
    const told = chat.messages.slice(0, -1).map(({ role, content }) => ({ role, content }));
    return {
      ...Settings.request(),
      messages: system ? [{ role: "system", content: system }, ...told] : told,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }

  /* Streams into `answer` and its element; leaves under it how fast it was and how it ended. */
  async function receive(answer, element) {
    running = { controller: new AbortController(), stopped: false };
    const mine = running;
    const clock = new Clock();
    const painter = new Painter(element, answer);
    const asked = body();
    busy(element, true);
    try {
      await Api.chat(asked, mine.controller.signal, (chunk) => {
        const choice = chunk.choices[0];
        answer.content += choice?.delta.content ?? "";
        clock.take(chunk);
        const isFull = choice?.finish_reason === "length" && !(clock.tokens >= asked.max_completion_tokens);
        answer.note = clock.note(isFull ? "full" : choice?.finish_reason);
        painter.ask();
      });
      byId("announcer").textContent = `The model says: ${answer.content}`;
    } catch (error) {
      answer.note = clock.note(mine.stopped ? "stopped" : "failed");
      byId("announcer").textContent = mine.stopped ? "Stopped." : "";
      if (!mine.stopped) complain(error);
    } finally {
      painter.end();
      busy(element, false);
      running = null;
    }
  }

  function complain(error) {
    const key = error.status === 401;
    const known = error instanceof Api.ApiError ? error.message : `The server cannot be reached (${error.message}).`;
    problem(byId("problem"), key ? "This server wants an API key: type it under Settings." : known);
    if (key) {
      byId("settings").open = true;
      byId("set-key").focus();
    }
  }

  function busy(element, on) {
    element.setAttribute("aria-busy", on);
    if (!on && document.activeElement === byId("stop")) question.focus();
    byId("stop").hidden = !on;
    byId("send").hidden = on;
    if (on) {
      problem(byId("problem"), "");
      byId("announcer").textContent = "The model is answering.";
    }
  }

  function stop() {
    if (!running) return;
    running.stopped = true;
    running.controller.abort();
  }

  /* The conversation as a JSON file. */
  function save() {
    const text = JSON.stringify({ title: chat.title, system: Settings.system(), messages: chat.messages }, null, 2);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    make("a", { href: url, download: "conversation.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /* Tokens and seconds of an answer, by the server's counts and this browser's clock. */
  class Clock {
    began = performance.now();
    tokens = 0;
    first = null; // [when, tokens] of the first text
    last = null;
    end = null;

    take(chunk) {
      this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
      if (!chunk.choices[0]?.delta.content) return;
      this.last = [performance.now(), this.tokens];
      this.first ??= this.last;
    }

    note(end) {
      this.end = end ?? this.end;
      const gained = this.first ? this.last[1] - this.first[1] : 0;
      return {
        tokens: this.tokens,
        first: this.first ? (this.first[0] - this.began) / 1000 : null,
        speed: gained ? (1000 * gained) / (this.last[0] - this.first[0]) : null,
        end: this.end,
      };
    }
  }

  /* Shows an answer as it grows, at most once a frame, less often the longer that takes. */
  class Painter {
    constructor(element, answer) {
      Object.assign(this, { element, answer, timer: null, cost: 0 });
    }

    ask() {
      this.timer ??= setTimeout(() => requestAnimationFrame(() => this.paint()), 4 * this.cost);
    }

    paint() {
      if (this.timer === null) return;
      this.timer = null;
      const began = performance.now();
      const below = messages.scrollHeight - messages.scrollTop - messages.clientHeight;
      Message.update(this.element, this.answer);
      if (below < 40) messages.scrollTop = messages.scrollHeight;
      this.cost = performance.now() - began;
    }

    end() {
      clearTimeout(this.timer);
      this.timer = 0;
      this.paint();
    }
  }

  return { start };
})();
