"use strict";
/* What this browser keeps: conversations and settings for good, the API key for as long as the tab is open. */
const Store = (() => {
  const CHATS = "qinfer.chats";
  const SETTINGS = "qinfer.settings";
  const KEY = "qinfer.key";

  function read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(name)) ?? otherwise;
    } catch {
      return otherwise; // storage is closed to us, or holds what we did not write
    }
  }

  function write(name, value) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
    } catch {
      /* storage is full or closed: the conversation lives as long as the page */
    }
  }

  /* A conversation: {id, title, messages: [{role, content, note}]}, the newest first. */
  const chats = read(CHATS, []);
  const saveChats = () => write(CHATS, chats);

  function newChat() {
    const chat = { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "New conversation", messages: [] };
    chats.unshift(chat);
    return chat;
  }

  function removeChat(chat) {
    chats.splice(chats.indexOf(chat), 1);
    saveChats();
  }

  const settings = () => read(SETTINGS, {});
  const saveSettings = (values) => write(SETTINGS, values);

  let typedKey = "";
  function key() {
    try {
      return sessionStorage.getItem(KEY) ?? typedKey;
    } catch {
      return typedKey;
    }
  }
  function saveKey(value) {
    typedKey = value.trim();
    try {
      sessionStorage.setItem(KEY, typedKey);
    } catch {
      /* closed to us: it is remembered until the page is left */
    }
  }

  return { chats, saveChats, newChat, removeChat, settings, saveSettings, key, saveKey };
})();
