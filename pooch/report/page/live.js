"use strict";

// Loads the page again every few seconds, unless the reader has stopped that; the address remembers it.

const SECONDS = 3;
const button = document.getElementById("reload");
let waiting;

function apply() {
  const isStopped = location.hash === "#stopped";
  button.textContent = isStopped ? `Load again every ${SECONDS} s` : "Stop loading again";
  clearTimeout(waiting);
  if (!isStopped) waiting = setTimeout(() => location.reload(), 1000 * SECONDS);
}

button.addEventListener("click", () => {
  history.replaceState(null, "", location.hash === "#stopped" ? location.pathname + location.search : "#stopped");
  apply();
});
apply();
